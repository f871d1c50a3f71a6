//go:build e2e

package e2e_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cosi-project/runtime/pkg/resource/meta"
	"github.com/cosi-project/runtime/pkg/safe"
	"github.com/siderolabs/talos/pkg/machinery/resources/config"
	"github.com/siderolabs/talos/pkg/machinery/resources/network"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/siderolabs/talos/pkg/machinery/resources/v1alpha1"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	cloudproviderapi "k8s.io/cloud-provider/api"
	"k8s.io/utils/ptr"

	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/test/talos"
)

const (
	timeout = 4 * time.Minute
	tick    = 50 * time.Millisecond
	// attemptTimeout limits one evaluation of a condition, because requests to a stopping API server may hang.
	attemptTimeout = 30 * time.Second
	// maxAttempts limits the attempts of requireWithin.
	maxAttempts = 3
)

// eventually waits until condition returns nil, and returns the elapsed time. Cleanup functions can use it.
func eventually(t *testing.T, condition func(ctx context.Context) error) time.Duration {
	t.Helper()

	return eventuallyWithin(t, timeout, condition)
}

// eventuallyWithin is eventually with another timeout.
func eventuallyWithin(t *testing.T, timeout time.Duration, condition func(ctx context.Context) error) time.Duration {
	t.Helper()

	var last error

	start := time.Now()

	err := wait.PollUntilContextTimeout(context.WithoutCancel(t.Context()), tick, timeout, true, func(all context.Context) (bool, error) {
		ctx, cancel := context.WithTimeout(all, attemptTimeout)
		defer cancel()

		err := condition(ctx)
		if all.Err() == nil { // otherwise err is only the timeout
			last = err
		}

		return err == nil, nil
	})
	if !assert.NoError(t, err, "last error: %v", last) {
		for _, m := range bed.Machines() {
			t.Logf("console of %s:\n%s", m.Name(), m.Console())
		}

		t.FailNow()
	}

	return time.Since(start)
}

// requireWithin calls measure up to maxAttempts times, until it returns at most limit. A busy host can delay single
// attempts; a timer in the product delays all of them.
func requireWithin(t *testing.T, limit time.Duration, measure func() time.Duration) {
	t.Helper()

	took := measure()

	for attempt := 1; attempt < maxAttempts && took > limit; attempt++ {
		t.Logf("attempt %d took %s, want at most %s", attempt, took.Round(time.Millisecond), limit)

		took = measure()
	}

	require.LessOrEqual(t, took, limit, "attempt %d", maxAttempts)
}

// getNode returns the Node with a name.
func getNode(ctx context.Context, name string) (*corev1.Node, error) {
	return client.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
}

// nodeOf returns the Node of m. It retries until the request succeeds.
func nodeOf(t *testing.T, m *talos.Machine) (node *corev1.Node) {
	t.Helper()

	eventually(t, func(ctx context.Context) (err error) {
		node, err = getNode(ctx, m.Name())

		return err
	})

	return node
}

// resource returns a COSI resource of m.
func resource[R meta.ResourceWithRD](ctx context.Context, m *talos.Machine, id string) (res R, err error) {
	api, err := m.TalosClient(ctx)
	if err != nil {
		return res, err
	}
	defer api.Close() //nolint:errcheck // read only

	return safe.StateGetByID[R](ctx, api.COSI, id)
}

// checkInitialized returns an error unless m's Node is initialized.
func checkInitialized(ctx context.Context, m *talos.Machine) error {
	return checkInitializedAs(ctx, m, m.Name(), providerID(m))
}

// providerID returns the providerID of m's Node.
func providerID(m *talos.Machine) string { return "talos://container/" + m.Address().String() }

// checkInitializedAs returns an error unless the Node with a name is initialized with the providerID and m's address.
func checkInitializedAs(ctx context.Context, m *talos.Machine, name, providerID string) error {
	node, err := getNode(ctx, name)
	if err != nil {
		return err
	}

	addresses := []corev1.NodeAddress{
		{Type: corev1.NodeInternalIP, Address: m.Address().String()}, {Type: corev1.NodeHostName, Address: name},
	}
	missing := func(a corev1.NodeAddress) bool { return !slices.Contains(node.Status.Addresses, a) }

	if slices.ContainsFunc(node.Spec.Taints, func(t corev1.Taint) bool { return t.Key == cloudproviderapi.TaintExternalCloudProvider }) ||
		node.Spec.ProviderID != providerID || node.Labels[nodespec.LabelPlatform] != "container" || slices.ContainsFunc(addresses, missing) {
		return fmt.Errorf("%s has taints %v, providerID %q, labels %v, addresses %v",
			name, node.Spec.Taints, node.Spec.ProviderID, node.Labels, node.Status.Addresses)
	}

	return nil
}

// checkNodesInitialized returns an error unless all Nodes are initialized.
func checkNodesInitialized(ctx context.Context) error {
	for _, m := range bed.Machines() {
		if err := checkInitialized(ctx, m); err != nil {
			return err
		}
	}

	return nil
}

func TestNodes_AreInitialized(t *testing.T) {
	t.Logf("all Nodes were initialized after %s", eventually(t, checkNodesInitialized))

	for _, m := range bed.Machines() {
		node := nodeOf(t, m)
		t.Logf("%s: %s %v %v", node.Name, node.Spec.ProviderID, node.Labels, node.Status.Addresses)

		// No other client initializes Nodes.
		assert.True(t, slices.ContainsFunc(node.ManagedFields, func(f metav1.ManagedFieldsEntry) bool { return f.Manager == "talos-ccm" }), node.Name)
		assert.Equal(t, bed.Release().Kubernetes, node.Status.NodeInfo.KubeletVersion, node.Name)
		assert.Equal(t, "Talos ("+bed.Release().Talos+")", node.Status.NodeInfo.OSImage, node.Name)
	}
}

func TestNodes_HaveAddressesOfTalos(t *testing.T) {
	eventually(t, checkNodesInitialized)

	for _, m := range bed.Machines() {
		api, err := m.TalosClient(t.Context())
		require.NoError(t, err)

		defer api.Close() //nolint:errcheck // read only

		reported, err := safe.StateListAll[*network.AddressStatus](t.Context(), api.COSI)
		require.NoError(t, err)

		for _, a := range nodeOf(t, m).Status.Addresses {
			ip, err := netip.ParseAddr(a.Address)
			if err != nil {
				continue // host name
			}

			_, found := reported.Find(func(s *network.AddressStatus) bool { return s.TypedSpec().Address.Addr() == ip })
			assert.True(t, found, "%s: Talos does not report %s", m.Name(), ip)
		}
	}
}

func TestExtension_NeedsNoKubernetesTalosAPIAccess(t *testing.T) {
	for _, m := range bed.Machines() {
		machineConfig, err := resource[*config.MachineConfig](t.Context(), m, config.ActiveID)
		require.NoError(t, err)

		text, err := machineConfig.Container().Bytes()
		require.NoError(t, err)
		assert.NotContains(t, string(text), "kubernetesTalosAPIAccess", m.Name())
	}
}

func TestNodes_FollowPublicAddress(t *testing.T) {
	eventually(t, checkNodesInitialized)
	requireAddressUpdates(t, worker, netip.MustParsePrefix("203.0.113.7/32"))
}

// requireAddressUpdates adds a public address to m, removes it, and requires each change on the Node within two seconds.
// Before, it waits until talos-ccm watches all machines.
func requireAddressUpdates(t *testing.T, m *talos.Machine, prefix netip.Prefix) {
	t.Helper()

	eventually(t, checkMachinesCurrent)
	requireWithin(t, 2*time.Second, func() time.Duration { return max(addAddress(t, m, prefix), removeAddress(t, m, prefix)) })
}

// addAddress adds an address to m, waits until the Node has it, and returns the elapsed time.
func addAddress(t *testing.T, m *talos.Machine, prefix netip.Prefix) time.Duration {
	t.Helper()
	require.NoError(t, m.AddAddress(t.Context(), prefix))

	took := eventually(t, checkExternalIP(m, prefix.Addr(), present))
	t.Logf("%s: %s was added to the Node after %s", m.Name(), prefix, took.Round(time.Millisecond))

	return took
}

// removeAddress removes an address from m, waits until the Node lacks it, and returns the elapsed time. Cleanup functions
// can use it.
func removeAddress(t *testing.T, m *talos.Machine, prefix netip.Prefix) time.Duration {
	t.Helper()
	require.NoError(t, m.RemoveAddress(context.WithoutCancel(t.Context()), prefix))

	took := eventually(t, checkExternalIP(m, prefix.Addr(), absent))
	t.Logf("%s: %s was removed from the Node after %s", m.Name(), prefix, took.Round(time.Millisecond))

	return took
}

// checkExternalIP returns a condition: m's Node has, or lacks, the ExternalIP ip.
func checkExternalIP(m *talos.Machine, ip netip.Addr, want presence) func(context.Context) error {
	return func(ctx context.Context) error {
		node, err := getNode(ctx, m.Name())
		if err != nil {
			return err
		}

		external := corev1.NodeAddress{Type: corev1.NodeExternalIP, Address: ip.String()}

		return want.check(presence(slices.Contains(node.Status.Addresses, external)), "%s: %v in %v", m.Name(), external, node.Status.Addresses)
	}
}

// presence is whether an object contains an element.
type presence bool

const (
	present presence = true
	absent  presence = false
)

// check returns an error unless got equals want. The format and args describe the element.
func (want presence) check(got presence, format string, args ...any) error {
	if got != want {
		return fmt.Errorf(format+": present is %t, want %t", append(args, got, want)...)
	}

	return nil
}

func TestExtension_IdlesOnWorker(t *testing.T) {
	eventually(t, func(ctx context.Context) error {
		state, err := resource[*v1alpha1.Service](ctx, worker, service)
		if err != nil {
			return err
		}

		if !state.TypedSpec().Running {
			return errors.New("the service is not running on the worker")
		}

		log, err := worker.Logs(ctx, service)
		require.NotContains(t, log, "lease", "the instance on the worker takes part in leader election")

		if err == nil && !strings.Contains(log, "Waiting for the local machine to become a control-plane machine") {
			err = fmt.Errorf("the instance on the worker does not log that it is waiting:\n%s", log)
		}

		return err
	})
}

func TestExtension_DoesNotBlockBoot(t *testing.T) {
	for _, m := range bed.Machines() {
		eventually(t, func(ctx context.Context) error {
			status, err := resource[*runtime.MachineStatus](ctx, m, runtime.MachineStatusID)
			if err == nil && status.TypedSpec().Stage != runtime.MachineStageRunning {
				err = fmt.Errorf("%s is in stage %s", m.Name(), status.TypedSpec().Stage)
			}

			return err
		})
	}
}

// maxLeaseAge is the maximum time since the last renewal of a held lease. Leaders renew every two seconds.
const maxLeaseAge = 5 * time.Second

// getLease returns talos-ccm's leader election lease.
func getLease(ctx context.Context) (*coordinationv1.Lease, error) {
	return client.CoordinationV1().Leases(metav1.NamespaceSystem).Get(ctx, leaseName, metav1.GetOptions{})
}

// checkLeaseRenewed returns an error unless an instance holds the lease and renews it.
func checkLeaseRenewed(ctx context.Context) error {
	lease, err := getLease(ctx)
	if err != nil {
		return err
	}

	if holder := ptr.Deref(lease.Spec.HolderIdentity, ""); holder == "" || time.Since(lease.Spec.RenewTime.Time) > maxLeaseAge {
		return fmt.Errorf("the lease is held by %q and was last renewed at %s", holder, lease.Spec.RenewTime)
	}

	return nil
}
