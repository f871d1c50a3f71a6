//go:build e2e

package e2e_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/talos-ccm/talos-ccm/test/talos"
)

func TestBed_LeavesNoProcessesWhenKilled(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^$")
	cmd.Env = append(os.Environ(), extensionEnv+"="+extensionDir(version))
	cmd.Stderr = os.Stderr

	output, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())

	var id string

	// Both machines are running when the bed bootstraps etcd.
	for scanner := bufio.NewScanner(output); scanner.Scan() && !strings.Contains(scanner.Text(), "bootstrap etcd"); {
		if dir, ok := strings.CutPrefix(scanner.Text(), "Talos test bed: directory "); ok {
			id = filepath.Base(dir)
		}
	}

	require.NotEmpty(t, id, "the child process did not create a bed")

	processes, err := bedProcesses(id)
	require.NoError(t, err)
	require.NotEmpty(t, processes)

	require.NoError(t, cmd.Process.Kill())
	cmd.Wait() //nolint:errcheck // it was killed

	took := eventually(t, func(context.Context) error {
		processes, err := bedProcesses(id)
		if err == nil && len(processes) > 0 {
			err = errors.New("processes of the bed are running: " + strings.Join(processes, " "))
		}

		return err
	})
	t.Logf("all processes ended after %s", took)

	require.NoError(t, talos.Sweep())
	require.NoError(t, checkNoLeftovers(id))
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
