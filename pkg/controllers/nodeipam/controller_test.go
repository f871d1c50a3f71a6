package nodeipam_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cosi-project/runtime/pkg/safe"
	"github.com/siderolabs/talos/pkg/machinery/resources/k8s"
	talosruntime "github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/talos-ccm/talos-ccm/pkg/controllers/nodeipam"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/rules"
	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
	"github.com/talos-ccm/talos-ccm/test/ctest"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

func prefixes(texts ...string) []netip.Prefix {
	var list []netip.Prefix
	for _, text := range texts {
		list = append(list, netip.MustParsePrefix(text))
	}

	return list
}

// cidrs are Options with the given cluster CIDRs.
func cidrs(texts ...string) nodeipam.Options {
	return nodeipam.Options{ClusterCIDRs: prefixes(texts...)}
}

// cloud are Options with the given cluster CIDRs and the cloud allocator, which takes IPv6 from the machines' prefixes.
func cloud(texts ...string) nodeipam.Options {
	return nodeipam.Options{ClusterCIDRs: prefixes(texts...), Allocator: nodeipam.CloudAllocator}
}

func TestController_AssignsBlocksOfEachFamilyInOrder(t *testing.T) {
	w := start(t, cidrs("fd00:1::/48", "10.1.0.0/16"))
	w.register("a")
	w.wantCIDRs("a", "fd00:1::/80", "10.1.0.0/24")
	w.register("b", initialized)
	w.wantCIDRs("b", "fd00:1:0:0:1::/80", "10.1.1.0/24")
}

func TestController_WritesBothFamiliesAtOnce(t *testing.T) {
	w := start(t, cidrs("10.1.0.0/16", "fd00:1::/48"))
	options := metav1.ListOptions{LabelSelector: w.label(), ResourceVersion: w.register("a").ResourceVersion}

	node := ctest.Await(w, w.Client.CoreV1().Nodes(), options, func(node *corev1.Node, asrt *assert.Assertions) {
		asrt.NotEmpty(node.Spec.PodCIDR + strings.Join(node.Spec.PodCIDRs, ""))
	})
	assert.Equal(t, "10.1.0.0/24", node.Spec.PodCIDR)
	assert.Equal(t, []string{"10.1.0.0/24", "fd00:1::/80"}, node.Spec.PodCIDRs)

	for _, m := range node.ManagedFields {
		if strings.Contains(m.FieldsV1.GetRawString(), "podCIDR") {
			assert.Equal(t, nodeipam.FieldManager, m.Manager)
		}
	}
}

// TestController_FinishesItsWriteBeforeItStops: the next leader must see the result.
func TestController_FinishesItsWriteBeforeItStops(t *testing.T) {
	w := newWorld(t)
	p := w.prepare(cidrs("10.1.0.0/16"))
	sent, stopping := make(chan struct{}), make(chan struct{})

	p.wire.plan(func(string) fault {
		close(sent)
		<-stopping

		return none
	})

	ctx, stop := context.WithCancel(t.Context())
	defer stop()

	var (
		after *corev1.Node
		err   error
	)

	p.Start(p.reflector.Run, p.reader.Run, func(context.Context) {
		p.Run(ctx)

		after, err = w.Client.CoreV1().Nodes().Get(t.Context(), w.node("a"), metav1.GetOptions{})
	})
	w.register("a")
	ctest.Receive(t, sent, "the write is in flight")
	stop() // cancels the write before it returns, unless the write has its own context
	close(stopping)
	p.Stop()
	require.NoError(t, err)
	assert.Equal(t, []string{"10.1.0.0/24"}, after.Spec.PodCIDRs, "when the controller has stopped")
}

// TestController_LateWriteIsRejected: a write that timed out, whose block was allocated to another Node, arrives late.
func TestController_LateWriteIsRejected(t *testing.T) {
	w := newWorld(t)
	p := w.prepare(cidrs("10.1.0.0/23"))

	var sent atomic.Int32

	p.wire.plan(func(path string) fault {
		switch {
		case !strings.HasSuffix(path, "-a"):
			return none
		case sent.Add(1) == 1:
			return late
		default:
			return refused
		}
	})

	w.register("before", having("10.1.0.0/24"))
	p.lead()
	w.register("a") // the write of 10.1.1.0/24 is in flight
	w.eventually("a has been written to again", func() bool { return sent.Load() > 1 })
	w.setOSImage("a", "Fedora CoreOS") // makes the allocation stale
	w.register("b")
	w.wantCIDRs("b", "10.1.1.0/24")

	before := sent.Load()

	w.remove("before")
	w.setOSImage("a", kube.DefaultOSImage) // allocates another block, 10.1.0.0/24
	w.eventually("a has been written to after that", func() bool { return sent.Load() > before })
	p.wire.land()
	p.wire.plan(calm)
	w.wantCIDRs("a", "10.1.0.0/24")
}

func TestController_DefaultsToTheCIDRsOfTalos(t *testing.T) {
	w := newWorld(t)
	w.setCIDRs(w.controlPlane, []string{"10.2.0.0/16", "fd00:2::/48"}, []string{"10.2.0.0/23", "fd00:2::/108"})
	w.run(nodeipam.Options{})
	w.register("a")
	w.wantCIDRs("a", "10.2.2.0/24", "fd00:2:0:0:1::/80")
}

func TestController_DefaultsToTheMaskSizesOfKubeControllerManager(t *testing.T) {
	dual := []string{"10.2.0.0/16", "fd00:2::/48"}

	for name, test := range map[string]struct {
		sizeIPv4              int
		pods, arguments, want []string
	}{
		"dual-stack":             {0, dual, []string{"--node-cidr-mask-size-ipv4=26", "--node-cidr-mask-size-ipv6=64"}, []string{"10.2.0.0/26", "fd00:2::/64"}},
		"single-stack":           {0, []string{"fd00:2::/48"}, []string{"--node-cidr-mask-size=72"}, []string{"fd00:2::/72"}},
		"flags win":              {25, dual, []string{"--node-cidr-mask-size-ipv4=26", "--node-cidr-mask-size-ipv6=72"}, []string{"10.2.0.0/25", "fd00:2::/72"}},
		"size of the CIDR":       {0, []string{"fd00:2::/64"}, []string{"--node-cidr-mask-size-ipv6=64"}, []string{"fd00:2::/80"}},
		"size that does not fit": {0, []string{"fd00:2::/72"}, []string{"--node-cidr-mask-size-ipv6=64"}, []string{"fd00:2::/80"}},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.setCIDRs(w.controlPlane, test.pods, nil)
			w.setArguments(w.controlPlane, append(test.arguments, "--allocate-node-cidrs=false")...)
			w.run(nodeipam.Options{MaskSizeIPv4: test.sizeIPv4})
			w.register("a")
			w.wantCIDRs("a", test.want...)
		})
	}
}

// TestController_NeverUsesMaskSizesOfKubeControllerManagerForPools: they apply to cluster CIDRs only.
func TestController_NeverUsesMaskSizesOfKubeControllerManagerForPools(t *testing.T) {
	w := newWorld(t)
	w.setArguments(w.controlPlane, "--allocate-node-cidrs=false", "--node-cidr-mask-size-ipv4=26")
	w.setPools(nodeipam.Pool{Name: "all", CIDRs: prefixes("10.5.0.0/16")})
	w.run(nodeipam.Options{})
	w.register("a")
	w.wantCIDRs("a", "10.5.0.0/24")
}

func TestController_ReservesServiceCIDRs(t *testing.T) {
	w := newWorld(t)
	client := w.Client.NetworkingV1().ServiceCIDRs()
	declared := &networkingv1.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: w.name}, Spec: networkingv1.ServiceCIDRSpec{CIDRs: []string{"10.3.0.0/25"}}}

	_, err := client.Create(t.Context(), declared, metav1.CreateOptions{})
	require.NoError(t, err)
	t.Cleanup(func() { _ = client.Delete(context.WithoutCancel(t.Context()), w.name, metav1.DeleteOptions{}) })

	w.run(cidrs("10.3.0.0/16"))
	w.register("a")
	w.wantCIDRs("a", "10.3.1.0/24")
}

func TestController_IgnoresNodesOfOtherSystems(t *testing.T) {
	w := newWorld(t)
	w.register("other", foreign)
	w.run(cidrs("10.1.0.0/16"))
	w.register("a")
	w.awaitCIDRs("a")
	assert.Empty(t, w.cidrs("other"))
}

func TestController_ReleasesBlocksOfDeletedNodes(t *testing.T) {
	w := start(t, cidrs("10.1.0.0/24"))
	w.register("a", func(n *corev1.Node) { n.Finalizers = []string{"test/finalizer"} })
	w.wantCIDRs("a", "10.1.0.0/24")
	w.remove("a")
	w.register("b")
	w.awaitPending("b", nodeipam.ReasonExhausted)
	w.patch("a", "test", `{"metadata":{"finalizers":null}}`)
	w.wantCIDRs("b", "10.1.0.0/24")
}

// TestController_ReleasesBlocksOfNodesThatAreNeverCached: a Node was listed, but deleted before the cache contained it.
func TestController_ReleasesBlocksOfNodesThatAreNeverCached(t *testing.T) {
	w := newWorld(t)
	w.register("short", having("10.1.0.0/24"), func(n *corev1.Node) { n.Labels[labelUncached] = "" })
	w.run(cidrs("10.1.0.0/24"))
	w.register("a")
	w.awaitPending("a", nodeipam.ReasonExhausted)
	w.remove("short")
	w.step(w.clock, time.Minute)
	w.wantCIDRs("a", "10.1.0.0/24")
}

func TestController_KeepsClearOfAllExistingBlocks(t *testing.T) {
	w := newWorld(t)
	w.register("odd", having("10.1.0.64/27", "fd00:1:0:1::/64"))
	w.register("far", having("192.168.7.0/24"))
	w.register("twin-a", having("10.1.2.0/24"))
	w.register("twin-b", having("10.1.2.0/24"))
	w.run(cidrs("10.1.0.0/22", "fd00:1::/63"))
	w.awaitEvent("twin-a", nodeipam.ReasonOverlap, w.node("twin-b"))
	w.awaitEvent("twin-b", nodeipam.ReasonOverlap, w.node("twin-a"))

	w.register("a")
	w.wantCIDRs("a", "10.1.1.0/24", "fd00:1::/80")
	w.remove("twin-b")
	w.register("b")
	w.wantCIDRs("b", "10.1.3.0/24", "fd00:1:0:0:1::/80")
	w.register("c")
	w.awaitPending("c", nodeipam.ReasonExhausted)
	w.remove("twin-a")
	w.wantCIDRs("c", "10.1.2.0/24", "fd00:1:0:0:2::/80")
}

// zone selects machines by the platform's zone.
func zone(name string) *rules.Selector {
	selector, mistakes := rules.CompileNodeSelector([]rules.SelectorTerm{{
		MatchExpressions: []rules.Expression{{Key: "zone", Operator: rules.In, Values: []string{name}}},
	}}, nil)
	if len(mistakes) > 0 {
		panic(mistakes)
	}

	return selector
}

// in registers a Node that is initialized, and whose machine is in a zone.
func (w *world) in(name, zone string) {
	w.Helper()
	w.showAs(name, func(m *machine.Machine) { m.Platform.Zone = zone })
	w.register(name, initialized)
}

func TestController_IgnoresNodesThatAreNotManaged(t *testing.T) {
	w := newWorld(t)
	w.selector = zone("ours")
	w.run(cidrs("10.1.0.0/16"))
	w.in("theirs", "theirs")
	w.register("unknown")
	w.awaitPending("unknown", nodeipam.ReasonMachineUnknown)
	w.in("ours", "ours")
	w.wantCIDRs("ours", "10.1.0.0/24")
	assert.Empty(t, w.cidrs("theirs"))
}

func TestController_PoolChangesKeepAssignedBlocks(t *testing.T) {
	w := newWorld(t)
	w.setPools(nodeipam.Pool{Name: "one", Selector: zone("one"), CIDRs: prefixes("10.1.0.0/24")})

	p := w.run(cidrs("10.9.0.0/16", "fd00:9::/48"))

	w.in("a", "one")
	w.wantCIDRs("a", "10.1.0.0/24", "fd00:9::/80")
	w.in("b", "elsewhere")
	w.wantCIDRs("b", "10.9.0.0/24", "fd00:9:0:0:1::/80")
	w.in("c", "one")
	w.awaitPending("c", nodeipam.ReasonExhausted)

	w.setPools(
		nodeipam.Pool{Name: "other", Selector: zone("other"), CIDRs: prefixes("10.7.0.0/16")},
		nodeipam.Pool{Name: "one", Selector: zone("one"), CIDRs: prefixes("10.2.0.0/16", "2001:db8:2::/48"), MaskSizeIPv4: 26, MaskSizeIPv6: 64},
	)
	p.Resync()
	w.wantCIDRs("c", "10.2.0.0/26", "2001:db8:2::/64")
	w.wantCIDRs("a", "10.1.0.0/24", "fd00:9::/80")
}

// TestController_WaitsForAnIPv6Prefix: a Node whose machine has only a /128 is pending, and gets both families once
// there is a prefix.
func TestController_WaitsForAnIPv6Prefix(t *testing.T) {
	w := start(t, cloud("10.1.0.0/16", "fd00:1::/48"))
	w.join("a", "10.0.0.1/24", "2001:db8:1:2::5/128")
	w.awaitPending("a", nodeipam.ReasonPrefixMissing)
	w.join("b", "10.0.0.2/24", "2001:db8:1:3::5/64")
	w.wantCIDRs("b", "10.1.0.0/24", "2001:db8:1:3:1::/80")

	w.show("a", "10.0.0.1/24", "2001:db8:1:2::5/64")
	w.wantCIDRs("a", "10.1.1.0/24", "2001:db8:1:2:1::/80")
	w.wantReasons("a", nodeipam.ReasonPrefixMissing)
}

// TestController_FallsBackToClusterCIDRs: only if the configuration allows it, and not before the machine has had time
// to get an address.
func TestController_FallsBackToClusterCIDRs(t *testing.T) {
	w := newWorld(t)
	p := w.run(cloud("10.1.0.0/16", "fd00:1::/48"))
	running := func(m *machine.Machine) { m.Stage = talosruntime.MachineStageRunning }

	for _, name := range []string{"single", "none", "late", "booting"} {
		w.register(name)
	}

	w.showAs("none", running, "10.0.0.1/24")
	w.awaitPending("none", nodeipam.ReasonPrefixMissing)
	w.step(w.clock, 5*time.Minute)
	w.fallback.Store(true)
	p.Resync()
	w.wantCIDRs("none", "10.1.0.0/24", "fd00:1::/80")

	// A booting machine may still get an address. A machine that does not respond may have one.
	w.showAs("booting", func(m *machine.Machine) { m.Stage = talosruntime.MachineStageBooting }, "10.0.0.2/24")
	w.awaitPending("booting", nodeipam.ReasonPrefixMissing)
	w.awaitPending("late", nodeipam.ReasonMachineUnknown)
	w.showAs("late", running, "10.0.0.3/24", "2001:db8:1:3::5/64")
	w.wantCIDRs("late", "10.1.1.0/24", "2001:db8:1:3:1::/80")
	w.showAs("single", running, "2001:db8:1:2::5/128")
	w.wantCIDRs("single", "10.1.2.0/24", "fd00:1:0:0:1::/80")
	assert.Empty(t, w.cidrs("booting"), "while the machine boots")
}

// TestController_FallbackWaitsForAddresses: a machine gets its IPv6 address after the Node has registered.
func TestController_FallbackWaitsForAddresses(t *testing.T) {
	w := newWorld(t)
	w.fallback.Store(true)
	w.run(cloud("10.1.0.0/16", "fd00:1::/48"))
	w.showAs("a", func(m *machine.Machine) { m.Stage = talosruntime.MachineStageRunning }, "10.0.0.1/24")
	w.register("a")
	w.awaitPending("a", nodeipam.ReasonPrefixMissing)
	w.show("a", "10.0.0.1/24", "2001:db8:1:2::5/64")
	w.wantCIDRs("a", "10.1.0.0/24", "2001:db8:1:2:1::/80")
}

// TestController_ReportsBlocksOfFormerPrefix: the router of the new prefix does not deliver to them.
func TestController_ReportsBlocksOfFormerPrefix(t *testing.T) {
	w := start(t, cloud("10.1.0.0/16", "fd00:1::/48"))
	w.join("a", "10.0.0.1/24", "2001:db8:1:2::5/64")
	w.wantCIDRs("a", "10.1.0.0/24", "2001:db8:1:2:1::/80")

	w.show("a", "10.0.0.1/24") // without an address, the prefix is not known to have changed
	w.show("a", "10.0.0.1/24", "2001:db8:9:2::5/64")
	w.awaitEvent("a", "PodCIDRPrefixChanged", "2001:db8:1:2:1::/80", "2001:db8:9:2::/64")

	w.show("a", "10.0.0.2/24", "2001:db8:9:2::5/64")
	w.join("b", "10.0.0.3/24", "2001:db8:9:2::6/64") // is handled later
	w.wantCIDRs("b", "10.1.1.0/24", "2001:db8:9:2:1::/80")
	w.wantReasons("a", "PodCIDRPrefixChanged")
}

func TestController_KeepsSingleStackNodesOfDualStackClusters(t *testing.T) {
	w := newWorld(t)
	w.setCIDRs(w.controlPlane, []string{"10.1.0.0/16"}, nil)
	w.register("old", having("10.1.0.0/24"))
	w.run(nodeipam.Options{})

	w.setCIDRs(w.controlPlane, []string{"10.1.0.0/16", "fd00:1::/48"}, nil)
	w.refresh()
	w.register("b")
	w.wantCIDRs("b", "10.1.1.0/24", "fd00:1::/80")
	w.wantCIDRs("old", "10.1.0.0/24")
	w.wantReasons("old")
}

// TestController_PoolsOfOneCIDR: two pools divide one CIDR into blocks of different sizes.
func TestController_PoolsOfOneCIDR(t *testing.T) {
	small := nodeipam.Pool{Name: "small", CIDRs: prefixes("10.5.0.0/22"), MaskSizeIPv4: 25}
	large := nodeipam.Pool{Name: "large", CIDRs: prefixes("10.5.0.0/22"), MaskSizeIPv4: 23}

	w := start(t, nodeipam.Options{})

	for i, step := range []struct {
		first, second nodeipam.Pool
		want          string
	}{
		{small, large, "10.5.0.0/25"},
		{large, small, "10.5.2.0/23"},
		{small, large, "10.5.0.128/25"},
		{small, large, "10.5.1.0/25"},
		{small, large, "10.5.1.128/25"},
	} {
		w.setPools(step.first, step.second)

		name := fmt.Sprintf("n-%d", i)
		w.register(name)
		w.wantCIDRs(name, step.want)
	}

	w.register("last")
	w.awaitPending("last", nodeipam.ReasonExhausted)
	w.wantReasons("n-1") // the one with the large block
}

// TestController_KeepsClearOfMachinesAndGateway: no block contains the address of a machine of the site, or of the
// gateway.
func TestController_KeepsClearOfMachinesAndGateway(t *testing.T) {
	w := start(t, cloud("10.1.0.0/24", "fd00:1::/48"))

	// Four blocks of /120: one with the gateway, one with the other machine, one with this machine, and a free one.
	w.show("neighbor", "2001:db8:1:2::105/118")
	w.join("a", "2001:db8:1:2::205/118", "10.1.0.7/16")
	w.awaitPending("a", nodeipam.ReasonExhausted) // the only IPv4 block contains the machine's address
	w.show("a", "2001:db8:1:2::205/118")
	w.wantCIDRs("a", "10.1.0.0/24", "2001:db8:1:2::300/120")
}

// TestController_KeepsClearOfMachineWithManyAddresses: of the addresses of a machine, those that a block could contain are
// reserved first. A prefix can be routed to the machine.
func TestController_KeepsClearOfMachineWithManyAddresses(t *testing.T) {
	w := newWorld(t)
	p := w.run(cloud("10.1.0.0/23", "fd00:1::/48"))
	addresses := []string{"2001:db8:1:2::105/118", "10.1.0.7/16", "10.2.0.7/16"}

	for i := range 100 {
		addresses = append(addresses, fmt.Sprintf("8.8.8.%d/32", i))
	}

	w.join("a", addresses...)
	w.wantCIDRs("a", "10.1.1.0/24", "2001:db8:1:2::200/120")

	w.setPools(nodeipam.Pool{Name: "new", CIDRs: prefixes("10.2.0.0/23")})
	p.Resync()
	w.join("b", "2001:db8:2:2::105/118")
	w.wantCIDRs("b", "10.2.1.0/24", "2001:db8:2:2::200/120")
}

// TestController_KnowsAllMachinesBeforeItStarts: a new leader reserves the addresses of all machines before its first
// allocation.
func TestController_KnowsAllMachinesBeforeItStarts(t *testing.T) {
	w := newWorld(t)
	p := w.prepare(cloud("10.1.0.0/16", "fd00:1::/48"))
	w.join("a", "2001:db8:1:2::5/118")

	for i := range 8 { // two of its three other blocks
		name := fmt.Sprintf("neighbor-%d", i)
		w.show(name, fmt.Sprintf("2001:db8:1:2::%d05/118", 1+i%2))
		w.register(name, having(fmt.Sprintf("192.168.%d.0/24", i)))
	}

	p.lead()
	assert.Equal(t, "2001:db8:1:2::300/120", w.awaitCIDRs("a")[1], "the only IPv6 block without a machine")
}

// TestController_AssignsTheSameBlockAgain: the address of its CNI bridge does not exclude the block of a Node
// that registers again.
func TestController_AssignsTheSameBlockAgain(t *testing.T) {
	w := start(t, cidrs("10.1.0.0/24"))
	w.showAs("a", func(m *machine.Machine) { m.Addresses[1].Link = "cni0" }, "10.0.0.1/24", "10.1.0.1/24")

	for range 2 {
		w.register("a")
		w.wantCIDRs("a", "10.1.0.0/24")
		w.remove("a")
	}
}

// TestController_WaitsForTheMachine: the Node is pending, and never gets IPv6 of another prefix than its machine's.
func TestController_WaitsForTheMachine(t *testing.T) {
	w := start(t, cloud("10.1.0.0/16", "fd00:1::/48"))
	w.show("a", "2001:db8:1:2::5/64")
	w.inventory.MarkUnreachable(w.node("a"), "no route to host")
	w.register("a")
	w.awaitPending("a", nodeipam.ReasonMachineUnknown, "no route to host")
	w.register("b")
	w.awaitPending("b", nodeipam.ReasonMachineUnknown)
	w.show("a", "2001:db8:1:2::5/64")
	w.wantCIDRs("a", "10.1.0.0/24", "2001:db8:1:2:1::/80")
}

// TestController_ExhaustedFamilyLeaksNothing: Nodes without an IPv6 block hold no IPv4 block either, however often they
// are retried.
func TestController_ExhaustedFamilyLeaksNothing(t *testing.T) {
	w := start(t, cidrs("10.1.0.0/23", "fd00:1::/80")) // two blocks, and one
	w.register("a")
	w.wantCIDRs("a", "10.1.0.0/24", "fd00:1::/80")

	for i := range 5 {
		name := fmt.Sprintf("pending-%d", i)
		w.register(name)
		w.awaitPending(name, nodeipam.ReasonExhausted)
	}

	w.remove("a")
	ctest.Await(w, w.Client.CoreV1().Nodes(), metav1.ListOptions{LabelSelector: w.label()}, func(n *corev1.Node, asrt *assert.Assertions) {
		asrt.NotEqual(w.node("a"), n.Name)
		asrt.Equal([]string{"10.1.0.0/24", "fd00:1::/80"}, n.Spec.PodCIDRs)
	})
}

// TestController_ConcurrentChanges: Nodes and machines appear, change and disappear concurrently, for the race
// detector.
func TestController_ConcurrentChanges(t *testing.T) {
	w := start(t, cloud("10.1.0.0/16", "fd00:1::/48"))

	var group sync.WaitGroup

	for i := range 16 {
		name := fmt.Sprintf("n%d", i)

		group.Go(func() {
			for range 3 {
				w.join(name, fmt.Sprintf("2001:db8:1:2::%x/64", i+16))
				w.inventory.MarkUnreachable(w.node(name), "for a moment")
				assert.NoError(t, w.Client.CoreV1().Nodes().Delete(t.Context(), w.node(name), metav1.DeleteOptions{}))
				w.inventory.Forget(w.node(name))
			}
		})
	}

	group.Wait()

	assigned := map[string]string{}

	for i := range 16 {
		name := fmt.Sprintf("n%d", i)
		w.join(name, fmt.Sprintf("2001:db8:1:2::%x/64", i+16))

		for _, block := range w.awaitCIDRs(name) {
			assert.Empty(t, assigned[block], "%s was assigned to another Node and %s", block, name)
			assigned[block] = name
		}
	}
}

// TestController_BlockedWhileKubeControllerManagerAllocates: until it is reconfigured on the last control-plane machine.
// The Event contains the required change.
func TestController_BlockedWhileKubeControllerManagerAllocates(t *testing.T) {
	w := newWorld(t)
	machines := w.controlPlanes("cp-1", "cp-2")

	for _, m := range machines { // the default of Talos
		w.setArguments(m, "--allocate-node-cidrs=true", "--controllers=*,tokencleaner")
	}

	var unreachable atomic.Bool // cp-2

	dial := w.dial
	w.dial = func(ctx context.Context, nodename string, addr netip.Addr) (talosapi.State, error) {
		if unreachable.Load() && nodename == w.node("cp-2") {
			return nil, errors.New("no route to host")
		}

		return dial(ctx, nodename, addr)
	}

	w.run(cidrs("10.1.0.0/16"))
	w.register("a")
	w.awaitPending("a", nodeipam.ReasonAllocatorConflict,
		w.node("cp-1"), w.node("cp-2"), `cluster: {controllerManager: {extraArgs: {controllers: "-node-ipam-controller"}}}`)

	w.setArguments(machines[0], "--allocate-node-cidrs=true", "--controllers=*,tokencleaner,-node-ipam-controller")
	w.refresh()
	w.register("b")
	w.awaitPending("b", nodeipam.ReasonAllocatorConflict, w.node("cp-2"))

	// The last known configuration of an unreachable machine is used.
	unreachable.Store(true)
	machines[1].BreakStreams()
	w.refresh()
	w.eventually("the reader waits", w.readerClock.HasWaiters)
	w.register("c")
	w.awaitPending("c", nodeipam.ReasonAllocatorConflict)

	unreachable.Store(false)
	w.setArguments(machines[1], "--allocate-node-cidrs=false", "--controllers=*,tokencleaner")
	w.refresh()

	for _, name := range []string{"a", "b", "c"} {
		w.awaitCIDRs(name)
	}
}

// TestController_BlockedByTheDefaultsOfTalos: with only the local machine to read.
func TestController_BlockedByTheDefaultsOfTalos(t *testing.T) {
	w := newWorld(t)
	w.setArguments(w.controlPlane, "--use-service-account-credentials", "--allocate-node-cidrs=true", "--controllers=*,tokencleaner")
	w.run(cidrs("10.1.0.0/16"))
	w.register("a")
	w.awaitPending("a", nodeipam.ReasonAllocatorConflict)
}

// TestController_IgnoresControlPlaneMachinesWithoutTheLabel: a worker can neither block allocation nor change the
// cluster CIDRs.
func TestController_IgnoresControlPlaneMachinesWithoutTheLabel(t *testing.T) {
	w := newWorld(t)
	w.setCIDRs(w.controlPlane, []string{"10.1.0.0/16"}, []string{"10.96.0.0/12"})

	liar := w.controlPlanes("a-liar")[0]
	w.setCIDRs(liar, []string{"192.0.2.0/24"}, []string{"10.1.0.0/17"})
	w.setArguments(liar, "--allocate-node-cidrs=true")
	w.patch("a-liar", "test", `{"metadata":{"labels":{"node-role.kubernetes.io/control-plane":null}}}`)

	w.run(nodeipam.Options{})
	w.register("a")
	w.wantCIDRs("a", "10.1.0.0/24")

	for _, call := range liar.Calls() {
		assert.NotEqual(t, k8s.ControllerManagerConfigType, call.ResourceType, "a machine without the label was asked for it")
	}
}

// TestController_BlockedWhilePodSubnetsDiffer: the pod subnets are not taken from one of several machines.
func TestController_BlockedWhilePodSubnetsDiffer(t *testing.T) {
	w := newWorld(t)
	machines := w.controlPlanes("cp-1", "cp-2")
	w.setCIDRs(machines[0], []string{"10.1.0.0/16"}, nil)
	w.setCIDRs(machines[1], []string{"10.2.0.0/16"}, nil)
	w.run(nodeipam.Options{})
	w.register("a")
	w.awaitPending("a", nodeipam.ReasonAllocatorUnknown)

	w.setCIDRs(machines[0], []string{"10.2.0.0/16"}, nil)
	w.refresh()
	w.wantCIDRs("a", "10.2.0.0/24")
}

// TestController_ReportsPoolsOutsidePodSubnets: one Event for the whole cluster.
func TestController_ReportsPoolsOutsidePodSubnets(t *testing.T) {
	w := newWorld(t)
	w.setPools(nodeipam.Pool{Name: "inside", CIDRs: prefixes("10.1.4.0/22")}, nodeipam.Pool{Name: "outside", CIDRs: prefixes("10.9.0.0/16")})

	for _, m := range w.controlPlanes("cp-1", "cp-2") {
		w.setCIDRs(m, []string{"10.1.0.0/16"}, nil)
		require.NoError(t, safe.StateModify(t.Context(), m.State(), k8s.NewBootstrapManifestsConfig(), func(config *k8s.BootstrapManifestsConfig) error {
			config.TypedSpec().FlannelEnabled, config.TypedSpec().ProxyEnabled = true, true

			return nil
		}))
	}

	w.run(nodeipam.Options{})
	w.awaitEvent("cp-1", nodeipam.ReasonOutsidePodSubnets, "from 10.9.0.0/16 are outside podSubnets [10.1.0.0/16]", "deploys: Flannel, kube-proxy.")
	w.register("a")
	w.wantCIDRs("a", "10.1.4.0/24") // allocation continues
	w.refresh()
	w.step(w.clock, time.Minute)
	assert.Len(t, w.events.of("", nodeipam.ReasonOutsidePodSubnets), 1)
}

func TestController_BlockedWhileMaskSizesDiffer(t *testing.T) {
	w := newWorld(t)
	machines := w.controlPlanes("cp-1", "cp-2")

	for i, size := range []string{"25", "26"} {
		w.setCIDRs(machines[i], []string{"10.1.0.0/16"}, nil)
		w.setArguments(machines[i], "--allocate-node-cidrs=false", "--node-cidr-mask-size-ipv4="+size)
	}

	w.run(nodeipam.Options{})
	w.register("a")
	w.awaitPending("a", nodeipam.ReasonAllocatorUnknown, "mask size")

	w.setArguments(machines[1], "--allocate-node-cidrs=false", "--node-cidr-mask-size-ipv4=25")
	w.refresh()
	w.wantCIDRs("a", "10.1.0.0/25")
}

// TestController_WaitsUntilEveryControlPlaneMachineWasTried: the one that has not been read yet may be the one that
// allocates.
func TestController_WaitsUntilEveryControlPlaneMachineWasTried(t *testing.T) {
	w := newWorld(t)
	w.controlPlanes("cp-1", "cp-2")

	dial, dialing, dialed := w.dial, make(chan struct{}), make(chan struct{})
	announce := sync.OnceFunc(func() { close(dialing) }) // cp-2 may be tried again
	w.dial = func(ctx context.Context, nodename string, addr netip.Addr) (talosapi.State, error) {
		if nodename == w.node("cp-2") {
			announce()
			<-dialed

			return nil, errors.New("no route to host")
		}

		return dial(ctx, nodename, addr)
	}

	options := cidrs("10.1.0.0/16")
	options.MaskSizeIPv4 = 24 // otherwise, most machines must have been read
	p := w.run(options)
	w.register("a")
	<-dialing
	w.eventually("the reader waits", w.readerClock.HasWaiters)
	assert.Nil(t, p.reader.Network().Current(), "before cp-2 was tried")
	close(dialed)
	w.wantCIDRs("a", "10.1.0.0/24")
}

// podCIDRPatch sets an IPv4 block.
func podCIDRPatch(i int) string {
	return fmt.Sprintf(`{"spec":{"podCIDR":"10.1.%[1]d.0/24","podCIDRs":["10.1.%[1]d.0/24"]}}`, i)
}

// TestController_BlockedAfterAnotherControllerAllocates: until the other one has stopped for a while. A controller assigns
// podCIDRs of many Nodes, a kubelet only those of its own Node.
func TestController_BlockedAfterAnotherControllerAllocates(t *testing.T) {
	w := start(t, cloud("10.1.0.0/16", "fd00:1::/48"))

	for i, name := range []string{"their-first", "their-second"} {
		w.register(name)
		w.awaitPending(name, nodeipam.ReasonMachineUnknown)
		w.patch(name, "cilium-operator", podCIDRPatch(i))
	}

	w.awaitEvent("their-second", nodeipam.ReasonAllocatorConflict)

	// The same watch delivers the writes of the other controller before this Node.
	w.join("a", "2001:db8:1:2::5/64")
	w.awaitPending("a", nodeipam.ReasonAllocatorConflict, "cilium-operator")

	w.step(w.clock, 11*time.Minute)
	w.wantCIDRs("a", "10.1.2.0/24", "2001:db8:1:2:1::/80")
}

// kubelet returns a client with the credentials of a Node's kubelet.
func (w *world) kubelet(name string) kubernetes.Interface {
	w.Helper()

	client, err := kubernetes.NewForConfig(w.Kube.KubeletConfig(w.node(name)))
	require.NoError(w, err)

	return client
}

// TestController_AllocatesDespiteKubeletThatWritesPodCIDRs: a kubelet can write the podCIDRs of its own Node, under any
// name and again after each registration, and does not block the allocation for others.
func TestController_AllocatesDespiteKubeletThatWritesPodCIDRs(t *testing.T) {
	w := start(t, cloud("10.1.0.0/16", "fd00:1::/48"))

	for i, name := range []string{"a", "b"} {
		w.register("self-made")
		w.awaitPending("self-made", nodeipam.ReasonMachineUnknown)

		options := metav1.PatchOptions{FieldManager: "cilium-operator"}
		_, err := w.kubelet("self-made").CoreV1().Nodes().Patch(t.Context(), w.node("self-made"), types.MergePatchType, []byte(podCIDRPatch(i)), options)
		require.NoError(t, err)

		// The same watch delivers the write of the kubelet before this Node.
		w.join(name, fmt.Sprintf("2001:db8:1:%d::5/64", i))
		w.wantCIDRs(name, fmt.Sprintf("10.1.%d.0/24", 1-i), fmt.Sprintf("2001:db8:1:%d:1::/80", i))
		w.remove(name)
		w.remove("self-made")
	}
}

// TestController_AllocatesDespiteKubeletThatRegistersWithTheWholePool: its podCIDRs never count. Those of a kubelet that
// registers with a quarter of the pool do.
func TestController_AllocatesDespiteKubeletThatRegistersWithTheWholePool(t *testing.T) {
	w := newWorld(t)
	w.register("before", having("10.1.7.0/24", "fd00:1:0:0:7::/80"))

	for name, cidrs := range map[string][]string{"quarter": {"10.1.0.0/18", "fd00:1::/50"}, "all": {"10.1.0.0/16", "fd00::/16"}} {
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: w.node(name), Labels: map[string]string{labelWorld: w.name}}}
		having(cidrs...)(node)

		assigned := node.DeepCopy()
		assigned.Labels["talos-ccm.node-restriction.kubernetes.io/pod-cidrs"] = "true"
		_, err := w.kubelet(name).CoreV1().Nodes().Create(t.Context(), assigned, metav1.CreateOptions{})
		require.True(t, apierrors.IsForbidden(err), err)

		_, err = w.kubelet(name).CoreV1().Nodes().Create(t.Context(), node, metav1.CreateOptions{})
		require.NoError(t, err)
	}

	for range 2 {
		p := w.run(cidrs("10.1.0.0/16", "fd00:1::/48"))
		w.awaitEvent("all", nodeipam.ReasonTooLarge, "10.1.0.0/16", "fd00::/16")
		w.register("a")
		w.wantCIDRs("a", "10.1.64.0/24", "fd00:1:0:4000::/80")
		w.remove("a")
		p.Stop()
	}

	assert.Empty(t, w.events.of(w.node("quarter"), nodeipam.ReasonTooLarge), "a quarter")
}

// TestController_KeepsBlocksOfReducedPools: an assigned block counts, also if it is larger than what is left of its pool.
func TestController_KeepsBlocksOfReducedPools(t *testing.T) {
	w := newWorld(t)
	p := w.run(cidrs("10.1.0.0/24"))
	w.register("a")
	w.wantCIDRs("a", "10.1.0.0/24")
	p.Stop()

	for name, reduced := range map[string]string{"smaller-blocks": "10.1.0.0/24", "smaller-pool": "10.1.0.0/25"} {
		p := w.run(nodeipam.Options{ClusterCIDRs: prefixes(reduced), MaskSizeIPv4: 25})
		w.register(name)
		w.awaitPending(name, nodeipam.ReasonExhausted, "larger podCIDRs [10.1.0.0/24]")
		assert.Empty(t, w.events.of(w.node("a"), nodeipam.ReasonTooLarge))
		p.Stop()
	}
}

// TestController_BlockedWhileTheControlPlaneIsUnreachable: the Event contains the address.
func TestController_BlockedWhileTheControlPlaneIsUnreachable(t *testing.T) {
	w := newWorld(t)
	address := w.controlPlanes("cp-1")[0].Address()

	var reachable atomic.Bool

	dial := w.dial
	w.dial = func(ctx context.Context, nodename string, addr netip.Addr) (talosapi.State, error) {
		if !reachable.Load() {
			return nil, fmt.Errorf("dial %s: no route to host", addr)
		}

		return dial(ctx, nodename, addr)
	}

	w.run(cidrs("10.1.0.0/16"))
	w.register("a")
	w.awaitPending("a", nodeipam.ReasonAllocatorUnknown, address.String())
	reachable.Store(true)
	w.wantCIDRs("a", "10.1.0.0/24")
}

func TestOptions_RefusesInvalidSettings(t *testing.T) {
	for name, options := range map[string]nodeipam.Options{
		"an unknown allocator":                 {Allocator: "Guesswork"},
		"a block larger than the cluster CIDR": cidrs("10.0.0.0/26"),
		"an impossible mask size":              {ClusterCIDRs: prefixes("fd00::/64"), MaskSizeIPv6: 129},
		"cluster CIDRs that overlap":           cidrs("10.0.0.0/16", "10.0.128.0/17"),
		"a cluster CIDR of Services":           {ClusterCIDRs: prefixes("10.0.0.0/16"), ServiceCIDRs: prefixes("10.0.0.0/12")},
	} {
		assert.Error(t, options.Validate(), name)
	}

	assert.NoError(t, cidrs("10.0.0.0/16", "fd00::/48").Validate())
}
