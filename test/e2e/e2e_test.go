//go:build e2e

package e2e_test

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cosi-project/runtime/pkg/safe"
	"github.com/siderolabs/talos/pkg/machinery/resources/config"
	"github.com/siderolabs/talos/pkg/machinery/resources/network"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	cloudproviderapi "k8s.io/cloud-provider/api"

	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/test/talos"
)

const (
	patience = 2 * time.Minute
	tick     = 50 * time.Millisecond
)

// eventually waits for condition, which says what is still missing; empty: nothing. It returns how long that took.
func eventually(t *testing.T, limit time.Duration, condition func(ctx context.Context) string) time.Duration {
	t.Helper()

	var missing string

	start := time.Now()

	err := wait.PollUntilContextTimeout(t.Context(), tick, limit, true, func(ctx context.Context) (bool, error) {
		now := condition(ctx)
		if ctx.Err() == nil { // else it says no more than that
			missing = now
		}

		return now == "", nil
	})
	if err != nil {
		t.Fatalf("after %s: %s", time.Since(start).Round(time.Millisecond), missing)
	}

	return time.Since(start)
}

// initialised says what is missing for the machine's Node to be right, or returns empty.
func initialised(ctx context.Context, m *talos.Machine) string {
	node, err := client.CoreV1().Nodes().Get(ctx, m.Name(), metav1.GetOptions{})
	if err != nil {
		return err.Error()
	}

	ip := m.Address().String()

	switch {
	case slices.ContainsFunc(node.Spec.Taints, func(t corev1.Taint) bool { return t.Key == cloudproviderapi.TaintExternalCloudProvider }):
		return node.Name + " has the uninitialized taint"
	case node.Spec.ProviderID != "talos://container/"+ip:
		return fmt.Sprintf("%s has providerID %q", node.Name, node.Spec.ProviderID)
	case node.Labels[nodespec.LabelPlatform] != "container":
		return fmt.Sprintf("%s has labels %v", node.Name, node.Labels)
	case !slices.Contains(node.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: ip}):
		return fmt.Sprintf("%s has addresses %v", node.Name, node.Status.Addresses)
	case !slices.Contains(node.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeHostName, Address: m.Name()}):
		return fmt.Sprintf("%s has addresses %v", node.Name, node.Status.Addresses)
	}

	return ""
}

func bothInitialised(ctx context.Context) string {
	for _, m := range bed.Machines() {
		if missing := initialised(ctx, m); missing != "" {
			return missing
		}
	}

	return ""
}

func TestBothNodesAreInitialised(t *testing.T) {
	t.Logf("both Nodes are right %s after the bed was up", eventually(t, patience, bothInitialised))

	for _, m := range bed.Machines() {
		node, err := client.CoreV1().Nodes().Get(t.Context(), m.Name(), metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}

		t.Logf("%s: %s %v %v", node.Name, node.Spec.ProviderID, node.Labels, node.Status.Addresses)
		showInitialisation(t, node)
	}
}

// showInitialisation logs how long the Node waited for us, which is short only if we were up before it.
func showInitialisation(t *testing.T, node *corev1.Node) {
	t.Helper()

	for _, f := range node.ManagedFields {
		if f.Manager == "talos-ccm" {
			t.Logf("%s: created %s, %s by talos-ccm at %s", node.Name, node.CreationTimestamp.UTC().Format(time.TimeOnly), f.Operation, f.Time.UTC().Format(time.TimeOnly))
		}
	}
}

func TestAddressesAreThoseTalosReports(t *testing.T) {
	eventually(t, patience, bothInitialised)

	for _, m := range bed.Machines() {
		api, err := m.TalosClient(t.Context())
		if err != nil {
			t.Fatal(err)
		}

		defer api.Close()

		reported, err := safe.StateListAll[*network.AddressStatus](t.Context(), api.COSI)
		if err != nil {
			t.Fatal(err)
		}

		node, err := client.CoreV1().Nodes().Get(t.Context(), m.Name(), metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}

		for _, a := range node.Status.Addresses {
			ip, err := netip.ParseAddr(a.Address)
			if err != nil {
				continue // a name
			}

			if _, found := reported.Find(func(s *network.AddressStatus) bool { return s.TypedSpec().Address.Addr() == ip }); !found {
				t.Errorf("%s: Talos does not report %s", m.Name(), ip)
			}
		}
	}
}

func TestTalosAPIAccessIsNotAskedFor(t *testing.T) {
	for _, m := range bed.Machines() {
		api, err := m.TalosClient(t.Context())
		if err != nil {
			t.Fatal(err)
		}

		defer api.Close()

		machineConfig, err := safe.StateGetByID[*config.MachineConfig](t.Context(), api.COSI, config.ActiveID)
		if err != nil {
			t.Fatal(err)
		}

		if text, err := machineConfig.Container().Bytes(); err != nil || strings.Contains(string(text), "kubernetesTalosAPIAccess") {
			t.Errorf("%s: kubernetesTalosAPIAccess is in the machine config (%v)", m.Name(), err)
		}
	}
}

func TestPublicAddressReachesTheNode(t *testing.T) {
	eventually(t, patience, bothInitialised)
	reachesTheNode(t, bed.Worker, netip.MustParsePrefix("203.0.113.7/32"))
}

// reachesTheNode gives m a public address, sees it on the Node within two seconds, and takes it away again.
func reachesTheNode(t *testing.T, m *talos.Machine, prefix netip.Prefix) {
	t.Helper()

	if err := m.AddAddress(t.Context(), "eth0", prefix); err != nil {
		t.Fatal(err)
	}

	took := eventually(t, 2*time.Second, has(m, prefix.Addr()))
	t.Logf("%s: %s was on the Node after %s", m.Name(), prefix, took.Round(time.Millisecond))

	removeAddress(t, m, prefix)
}

// removeAddress takes an address away from m, and sees it gone from the Node within two seconds.
func removeAddress(t *testing.T, m *talos.Machine, prefix netip.Prefix) {
	t.Helper()

	if err := m.DelAddress(t.Context(), "eth0", prefix); err != nil {
		t.Fatal(err)
	}

	took := eventually(t, 2*time.Second, func(ctx context.Context) string {
		if has(m, prefix.Addr())(ctx) == "" {
			return fmt.Sprintf("%s still has %s", m.Name(), prefix)
		}

		return ""
	})
	t.Logf("%s: %s was gone from the Node after %s", m.Name(), prefix, took.Round(time.Millisecond))
}

func TestWorkerIdles(t *testing.T) {
	state, err := bed.Worker.ServiceState(t.Context(), service)
	if err != nil {
		t.Fatal(err)
	}

	if state.State != talos.StateRunning {
		t.Errorf("the service is %s on the worker", state.State)
	}

	log, err := bed.Worker.Logs(t.Context(), service)
	if err != nil {
		t.Fatal(err)
	}

	if !strings.Contains(log, "Waiting for this machine to be a control-plane machine") || strings.Contains(log, "lease") {
		t.Errorf("the worker's copy does not idle:\n%s", log)
	}
}

func TestMachineGetsThroughItsBoot(t *testing.T) {
	eventually(t, patience, func(ctx context.Context) string {
		for _, m := range bed.Machines() {
			api, err := m.TalosClient(ctx)
			if err != nil {
				return err.Error()
			}

			status, err := safe.StateGetByID[*runtime.MachineStatus](ctx, api.COSI, runtime.MachineStatusID)
			api.Close() //nolint:errcheck // read-only

			if err != nil {
				return err.Error()
			}

			if stage := status.TypedSpec().Stage; stage != runtime.MachineStageRunning {
				return fmt.Sprintf("%s is in stage %s", m.Name(), stage)
			}
		}

		return ""
	})
}

// has says whether m's Node lacks ip as ExternalIP.
func has(m *talos.Machine, ip netip.Addr) func(context.Context) string {
	external := corev1.NodeAddress{Type: corev1.NodeExternalIP, Address: ip.String()}

	return func(ctx context.Context) string {
		if list := addresses(ctx, m); !slices.Contains(list, external) {
			return fmt.Sprintf("%s lacks %v: %v", m.Name(), external, list)
		}

		return ""
	}
}

// addresses of m's Node; none if they cannot be read just now.
func addresses(ctx context.Context, m *talos.Machine) []corev1.NodeAddress {
	node, err := client.CoreV1().Nodes().Get(ctx, m.Name(), metav1.GetOptions{})
	if err != nil {
		return nil
	}

	return node.Status.Addresses
}

// working says what is missing for an instance to hold the lease and renew it.
func working(ctx context.Context) string {
	lease, err := client.CoordinationV1().Leases("kube-system").Get(ctx, "cloud-controller-manager-talos", metav1.GetOptions{})

	switch {
	case err != nil:
		return err.Error()
	case lease.Spec.HolderIdentity == nil || *lease.Spec.HolderIdentity == "":
		return "nobody holds the lease"
	case time.Since(lease.Spec.RenewTime.Time) > 5*time.Second:
		return fmt.Sprintf("%s has not renewed the lease since %s", *lease.Spec.HolderIdentity, lease.Spec.RenewTime)
	}

	return ""
}
