package kube

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

const (
	folderPrefix = "talos-ccm-kube-"
	folderLock   = "lock"
)

// folder is a cluster's temporary folder. Its lock is held for as long as this process lives, so that a later start can tell the folder
// of a killed process from one in use.
type folder struct {
	root string
	logs string
	lock *os.File
}

// newFolder makes the folder, after removing those that killed processes left behind. An empty logDir means a folder inside.
func newFolder(logDir string) (*folder, error) {
	if err := removeAbandoned(os.TempDir()); err != nil {
		return nil, err
	}

	root, err := os.MkdirTemp("", folderPrefix)
	if err != nil {
		return nil, fmt.Errorf("make the cluster's folder: %w", err)
	}

	f := &folder{root: root, logs: logDir}
	if f.logs == "" {
		f.logs = f.path("logs")
	}

	if err := f.fill(); err != nil {
		return nil, errors.Join(fmt.Errorf("make the cluster's folder: %w", err), f.remove())
	}

	return f, nil
}

func (f *folder) fill() error {
	if err := os.MkdirAll(f.logs, 0o700); err != nil {
		return err
	}

	// The lock gets its name only once it is held: a folder with a free lock is abandoned.
	lock, err := os.Create(f.path("new-" + folderLock))
	if err != nil {
		return err
	}

	f.lock = lock

	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return err
	}

	return os.Rename(lock.Name(), f.path(folderLock))
}

func (f *folder) path(name string) string {
	return filepath.Join(f.root, name)
}

// remove deletes the folder. A nil or removed folder is fine.
func (f *folder) remove() error {
	if f == nil {
		return nil
	}

	if err := os.RemoveAll(f.root); err != nil {
		return fmt.Errorf("remove the cluster's folder: %w", err)
	}

	if f.lock != nil {
		_ = f.lock.Close()
		f.lock = nil
	}

	return nil
}

// removeAbandoned removes the folders in parent that processes which were killed left there.
func removeAbandoned(parent string) error {
	locks, err := filepath.Glob(filepath.Join(parent, folderPrefix+"*", folderLock))
	if err != nil {
		return fmt.Errorf("look for abandoned folders in %s: %w", parent, err)
	}

	for _, path := range locks {
		if err := removeIfAbandoned(path); err != nil {
			return err
		}
	}

	return nil
}

func removeIfAbandoned(lockPath string) error {
	lock, err := os.Open(lockPath)
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, os.ErrPermission) {
		return nil // already removed, or owned by another user
	}

	if err != nil {
		return fmt.Errorf("look for abandoned folders: %w", err)
	}
	defer lock.Close() //nolint:errcheck // only locked

	if unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil {
		return nil // in use
	}

	if err := os.RemoveAll(filepath.Dir(lockPath)); err != nil {
		return fmt.Errorf("remove an abandoned folder: %w", err)
	}

	return nil
}
