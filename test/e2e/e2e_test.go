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
	// attempt limits one evaluation of a condition: a call to an API server that goes down may hang.
	attempt = 30 * time.Second
	// tries is how often something is tried that takes longer than promised on a busy machine.
	tries = 3
)

// eventually waits until condition returns nil, and returns how long that took. Cleanup functions use it, too.
func eventually(t *testing.T, condition func(ctx context.Context) error) time.Duration {
	t.Helper()

	var last error

	start := time.Now()

	err := wait.PollUntilContextTimeout(context.WithoutCancel(t.Context()), tick, timeout, true, func(all context.Context) (bool, error) {
		ctx, cancel := context.WithTimeout(all, attempt)
		defer cancel()

		err := condition(ctx)
		if all.Err() == nil { // else err only says that the time is over
			last = err
		}

		return err == nil, nil
	})
	require.NoError(t, err, "last error: %v", last)

	return time.Since(start)
}

// promptly repeats do, which returns how long its effects took, until they took no longer than limit: the machine that runs
// this test may be busy for a while. What waits for a timer is late every time.
func promptly(t *testing.T, limit time.Duration, do func() time.Duration) {
	t.Helper()

	took := do()

	for try := 1; try < tries && took > limit; try++ {
		t.Logf("it took %s in try %d, and should take less than %s", took.Round(time.Millisecond), try, limit)

		took = do()
	}

	require.LessOrEqual(t, took, limit, "the last of %d tries", tries)
}

// getNode returns a Node by its name.
func getNode(ctx context.Context, name string) (*corev1.Node, error) {
	return client.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
}

// nodeOf returns the Node of m.
func nodeOf(t *testing.T, m *talos.Machine) (node *corev1.Node) {
	t.Helper()

	eventually(t, func(ctx context.Context) (err error) {
		node, err = getNode(ctx, m.Name())

		return err
	})

	return node
}

// resource reads a resource of m.
func resource[R meta.ResourceWithRD](ctx context.Context, m *talos.Machine, id string) (res R, err error) {
	api, err := m.TalosClient(ctx)
	if err != nil {
		return res, err
	}
	defer api.Close() //nolint:errcheck // read only

	return safe.StateGetByID[R](ctx, api.COSI, id)
}

// initialized returns an error unless the Node is right for the machine.
func initialized(ctx context.Context, m *talos.Machine) error {
	return initializedAs(ctx, m, m.Name(), providerID(m))
}

func providerID(m *talos.Machine) string { return "talos://container/" + m.Address().String() }

// initializedAs returns an error unless the Node with the name and the providerID is right for the machine.
func initializedAs(ctx context.Context, m *talos.Machine, name, providerID string) error {
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

func bothInitialized(ctx context.Context) error {
	return errors.Join(initialized(ctx, bed.ControlPlane), initialized(ctx, bed.Worker))
}

func TestNodes_AreInitialized(t *testing.T) {
	t.Logf("both Nodes are right %s after the bed was up", eventually(t, bothInitialized))

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
	eventually(t, bothInitialized)

	for _, m := range bed.Machines() {
		api, err := m.TalosClient(t.Context())
		require.NoError(t, err)

		defer api.Close() //nolint:errcheck // read only

		reported, err := safe.StateListAll[*network.AddressStatus](t.Context(), api.COSI)
		require.NoError(t, err)

		for _, a := range nodeOf(t, m).Status.Addresses {
			ip, err := netip.ParseAddr(a.Address)
			if err != nil {
				continue // a name
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
	eventually(t, bothInitialized)
	reachesTheNode(t, bed.Worker, netip.MustParsePrefix("203.0.113.7/32"))
}

// reachesTheNode gives m a public address and takes it away again, and checks that the Node follows within two seconds. That
// takes a connection to both machines.
func reachesTheNode(t *testing.T, m *talos.Machine, prefix netip.Prefix) {
	t.Helper()

	eventually(t, bothCurrent)
	promptly(t, 2*time.Second, func() time.Duration { return max(addAddress(t, m, prefix), removeAddress(t, m, prefix)) })
}

// addAddress gives m an address, and returns how long it took to be on the Node.
func addAddress(t *testing.T, m *talos.Machine, prefix netip.Prefix) time.Duration {
	t.Helper()
	require.NoError(t, m.AddAddress(t.Context(), prefix))

	took := eventually(t, externalIP(m, prefix.Addr(), present))
	t.Logf("%s: %s was on the Node after %s", m.Name(), prefix, took.Round(time.Millisecond))

	return took
}

// removeAddress takes an address away from m, and returns how long it took to be gone from the Node. Cleanup functions use
// it, too.
func removeAddress(t *testing.T, m *talos.Machine, prefix netip.Prefix) time.Duration {
	t.Helper()
	require.NoError(t, m.RemoveAddress(context.WithoutCancel(t.Context()), prefix))

	took := eventually(t, externalIP(m, prefix.Addr(), absent))
	t.Logf("%s: %s was gone from the Node after %s", m.Name(), prefix, took.Round(time.Millisecond))

	return took
}

// externalIP returns an error unless ip is, or is not, an ExternalIP of m's Node.
func externalIP(m *talos.Machine, ip netip.Addr, want presence) func(context.Context) error {
	return func(ctx context.Context) error {
		node, err := getNode(ctx, m.Name())
		if err != nil {
			return err
		}

		external := corev1.NodeAddress{Type: corev1.NodeExternalIP, Address: ip.String()}

		return want.check(presences[slices.Contains(node.Status.Addresses, external)], "%s: %v in %v", m.Name(), external, node.Status.Addresses)
	}
}

// presence is whether something should be there.
type presence string

const (
	present presence = "there"
	absent  presence = "not there"
)

// presences are the presences by what Contains functions return.
var presences = map[bool]presence{true: present, false: absent}

// check returns an error with a description unless the presence is as wanted.
func (want presence) check(got presence, format string, args ...any) error {
	if got != want {
		return fmt.Errorf(format+" should be "+string(want), args...)
	}

	return nil
}

func TestExtension_IdlesOnWorker(t *testing.T) {
	eventually(t, func(ctx context.Context) error {
		state, err := resource[*v1alpha1.Service](ctx, bed.Worker, service)
		if err != nil {
			return err
		}

		if !state.TypedSpec().Running {
			return errors.New("the service does not run on the worker")
		}

		log, err := bed.Worker.Logs(ctx, service)
		require.NotContains(t, log, "lease", "the worker's copy does not idle")

		if err == nil && !strings.Contains(log, "Waiting for the local machine to become a control-plane machine") {
			err = fmt.Errorf("the worker's copy does not say that it idles:\n%s", log)
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

// renewedLately is the maximum age of the last renewal of a held lease: leaders renew every two seconds.
const renewedLately = 5 * time.Second

// getLease returns the lease of talos-ccm's leader election.
func getLease(ctx context.Context) (*coordinationv1.Lease, error) {
	return client.CoordinationV1().Leases(metav1.NamespaceSystem).Get(ctx, leaseName, metav1.GetOptions{})
}

// working returns an error unless an instance holds the lease and renews it.
func working(ctx context.Context) error {
	lease, err := getLease(ctx)
	if err != nil {
		return err
	}

	if holder := ptr.Deref(lease.Spec.HolderIdentity, ""); holder == "" || time.Since(lease.Spec.RenewTime.Time) > renewedLately {
		return fmt.Errorf("%q holds the lease, renewed at %s", holder, lease.Spec.RenewTime)
	}

	return nil
}
