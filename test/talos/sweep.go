package talos

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/talos-ccm/talos-ccm/test/builder"
)

// claimedPrefix begins the name of every bed's folder.
const claimedPrefix = "bed-"

// claim makes the folder of a new bed and holds a lock on it, which the kernel lets go of when this process ends.
func claim(base string) (dir string, owner *os.File, err error) {
	dir, err = os.MkdirTemp(base, claimedPrefix)
	if err != nil {
		return "", nil, fmt.Errorf("make folder for bed: %w", err)
	}

	owner, err = lockFolder(dir, unix.LOCK_EX)

	return dir, owner, err
}

// Sweep removes what beds have left whose process was killed. Up does that, too.
func Sweep(ctx context.Context) error {
	base, err := builder.CacheDir("beds")
	if err != nil {
		return err
	}

	return sweep(ctx, base)
}

// sweep removes what beds have left whose process was killed. Their machines died with that process; files and cgroups remain.
func sweep(ctx context.Context, base string) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()

	dirs, err := filepath.Glob(filepath.Join(base, claimedPrefix+"*"))
	if err != nil {
		return fmt.Errorf("list beds: %w", err)
	}

	for _, dir := range dirs {
		owner, err := lockFolder(dir, unix.LOCK_EX|unix.LOCK_NB)
		if err != nil {
			continue // still in use
		}

		err = errors.Join(sweepCgroups(ctx, filepath.Base(dir)), os.RemoveAll(dir), owner.Close())
		if err != nil {
			return fmt.Errorf("sweep bed %s: %w", dir, err)
		}
	}

	return nil
}

func sweepCgroups(ctx context.Context, id string) error {
	root, err := cgroupRoot()
	if err != nil {
		return err
	}

	dirs, err := filepath.Glob(filepath.Join(root, cgroupPrefix+id+"-*"))
	if err != nil {
		return fmt.Errorf("list cgroups of bed: %w", err)
	}

	for _, dir := range dirs {
		if err := cgroup(dir).remove(ctx); err != nil {
			return err
		}
	}

	return nil
}

func lockFolder(dir string, how int) (*os.File, error) {
	file, err := os.Open(dir)
	if err != nil {
		return nil, fmt.Errorf("open folder of bed: %w", err)
	}

	if err := unix.Flock(int(file.Fd()), how); err != nil {
		file.Close() //nolint:errcheck // only read

		return nil, fmt.Errorf("lock folder of bed %s: %w", dir, err)
	}

	return file, nil
}
