// Package builder builds programs for tests with Go, shows the progress, and keeps the results in a cache.
package builder

import (
	"bytes"
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
	// kept is the number of builds of a kind that the cache keeps besides those used within ttl.
	kept     = 2
	ttl      = 24 * time.Hour
	lockPoll = 200 * time.Millisecond
	// unfinished is the prefix of directories of unfinished builds.
	unfinished = "unfinished-"
)

// CacheDir creates and returns a directory of the cache, which is TALOS_CCM_CACHE or talos-ccm in the user's cache
// directory.
func CacheDir(name string) (string, error) {
	cache := os.Getenv(cacheEnv)

	if cache == "" {
		user, err := os.UserCacheDir()
		if err != nil {
			return "", fmt.Errorf("find the cache: %w (or set %s)", err, cacheEnv)
		}

		cache = filepath.Join(user, "talos-ccm")
	}

	dir, err := filepath.Abs(filepath.Join(cache, name))
	if err == nil {
		err = os.MkdirAll(dir, 0o755)
	}

	if err != nil {
		return "", fmt.Errorf("create directory of the cache: %w", err)
	}

	return dir, nil
}

// Cached returns the directory of a kind of build. The key identifies all inputs of the build. If the directory does not
// exist, build fills it: once, even if several processes request it at the same time, and completely or not at all.
// Old builds are removed. A nil writer discards progress.
func Cached(ctx context.Context, kind, key string, progress io.Writer, build func(dir string) error) (string, error) {
	cache, err := CacheDir(kind)
	if err != nil {
		return "", err
	}

	dir := filepath.Join(cache, key)
	if used(dir) {
		return dir, nil
	}

	lock, err := Lock(ctx, filepath.Join(cache, "lock"), progress)
	if err != nil {
		return "", err
	}
	defer lock.Close() //nolint:errcheck // only locked

	if used(dir) { // the previous holder of the lock built it
		return dir, nil
	}

	temporary, err := os.MkdirTemp(cache, unfinished)
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(temporary) //nolint:errcheck // after success it is gone, after an error that one counts

	if err := errors.Join(os.Chmod(temporary, 0o755), build(temporary)); err != nil {
		return "", err
	}

	if err := os.Rename(temporary, dir); err != nil {
		return "", err
	}

	return dir, prune(cache)
}

// used reports whether the directory exists, and marks it as used now.
func used(dir string) bool { return os.Chtimes(dir, time.Now(), time.Now()) == nil }

// Lock locks a file until the returned file is closed or this process ends. While another process holds the lock, Lock waits
// until ctx is done, and writes once to progress which process that is. A nil writer discards progress.
func Lock(ctx context.Context, path string, progress io.Writer) (*os.File, error) {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}

	waiting := false

	err = wait.PollUntilContextCancel(ctx, lockPoll, true, func(context.Context) (bool, error) {
		err := unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return err == nil, err
		}

		if progress != nil && !waiting {
			holder, _ := os.ReadFile(path)
			fmt.Fprintf(progress, "Waiting for another process that has locked %s: %s\n", path, bytes.TrimSpace(holder))
		}

		waiting = true

		return false, nil
	})
	if err == nil {
		err = file.Truncate(0)
	}

	if err == nil {
		_, err = fmt.Fprintf(file, "process %d since %s\n", os.Getpid(), time.Now().Format(time.DateTime))
	}

	if err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", path, err), file.Close())
	}

	return file, nil
}

// prune removes builds beyond those to keep, and leftovers of interrupted builds. The caller holds the lock.
func prune(cache string) error {
	entries, err := os.ReadDir(cache)
	if err != nil {
		return err
	}

	var directories []os.FileInfo

	for _, entry := range entries {
		if info, err := entry.Info(); err == nil && info.IsDir() {
			directories = append(directories, info)
		}
	}

	slices.SortFunc(directories, func(a, b os.FileInfo) int { return b.ModTime().Compare(a.ModTime()) })

	for i, info := range directories {
		isOld := i >= kept && time.Since(info.ModTime()) > ttl
		if isOld || strings.HasPrefix(info.Name(), unfinished) {
			err = errors.Join(err, os.RemoveAll(filepath.Join(cache, info.Name())))
		}
	}

	return err
}

// PackageDir returns the directory of a package in the checkout of the working directory.
func PackageDir(ctx context.Context, pkg string) (string, error) {
	output, err := Output(exec.CommandContext(ctx, "go", "list", "-find", "-f", "{{.Dir}}", pkg))

	return strings.TrimSpace(string(output)), err
}
