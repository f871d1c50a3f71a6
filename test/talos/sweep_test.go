//go:build e2e

package talos_test

import (
	"bufio"
	"context"
	"errors"
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
	cmd.Env = append(os.Environ(), victim+"=1")

	output, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())

	var id string

	// When etcd is bootstrapped, both machines are running.
	for scanner := bufio.NewScanner(output); scanner.Scan() && !strings.Contains(scanner.Text(), "bootstrap etcd"); {
		if dir, ok := strings.CutPrefix(scanner.Text(), "Talos test bed: folder "); ok {
			id = filepath.Base(dir)
		}
	}

	require.NotEmpty(t, id, "the victim has made no bed")
	require.NoError(t, cmd.Process.Kill())
	cmd.Wait() //nolint:errcheck // it was killed

	took := eventually(t, func(context.Context) error {
		processes, err := processesOf(id)
		if err == nil && len(processes) > 0 {
			err = errors.New("there are still processes: " + strings.Join(processes, " "))
		}

		return err
	})
	t.Logf("all processes were gone after %s", took)

	require.NoError(t, talos.Sweep(t.Context()))
	require.NoError(t, leftovers(id))
}

// processesOf lists the processes of a bed's machines, and the chassis that hold them.
func processesOf(id string) ([]string, error) {
	var found []string

	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		return nil, err
	}

	for _, file := range files {
		dir := filepath.Dir(file)

		if (names(file, id) || names(filepath.Join(dir, "cgroup"), id)) && !zombie(dir) {
			found = append(found, dir)
		}
	}

	return found, nil
}

// names tells whether a file of a process that is still there has a word in it.
func names(file, word string) bool {
	content, err := os.ReadFile(file)

	return err == nil && strings.Contains(string(content), word)
}

// zombie reports whether a process has exited and has not been reaped yet.
func zombie(dir string) bool {
	status, err := os.ReadFile(filepath.Join(dir, "status"))

	return err != nil || strings.Contains(string(status), "State:\tZ")
}
