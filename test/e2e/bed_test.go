//go:build e2e

package e2e_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestBed_DoesNotRestartCRI requires that the machine configuration does not change the configuration of CRI.
func TestBed_DoesNotRestartCRI(t *testing.T) {
	for _, m := range bed.Machines() {
		_, after, isLoaded := strings.Cut(m.Console(), "machine config loaded successfully")
		require.True(t, isLoaded, "%s has no machine configuration", m.Name())
		assert.NotContains(t, after, "service[cri](Finished)", "console of %s", m.Name())
	}
}

// bedProcesses returns the /proc directories of the processes in a bed's cgroups.
func bedProcesses(id string) ([]string, error) {
	var found []string

	files, err := filepath.Glob("/proc/[0-9]*/cgroup")

	for _, file := range files {
		if dir := filepath.Dir(file); fileContains(file, id) && !isZombie(dir) {
			found = append(found, dir)
		}
	}

	return found, err
}

// fileContains reports whether a file exists and contains a text.
func fileContains(file, text string) bool {
	content, err := os.ReadFile(file)

	return err == nil && strings.Contains(string(content), text)
}

// isZombie reports whether the process with a /proc directory has exited.
func isZombie(dir string) bool {
	status, err := os.ReadFile(filepath.Join(dir, "status"))

	return err != nil || strings.Contains(string(status), "State:\tZ")
}

// checkNoLeftovers returns an error unless all processes, cgroups, mounts and directories of a bed are removed.
func checkNoLeftovers(id string) error {
	processes, err := bedProcesses(id)
	errs := []error{err}

	for _, process := range processes {
		errs = append(errs, fmt.Errorf("process %s is running", process))
	}

	if fileContains("/proc/self/mountinfo", id) {
		errs = append(errs, fmt.Errorf("a file system of %s is mounted", id))
	}

	for _, root := range []string{"/sys/fs/cgroup", filepath.Dir(bed.Dir())} {
		err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
			if err == nil && entry.IsDir() && strings.Contains(entry.Name(), id) {
				errs = append(errs, fmt.Errorf("directory %s exists", path))
			}

			return nil
		})
		errs = append(errs, err)
	}

	return errors.Join(errs...)
}
