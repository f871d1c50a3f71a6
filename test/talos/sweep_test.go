//go:build e2e

package talos_test

import (
	"bufio"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/talos-ccm/talos-ccm/test/talos"
)

func beds(t *testing.T) []string {
	t.Helper()

	dirs, err := filepath.Glob(filepath.Join(filepath.Dir(bed.Dir()), "*"))
	check(t, err)

	return dirs
}

func TestKilledProcessLeavesNothingRunning(t *testing.T) {
	before := beds(t)

	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^$")
	cmd.Env = append(os.Environ(), victim+"=1")

	output, err := cmd.StdoutPipe()
	check(t, err)
	check(t, cmd.Start())

	// When etcd is bootstrapped, both machines are running.
	for scanner := bufio.NewScanner(output); scanner.Scan(); {
		if strings.Contains(scanner.Text(), "bootstrap etcd") {
			break
		}
	}

	left := slices.DeleteFunc(beds(t), func(dir string) bool { return slices.Contains(before, dir) })
	if len(left) != 1 {
		t.Fatalf("the victim has made %v", left)
	}

	check(t, cmd.Process.Kill())
	cmd.Wait() //nolint:errcheck // it was killed

	id := filepath.Base(left[0])

	took := eventually(t, func(context.Context) error {
		processes, err := processesOf(id)
		if err == nil && len(processes) > 0 {
			err = errors.New("there are still processes: " + strings.Join(processes, " "))
		}

		return err
	})
	t.Logf("all processes were gone after %s", took)

	check(t, talos.Sweep(t.Context()))
	check(t, leftovers(id))
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
		command, _ := os.ReadFile(file)
		cgroup, _ := os.ReadFile(filepath.Join(dir, "cgroup"))

		if (strings.Contains(string(command), id) || strings.Contains(string(cgroup), id)) && !zombie(dir) {
			found = append(found, dir)
		}
	}

	return found, nil
}

// zombie tells whether a process has ended and only waits for whoever adopted it to notice.
func zombie(dir string) bool {
	status, err := os.ReadFile(filepath.Join(dir, "status"))

	return err != nil || strings.Contains(string(status), "State:\tZ")
}
