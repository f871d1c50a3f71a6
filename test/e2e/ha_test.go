//go:build e2e && ha

package e2e_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/siderolabs/talos/pkg/machinery/resources/v1alpha1"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"github.com/talos-ccm/talos-ccm/pkg/status"
	"github.com/talos-ccm/talos-ccm/test/talos"
)

// controlPlanes is the number of control-plane machines.
const controlPlanes = 3

// goalTimeout is longer than the five minutes after which talos-ccm reports a difference, or deletes a Node.
const goalTimeout = 8 * time.Minute

// haDocument enables the node-ipam-controller on all control-plane machines. It has no configuration file: after a boot,
// Talos in a container may mount the file, which it never writes.
const haDocument = documentHead + upgradeEnvironment

// story is a test of the cluster with three control-plane machines. It logs a table of times.
type story struct {
	*testing.T
	auditor *auditor
	// rows is the table.
	rows []string
}

// begin waits until the cluster is healthy and configured, and starts an auditor.
func begin(t *testing.T) *story {
	t.Helper()

	for _, m := range bed.ControlPlanes {
		awaitTalosAPI(t, m)

		// A second patch would append to the environment.
		document := shell(t, "talosctl -n "+m.Address().String()+" get machineconfig v1alpha1 -o yaml")
		if !strings.Contains(string(document), "TALOS_CCM_CLUSTER_CIDR") {
			patchMachine(t, m, "no-reboot", haDocument)
		}
	}

	eventually(t, checkHealthy)
	eventually(t, checkNodesInitialized)
	eventually(t, func(ctx context.Context) error {
		for _, m := range bed.Machines() {
			if node, err := getNode(ctx, m.Name()); err != nil || len(node.Spec.PodCIDRs) == 0 {
				return fmt.Errorf("%s has no podCIDRs (%v)", m.Name(), err) //nolint:errorlint // may be nil
			}
		}

		return checkServingCertificate(worker.Name(), worker.Address())(ctx)
	})

	return newStory(t)
}

// newStory starts an auditor.
func newStory(t *testing.T) *story {
	t.Helper()

	t.Cleanup(func() {
		for _, m := range bed.ControlPlanes {
			if log, err := m.Logs(context.WithoutCancel(t.Context()), service); t.Failed() {
				t.Logf("log of %s (%v):\n%s", m.Name(), err, log)
			}
		}
	})

	return &story{T: t, auditor: audit(t)}
}

// end logs the table and stops the auditor.
func (s *story) end() {
	s.Helper()
	s.Log("times in seconds\n" + strings.Join(s.rows, "\n"))
	s.auditor.finish(s.T)
}

// goal is a condition and its name in the table.
type goal struct {
	name  string
	check func(context.Context) error
}

// measure waits until all goals are reached, and adds a row with their times to the table.
func (s *story) measure(name string, goals ...goal) {
	s.Helper()

	var (
		start = time.Now()
		cells []string
	)

	eventuallyWithin(s.T, goalTimeout, func(ctx context.Context) (err error) {
		for i, g := range goals {
			if g.check == nil {
				continue
			}

			if failed := g.check(ctx); failed != nil {
				err = errors.Join(err, fmt.Errorf("%s: %s: %w", name, g.name, failed))
			} else {
				cells = append(cells, fmt.Sprintf("%s %.1f", g.name, time.Since(start).Seconds()))
				goals[i].check = nil
			}
		}

		return err
	})

	s.rows = append(s.rows, name+": "+strings.Join(cells, ", "))
}

// leader returns the control-plane machine with the leader, which renews the lease.
func (s *story) leader() (leader *talos.Machine) {
	s.Helper()
	eventually(s.T, func(ctx context.Context) error {
		lease, err := getLease(ctx)
		if err != nil {
			return err
		}

		i := slices.IndexFunc(bed.ControlPlanes, func(m *talos.Machine) bool {
			return s.auditor.names[ptr.Deref(lease.Spec.HolderIdentity, "")] == m.Name()
		})
		if i < 0 {
			return fmt.Errorf("the lease is held by %v", lease.Spec)
		}

		leader = bed.ControlPlanes[i]

		return checkLeaseRenewed(ctx)
	})

	return leader
}

// isLedByOther is the goal that a machine other than m leads.
func isLedByOther(t *testing.T, m *talos.Machine) goal {
	t.Helper()

	own := extensionHolder + identityOf(t, m)

	return goal{"lease", func(ctx context.Context) error {
		lease, err := getLease(ctx)
		if err == nil && *lease.Spec.HolderIdentity == own {
			err = fmt.Errorf("the lease is held by %s", m.Name())
		}

		return errors.Join(err, checkLeaseRenewed(ctx))
	}}
}

// others returns the control-plane machines except m.
func others(m *talos.Machine) []*talos.Machine {
	return slices.DeleteFunc(slices.Clone(bed.ControlPlanes), func(other *talos.Machine) bool { return other == m })
}

// addWorker adds a worker, and returns the goals that its Node is initialized and its kubelet has a certificate, and a
// function that removes the worker.
func (s *story) addWorker() ([]goal, func()) {
	s.Helper()

	added, err := bed.AddWorker(s.Context())
	require.NoError(s, err)

	return joined(added), func() { s.remove(added) }
}

// joined returns the goals that the Node of a worker is initialized and its kubelet has a certificate.
func joined(added *talos.Machine) []goal {
	return []goal{
		{"new Node", func(ctx context.Context) error { return checkInitialized(ctx, added) }},
		{"its certificate", checkServingCertificate(added.Name(), added.Address())},
	}
}

// remove removes a worker and its Node.
func (s *story) remove(added *talos.Machine) {
	s.Helper()
	require.NoError(s, bed.RemoveWorker(s.Context(), added))
	s.auditor.expectDeletion(added.Name())
	require.NoError(s, client.CoreV1().Nodes().Delete(s.Context(), added.Name(), metav1.DeleteOptions{}))
}

// addWorkerAddress adds an address to the first worker. It returns the goal that the kubelet has a certificate for it, and a
// function that removes the address.
func (s *story) addWorkerAddress(address string) (goal, func()) {
	s.Helper()

	prefix := netip.MustParsePrefix(address)
	require.NoError(s, worker.AddAddress(s.Context(), prefix))

	return goal{"renewed certificate", checkServingCertificate(worker.Name(), worker.Address(), prefix.Addr())},
		func() { removeAddress(s.T, worker, prefix) }
}

// status logs and returns the report of talos-ccm status.
func (s *story) status() status.Report {
	s.Helper()

	report, err := readStatus(s.Context())
	require.NoError(s, err)

	kubeconfig := filepath.Join(s.TempDir(), "kubeconfig")
	require.NoError(s, os.WriteFile(kubeconfig, bed.Kubeconfig(), 0o600))
	// The exit code is 2 if there are problems.
	s.Logf("talos-ccm status:\n%s", shell(s.T, fmt.Sprintf("%s status --kubeconfig %s || [ $? = 2 ]", binaryPath(), kubeconfig)))

	return report
}

// readStatus returns the report of talos-ccm status.
func readStatus(ctx context.Context) (status.Report, error) {
	return status.Read(ctx, client, metav1.NamespaceSystem, leaseName)
}

// checkReported returns an error unless talos-ccm status reports, or does not report, a problem of the Node of m.
func checkReported(ctx context.Context, m *talos.Machine, reason string, want presence) error {
	report, err := readStatus(ctx)
	if err != nil {
		return err
	}

	isReported := slices.ContainsFunc(report.Problems, func(p status.Problem) bool {
		return p.Reason == reason && slices.Contains(p.Objects, m.Name())
	})

	return want.check(presence(isReported), "%s of %s in %v", reason, m.Name(), report.Problems)
}

// checkHealthy returns an error unless the control plane is healthy, and talos-ccm runs on all of its machines.
func checkHealthy(ctx context.Context) error {
	err := checkControlPlane(ctx)

	for _, m := range bed.ControlPlanes {
		_, stopped := processes(m)
		err = errors.Join(err, stopped)
	}

	return err
}

// checkControlPlane returns an error unless etcd and the API servers of all control-plane machines are healthy.
func checkControlPlane(ctx context.Context) error {
	for _, m := range bed.ControlPlanes {
		config, err := bed.RESTConfig()
		if err != nil {
			return err
		}

		config.Host = "https://" + m.Address().String() + ":6443"

		api, err := kubernetes.NewForConfig(config)
		if err != nil {
			return err
		}

		if err := api.Discovery().RESTClient().Get().AbsPath("/readyz").Do(ctx).Error(); err != nil {
			return fmt.Errorf("API server of %s: %w", m.Name(), err)
		}

		etcd, err := resource[*v1alpha1.Service](ctx, m, "etcd")
		if err == nil && !etcd.TypedSpec().Healthy {
			err = errors.New("not healthy")
		}

		if err != nil {
			return fmt.Errorf("etcd of %s: %w", m.Name(), err)
		}

		if status, err := resource[*runtime.MachineStatus](ctx, m, runtime.MachineStatusID); err != nil || status.TypedSpec().Stage != runtime.MachineStageRunning {
			return fmt.Errorf("%s is not running (%v)", m.Name(), err) //nolint:errorlint // may be nil
		}
	}

	return nil
}

// TestHA_RollingUpgrade upgrades the control-plane machines one after the other, the leader's first, and rolls them back, the
// leader's last. During each reboot, a new Node registers and a kubelet requests a certificate.
func TestHA_RollingUpgrade(t *testing.T) {
	s := begin(t)

	leader := s.leader()
	for i, m := range append([]*talos.Machine{leader}, others(leader)...) {
		s.upgrade(m, nextVersion, fmt.Sprintf("203.0.113.%d/32", 50+i))
	}

	leader = s.leader()
	for i, m := range append(others(leader), leader) {
		s.upgrade(m, version, fmt.Sprintf("203.0.113.%d/32", 60+i))
	}

	s.end()
}

// upgrade installs a version of the extension on m, and reboots it.
func (s *story) upgrade(m *talos.Machine, version, address string) {
	s.Helper()

	name := fmt.Sprintf("%s to %s", m.Name(), version)
	if s.leader() == m {
		name += " (leader)"
	}

	goals := []goal{isLedByOther(s.T, m)}

	require.NoError(s, m.Install(extensionDir(version)))

	off := make(chan error, 1)
	go func() { off <- m.Shutdown(s.Context()) }()

	added, remove := s.addWorker()
	renewed, removeAddress := s.addWorkerAddress(address)
	s.measure(name, append(append(goals, added...), renewed)...)

	require.NoError(s, <-off)
	require.NoError(s, m.PowerOn())
	s.measure(name+", switched on", goal{"version", func(ctx context.Context) error { return checkInstalled(ctx, m, version) }}, goal{"healthy", checkControlPlane})

	removeAddress()
	remove()
}

// cut cuts the power of machines. They become silent instead of closing their connections.
func (s *story) cut(machines ...*talos.Machine) {
	s.Helper()

	for _, m := range machines {
		require.NoError(s, m.SetLink(s.Context(), "down"))
		require.NoError(s, m.PowerOff(s.Context()))
	}
}

// restore switches a machine on.
func (s *story) restore(m *talos.Machine) {
	s.Helper()

	require.NoError(s, m.SetLink(s.Context(), "up"))
	require.NoError(s, m.PowerOn())
}

// TestHA_PowerCut cuts the power of the leader's machine, and then that of two machines, so that etcd has no quorum.
func TestHA_PowerCut(t *testing.T) {
	s := begin(t)

	leader := s.leader()
	goals := []goal{isLedByOther(t, leader)}

	s.cut(leader)

	added, remove := s.addWorker()
	s.measure("power cut of leader "+leader.Name(), append(goals, added...)...)
	s.restore(leader)
	s.measure("power of "+leader.Name(), goal{"healthy", checkHealthy})
	remove()

	leader = s.leader()
	rest := others(leader)
	start := time.Now()

	s.cut(rest...)
	s.measure("power cut of all but leader "+leader.Name(), goal{"leader stopped", func(ctx context.Context) error {
		log, err := leader.Logs(ctx, service)
		if err == nil && !strings.Contains(after(log, start), "leader election lost") {
			err = errors.New("the leader has not stopped")
		}

		return err
	}})

	s.restore(rest[0])
	s.measure("power of "+rest[0].Name(), goal{"lease", checkLeaseRenewed})
	s.restore(rest[1])

	added, remove = s.addWorker()
	s.measure("power of "+rest[1].Name(), append(added, goal{"healthy", checkHealthy})...)
	remove()

	log, err := leader.Logs(t.Context(), service)
	require.NoError(t, err)
	t.Logf("log of %s since it had no quorum:\n%s", leader.Name(), after(log, start))
	s.end()
}

// after returns the lines of a log since a time.
func after(log string, since time.Time) string {
	var lines []string

	for line := range strings.Lines(log) {
		// "10.77.0.2: I1129 06:50:45.338920 ..."
		if fields := strings.Fields(line); len(fields) > 3 && fields[2] >= since.UTC().Format("15:04:05.000000") {
			lines = append(lines, line)
		}
	}

	return strings.Join(lines, "")
}
