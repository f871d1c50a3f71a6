package controlplane_test

import (
	"context"
	"errors"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	applydiscoveryv1 "k8s.io/client-go/applyconfigurations/discovery/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/tools/cache"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/talos-ccm/talos-ccm/pkg/controlplane"
	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
	"github.com/talos-ccm/talos-ccm/test/ctest"
)

var errDialed = errors.New("dialed")

// guarded is a DialFunc that returns errDialed if the address may be dialed.
type guarded struct {
	ctest.Suite

	clock   *clocktesting.FakeClock
	dial    talosapi.DialFunc
	members []netip.Addr
	failure error                 // of the list of etcd members
	reading func(context.Context) // called for each list of etcd members
}

// newGuarded registers the Nodes guard-cp, which is labeled, and guard-w.
func newGuarded(t *testing.T) *guarded {
	t.Helper()

	g := &guarded{Suite: bed.NewSuite(t), reading: func(context.Context) {}, clock: clocktesting.NewFakeClock(time.Now())}
	register(g.Suite, "guard-cp", "192.0.2.1")
	register(g.Suite, "guard-w", "192.0.2.9")
	label(g.Suite, "guard-cp")

	factory := informers.NewSharedInformerFactory(g.Client, 0)
	nodes := factory.Core().V1().Nodes()
	synced := nodes.Informer().HasSynced

	factory.Start(t.Context().Done())

	require.True(t, cache.WaitForCacheSync(t.Context().Done(), synced))

	members := func(ctx context.Context) ([]netip.Addr, error) {
		g.reading(ctx)

		return g.members, g.failure
	}
	g.dial = controlplane.NewAddresses(g.Client, nodes.Lister(), members, g.clock).
		Guard(func(context.Context, string, netip.Addr) (talosapi.State, error) { return nil, errDialed })

	return g
}

// want dials after the last answers have expired, and checks whether the error contains text.
func (g *guarded) want(nodename, addr, text string) {
	g.Helper()
	g.clock.Step(time.Minute)

	_, err := g.dial(g.Context(), nodename, netip.MustParseAddr(addr))
	assert.ErrorContains(g, err, text, "%s at %s", nodename, addr)
}

// publish applies an EndpointSlice of default/kubernetes.
func publish(s ctest.Suite, name string, addresses ...string) {
	s.Helper()

	endpointSlices := s.Client.DiscoveryV1().EndpointSlices(metav1.NamespaceDefault)
	slice := applydiscoveryv1.EndpointSlice(name, metav1.NamespaceDefault).
		WithLabels(map[string]string{discoveryv1.LabelServiceName: "kubernetes"}).
		WithAddressType(discoveryv1.AddressTypeIPv4).WithPorts(applydiscoveryv1.EndpointPort().WithName("https").WithPort(6443)).
		WithEndpoints(applydiscoveryv1.Endpoint().WithAddresses(addresses...))

	_, err := endpointSlices.Apply(s.Context(), slice, metav1.ApplyOptions{FieldManager: "test"})
	require.NoError(s, err)
	s.Cleanup(func() {
		if err := endpointSlices.Delete(context.WithoutCancel(s.Context()), name, metav1.DeleteOptions{}); !apierrors.IsNotFound(err) {
			require.NoError(s, err)
		}
	})
}

func TestAddresses_GuardControlPlaneNodes(t *testing.T) {
	const refused = `address 192.0.2.1 of control-plane node "guard-cp" is neither an endpoint of default/kubernetes nor an etcd member's`

	g := newGuarded(t)
	dialed := errDialed.Error()

	g.want("guard-w", "192.0.2.9", dialed)
	g.want("deleted", "192.0.2.9", dialed)
	g.want("guard-cp", "192.0.2.1", refused)

	publish(g.Suite, "other", "192.0.2.1") // which no API server writes
	g.want("guard-cp", "192.0.2.1", refused)

	g.members = []netip.Addr{netip.MustParseAddr("192.0.2.1")}
	g.want("guard-cp", "192.0.2.1", dialed)
	g.want("guard-cp", "192.0.2.2", "192.0.2.2")

	// The last answer is used while a source does not respond.
	g.failure = errors.New("etcdserver: no leader")
	g.want("guard-cp", "192.0.2.1", dialed)
	g.want("guard-cp", "192.0.2.2", "etcdserver: no leader")

	g.members, g.failure = nil, nil
	g.want("guard-cp", "192.0.2.1", refused)

	publish(g.Suite, "kubernetes", "192.0.2.1", "192.0.2.3")
	g.want("guard-cp", "192.0.2.1", dialed)
	g.want("guard-cp", "192.0.2.3", dialed)
	g.want("guard-cp", "192.0.2.2", "neither")
}

// Other Nodes must not cause continuous reads of the addresses.
func TestAddresses_ReadAgainAfterAWhile(t *testing.T) {
	g := newGuarded(t)
	g.want("guard-cp", "192.0.2.1", "neither")

	g.members = []netip.Addr{netip.MustParseAddr("192.0.2.1")}

	_, err := g.dial(t.Context(), "guard-cp", netip.MustParseAddr("192.0.2.1"))
	assert.NotErrorIs(t, err, errDialed, "the addresses were read again at once")

	g.want("guard-cp", "192.0.2.1", errDialed.Error())
}

func TestAddresses_SlowReadBlocksNoOther(t *testing.T) {
	g := newGuarded(t)
	g.members = []netip.Addr{netip.MustParseAddr("192.0.2.1")}

	var reads atomic.Int32

	entered, release, done := make(chan struct{}), make(chan struct{}), make(chan struct{})
	g.reading = func(context.Context) {
		if reads.Add(1) == 1 {
			close(entered)
			<-release
		}
	}

	go func() {
		defer close(done)

		_, _ = g.dial(t.Context(), "guard-cp", g.members[0])
	}()

	<-entered
	g.want("guard-cp", "192.0.2.1", errDialed.Error())
	close(release)
	<-done
}

// A canceled caller must not wait for a source that does not respond, and the next caller must read the source again.
func TestAddresses_ReadEndsWithContext(t *testing.T) {
	g := newGuarded(t)

	ctx, cancel := context.WithCancel(t.Context())
	g.reading = func(read context.Context) {
		cancel()
		<-read.Done()
		g.failure = read.Err()
	}

	_, err := g.dial(ctx, "guard-cp", netip.MustParseAddr("192.0.2.1"))
	require.ErrorIs(t, err, context.Canceled)

	g.members, g.failure, g.reading = []netip.Addr{netip.MustParseAddr("192.0.2.1")}, nil, func(context.Context) {}

	_, err = g.dial(t.Context(), "guard-cp", g.members[0])
	assert.ErrorIs(t, err, errDialed)
}
