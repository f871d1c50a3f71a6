package talos

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path"
	"regexp"
	"strings"
	"syscall"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/api/common"
	"github.com/siderolabs/talos/pkg/machinery/constants"
)

// extensionPrefix begins the id of every service that comes with an extension.
const extensionPrefix = "ext-"

// StateRunning is the state of a service whose process runs.
const StateRunning = "Running"

// ServiceState returns the state of a service from apid. See ServiceRunning for a machine that cannot answer.
func (m *Machine) ServiceState(ctx context.Context, id string) (string, error) {
	c, err := m.TalosClient(ctx)
	if err != nil {
		return "", err
	}
	defer c.Close() //nolint:errcheck // nothing is lost

	services, err := c.ServiceInfo(ctx, id)
	if err == nil && len(services) == 0 {
		err = errors.New("no such service")
	}

	if err != nil {
		return "", m.named("get state of service "+id, err)
	}

	return services[0].Service.GetState(), nil
}

// serviceLine matches the console message for a state change of a service.
func serviceLine(id, state string) *regexp.Regexp {
	return regexp.MustCompile(`service\[` + regexp.QuoteMeta(id) + `\]\(` + regexp.QuoteMeta(state) + `\)`)
}

// ServiceRunning waits until the console reports in this boot that a service is running, and returns the time since
// machined started.
func (m *Machine) ServiceRunning(ctx context.Context, id string) (time.Duration, error) {
	boot := m.console.PowerOn()

	machined, err := m.console.Wait(ctx, boot, serviceLine("machined", StateRunning))
	if err != nil {
		return 0, m.named("wait for machined", err)
	}

	line, err := m.console.Wait(ctx, boot, serviceLine(id, StateRunning))
	if err != nil {
		return 0, m.named("wait for service "+id, err)
	}

	return line.Since - machined.Since, nil
}

// ServiceRunningAgain waits until the console reports after a mark that a service is running.
func (m *Machine) ServiceRunningAgain(ctx context.Context, id string, after Mark) error {
	_, err := m.console.Wait(ctx, after, serviceLine(id, StateRunning))

	return m.named("wait for service "+id, err)
}

// Logs returns what a service of Talos has logged since the machine was switched on, as far as Talos remembers it.
func (m *Machine) Logs(ctx context.Context, service string) (string, error) {
	c, err := m.TalosClient(ctx)
	if err != nil {
		return "", err
	}
	defer c.Close() //nolint:errcheck // nothing is lost

	const everything = -1

	stream, err := c.Logs(ctx, constants.SystemContainerdNamespace, common.ContainerDriver_CONTAINERD, service, false, everything)
	if err != nil {
		return "", m.named("read logs of "+service, err)
	}

	var logs strings.Builder

	for {
		part, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return logs.String(), nil
		}

		if err != nil {
			return "", m.named("read logs of "+service, err)
		}

		logs.Write(part.GetBytes())
	}
}

// ServiceTask returns the PIDs, as this process sees them, of all processes of a service that Talos runs; none if it is not
// running. /proc/PID/status tells their user and capabilities.
func (m *Machine) ServiceTask(service string) ([]int, error) {
	pids, err := m.cgroup.processes(serviceCgroup(service))

	return pids, m.named("list processes of service "+service, err)
}

func serviceCgroup(service string) string {
	if extension, ok := strings.CutPrefix(service, extensionPrefix); ok {
		return path.Join(constants.CgroupExtensions, extension)
	}

	for _, dir := range []string{constants.CgroupEtcd, constants.CgroupKubelet} {
		if path.Base(dir) == service {
			return dir
		}
	}

	return path.Join(constants.CgroupSystem, service)
}

// KillService kills a service's processes, as a crash would. Talos starts the service again after five seconds.
func (m *Machine) KillService(service string) error {
	pids, err := m.ServiceTask(service)
	if err != nil {
		return err
	}

	if len(pids) == 0 {
		return m.named("kill service "+service, errors.New("it has no processes"))
	}

	for _, pid := range pids {
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
			return m.named(fmt.Sprintf("kill service %s (PID %d)", service, pid), err)
		}
	}

	return nil
}
