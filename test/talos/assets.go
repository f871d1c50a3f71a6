package talos

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
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
	// layout changes whenever the builder lays out its result differently.
	layout = "1"
	// modfileName is the go.mod that Talos was built with.
	modfileName = "talos.mod"
	// selfImport is the path of this package.
	selfImport = "github.com/talos-ccm/talos-ccm/test/talos"
)

// assets is a build in the cache.
type assets struct{ dir string }

func (a *assets) rootfs() string          { return filepath.Join(a.dir, "rootfs") }
func (a *assets) tool(name string) string { return filepath.Join(a.dir, "bin", name) }

// limited is a layer for machines whose root lacks rights that runc needs.
func (a *assets) limited() string { return filepath.Join(a.dir, "limited") }

// Assets builds the selected release of Talos, its Kubernetes, its container runtime and the tools of this bed,
// unless that has been done before, and returns the folder with Talos: a root file system in rootfs and commands in
// bin. The cache is $TALOS_CCM_CACHE, or talos-ccm in the user's cache folder. Progress is written to out, which may
// be nil.
func Assets(ctx context.Context, out io.Writer) (string, error) {
	src, err := selectSource()
	if err != nil {
		return "", err
	}

	if _, err := kube.AssetsOf(ctx, src.Kubernetes, out); err != nil {
		return "", fmt.Errorf("build Kubernetes: %w", err)
	}

	a, err := prepare(ctx, src, out)
	if err != nil {
		return "", err
	}

	return a.dir, nil
}

// Imager builds the imager of the selected release of Talos into the folder dir, and returns its path.
func Imager(ctx context.Context, dir string, out io.Writer) (string, error) {
	src, err := selectSource()
	if err != nil {
		return "", err
	}

	// go runs in another folder.
	if dir, err = filepath.Abs(dir); err != nil {
		return "", fmt.Errorf("find folder for the imager: %w", err)
	}

	temporary, err := os.MkdirTemp("", "talos-ccm-imager-")
	if err != nil {
		return "", fmt.Errorf("make folder for build: %w", err)
	}
	defer os.RemoveAll(temporary) //nolint:errcheck // a temporary folder

	modfile := filepath.Join(temporary, modfileName)

	talos, err := src.open(ctx, modfile)
	if err != nil {
		return "", err
	}

	if err := talosBuild(talos, modfile, "cmd/installer").run(ctx, dir, out); err != nil {
		return "", err
	}

	// The program is the imager or the installer, by its name.
	imager := filepath.Join(dir, "imager")

	return imager, os.Rename(filepath.Join(dir, "installer"), imager)
}

func prepare(ctx context.Context, src source, out io.Writer) (*assets, error) {
	if out == nil {
		out = io.Discard
	}

	bed, err := builder.Folder(ctx, selfImport)
	if err != nil {
		return nil, err
	}

	key, err := fingerprint(ctx, bed, src)
	if err != nil {
		return nil, err
	}

	dir, err := builder.Cached(ctx, "talos", key, out, func(dir string) error { return construct(ctx, bed, src, dir, out) })
	if err != nil {
		return nil, err
	}

	return &assets{dir}, nil
}

// fingerprint covers everything that decides what a build yields.
func fingerprint(ctx context.Context, bed string, src source) (string, error) {
	version, err := builder.Output(exec.CommandContext(ctx, "go", "version"))
	if err != nil {
		return "", err
	}

	sum := sha256.New()
	fmt.Fprintf(sum, "%s\n%s%+v\n%+v\n", layout, version, builds("", "", ""), src)

	for _, module := range []string{"runtime", "tools"} {
		if err := hashFiles(sum, bed, module); err != nil {
			return "", err
		}
	}

	// A checkout may be changed; the module proxy never changes a version.
	if src.checkout != "" {
		for _, path := range []string{"go.mod", "go.sum", "cmd", "hack", "internal", "pkg"} {
			if err := hashFiles(sum, src.checkout, path); err != nil {
				return "", err
			}
		}
	}

	return hex.EncodeToString(sum.Sum(nil))[:16], nil
}

// hashFiles covers a file, or all files of a folder, by its name in the folder dir.
func hashFiles(sum io.Writer, dir, name string) error {
	return filepath.WalkDir(filepath.Join(dir, name), func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.Type().IsRegular() {
			return err
		}

		content, err := os.ReadFile(path)
		if err != nil {
			return fmt.Errorf("read source: %w", err)
		}

		name, err := filepath.Rel(dir, path)
		if err != nil {
			return fmt.Errorf("name source: %w", err)
		}

		fmt.Fprintf(sum, "%s %d\n%s", name, len(content), content)

		return nil
	})
}

// construct builds everything into the folder dir.
func construct(ctx context.Context, bed string, src source, dir string, out io.Writer) error {
	if err := requirePackages(ctx, out); err != nil {
		return err
	}

	bin := filepath.Join(dir, "bin")
	if err := os.Mkdir(bin, 0o755); err != nil {
		return fmt.Errorf("make folder for build: %w", err)
	}

	modfile := filepath.Join(dir, modfileName)

	talos, err := src.open(ctx, modfile)
	if err != nil {
		return err
	}

	for _, b := range builds(bed, talos, modfile) {
		if err := b.run(ctx, bin, out); err != nil {
			return err
		}
	}

	return assembleRootfs(talos, src.Talos, dir)
}
