package talos

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/constants"
)

// awaitRunning waits until the console reports, after its first n lines, that a service is running.
func (m *Machine) awaitRunning(ctx context.Context, id string, n int) (line, error) {
	found, err := m.console.wait(ctx, n, "service["+id+"](Running)")

	return found, m.wrap("wait for service "+id, err)
}

// ServiceRunning waits until the console reports that a service is running in the current boot, and returns the time
// between the start of machined and the report.
func (m *Machine) ServiceRunning(ctx context.Context, id string) (time.Duration, error) {
	machined, err := m.awaitRunning(ctx, "machined", m.console.boot)
	if err != nil {
		return 0, err
	}

	service, err := m.awaitRunning(ctx, id, m.console.boot)

	return service.since - machined.since, err
}

// Logs returns the logs of a service that Talos has kept since the machine was switched on.
func (m *Machine) Logs(ctx context.Context, service string) (string, error) {
	logs, err := m.bed.Shell(ctx, "talosctl -n "+m.address.String()+" logs "+service)

	return string(logs), err
}

// serviceFile returns the path of a file in the cgroup of an extension service.
func (m *Machine) serviceFile(service, file string) string {
	return filepath.Join(string(m.cgroup), constants.CgroupExtensions, strings.TrimPrefix(service, "ext-"), file)
}

// ServicePIDs returns the PIDs of an extension service in the PID namespace of this process. It returns none if the service
// is not running.
func (m *Machine) ServicePIDs(service string) (pids []int, err error) {
	list, err := os.ReadFile(m.serviceFile(service, "cgroup.procs"))
	if errors.Is(err, os.ErrNotExist) {
		err = nil
	}

	for field := range strings.FieldsSeq(string(list)) {
		pid, invalid := strconv.Atoi(field)
		pids, err = append(pids, pid), errors.Join(err, invalid)
	}

	return pids, m.wrap("list processes of service "+service, err)
}

// CrashService kills the processes of an extension service, and waits until Talos has restarted it, which takes five
// seconds.
func (m *Machine) CrashService(ctx context.Context, service string) error {
	lines := len(m.console.after(0))

	if err := os.WriteFile(m.serviceFile(service, "cgroup.kill"), []byte("1"), 0o644); err != nil {
		return m.wrap("kill service "+service, err)
	}

	_, err := m.awaitRunning(ctx, service, lines)

	return err
}
