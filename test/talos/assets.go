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
	"runtime"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/talos-ccm/talos-ccm/test/kube"
)

const (
	// layout changes whenever the builder lays out its result differently.
	layout = "1"
	// keepBuilds is how many builds stay in the cache besides the current one and those in use.
	keepBuilds = 2
	// unfinished begins the names of builds under construction.
	unfinished = ".building-"
	// modfileName is the go.mod that Talos was built with.
	modfileName = "talos.mod"
	// selfImport is where go list finds this folder when the binary does not know.
	selfImport = "github.com/talos-ccm/talos-ccm/test/talos"
)

// assets is a build in the cache.
type assets struct {
	dir string
	// use keeps a shared lock on the folder, so that it is not pruned.
	use *os.File
}

func (a *assets) rootfs() string          { return filepath.Join(a.dir, "rootfs") }
func (a *assets) tool(name string) string { return filepath.Join(a.dir, "bin", name) }

// limited is a layer for machines whose root lacks rights that runc needs.
func (a *assets) limited() string { return filepath.Join(a.dir, "limited") }

func (a *assets) release() error { return a.use.Close() }

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

	return a.dir, a.release()
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

	bed, err := bedSource(ctx)
	if err != nil {
		return nil, err
	}

	key, err := fingerprint(ctx, bed, src)
	if err != nil {
		return nil, err
	}

	cache, err := cacheDir()
	if err != nil {
		return nil, err
	}

	lock, err := lockCache(cache)
	if err != nil {
		return nil, err
	}
	defer lock.Close() //nolint:errcheck // closing is unlocking

	dir := filepath.Join(cache, key)
	if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		err = construct(ctx, bed, src, dir, out)
		if err != nil {
			return nil, err
		}
	}

	use, err := lockFolder(dir, unix.LOCK_SH)
	if err != nil {
		return nil, err
	}

	// The time of last use, by which prune chooses. A cache that cannot note it still works.
	os.Chtimes(dir, time.Time{}, time.Now()) //nolint:errcheck // see above
	prune(cache, key)

	return &assets{dir: dir, use: use}, nil
}

// bedSource is the folder of this package, which holds the nested modules.
func bedSource(ctx context.Context) (string, error) {
	if _, file, _, ok := runtime.Caller(0); ok && filepath.IsAbs(file) {
		if _, err := os.Stat(file); err == nil {
			return filepath.Dir(file), nil
		}
	}

	out, err := exec.CommandContext(ctx, "go", "list", "-f", "{{.Dir}}", selfImport).Output()
	if err != nil {
		return "", fmt.Errorf("find folder of %s: %w", selfImport, explain(err))
	}

	return strings.TrimSpace(string(out)), nil
}

func cacheDir() (string, error) {
	base := os.Getenv("TALOS_CCM_CACHE")

	if base == "" {
		user, err := os.UserCacheDir()
		if err != nil {
			return "", fmt.Errorf("find cache folder (TALOS_CCM_CACHE would name one): %w", err)
		}

		base = filepath.Join(user, "talos-ccm")
	}

	base, err := filepath.Abs(base)
	if err != nil {
		return "", fmt.Errorf("find cache folder: %w", err)
	}

	dir := filepath.Join(base, "talos")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", fmt.Errorf("make cache folder: %w", err)
	}

	return dir, nil
}

// fingerprint covers everything that decides what a build yields.
func fingerprint(ctx context.Context, bed string, src source) (string, error) {
	version, err := exec.CommandContext(ctx, "go", "version").Output()
	if err != nil {
		return "", fmt.Errorf("ask for version of go: %w", explain(err))
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

// lockCache waits until no other process builds into the cache.
func lockCache(cache string) (*os.File, error) {
	file, err := os.OpenFile(filepath.Join(cache, ".lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, fmt.Errorf("open lock of cache: %w", err)
	}

	if err := unix.Flock(int(file.Fd()), unix.LOCK_EX); err != nil {
		return nil, fmt.Errorf("lock cache: %w", err)
	}

	return file, nil
}

func lockFolder(dir string, how int) (*os.File, error) {
	file, err := os.Open(dir)
	if err != nil {
		return nil, fmt.Errorf("open build in cache: %w", err)
	}

	if err := unix.Flock(int(file.Fd()), how); err != nil {
		file.Close() //nolint:errcheck // only read

		return nil, fmt.Errorf("lock build %s in cache: %w", dir, err)
	}

	return file, nil
}

// construct makes dir in one step: it exists only when it is complete.
func construct(ctx context.Context, bed string, src source, dir string, out io.Writer) error {
	if err := requirePackages(ctx, out); err != nil {
		return err
	}

	temporary, err := os.MkdirTemp(filepath.Dir(dir), unfinished)
	if err != nil {
		return fmt.Errorf("make folder for build: %w", err)
	}
	defer os.RemoveAll(temporary) //nolint:errcheck // gone when the build succeeded

	bin := filepath.Join(temporary, "bin")
	if err := os.Mkdir(bin, 0o755); err != nil {
		return fmt.Errorf("make folder for build: %w", err)
	}

	modfile := filepath.Join(temporary, modfileName)

	talos, err := src.open(ctx, modfile)
	if err != nil {
		return err
	}

	for _, b := range builds(bed, talos, modfile) {
		if err := b.run(ctx, bin, out); err != nil {
			return err
		}
	}

	if err := assembleRootfs(talos, src.Talos, temporary); err != nil {
		return err
	}

	if err := os.Chmod(temporary, 0o755); err != nil {
		return fmt.Errorf("open up build: %w", err)
	}

	if err := os.Rename(temporary, dir); err != nil {
		return fmt.Errorf("put build into cache: %w", err)
	}

	return nil
}

// prune removes builds that were given up and all but the latest finished ones. The cache lock is held.
func prune(cache, current string) {
	entries, err := os.ReadDir(cache)
	if err != nil {
		return
	}

	var finished []fs.FileInfo

	for _, entry := range entries {
		info, err := entry.Info()

		switch {
		case err != nil || !entry.IsDir() || entry.Name() == current:
		case strings.HasPrefix(entry.Name(), unfinished):
			removeUnused(filepath.Join(cache, entry.Name()))
		default:
			finished = append(finished, info)
		}
	}

	slices.SortFunc(finished, func(a, b fs.FileInfo) int { return b.ModTime().Compare(a.ModTime()) })

	for _, info := range finished[min(keepBuilds, len(finished)):] {
		removeUnused(filepath.Join(cache, info.Name()))
	}
}

// removeUnused removes a build unless it is locked. What cannot be removed is retried next time.
func removeUnused(dir string) {
	lock, err := lockFolder(dir, unix.LOCK_EX|unix.LOCK_NB)
	if err != nil {
		return
	}

	os.RemoveAll(dir) //nolint:errcheck // see above
	lock.Close()      //nolint:errcheck // only read
}
