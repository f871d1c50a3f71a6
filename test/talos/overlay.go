package talos

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// platforms is the directory of Talos's platforms.
const platforms = "internal/app/machined/pkg/runtime/v1alpha1/platform/"

// edits are the changes of Talos's source for machines that run in containers and have the platform in PLATFORM. Each old
// text must occur exactly once.
var edits = []struct{ file, old, new string }{
	{platforms + "platform.go", `return newPlatform("container")`, `return containedPlatform()`},
	// Machines have no config drives. Without disks, Talos would wait for them permanently.
	{
		platforms + "internal/blockutils/blockutils.go",
		"	if len(labels) == 0 {\n		panic(\"at least one label must be provided\")\n	}\n", "	return fs.ErrNotExist\n",
	},
}

// contained is a file in platforms. The mode of a container prevents changes to the host. The machine configuration comes
// from the environment, because Azure has it only on a CD.
const contained = `package platform

import (
	"context"
	"os"

	"github.com/cosi-project/runtime/pkg/state"

	"github.com/siderolabs/talos/internal/app/machined/pkg/runtime"
	"github.com/siderolabs/talos/internal/app/machined/pkg/runtime/v1alpha1/platform/container"
)

type contained struct{ runtime.Platform }

func (contained) Mode() runtime.Mode { return runtime.ModeContainer }

func (contained) Configuration(ctx context.Context, st state.State) ([]byte, error) {
	return (&container.Container{}).Configuration(ctx, st)
}

func containedPlatform() (runtime.Platform, error) {
	p, err := newPlatform(os.Getenv("PLATFORM"))

	return contained{p}, err
}
`

// overlay writes edits and contained as an overlay for go build into the directory dir. It returns a link to Talos's source,
// because go rejects overlays of files in the module cache, and the file for the -overlay flag.
func overlay(talos, dir string) (link, file string, err error) {
	link, file = filepath.Join(dir, "source"), filepath.Join(dir, "overlay.json")
	added := filepath.Join(dir, "contained.go")
	replaced := map[string]string{filepath.Join(link, platforms, "contained.go"): added}

	for _, edit := range edits {
		original, err := os.ReadFile(filepath.Join(talos, edit.file))
		if err != nil {
			return "", "", fmt.Errorf("edit source of Talos: %w", err)
		}

		if n := strings.Count(string(original), edit.old); n != 1 {
			return "", "", fmt.Errorf("edit source of Talos: %s contains %q %d times; want once", edit.file, edit.old, n)
		}

		edited := filepath.Join(dir, filepath.Base(edit.file))
		replaced[filepath.Join(link, edit.file)] = edited

		if err := os.WriteFile(edited, []byte(strings.Replace(string(original), edit.old, edit.new, 1)), 0o644); err != nil {
			return "", "", fmt.Errorf("edit source of Talos: %w", err)
		}
	}

	encoded, err := json.Marshal(map[string]any{"Replace": replaced})

	return link, file, errors.Join(err, os.Symlink(talos, link), os.WriteFile(added, []byte(contained), 0o644), os.WriteFile(file, encoded, 0o644))
}
