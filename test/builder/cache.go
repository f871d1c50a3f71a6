// Package builder builds with Go what tests start, shows the progress, and keeps the results in a cache.
package builder

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/util/wait"
)

const (
	cacheEnv = "TALOS_CCM_CACHE"
	// kept is how many builds of a kind the cache keeps besides those used within ttl.
	kept     = 2
	ttl      = 24 * time.Hour
	lockPoll = 200 * time.Millisecond
	// unfinished begins the names of folders of interrupted builds.
	unfinished = "unfinished-"
)

// CacheDir returns a folder of the cache, which is TALOS_CCM_CACHE or talos-ccm in the user's cache folder, and makes it.
func CacheDir(name string) (string, error) {
	cache := os.Getenv(cacheEnv)

	if cache == "" {
		user, err := os.UserCacheDir()
		if err != nil {
			return "", fmt.Errorf("find the cache: %w (or set %s)", err, cacheEnv)
		}

		cache = filepath.Join(user, "talos-ccm")
	}

	folder, err := filepath.Abs(filepath.Join(cache, name))
	if err == nil {
		err = os.MkdirAll(folder, 0o755)
	}

	if err != nil {
		return "", fmt.Errorf("make folder of the cache: %w", err)
	}

	return folder, nil
}

// Cached returns a folder in the folder kind of the cache. The key changes with everything that the folder is built from.
// If the folder does not exist, build fills it: once, however many processes ask for it at the same time, and complete or
// not at all. Old builds are removed. A nil writer discards progress.
func Cached(ctx context.Context, kind, key string, progress io.Writer, build func(folder string) error) (string, error) {
	cache, err := CacheDir(kind)
	if err != nil {
		return "", err
	}

	folder := filepath.Join(cache, key)
	if used(folder) {
		return folder, nil
	}

	lock, err := lockCache(ctx, cache, progress)
	if err != nil {
		return "", fmt.Errorf("lock %s: %w", cache, err)
	}
	defer lock.Close() //nolint:errcheck // only locked

	if used(folder) { // the previous holder of the lock built it
		return folder, nil
	}

	temporary, err := os.MkdirTemp(cache, unfinished)
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(temporary) //nolint:errcheck // after success it is gone, after an error that one counts

	if err := errors.Join(os.Chmod(temporary, 0o755), build(temporary)); err != nil {
		return "", err
	}

	if err := os.Rename(temporary, folder); err != nil {
		return "", err
	}

	return folder, prune(cache)
}

// used reports whether the folder exists, and marks it as used now.
func used(folder string) bool { return os.Chtimes(folder, time.Now(), time.Now()) == nil }

// lockCache locks the cache until the returned file is closed.
func lockCache(ctx context.Context, cache string, progress io.Writer) (*os.File, error) {
	file, err := os.OpenFile(filepath.Join(cache, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}

	try := func(context.Context) (bool, error) {
		err := unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if errors.Is(err, unix.EWOULDBLOCK) {
			return false, nil
		}

		return err == nil, err
	}

	locked, err := try(ctx)
	if err == nil && !locked {
		if progress != nil {
			fmt.Fprintln(progress, "Waiting for another process that builds into", cache)
		}

		err = wait.PollUntilContextCancel(ctx, lockPoll, false, try)
	}

	if err != nil {
		return nil, errors.Join(err, file.Close())
	}

	return file, nil
}

// prune removes builds beyond those to keep, and leftovers of interrupted builds. The caller holds the lock.
func prune(cache string) error {
	entries, err := os.ReadDir(cache)
	if err != nil {
		return err
	}

	var folders []os.FileInfo

	for _, entry := range entries {
		if info, err := entry.Info(); err == nil && info.IsDir() {
			folders = append(folders, info)
		}
	}

	slices.SortFunc(folders, func(a, b os.FileInfo) int { return b.ModTime().Compare(a.ModTime()) })

	for i, info := range folders {
		isOld := i >= kept && time.Since(info.ModTime()) > ttl
		if isOld || strings.HasPrefix(info.Name(), unfinished) {
			err = errors.Join(err, os.RemoveAll(filepath.Join(cache, info.Name())))
		}
	}

	return err
}

// Folder returns the folder of a package in the checkout of the working directory.
func Folder(ctx context.Context, pkg string) (string, error) {
	output, err := Output(exec.CommandContext(ctx, "go", "list", "-find", "-f", "{{.Dir}}", pkg))

	return strings.TrimSpace(string(output)), err
}
