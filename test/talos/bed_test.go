//go:build e2e

package talos_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cosi-project/runtime/pkg/resource"
	"github.com/cosi-project/runtime/pkg/safe"
	"github.com/cosi-project/runtime/pkg/state"
	"github.com/siderolabs/talos/pkg/machinery/resources/network"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/talos-ccm/talos-ccm/test/talos"
)

const (
	service          = "ext-talos-ccm"
	uninitialized    = "node.cloudprovider.kubernetes.io/uninitialized"
	patience         = 4 * time.Minute
	attempt          = 30 * time.Second
	firmStart        = 5 * time.Second
	boots            = 3
	environmentValue = "from the machine configuration"
)

// probeConfig reaches the probe's environment.
const probeConfig = `
apiVersion: v1alpha1
kind: ExtensionServiceConfig
name: talos-ccm
environment:
  - PROBE=` + environmentValue + `
`

// eventually waits until a condition has no objection any more.
func eventually(t *testing.T, condition func(context.Context) error) time.Duration {
	t.Helper()

	start := time.Now()

	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()

	var objection error

	if err := wait.PollUntilContextCancel(ctx, 100*time.Millisecond, true, func(ctx context.Context) (bool, error) {
		// A call that hangs, as one to an API server that goes down, is not the last one.
		ctx, cancel := context.WithTimeout(ctx, attempt)
		defer cancel()

		objection = condition(ctx)

		return objection == nil, nil
	}); err != nil {
		t.Fatal(objection)
	}

	return time.Since(start)
}

func check(t *testing.T, err error) {
	t.Helper()

	if err != nil {
		t.Fatal(err)
	}
}

// nodeOf reads m's Node.
func nodeOf(t *testing.T, m *talos.Machine) (node *corev1.Node) {
	t.Helper()

	kubernetes, err := bed.Kubernetes()
	check(t, err)

	eventually(t, func(ctx context.Context) (err error) {
		node, err = kubernetes.CoreV1().Nodes().Get(ctx, m.Name(), metav1.GetOptions{})

		return err
	})

	return node
}

func TestBed_NodesWaitForCloudProvider(t *testing.T) {
	for _, m := range bed.Machines() {
		node := nodeOf(t, m)

		if !slices.ContainsFunc(node.Spec.Taints, func(taint corev1.Taint) bool { return taint.Key == uninitialized }) {
			t.Errorf("Node %s has taints %v, none of them %s", node.Name, node.Spec.Taints, uninitialized)
		}

		if info := node.Status.NodeInfo; info.KubeletVersion != bed.Release().Kubernetes || info.OSImage != "Talos ("+bed.Release().Talos+")" {
			t.Errorf("Node %s has kubelet %s on %s", node.Name, info.KubeletVersion, info.OSImage)
		}
	}
}

func TestBed_TalosctlReachesMachines(t *testing.T) {
	for _, m := range bed.Machines() {
		out, err := bed.Shell(t.Context(), "talosctl --nodes "+m.Address().String()+" get nodename --output 'jsonpath={.spec.nodename}'")
		check(t, err)

		if got := strings.TrimSpace(string(out)); got != m.Name() {
			t.Errorf("got %q, want %q", got, m.Name())
		}
	}
}

func TestBed_ServingCertificatesArePending(t *testing.T) {
	kubernetes, err := bed.Kubernetes()
	check(t, err)

	for _, m := range bed.Machines() {
		took := eventually(t, func(ctx context.Context) error {
			requests, err := kubernetes.CertificatesV1().CertificateSigningRequests().List(ctx, metav1.ListOptions{})
			if err != nil {
				return err
			}

			for _, r := range requests.Items {
				if r.Spec.SignerName == certificatesv1.KubeletServingSignerName && r.Spec.Username == "system:node:"+m.Name() &&
					len(r.Status.Conditions) == 0 {
					return nil
				}
			}

			return fmt.Errorf("Node %s has no pending request for a serving certificate", m.Name())
		})

		t.Logf("%s asked for a serving certificate %.1f s after the bed was up", m.Name(), took.Seconds())
	}
}

func TestBed_ExtensionStartsSoonAfterTalos(t *testing.T) {
	for _, m := range bed.Machines() {
		runsSoon(t, m, func() { check(t, m.PowerCycle(t.Context())) })

		eventually(t, func(ctx context.Context) error {
			state, err := m.ServiceState(ctx, service)
			if err == nil && (state.State != talos.StateRunning || len(state.Events) == 0) {
				err = fmt.Errorf("%s: Talos says of %s: %+v", m.Name(), service, state)
			}

			return err
		})
	}
}

// runsSoon sees the extension run soon after Talos, in this boot or, after again, in one of the next: the machine that runs this test may be busy with
// something else for a while, and an extension that waits for something is late every time.
func runsSoon(t *testing.T, m *talos.Machine, again func()) {
	t.Helper()

	for boot := 1; ; boot++ {
		took, err := m.ServiceRunning(t.Context(), service)
		check(t, err)
		t.Logf("%s: %s ran %.1f s after machined", m.Name(), service, took.Seconds())

		if took <= firmStart {
			return
		}

		if boot == boots {
			t.Fatalf("%s: %s ran only %s after machined", m.Name(), service, took)
		}

		again()
	}
}

func TestBed_TalosListsExtension(t *testing.T) {
	for _, m := range bed.Machines() {
		c, err := m.TalosClient(t.Context())
		check(t, err)
		defer c.Close() //nolint:errcheck // nothing is lost

		installed, err := safe.StateListAll[*runtime.ExtensionStatus](t.Context(), c.COSI)
		check(t, err)

		if installed.Len() != 1 || installed.Get(0).TypedSpec().Metadata.Name != "talos-ccm" {
			t.Errorf("%s has the extensions %v", m.Name(), installed)
		}
	}
}

// report is the last report of the probe.
type report struct{ Version, MachineType, Platform, Environment string }

func reported(ctx context.Context, m *talos.Machine) (last report, err error) {
	logs, err := m.Logs(ctx, service)
	if err != nil {
		return last, err
	}

	err = fmt.Errorf("%s: the probe has not reported: %s", m.Name(), logs)

	for line := range strings.Lines(logs) {
		if _, object, ok := strings.Cut(line, "{"); ok {
			err = json.Unmarshal([]byte("{"+object), &last)
		}
	}

	return last, err
}

func TestBed_ExtensionReachesMachineSocket(t *testing.T) {
	for _, m := range bed.Machines() {
		var got report

		eventually(t, func(ctx context.Context) (err error) {
			got, err = reported(ctx, m)

			return err
		})

		// What only the configuration tells, Talos may know later than the probe asks.
		if got.Version != bed.Release().Talos || got.Platform != "container" {
			t.Errorf("%s: the probe reported %+v", m.Name(), got)
		}
	}
}

func TestBed_RestartedExtensionSeesConfiguration(t *testing.T) {
	for m, machineType := range map[*talos.Machine]string{bed.ControlPlane: "controlplane", bed.Worker: "worker"} {
		check(t, m.RestartService(t.Context(), service))

		want := report{Version: bed.Release().Talos, MachineType: machineType, Platform: "container", Environment: environmentValue}

		eventually(t, func(ctx context.Context) error {
			got, err := reported(ctx, m)
			if err == nil && got != want {
				err = fmt.Errorf("%s: the probe reported %+v", m.Name(), got)
			}

			return err
		})
	}
}

func TestBed_AddressesAppearInTalos(t *testing.T) {
	prefix := netip.MustParsePrefix("203.0.113.7/32")

	c, err := bed.Worker.TalosClient(t.Context())
	check(t, err)
	defer c.Close() //nolint:errcheck // nothing is lost

	events := make(chan safe.WrappedStateEvent[*network.AddressStatus])
	check(t, safe.StateWatchKind(t.Context(), c.COSI,
		resource.NewMetadata(network.NamespaceName, network.AddressStatusType, "", resource.VersionUndefined), events))

	next := func(wanted state.EventType, start time.Time) time.Duration {
		deadline := time.After(patience)

		for {
			select {
			case event := <-events:
				check(t, event.Error())

				status, err := event.Resource()
				check(t, err)

				if event.Type() == wanted && status.TypedSpec().Address == prefix {
					return time.Since(start)
				}
			case <-deadline:
				t.Fatalf("no event of type %s for %s", wanted, prefix)
			}
		}
	}

	start := time.Now()
	check(t, bed.Worker.AddAddress(t.Context(), "eth0", prefix))
	t.Logf("the address came after %s", next(state.Created, start))

	start = time.Now()
	check(t, bed.Worker.DelAddress(t.Context(), "eth0", prefix))
	t.Logf("it went after %s", next(state.Destroyed, start))
}

func TestBed_RestartsKilledExtension(t *testing.T) {
	m := bed.Worker

	before, err := m.ServiceTask(service)
	check(t, err)

	if len(before) != 1 {
		t.Fatalf("%s has processes %v", service, before)
	}

	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", before[0]))
	check(t, err)

	if !strings.Contains(string(status), "Name:\ttalos-ccm\n") {
		t.Errorf("PID %d is another process: %s", before[0], status)
	}

	mark, start := m.Console().Now(), time.Now()
	check(t, m.KillService(service))
	check(t, m.ServiceRunningAgain(t.Context(), service, mark))
	t.Logf("%s ran again after %.1f s", service, time.Since(start).Seconds())

	// What the console shows of the start before may come after the mark.
	eventually(t, func(context.Context) error {
		after, err := m.ServiceTask(service)
		if err == nil && (len(after) != 1 || after[0] == before[0]) {
			err = fmt.Errorf("%s had processes %v and has %v", service, before, after)
		}

		return err
	})
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

func TestBed_CableDisconnectsMachine(t *testing.T) {
	eventually(t, func(ctx context.Context) error { return dial(ctx, bed.Worker) })
	check(t, bed.Worker.SetLink(t.Context(), talos.LinkDown))

	if dial(t.Context(), bed.Worker) == nil {
		t.Error("the worker can be reached without its cable")
	}

	// From within, the machine goes on.
	eventually(t, func(ctx context.Context) error {
		_, err := bed.Worker.ServiceState(ctx, service)

		return err
	})

	check(t, bed.Worker.SetLink(t.Context(), talos.LinkUp))
	eventually(t, func(ctx context.Context) error { return dial(ctx, bed.Worker) })
}

// alive waits until a machine's kubelet renews its lease.
func alive(t *testing.T, m *talos.Machine, since time.Time) time.Duration {
	t.Helper()

	kubernetes, err := bed.Kubernetes()
	check(t, err)

	return eventually(t, func(ctx context.Context) error {
		lease, err := kubernetes.CoordinationV1().Leases(corev1.NamespaceNodeLease).Get(ctx, m.Name(), metav1.GetOptions{})
		if err != nil {
			return err
		}

		if lease.Spec.RenewTime == nil || lease.Spec.RenewTime.Time.Before(since) {
			return errors.New("the kubelet is silent")
		}

		return nil
	})
}

func TestBed_MachinesKeepIdentity(t *testing.T) {
	for _, test := range []struct {
		name    string
		machine *talos.Machine
		restart func(*talos.Machine, context.Context) error
	}{
		{"worker reboots", bed.Worker, (*talos.Machine).Reboot},
		{"worker loses power", bed.Worker, (*talos.Machine).PowerCycle},
		{"control plane reboots", bed.ControlPlane, (*talos.Machine).Reboot},
		{"control plane loses power", bed.ControlPlane, (*talos.Machine).PowerCycle},
	} {
		t.Run(test.name, func(t *testing.T) {
			before := nodeOf(t, test.machine)
			start := time.Now()
			check(t, test.restart(test.machine, t.Context()))
			t.Logf("the machine was on again after %.1f s", time.Since(start).Seconds())

			_, err := test.machine.ServiceRunning(t.Context(), service)
			check(t, err)
			t.Logf("its kubelet spoke after %.1f s more", alive(t, test.machine, time.Now()).Seconds())

			if nodeOf(t, test.machine).UID != before.UID {
				t.Errorf("the Node was recreated")
			}
		})
	}
}

func TestBed_ExtensionRunsWithoutNetwork(t *testing.T) {
	m := bed.Worker

	check(t, m.PowerOff(t.Context()))
	check(t, m.SetLink(t.Context(), talos.LinkDown))
	check(t, m.PowerOn(t.Context()))

	runsSoon(t, m, func() { check(t, m.PowerCycle(t.Context())) })

	check(t, m.SetLink(t.Context(), talos.LinkUp))
	t.Logf("with its cable back, its kubelet spoke after %.1f s", alive(t, m, time.Now()).Seconds())
}
