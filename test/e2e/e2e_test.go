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
	patience = 4 * time.Minute
	tick     = 50 * time.Millisecond
	// attempt bounds one look at a condition: a call that hangs, as one to an API server that goes down, is not the last one.
	attempt = 30 * time.Second
	// tries is how often something is done that is to have its effect soon.
	tries = 3
)

// eventually waits for condition, which says what is still missing; empty: nothing. It returns how long that took. Tests tidy up with it, too.
func eventually(t *testing.T, condition func(ctx context.Context) string) time.Duration {
	t.Helper()

	var missing string

	start := time.Now()

	err := wait.PollUntilContextTimeout(context.WithoutCancel(t.Context()), tick, patience, true, func(all context.Context) (bool, error) {
		ctx, cancel := context.WithTimeout(all, attempt)
		defer cancel()

		now := condition(ctx)
		if all.Err() == nil { // else it says no more than that
			missing = now
		}

		return now == "", nil
	})
	if err != nil {
		t.Fatalf("after %s: %s", time.Since(start).Round(time.Millisecond), missing)
	}

	return time.Since(start)
}

// promptly does something whose effects take as long as it returns, until they come within limit: the machine that runs this test may be busy with something
// else for a while. What waits for a timer is late every time.
func promptly(t *testing.T, limit time.Duration, do func() time.Duration) {
	t.Helper()

	for try := 1; ; try++ {
		took := do()
		if took <= limit {
			return
		}

		t.Logf("it took %s in try %d, and should take less than %s", took.Round(time.Millisecond), try, limit)

		if try == tries {
			t.Fatalf("it took %s in the last of %d tries, and never less than %s", took.Round(time.Millisecond), tries, limit)
		}
	}
}

// nodeOf reads m's Node.
func nodeOf(t *testing.T, m *talos.Machine) (node *corev1.Node) {
	t.Helper()

	eventually(t, func(ctx context.Context) string {
		var err error
		if node, err = client.CoreV1().Nodes().Get(ctx, m.Name(), metav1.GetOptions{}); err != nil {
			return err.Error()
		}

		return ""
	})

	return node
}

// initialized says what is missing for the machine's Node to be right, or returns empty.
func initialized(ctx context.Context, m *talos.Machine) string {
	return initializedAs(ctx, m, m.Name(), providerID(m))
}

func providerID(m *talos.Machine) string { return "talos://container/" + m.Address().String() }

// initializedAs says what is missing for the Node to be right for the machine, or returns empty.
func initializedAs(ctx context.Context, m *talos.Machine, name, providerID string) string {
	node, err := client.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return err.Error()
	}

	ip := m.Address().String()

	switch {
	case slices.ContainsFunc(node.Spec.Taints, func(t corev1.Taint) bool { return t.Key == cloudproviderapi.TaintExternalCloudProvider }):
		return node.Name + " has the uninitialized taint"
	case node.Spec.ProviderID != providerID:
		return fmt.Sprintf("%s has providerID %q", node.Name, node.Spec.ProviderID)
	case node.Labels[nodespec.LabelPlatform] != "container":
		return fmt.Sprintf("%s has labels %v", node.Name, node.Labels)
	case !slices.Contains(node.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: ip}):
		return fmt.Sprintf("%s has addresses %v", node.Name, node.Status.Addresses)
	case !slices.Contains(node.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeHostName, Address: name}):
		return fmt.Sprintf("%s has addresses %v", node.Name, node.Status.Addresses)
	}

	return ""
}

func bothInitialized(ctx context.Context) string {
	for _, m := range bed.Machines() {
		if missing := initialized(ctx, m); missing != "" {
			return missing
		}
	}

	return ""
}

func TestNodes_AreInitialized(t *testing.T) {
	t.Logf("both Nodes are right %s after the bed was up", eventually(t, bothInitialized))

	for _, m := range bed.Machines() {
		node := nodeOf(t, m)

		t.Logf("%s: %s %v %v", node.Name, node.Spec.ProviderID, node.Labels, node.Status.Addresses)
		showInitialization(t, node)
	}
}

// showInitialization logs how long the Node waited for us, which is short only if we were up before it.
func showInitialization(t *testing.T, node *corev1.Node) {
	t.Helper()

	for _, f := range node.ManagedFields {
		if f.Manager == "talos-ccm" {
			t.Logf("%s: created %s, %s by talos-ccm at %s", node.Name, node.CreationTimestamp.UTC().Format(time.TimeOnly), f.Operation, f.Time.UTC().Format(time.TimeOnly))
		}
	}
}

func TestNodes_HaveAddressesOfTalos(t *testing.T) {
	eventually(t, bothInitialized)

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

		for _, a := range nodeOf(t, m).Status.Addresses {
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

func TestExtension_NeedsNoKubernetesTalosAPIAccess(t *testing.T) {
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

func TestNodes_FollowPublicAddress(t *testing.T) {
	eventually(t, bothInitialized)
	reachesTheNode(t, bed.Worker, netip.MustParsePrefix("203.0.113.7/32"))
}

// reachesTheNode gives m a public address, sees it on the Node within two seconds, takes it away again, and sees it gone within two seconds. No client can do
// that before both machines are watched.
func reachesTheNode(t *testing.T, m *talos.Machine, prefix netip.Prefix) {
	t.Helper()

	eventually(t, bothCurrent)

	promptly(t, 2*time.Second, func() time.Duration {
		return max(addAddress(t, m, prefix), removeAddress(t, m, prefix))
	})
}

// addAddress gives m an address, and returns how long it took to be on the Node.
func addAddress(t *testing.T, m *talos.Machine, prefix netip.Prefix) time.Duration {
	t.Helper()

	if err := m.AddAddress(t.Context(), "eth0", prefix); err != nil {
		t.Fatal(err)
	}

	took := eventually(t, has(m, prefix.Addr()))
	t.Logf("%s: %s was on the Node after %s", m.Name(), prefix, took.Round(time.Millisecond))

	return took
}

// removeAddress takes an address away from m, and returns how long it took to be gone from the Node. Tests tidy up with it, too.
func removeAddress(t *testing.T, m *talos.Machine, prefix netip.Prefix) time.Duration {
	t.Helper()

	if err := m.DelAddress(context.WithoutCancel(t.Context()), "eth0", prefix); err != nil {
		t.Fatal(err)
	}

	took := eventually(t, func(ctx context.Context) string {
		list, err := addresses(ctx, m)
		if err != nil {
			return err.Error()
		}

		if slices.ContainsFunc(list, func(a corev1.NodeAddress) bool { return a.Address == prefix.Addr().String() }) {
			return fmt.Sprintf("%s still has %s", m.Name(), prefix)
		}

		return ""
	})
	t.Logf("%s: %s was gone from the Node after %s", m.Name(), prefix, took.Round(time.Millisecond))

	return took
}

func TestExtension_IdlesOnWorker(t *testing.T) {
	eventually(t, func(ctx context.Context) string {
		state, err := bed.Worker.ServiceState(ctx, service)
		if err != nil {
			return err.Error()
		}

		if state.State != talos.StateRunning {
			return fmt.Sprintf("the service is %s on the worker", state.State)
		}

		log, err := bed.Worker.Logs(ctx, service)
		if err != nil {
			return err.Error()
		}

		if strings.Contains(log, "lease") {
			t.Fatalf("the worker's copy does not idle:\n%s", log)
		}

		if !strings.Contains(log, "Waiting for the local machine to become a control-plane machine") {
			return "the worker's copy does not say that it idles:\n" + log
		}

		return ""
	})
}

func TestExtension_DoesNotBlockBoot(t *testing.T) {
	eventually(t, func(ctx context.Context) string {
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
		if list, err := addresses(ctx, m); !slices.Contains(list, external) {
			return fmt.Sprintf("%s lacks %v: %v (%v)", m.Name(), external, list, err)
		}

		return ""
	}
}

// addresses of m's Node.
func addresses(ctx context.Context, m *talos.Machine) ([]corev1.NodeAddress, error) {
	node, err := client.CoreV1().Nodes().Get(ctx, m.Name(), metav1.GetOptions{})
	if err != nil {
		return nil, err
	}

	return node.Status.Addresses, nil
}

// renewedLately is the maximum age of the last renewal of a held lease: leaders renew every two seconds.
const renewedLately = 5 * time.Second

// working says what is missing for an instance to hold the lease and renew it.
func working(ctx context.Context) string {
	lease, err := client.CoordinationV1().Leases(metav1.NamespaceSystem).Get(ctx, leaseName, metav1.GetOptions{})

	switch {
	case err != nil:
		return err.Error()
	case lease.Spec.HolderIdentity == nil || *lease.Spec.HolderIdentity == "":
		return "no instance holds the lease"
	case time.Since(lease.Spec.RenewTime.Time) > renewedLately:
		return fmt.Sprintf("%s has not renewed the lease since %s", *lease.Spec.HolderIdentity, lease.Spec.RenewTime)
	}

	return ""
}
