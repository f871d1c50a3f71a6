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

// unprivileged is the UID and GID of an unprivileged user.
const unprivileged = 65534

// TestBed_RequiresRoot runs this test binary as an unprivileged user.
func TestBed_RequiresRoot(t *testing.T) {
	self, err := os.ReadFile(os.Args[0])
	require.NoError(t, err)

	dir := t.TempDir()
	copied := filepath.Join(dir, "bed.test")
	require.NoError(t, os.WriteFile(copied, self, 0o755))

	// By default, only the owner can access temporary directories.
	for _, private := range []string{dir, filepath.Dir(dir)} {
		require.NoError(t, os.Chmod(private, 0o755))
	}

	cmd := exec.CommandContext(t.Context(), copied, "-test.run=^$")
	cmd.Dir = "/"
	cmd.Env = append(os.Environ(), extensionEnv+"=/nowhere")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: unprivileged, Gid: unprivileged}}

	out, err := cmd.CombinedOutput()
	require.Error(t, err)
	assert.Contains(t, string(out), talos.ErrNotRoot.Error())
}

// checkReachable returns an error unless m's apid accepts connections from the bridge.
func checkReachable(ctx context.Context, m *talos.Machine) error {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()

	conn, err := bed.DialContext(ctx, "tcp", netip.AddrPortFrom(m.Address(), 50000).String())
	if err != nil {
		return err
	}

	return conn.Close()
}

func TestBed_LinkDownDisconnectsMachine(t *testing.T) {
	eventually(t, func(ctx context.Context) error { return checkReachable(ctx, bed.Worker) })
	require.NoError(t, bed.Worker.SetLink(t.Context(), "down"))

	assert.Error(t, checkReachable(t.Context(), bed.Worker), "the worker is reachable while its link is down")

	// apid is still reachable from the machine's network namespace.
	eventually(t, func(ctx context.Context) error {
		_, err := resource[*v1alpha1.Service](ctx, bed.Worker, service)

		return err
	})

	require.NoError(t, bed.Worker.SetLink(t.Context(), "up"))
	eventually(t, func(ctx context.Context) error { return checkReachable(ctx, bed.Worker) })
}

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
