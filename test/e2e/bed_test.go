//go:build e2e

package e2e_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/resources/v1alpha1"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/talos-ccm/talos-ccm/test/talos"
)

// unprivileged is the ID of a user and group without rights.
const unprivileged = 65534

// TestBed_RequiresRoot runs this binary as a user without rights: it must fail, and say why.
func TestBed_RequiresRoot(t *testing.T) {
	self, err := os.ReadFile(os.Args[0])
	require.NoError(t, err)

	dir := t.TempDir()
	copied := filepath.Join(dir, "bed.test")
	require.NoError(t, os.WriteFile(copied, self, 0o755))

	// Temporary directories are for their owner alone.
	for _, private := range []string{dir, filepath.Dir(dir)} {
		require.NoError(t, os.Chmod(private, 0o755))
	}

	cmd := exec.CommandContext(t.Context(), copied, "-test.run=^$")
	cmd.Dir = "/"
	cmd.Env = append(os.Environ(), victim+"=/nowhere")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: unprivileged, Gid: unprivileged}}

	out, err := cmd.CombinedOutput()
	require.Error(t, err)
	assert.Contains(t, string(out), talos.ErrNotRoot.Error())
}

func dial(ctx context.Context, m *talos.Machine) error {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()

	conn, err := bed.DialContext(ctx, "tcp", netip.AddrPortFrom(m.Address(), 50000).String())
	if err != nil {
		return err
	}

	return conn.Close()
}

func TestBed_LinkDownDisconnectsMachine(t *testing.T) {
	eventually(t, func(ctx context.Context) error { return dial(ctx, bed.Worker) })
	require.NoError(t, bed.Worker.SetLink(t.Context(), "down"))

	assert.Error(t, dial(t.Context(), bed.Worker), "the worker is reachable while its link is down")

	// From within, the machine goes on.
	eventually(t, func(ctx context.Context) error {
		_, err := resource[*v1alpha1.Service](ctx, bed.Worker, service)

		return err
	})

	require.NoError(t, bed.Worker.SetLink(t.Context(), "up"))
	eventually(t, func(ctx context.Context) error { return dial(ctx, bed.Worker) })
}

func TestBed_LeavesNoProcessesWhenKilled(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^$")
	cmd.Env = append(os.Environ(), victim+"="+unpacked(version))

	output, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())

	var id string

	// When etcd is bootstrapped, both machines are running.
	for scanner := bufio.NewScanner(output); scanner.Scan() && !strings.Contains(scanner.Text(), "bootstrap etcd"); {
		if dir, ok := strings.CutPrefix(scanner.Text(), "Talos test bed: directory "); ok {
			id = filepath.Base(dir)
		}
	}

	require.NotEmpty(t, id, "the victim has created no bed")

	processes, err := processesOf(id)
	require.NoError(t, err)
	require.NotEmpty(t, processes)

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

	require.NoError(t, talos.Sweep())
	require.NoError(t, leftovers(id))
}

// processesOf lists the processes of a bed's machines, by their cgroups.
func processesOf(id string) ([]string, error) {
	var found []string

	files, err := filepath.Glob("/proc/[0-9]*/cgroup")

	for _, file := range files {
		if dir := filepath.Dir(file); names(file, id) && !zombie(dir) {
			found = append(found, dir)
		}
	}

	return found, err
}

// names reports whether a file in /proc contains a word.
func names(file, word string) bool {
	content, err := os.ReadFile(file)

	return err == nil && strings.Contains(string(content), word)
}

// zombie reports whether a process has exited and has not been reaped yet.
func zombie(dir string) bool {
	status, err := os.ReadFile(filepath.Join(dir, "status"))

	return err != nil || strings.Contains(string(status), "State:\tZ")
}

// leftovers finds what a bed has left on this machine: processes, cgroups, mounts, files.
func leftovers(id string) error {
	processes, err := processesOf(id)
	left := []error{err}

	for _, process := range processes {
		left = append(left, fmt.Errorf("%s is left", process))
	}

	if names("/proc/self/mountinfo", id) {
		left = append(left, fmt.Errorf("a mount of %s is left", id))
	}

	for _, root := range []string{"/sys/fs/cgroup", filepath.Dir(bed.Dir())} {
		err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
			if err == nil && entry.IsDir() && strings.Contains(entry.Name(), id) {
				left = append(left, fmt.Errorf("%s is left", path))
			}

			return nil
		})
		left = append(left, err)
	}

	return errors.Join(left...)
}
