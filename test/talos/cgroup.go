package talos

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
)

const (
	cgroupPrefix = "talos-ccm-"
	pollInterval = 50 * time.Millisecond
)

// cgroupRoot finds the cgroup v2 hierarchy. That is all of /sys/fs/cgroup on most machines; where cgroup v1 is in use, v2 lies
// beside it and has no controllers.
func cgroupRoot() (string, error) {
	file, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return "", fmt.Errorf("list mounts: %w", err)
	}
	defer file.Close() //nolint:errcheck // only read

	for scanner := bufio.NewScanner(file); scanner.Scan(); {
		before, after, _ := strings.Cut(scanner.Text(), " - ")
		if fields := strings.Fields(before); strings.HasPrefix(after, "cgroup2 ") && len(fields) > 4 {
			return fields[4], nil
		}
	}

	return "", errors.New("find cgroup v2: no such file system is mounted")
}

// cgroup is a machine's cgroup v2 folder.
type cgroup string

func newCgroup(name string) (cgroup, error) {
	root, err := cgroupRoot()
	if err != nil {
		return "", err
	}

	delegateControllers(root)

	dir := filepath.Join(root, cgroupPrefix+name)
	if err := os.Mkdir(dir, 0o755); err != nil {
		return "", fmt.Errorf("make cgroup: %w", err)
	}

	return cgroup(dir), nil
}

// delegateControllers offers the machine what there is. A kernel that refuses (a container's root cgroup has processes of its
// own) leaves the machine without limits, which it can live with.
func delegateControllers(root string) {
	list, err := os.ReadFile(filepath.Join(root, "cgroup.controllers"))
	if err != nil {
		return
	}

	for controller := range strings.FieldsSeq(string(list)) {
		os.WriteFile(filepath.Join(root, "cgroup.subtree_control"), []byte("+"+controller), 0o644) //nolint:errcheck // see above
	}
}

// limited reports whether the cgroup lacks a controller that Talos sets limits with.
func (c cgroup) limited() bool {
	list, err := os.ReadFile(filepath.Join(string(c), "cgroup.controllers"))
	if err != nil {
		return true
	}

	present := strings.Fields(string(list))

	return slices.ContainsFunc([]string{"cpu", "memory", "pids"}, func(controller string) bool {
		return !slices.Contains(present, controller)
	})
}

// processes lists, by PID of this namespace, what runs in the cgroup's part below and in all of its parts.
func (c cgroup) processes(below string) ([]int, error) {
	var pids []int

	err := filepath.WalkDir(filepath.Join(string(c), below), func(path string, entry fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}

		if err != nil || entry.Name() != "cgroup.procs" {
			return err
		}

		list, err := os.ReadFile(path)
		if err != nil {
			return nil //nolint:nilerr // the cgroup is already gone
		}

		for line := range strings.FieldsSeq(string(list)) {
			if pid, err := strconv.Atoi(line); err == nil {
				pids = append(pids, pid)
			}
		}

		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list processes of cgroup: %w", err)
	}

	return pids, nil
}

// remove kills what is left in the cgroup and removes it, with all of its parts.
func (c cgroup) remove(ctx context.Context) error {
	if _, err := os.Stat(string(c)); errors.Is(err, fs.ErrNotExist) {
		return nil
	}

	if err := os.WriteFile(filepath.Join(string(c), "cgroup.kill"), []byte("1"), 0o644); err != nil {
		return fmt.Errorf("kill processes of cgroup: %w", err)
	}

	var last error

	// Killed processes leave a moment later.
	err := wait.PollUntilContextCancel(ctx, pollInterval, true, func(context.Context) (bool, error) {
		last = c.removeFolders()

		return last == nil, nil
	})
	if err != nil {
		return fmt.Errorf("remove cgroup: %w", errors.Join(err, last))
	}

	return nil
}

func (c cgroup) removeFolders() error {
	var dirs []string

	err := filepath.WalkDir(string(c), func(path string, entry fs.DirEntry, err error) error {
		if err == nil && entry.IsDir() {
			dirs = append(dirs, path)
		}

		return nil
	})

	for _, dir := range slices.Backward(dirs) {
		// Only rmdir(2) works on a cgroup.
		err = errors.Join(err, os.Remove(dir))
	}

	return err
}
