package talos

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/talos-ccm/talos-ccm/test/builder"
)

// The tags with which Talos itself is built, and its runtime as far as it is used here.
const (
	machinedTags   = "tcell_minimal,grpcnotrace"
	containerdTags = "no_btrfs,no_devmapper,no_zfs,netgo,osusergo"
	runcTags       = "seccomp,netgo,osusergo"
)

// build is one call of the Go compiler.
type build struct {
	// title is what a human reads.
	title string
	// module is the folder of the module, and modfile its go.mod if that is another file.
	module, modfile string
	// packages are built into the folder output.
	packages []string
	tags     string
	ldflags  string
	// cgo is the value of CGO_ENABLED.
	cgo string
}

const (
	static = "0"
	strip  = "-s -w"
)

// talosBuild is the build of a command of Talos from the folder talos with its source. Commands with the same tags share
// most of the work.
func talosBuild(talos, modfile, command string) build {
	return build{
		title: "Talos's " + filepath.Base(command), module: talos, modfile: modfile, tags: machinedTags, cgo: static, ldflags: strip,
		packages: []string{"./" + command},
	}
}

// builds returns everything that a bed needs, from the folder bed with the nested modules and the folder talos.
func builds(bed, talos, modfile string) []build {
	const containerd = "github.com/containerd/containerd/v2"

	runtime := filepath.Join(bed, "runtime")

	return []build{
		talosBuild(talos, modfile, "internal/app/machined"),
		talosBuild(talos, modfile, "cmd/talosctl"),
		{
			title: "containerd", module: runtime, tags: containerdTags, cgo: static, ldflags: strip,
			packages: []string{containerd + "/cmd/containerd", containerd + "/cmd/containerd-shim-runc-v2"},
		},
		{
			// runc has C of its own, which enters the container before Go starts.
			title: "runc", module: runtime, tags: runcTags, cgo: "1", ldflags: strip + " -linkmode=external -extldflags -static",
			packages: []string{"github.com/opencontainers/runc"},
		},
		{
			title: "tools", module: filepath.Join(bed, "tools"), cgo: static, ldflags: strip,
			packages: []string{"./chassis", "./shims"},
		},
	}
}

func (b build) arguments(verb string, extra ...string) []string {
	args := append([]string{verb, "-trimpath", "-tags", b.tags}, extra...)

	return append(args, b.packages...)
}

func (b build) command(ctx context.Context, args []string) *exec.Cmd {
	// The nested modules are complete: nothing may change them. A modfile lacks what its replacements require.
	flags := "-buildvcs=false -mod=readonly"
	if b.modfile != "" {
		flags = "-buildvcs=false -mod=mod -modfile=" + b.modfile
	}

	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir = b.module
	// No other toolchain is fetched.
	cmd.Env = append(os.Environ(), "CGO_ENABLED="+b.cgo, "GOFLAGS="+flags, "GOTOOLCHAIN=local", "GOWORK=off")

	return cmd
}

// run builds into the folder output and shows how far it is.
func (b build) run(ctx context.Context, output string, out io.Writer) error {
	list := b.command(ctx, b.arguments("list", "-deps"))
	compile := b.command(ctx, b.arguments("build", "-v", "-ldflags", b.ldflags, "-o", output+string(os.PathSeparator)))

	if err := builder.Packages(out, "Building "+b.title, list, compile); err != nil {
		return fmt.Errorf("build %s: %w", b.title, err)
	}

	return nil
}

// explain adds what a command said on standard error.
func explain(err error) error {
	var exit *exec.ExitError
	if errors.As(err, &exit) && len(exit.Stderr) > 0 {
		return fmt.Errorf("%w: %s", err, strings.TrimSpace(string(exit.Stderr)))
	}

	return err
}
