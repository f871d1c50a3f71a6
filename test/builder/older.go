package builder

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
)

// OlderVersion is the version of the program that Older builds.
const OlderVersion = "v0.0.1"

// olderRevision is the last one before machines stated their certificates. It knows only four labels of records.
const olderRevision = "620def8440915aa2073d2333f89fb3b1f8c31f3e"

// Older builds talos-ccm of an older revision on first use and returns its path. The clone must have the commit.
var Older = sync.OnceValues(func() (string, error) {
	dir, err := Cached(context.Background(), "older", olderRevision+"-"+OlderVersion+"-"+runtime.Version(), os.Stderr, func(dir string) error {
		archive := exec.Command("bash", "-c", `set -o pipefail; git -C "$(git rev-parse --show-toplevel)" archive "$1" | tar -x -C "$2"`, "bash", olderRevision, dir)
		if _, err := Output(archive); err != nil {
			return err
		}

		build := exec.Command("go", "build", "-buildvcs=false", "-ldflags=-X github.com/talos-ccm/talos-ccm/pkg/version.version="+OlderVersion,
			"-o=talos-ccm", "./cmd/talos-ccm")
		build.Dir, build.Env = dir, append(os.Environ(), "CGO_ENABLED=0")

		return Packages(os.Stderr, "Building an older talos-ccm", build)
	})
	if err != nil {
		return "", fmt.Errorf("build older talos-ccm: %w", err)
	}

	return filepath.Join(dir, "talos-ccm"), nil
})
