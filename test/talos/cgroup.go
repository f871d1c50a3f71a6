package talos

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/procfs"
	"k8s.io/apimachinery/pkg/util/wait"
)

// cgroup is the path of a machine's cgroup v2 directory.
type cgroup string

// cgroupRoot returns the mount point of cgroup v2. On most hosts, that is /sys/fs/cgroup. On hosts with cgroup v1, it is
// another directory and has no controllers.
func cgroupRoot() (string, error) {
	mounts, err := procfs.GetMounts()
	if err != nil {
		return "", fmt.Errorf("list mounts: %w", err)
	}

	for _, mount := range mounts {
		if mount.FSType == "cgroup2" {
			return mount.MountPoint, nil
		}
	}

	return "", errors.New("find cgroup v2: no such file system is mounted")
}

// cgroupOf returns the cgroup of a machine. The name may be a pattern for filepath.Glob.
func cgroupOf(bed, machine string) (cgroup, error) {
	root, err := cgroupRoot()

	return cgroup(filepath.Join(root, "talos-ccm-"+bed+"-"+machine)), err
}

// recreate removes and creates the cgroup, and opens its directory. A cgroup cannot be reused in another boot: Talos has
// enabled controllers for child cgroups, so the kernel rejects processes in it.
func (c cgroup) recreate() (*os.File, error) {
	if err := c.remove(); err != nil {
		return nil, err
	}

	root := filepath.Dir(string(c))
	controllers, _ := os.ReadFile(filepath.Join(root, "cgroup.controllers"))

	// Enabling a controller fails if the root cgroup contains processes, as in a container. The machine then runs without
	// limits.
	for controller := range strings.FieldsSeq(string(controllers)) {
		os.WriteFile(filepath.Join(root, "cgroup.subtree_control"), []byte("+"+controller), 0o644) //nolint:errcheck // see above
	}

	if err := os.Mkdir(string(c), 0o755); err != nil {
		return nil, fmt.Errorf("create cgroup: %w", err)
	}

	return os.Open(string(c))
}

// remove kills the processes in the cgroup and removes it with its child cgroups.
func (c cgroup) remove() error {
	err := os.WriteFile(filepath.Join(string(c), "cgroup.kill"), []byte("1"), 0o644)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}

	if err != nil {
		return fmt.Errorf("kill processes of cgroup: %w", err)
	}

	var last error

	// The kernel removes killed processes asynchronously.
	err = wait.PollUntilContextTimeout(context.Background(), pollInterval, time.Minute, true, func(context.Context) (bool, error) {
		last = c.removeDirectories()

		return last == nil, nil
	})
	if err != nil {
		return fmt.Errorf("remove cgroup: %w", errors.Join(err, last))
	}

	return nil
}

func (c cgroup) removeDirectories() error {
	var dirs []string

	err := filepath.WalkDir(string(c), func(path string, entry fs.DirEntry, err error) error {
		if err == nil && entry.IsDir() {
			dirs = append(dirs, path)
		}

		return nil
	})

	for _, dir := range slices.Backward(dirs) {
		// Cgroups can only be removed with rmdir(2).
		err = errors.Join(err, os.Remove(dir))
	}

	return err
}
