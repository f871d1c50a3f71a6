package talos

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/talos-ccm/talos-ccm/test/builder"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

const (
	// layout is the version of the directory layout of assets.
	layout = "2"
	// modfileName is the name of the go.mod for building Talos.
	modfileName = "talos.mod"
	// selfImport is the import path of this package.
	selfImport = "github.com/talos-ccm/talos-ccm/test/talos"
)

// assets is the path of a build in the cache.
type assets string

func (a assets) rootfs() string { return filepath.Join(string(a), "rootfs") }

// bin returns the directory with commands for the host.
func (a assets) bin() string { return filepath.Join(string(a), "bin") }

func (a assets) shims() string { return filepath.Join(a.rootfs(), "usr/bin/shims") }

// Assets builds Talos, the container runtime and the tools of the bed, unless they are in the cache. minor selects the
// release; if it is empty, TALOS does. It returns the directory, which contains a root file system in rootfs and commands in
// bin. The cache is $TALOS_CCM_CACHE, or talos-ccm in the user's cache directory. Progress is written to out, which may be
// nil.
func Assets(ctx context.Context, minor string, out io.Writer) (string, error) {
	src, err := selectSource(minor)
	if err != nil {
		return "", err
	}

	dir, err := src.assets(ctx, out)

	return string(dir), err
}

// BedAssets builds what [Assets] does for the release that TALOS selects, and its version of Kubernetes.
func BedAssets(ctx context.Context, out io.Writer) (string, error) {
	src, err := selectSource("")
	if err != nil {
		return "", err
	}

	dir, _, err := src.prepare(ctx, out)

	return string(dir), err
}

// Imager builds Talos's imager into the directory dir, and returns its path. minor selects the release; if it is empty, TALOS
// does. Imager also builds init, the first program of the initramfs, and copies file_contexts, the SELinux labels of files.
func Imager(ctx context.Context, minor, dir string, out io.Writer) (string, error) {
	src, err := selectSource(minor)
	if err != nil {
		return "", err
	}

	// The build runs in another directory.
	if dir, err = filepath.Abs(dir); err != nil {
		return "", fmt.Errorf("resolve directory for the imager: %w", err)
	}

	temporary, err := os.MkdirTemp("", "talos-ccm-imager-")
	if err != nil {
		return "", fmt.Errorf("create directory for build: %w", err)
	}
	defer os.RemoveAll(temporary) //nolint:errcheck // a temporary directory

	modfile := filepath.Join(temporary, modfileName)

	talos, err := src.open(ctx, modfile)
	if err != nil {
		return "", err
	}

	labels, err := os.ReadFile(filepath.Join(talos, "internal/pkg/selinux/policy/file_contexts"))
	if err != nil {
		return "", err
	}

	// The binary is the imager or the installer, depending on its name.
	return filepath.Join(dir, "imager"), errors.Join(
		talosBuild(talos, modfile, "cmd/installer", "imager").run(ctx, dir, out),
		talosBuild(talos, modfile, "internal/app/init", "init").run(ctx, dir, out),
		os.WriteFile(filepath.Join(dir, "file_contexts"), labels, 0o644), //nolint:gosec // not secret
	)
}

// prepare builds the release and its version of Kubernetes, unless they are in the cache, and returns their directories.
func (s source) prepare(ctx context.Context, out io.Writer) (talos assets, kubernetes string, err error) {
	if kubernetes, err = kube.NodeAssetsOf(ctx, s.Kubernetes, out); err != nil {
		return "", "", fmt.Errorf("build Kubernetes: %w", err)
	}

	talos, err = s.assets(ctx, out)

	return talos, kubernetes, err
}

// assets builds the release, unless it is in the cache, and returns its directory.
func (s source) assets(ctx context.Context, out io.Writer) (assets, error) {
	bed, err := builder.PackageDir(ctx, selfImport)
	if err != nil {
		return "", err
	}

	key, err := fingerprint(ctx, bed, s)
	if err != nil {
		return "", err
	}

	dir, err := builder.Cached(ctx, "talos", key, out, func(dir string) error { return construct(ctx, bed, s, dir, out) })

	return assets(dir), err
}

// fingerprint returns a hash of the inputs of a build. It does not include rootfs.go: update layout if that changes.
func fingerprint(ctx context.Context, bed string, src source) (string, error) {
	version, err := builder.Output(exec.CommandContext(ctx, "go", "version"))
	if err != nil {
		return "", err
	}

	sum := sha256.New()
	fmt.Fprintf(sum, "%s\n%s%+v\n%+v\n%+v\n%s\n", layout, version, builds("", "", "", ""), src, edits, contained)

	if err := hashFiles(sum, bed, "runtime", "tools"); err != nil {
		return "", err
	}

	// A checkout can change. Versions in the module proxy are immutable.
	if src.checkout != "" {
		if err := hashFiles(sum, src.checkout, "go.mod", "go.sum", "cmd", "hack", "internal", "pkg"); err != nil {
			return "", err
		}
	}

	return hex.EncodeToString(sum.Sum(nil))[:16], nil
}

// hashFiles writes the names and contents of files to sum. names are files and directories in the directory dir.
func hashFiles(sum io.Writer, dir string, names ...string) (err error) {
	for _, name := range names {
		err = errors.Join(err, fs.WalkDir(os.DirFS(dir), name, func(path string, entry fs.DirEntry, err error) error {
			if err != nil || !entry.Type().IsRegular() {
				return err
			}

			content, err := os.ReadFile(filepath.Join(dir, path))
			fmt.Fprintf(sum, "%q %q\n", path, content)

			return err
		}))
	}

	return err
}

// construct builds all assets into the directory dir.
func construct(ctx context.Context, bed string, src source, dir string, out io.Writer) error {
	modfile := filepath.Join(dir, modfileName)

	talos, err := src.open(ctx, modfile)
	if err != nil {
		return err
	}

	root, err := rootfs(talos, src.Talos)
	if err != nil {
		return err
	}

	if err := root.write(filepath.Join(dir, "rootfs")); err != nil {
		return fmt.Errorf("create root file system: %w", err)
	}

	link, overlay, err := overlay(talos, dir)
	if err != nil {
		return err
	}

	for _, b := range builds(bed, link, modfile, overlay) {
		if err := b.run(ctx, dir, out); err != nil {
			return err
		}
	}

	return nil
}

// build is one go build command.
type build struct {
	// module is the directory of the module, and modfile its go.mod if that is another file.
	module, modfile string
	packages        []string
	// output is a file, or a directory if it ends with a slash.
	output string
	tags   string
	// cgo enables cgo with static linking.
	cgo bool
	// overlay is the file for the -overlay flag, if any.
	overlay string
}

// talosBuild returns the build of a command from the directory talos with the source of Talos. All commands use the same
// tags, so they share most of the build cache.
func talosBuild(talos, modfile, command, output string) build {
	return build{module: talos, modfile: modfile, packages: []string{"./" + command}, output: output, tags: "tcell_minimal,grpcnotrace"}
}

// builds returns the builds for a bed. bed is the directory with the nested modules, and talos the directory with the source
// of Talos, which overlay edits. The tags are those of Talos that affect the bed.
func builds(bed, talos, modfile, overlay string) []build {
	const (
		program    = "rootfs/usr/bin/"
		containerd = "github.com/containerd/containerd/v2/cmd/containerd"
		runc       = "github.com/opencontainers/runc"
	)

	runtime, tools := filepath.Join(bed, "runtime"), filepath.Join(bed, "tools")

	machined := talosBuild(talos, modfile, "internal/app/machined", program+"init")
	machined.overlay = overlay

	return []build{
		machined,
		talosBuild(talos, modfile, "cmd/talosctl", "bin/"),
		{
			module: runtime, packages: []string{containerd, containerd + "-shim-runc-v2"}, output: program,
			tags: "no_btrfs,no_devmapper,no_zfs,netgo,osusergo",
		},
		// runc contains C code that enters the container before the Go runtime starts.
		{module: runtime, packages: []string{runc}, output: program + "runc.real", tags: "seccomp,netgo,osusergo", cgo: true},
		{module: tools, packages: []string{"./shims"}, output: program},
	}
}

// run builds into the directory dir and writes progress to out.
func (b build) run(ctx context.Context, dir string, out io.Writer) error {
	// The go.mod files of nested modules are complete. A modfile lacks the requirements of its replacements.
	flags, ldflags, cgo := "-mod=readonly", "-s -w", "0"
	if b.modfile != "" {
		flags = "-mod=mod -modfile=" + b.modfile
	}

	if b.cgo {
		ldflags, cgo = ldflags+" -linkmode=external -extldflags -static", "1"
	}

	if b.overlay != "" {
		flags += " -overlay=" + b.overlay
	}

	args := append([]string{"build", "-o=" + dir + "/" + b.output, "-tags", b.tags, "-ldflags", ldflags}, b.packages...)
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir = b.module
	// GOTOOLCHAIN=local prevents the download of another toolchain. PWD keeps links in the paths of an overlay.
	cmd.Env = append(os.Environ(), "PWD="+b.module, "CGO_ENABLED="+cgo, "GOFLAGS=-trimpath -buildvcs=false "+flags, "GOTOOLCHAIN=local", "GOWORK=off")

	title := filepath.Base(b.packages[0])
	if err := builder.Packages(out, "Building "+title, cmd); err != nil {
		return fmt.Errorf("build %s: %w", title, err)
	}

	return nil
}
