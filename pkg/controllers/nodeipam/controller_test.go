package nodeipam_test

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cosi-project/runtime/pkg/resource"
	"github.com/cosi-project/runtime/pkg/state"
	talosruntime "github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/siderolabs/talos/pkg/machinery/role"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/talos-ccm/talos-ccm/pkg/controllers/nodeipam"
	"github.com/talos-ccm/talos-ccm/pkg/rules"
	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
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

// cloud are Options for IPv4 of the given CIDR, and IPv6 of the machines' own.
func cloud(texts ...string) nodeipam.Options {
	o := cidrs(texts...)
	o.Allocator = nodeipam.CloudAllocator

	return o
}

// poolsNow are pools that can be changed while a controller runs.
type poolsNow struct {
	pools atomic.Pointer[[]nodeipam.Pool]
}

func (p *poolsNow) set(pools ...nodeipam.Pool) { p.pools.Store(&pools) }

func (p *poolsNow) get() []nodeipam.Pool { return *p.pools.Load() }

// setOSImage makes a version of a Node on which another system runs.
func (w *world) setOSImage(name, image string) {
	w.Helper()

	patch := fmt.Appendf(nil, `{"status":{"nodeInfo":{"osImage":%q}}}`, image)
	_, err := w.client.CoreV1().Nodes().Patch(w.Context(), w.node(name), types.MergePatchType, patch, metav1.PatchOptions{FieldManager: "kubelet"}, "status")
	w.require(err)
}

// manualClock advances only when the test steps it. Short timers, such as those of retries, run in real time.
type manualClock struct{ *clocktesting.FakeClock }

func newManualClock() manualClock { return manualClock{clocktesting.NewFakeClock(time.Now())} }

// NewTimer implements clock.Clock.
func (c manualClock) NewTimer(d time.Duration) clock.Timer {
	if d < 10*time.Second {
		return clock.RealClock{}.NewTimer(d)
	}

	return c.FakeClock.NewTimer(d)
}

// step advances the clock once something waits for it.
func (w *world) step(clock manualClock, d time.Duration) {
	w.Helper()
	w.eventually("the clock has a waiter", clock.HasWaiters)
	clock.Step(d)
}

func TestController_AssignsBlocksOfEachFamilyInOrder(t *testing.T) {
	t.Parallel()

	w := newWorld(t)
	w.run(setup{Options: cidrs("fd00:1::/48", "10.1.0.0/16")})

	w.register("a")
	w.wantCIDRs("a", "fd00:1::/80", "10.1.0.0/24")
	w.register("b", initialized)
	w.wantCIDRs("b", "fd00:1:0:0:1::/80", "10.1.1.0/24")
}

func TestController_WritesBothFamiliesAtOnce(t *testing.T) {
	t.Parallel()

	w := newWorld(t)

	versions := w.watch()

	w.run(setup{Options: cidrs("10.1.0.0/16", "fd00:1::/48")})
	w.register("a")

	for event := range versions.ResultChan() {
		node, ok := event.Object.(*corev1.Node)

		switch {
		case !ok:
			t.Fatal(event.Object)
		case node.Spec.PodCIDR == "" && len(node.Spec.PodCIDRs) == 0:
		case node.Spec.PodCIDR == "10.1.0.0/24" && slices.Equal(node.Spec.PodCIDRs, []string{"10.1.0.0/24", "fd00:1::/80"}):
			for _, m := range node.ManagedFields {
				if strings.Contains(m.FieldsV1.GetRawString(), "podCIDR") && m.Manager != nodeipam.FieldManager {
					t.Errorf("podCIDRs were written by %s", m.Manager)
				}
			}

			return
		default:
			t.Fatalf("podCIDR %s, podCIDRs %v", node.Spec.PodCIDR, node.Spec.PodCIDRs)
		}
	}

	t.Fatal("the watch ended")
}

// TestController_FinishesItsWriteBeforeItStops: the next leader must see the result.
func TestController_FinishesItsWriteBeforeItStops(t *testing.T) {
	t.Parallel()

	w := newWorld(t)
	wire := newWire()
	wire.plan(func(string) fault { return slow })

	p := w.run(setup{Options: cidrs("10.1.0.0/16"), wire: wire})
	w.register("a")
	w.eventually("the write is on its way", func() bool { return wire.slowed() > 0 })
	p.cancel()
	wire.land()
	p.stop()

	if got := w.get("a").Spec.PodCIDRs; !slices.Equal(got, []string{"10.1.0.0/24"}) {
		t.Errorf("podCIDRs %v after the controller stopped, want the podCIDRs of the write in flight", got)
	}
}

// TestController_LateWriteIsRejected: a write that timed out, whose block was allocated to another Node, arrives late.
func TestController_LateWriteIsRejected(t *testing.T) {
	t.Parallel()

	w := newWorld(t)
	wire := newWire()

	var sent atomic.Int32

	wire.plan(func(path string) fault {
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
	w.run(setup{Options: cidrs("10.1.0.0/23"), wire: wire})
	w.register("a") // the write of 10.1.1.0/24 is on its way
	w.eventually("a has been written to again", func() bool { return sent.Load() > 1 })
	w.setOSImage("a", "Fedora CoreOS") // makes the allocation stale
	w.register("b")
	w.wantCIDRs("b", "10.1.1.0/24")

	before := sent.Load()

	w.remove("before")
	w.setOSImage("a", kube.DefaultOSImage) // allocates another block, 10.1.0.0/24
	w.eventually("a has been written to after that", func() bool { return sent.Load() > before })
	wire.land()
	wire.plan(calm)
	w.wantCIDRs("a", "10.1.0.0/24")
}

func TestController_DefaultsToTheCIDRsOfTalos(t *testing.T) {
	t.Parallel()

	w := newWorld(t)
	w.setCIDRs(w.controlPlane, []string{"10.2.0.0/16", "fd00:2::/48"}, []string{"10.2.0.0/23", "fd00:2::/108"})
	w.run(setup{})
	w.register("a")
	w.wantCIDRs("a", "10.2.2.0/24", "fd00:2:0:0:1::/80")
}

func TestController_DefaultsToTheMaskSizesOfKubeControllerManager(t *testing.T) {
	t.Parallel()

	for name, test := range map[string]struct {
		nodeipam.Options
		pods, arguments, want []string
	}{
		"dual-stack": {
			pods: []string{"10.2.0.0/16", "fd00:2::/48"}, arguments: []string{"--node-cidr-mask-size-ipv4=26", "--node-cidr-mask-size-ipv6=64"},
			want: []string{"10.2.0.0/26", "fd00:2::/64"},
		},
		"single-stack": {pods: []string{"fd00:2::/48"}, arguments: []string{"--node-cidr-mask-size=72"}, want: []string{"fd00:2::/72"}},
		"flags win": {
			Options: nodeipam.Options{MaskSizeIPv4: 25},
			pods:    []string{"10.2.0.0/16", "fd00:2::/48"}, arguments: []string{"--node-cidr-mask-size-ipv4=26", "--node-cidr-mask-size-ipv6=72"},
			want: []string{"10.2.0.0/25", "fd00:2::/72"},
		},
		"size of the CIDR":       {pods: []string{"fd00:2::/64"}, arguments: []string{"--node-cidr-mask-size-ipv6=64"}, want: []string{"fd00:2::/80"}},
		"size that does not fit": {pods: []string{"fd00:2::/72"}, arguments: []string{"--node-cidr-mask-size-ipv6=64"}, want: []string{"fd00:2::/80"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			w := newWorld(t)
			w.setCIDRs(w.controlPlane, test.pods, nil)
			w.setArguments(w.controlPlane, append(test.arguments, "--allocate-node-cidrs=false")...)
			w.run(setup{Options: test.Options})
			w.register("a")
			w.wantCIDRs("a", test.want...)
		})
	}
}

// TestController_NeverUsesMaskSizesOfKubeControllerManagerForPools: it knows nothing of pools.
func TestController_NeverUsesMaskSizesOfKubeControllerManagerForPools(t *testing.T) {
	t.Parallel()

	w := newWorld(t)
	w.setArguments(w.controlPlane, "--allocate-node-cidrs=false", "--node-cidr-mask-size-ipv4=26")
	w.run(setup{pools: func() []nodeipam.Pool { return []nodeipam.Pool{{Name: "all", CIDRs: prefixes("10.5.0.0/16")}} }})
	w.register("a")
	w.wantCIDRs("a", "10.5.0.0/24")
}

func TestController_ReservesServiceCIDRs(t *testing.T) {
	t.Parallel()

	declared := &networkingv1.ServiceCIDR{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "nodeipam-"}, Spec: networkingv1.ServiceCIDRSpec{CIDRs: []string{"10.3.0.0/25"}},
	}

	w := newWorld(t)

	declared, err := w.client.NetworkingV1().ServiceCIDRs().Create(t.Context(), declared, metav1.CreateOptions{})
	w.require(err)
	t.Cleanup(func() {
		_ = w.client.NetworkingV1().ServiceCIDRs().Delete(context.WithoutCancel(t.Context()), declared.Name, metav1.DeleteOptions{})
	})

	w.run(setup{Options: cidrs("10.3.0.0/16")})
	w.register("a")
	w.wantCIDRs("a", "10.3.1.0/24")
}

func TestController_IgnoresNodesOfOtherSystems(t *testing.T) {
	t.Parallel()

	w := newWorld(t)
	w.register("other", func(n *corev1.Node) { n.Status.NodeInfo.OSImage = "Fedora CoreOS" })
	w.run(setup{Options: cidrs("10.1.0.0/16")})
	w.register("a")
	w.awaitCIDRs("a")

	if got := w.get("other").Spec.PodCIDRs; len(got) > 0 {
		t.Errorf("podCIDRs %v were assigned to a Node of another system", got)
	}
}

func TestController_ReleasesBlocksOfDeletedNodes(t *testing.T) {
	t.Parallel()

	w := newWorld(t)
	w.run(setup{Options: cidrs("10.1.0.0/24")})
	w.register("a", func(n *corev1.Node) { n.Finalizers = []string{"test/finalizer"} })
	w.wantCIDRs("a", "10.1.0.0/24")
	w.remove("a")
	w.register("b")
	w.awaitPending("b", nodeipam.ReasonExhausted)
	w.patch("a", "test", `{"metadata":{"finalizers":null}}`)
	w.wantCIDRs("b", "10.1.0.0/24")
}

func TestController_KeepsClearOfAllExistingBlocks(t *testing.T) {
	t.Parallel()

	w := newWorld(t)
	w.register("odd", having("10.1.0.64/27", "fd00:1:0:1::/64"))
	w.register("far", having("192.168.7.0/24"))
	w.register("twin-a", having("10.1.2.0/24"))
	w.register("twin-b", having("10.1.2.0/24"))

	w.run(setup{Options: cidrs("10.1.0.0/22", "fd00:1::/63")})

	for name, other := range map[string]string{"twin-a": "twin-b", "twin-b": "twin-a"} {
		if message := w.awaitEvent(name, nodeipam.ReasonOverlap); !strings.Contains(message, w.node(other)) {
			t.Errorf("Event %q on %s does not name %s", message, name, other)
		}
	}

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

	m := w.view(name)
	m.Platform.Zone = zone
	w.inventory.Replace(w.node(name), m)
	w.register(name, initialized)
}

func TestController_IgnoresNodesThatAreNotManaged(t *testing.T) {
	t.Parallel()

	w := newWorld(t)
	w.run(setup{Options: cidrs("10.1.0.0/16"), selector: func() *rules.Selector { return zone("ours") }})
	w.in("theirs", "theirs")
	w.register("unknown")
	w.awaitPending("unknown", nodeipam.ReasonMachineUnknown)
	w.in("ours", "ours")
	w.wantCIDRs("ours", "10.1.0.0/24")

	if got := w.get("theirs").Spec.PodCIDRs; len(got) > 0 {
		t.Errorf("podCIDRs %v were assigned to a Node that is not managed", got)
	}
}

func TestController_PoolChangesKeepAssignedBlocks(t *testing.T) {
	t.Parallel()

	var pools poolsNow

	w := newWorld(t)

	pools.set(nodeipam.Pool{Name: "one", Selector: zone("one"), CIDRs: prefixes("10.1.0.0/24")})
	p := w.run(setup{Options: cidrs("10.9.0.0/16", "fd00:9::/48"), pools: pools.get, clock: newManualClock()})

	w.in("a", "one")
	w.wantCIDRs("a", "10.1.0.0/24", "fd00:9::/80")
	w.in("b", "elsewhere")
	w.wantCIDRs("b", "10.9.0.0/24", "fd00:9:0:0:1::/80")
	w.in("c", "one")
	w.awaitPending("c", nodeipam.ReasonExhausted)

	pools.set(
		nodeipam.Pool{Name: "other", Selector: zone("other"), CIDRs: prefixes("10.7.0.0/16")},
		nodeipam.Pool{Name: "one", Selector: zone("one"), CIDRs: prefixes("10.2.0.0/16", "2001:db8:2::/48"), MaskSizeIPv4: 26, MaskSizeIPv6: 64},
	)
	p.resync()
	w.wantCIDRs("c", "10.2.0.0/26", "2001:db8:2::/64")
	w.wantCIDRs("a", "10.1.0.0/24", "fd00:9::/80")
}

// TestController_WaitsForAnIPv6Prefix: a Node whose machine has only a /128 is pending, and gets both families once
// there is a prefix.
func TestController_WaitsForAnIPv6Prefix(t *testing.T) {
	t.Parallel()

	w := newWorld(t)
	w.run(setup{Options: cloud("10.1.0.0/16", "fd00:1::/48")})

	w.join("a", "10.0.0.1/24", "2001:db8:1:2::5/128")
	w.awaitPending("a", nodeipam.ReasonPrefixMissing)
	w.join("b", "10.0.0.2/24", "2001:db8:1:3::5/64")
	w.wantCIDRs("b", "10.1.0.0/24", "2001:db8:1:3:1::/80")

	w.inventory.Replace(w.node("a"), w.view("a", "10.0.0.1/24", "2001:db8:1:2::5/64"))
	w.wantCIDRs("a", "10.1.1.0/24", "2001:db8:1:2:1::/80")

	if reasons := w.events.of(w.node("a")); len(reasons) != 1 {
		t.Errorf("Events %v, want one", reasons)
	}
}

// TestController_KeepsClearOfMachinesAndGateway: no block contains the address of a machine of the site, or of the
// gateway.
// TestController_FallsBackToClusterCIDRs: only if the configuration allows it, and not before the machine has had time
// to get an address.
func TestController_FallsBackToClusterCIDRs(t *testing.T) {
	t.Parallel()

	var allowed atomic.Bool

	w := newWorld(t)
	clock := newManualClock()
	p := w.run(setup{Options: cloud("10.1.0.0/16", "fd00:1::/48"), clock: clock, fallback: allowed.Load})

	for _, name := range []string{"single", "none", "late", "booting"} {
		w.register(name)
	}

	show := func(name string, stage talosruntime.MachineStage, addresses ...string) {
		m := w.view(name, addresses...)
		m.Stage = stage
		w.inventory.Replace(w.node(name), m)
	}

	show("none", talosruntime.MachineStageRunning, "10.0.0.1/24")
	w.awaitPending("none", nodeipam.ReasonPrefixMissing)
	w.step(clock, 5*time.Minute)
	allowed.Store(true)
	p.resync()
	w.wantCIDRs("none", "10.1.0.0/24", "fd00:1::/80")

	// A booting machine may get an address yet. A machine that does not respond may have one.
	show("booting", talosruntime.MachineStageBooting, "10.0.0.2/24")
	w.awaitPending("booting", nodeipam.ReasonPrefixMissing)
	w.awaitPending("late", nodeipam.ReasonMachineUnknown)
	show("late", talosruntime.MachineStageRunning, "10.0.0.3/24", "2001:db8:1:3::5/64")
	w.wantCIDRs("late", "10.1.1.0/24", "2001:db8:1:3:1::/80")
	show("single", talosruntime.MachineStageRunning, "2001:db8:1:2::5/128")
	w.wantCIDRs("single", "10.1.2.0/24", "fd00:1:0:0:1::/80")

	if got := w.get("booting").Spec.PodCIDRs; len(got) > 0 {
		t.Errorf("podCIDRs %v were assigned while the machine boots", got)
	}
}

// TestController_FallbackWaitsForAddresses: a machine gets its IPv6 address after the Node has registered.
func TestController_FallbackWaitsForAddresses(t *testing.T) {
	t.Parallel()

	w := newWorld(t)
	w.run(setup{Options: cloud("10.1.0.0/16", "fd00:1::/48"), clock: newManualClock(), fallback: func() bool { return true }})

	m := w.view("a", "10.0.0.1/24")
	m.Stage = talosruntime.MachineStageRunning
	w.inventory.Replace(w.node("a"), m)
	w.register("a")
	w.awaitPending("a", nodeipam.ReasonPrefixMissing)

	w.inventory.Replace(w.node("a"), w.view("a", "10.0.0.1/24", "2001:db8:1:2::5/64"))
	w.wantCIDRs("a", "10.1.0.0/24", "2001:db8:1:2:1::/80")
}

// TestController_ReportsBlocksOfFormerPrefix: the router of the new prefix does not deliver to them.
func TestController_ReportsBlocksOfFormerPrefix(t *testing.T) {
	t.Parallel()

	w := newWorld(t)
	w.run(setup{Options: cloud("10.1.0.0/16", "fd00:1::/48")})
	w.join("a", "10.0.0.1/24", "2001:db8:1:2::5/64")
	w.wantCIDRs("a", "10.1.0.0/24", "2001:db8:1:2:1::/80")

	// Without an address, the prefix is not known to have changed.
	w.inventory.Replace(w.node("a"), w.view("a", "10.0.0.1/24"))
	w.inventory.Replace(w.node("a"), w.view("a", "10.0.0.1/24", "2001:db8:9:2::5/64"))

	message := w.awaitEvent("a", "PodCIDRPrefixChanged")
	if !strings.Contains(message, "2001:db8:1:2:1::/80") || !strings.Contains(message, "2001:db8:9:2::/64") {
		t.Errorf("Event %q does not name block and prefix", message)
	}

	w.inventory.Replace(w.node("a"), w.view("a", "10.0.0.2/24", "2001:db8:9:2::5/64"))
	w.join("b", "10.0.0.3/24", "2001:db8:9:2::6/64") // is handled later
	w.wantCIDRs("b", "10.1.1.0/24", "2001:db8:9:2:1::/80")

	if reasons := w.events.of(w.node("a")); len(reasons) != 1 {
		t.Errorf("Events %v, want one", reasons)
	}
}

func TestController_ReportsSingleStackNodesOfDualStackClusters(t *testing.T) {
	t.Parallel()

	w := newWorld(t)
	w.setCIDRs(w.controlPlane, []string{"10.1.0.0/16"}, nil)

	clock := newManualClock()

	w.register("old", having("10.1.0.0/24"))
	w.register("other", having("10.1.1.0/24"), func(n *corev1.Node) { n.Status.NodeInfo.OSImage = "Fedora CoreOS" })
	w.run(setup{readerClock: clock})
	w.register("a")
	w.wantCIDRs("a", "10.1.2.0/24")

	if reasons := w.events.of(w.node("old")); len(reasons) > 0 {
		t.Errorf("Events %v in a single-stack cluster, want none", reasons)
	}

	w.setCIDRs(w.controlPlane, []string{"10.1.0.0/16", "fd00:1::/48"}, nil)
	w.step(clock, time.Minute)

	if message := w.awaitEvent("old", "PodCIDRFamilyMissing"); !strings.Contains(message, "IPv6") {
		t.Errorf("Event %q does not name the IP family", message)
	}

	w.awaitEvent("a", "PodCIDRFamilyMissing")
	w.setOSImage("old", kube.DefaultOSImage+" again")
	w.register("b")
	w.wantCIDRs("b", "10.1.3.0/24", "fd00:1::/80")

	for _, name := range []string{"old", "a"} {
		if reasons := w.events.of(w.node(name)); len(reasons) != 1 {
			t.Errorf("node %s: Events %v, want one", name, reasons)
		}
	}

	if reasons := w.events.of(w.node("other")); len(reasons) > 0 {
		t.Errorf("Events %v on a Node of another system", reasons)
	}
}

// TestController_PoolsOfOneCIDR: two pools divide one CIDR into blocks of different sizes.
func TestController_PoolsOfOneCIDR(t *testing.T) {
	t.Parallel()

	small := nodeipam.Pool{Name: "small", CIDRs: prefixes("10.5.0.0/22"), MaskSizeIPv4: 25}
	large := nodeipam.Pool{Name: "large", CIDRs: prefixes("10.5.0.0/22"), MaskSizeIPv4: 23}

	var pools poolsNow

	w := newWorld(t)

	pools.set(small, large)
	w.run(setup{pools: pools.get})
	w.register("a")
	w.wantCIDRs("a", "10.5.0.0/25")
	pools.set(large, small)
	w.register("b")
	w.wantCIDRs("b", "10.5.2.0/23")
	pools.set(small, large)

	for i, want := range []string{"10.5.0.128/25", "10.5.1.0/25", "10.5.1.128/25"} {
		name := fmt.Sprintf("c-%d", i)
		w.register(name)
		w.wantCIDRs(name, want)
	}

	w.register("f")
	w.awaitPending("f", nodeipam.ReasonExhausted)

	if reasons := w.events.of(w.node("b")); len(reasons) > 0 {
		t.Errorf("Events %v on the Node with the large block, want none", reasons)
	}
}

func TestController_KeepsClearOfMachinesAndGateway(t *testing.T) {
	t.Parallel()

	w := newWorld(t)
	w.run(setup{Options: cloud("10.1.0.0/24", "fd00:1::/48")})

	// Four blocks of /120: of the gateway, of the other machine, of this machine, and one that is free.
	w.inventory.Replace(w.node("neighbor"), w.view("neighbor", "2001:db8:1:2::105/118"))
	w.inventory.Replace(w.node("a"), w.view("a", "2001:db8:1:2::205/118", "10.1.0.7/16"))
	w.register("a")
	w.awaitPending("a", nodeipam.ReasonExhausted) // the IPv4 block is the one that the machine is in

	w.inventory.Replace(w.node("a"), w.view("a", "2001:db8:1:2::205/118"))
	w.wantCIDRs("a", "10.1.0.0/24", "2001:db8:1:2::300/120")
}

// TestController_KnowsAllMachinesBeforeItStarts: a new leader reserves the addresses of all machines before its first
// allocation.
func TestController_KnowsAllMachinesBeforeItStarts(t *testing.T) {
	t.Parallel()

	w := newWorld(t)
	p := w.prepare(setup{Options: cloud("10.1.0.0/16", "fd00:1::/48")})
	w.join("a", "2001:db8:1:2::5/118")

	for i := range 8 { // two of its three other blocks
		name := fmt.Sprintf("neighbor-%d", i)
		w.inventory.Replace(w.node(name), w.view(name, fmt.Sprintf("2001:db8:1:2::%d05/118", 1+i%2)))
		w.register(name, having(fmt.Sprintf("192.168.%d.0/24", i)))
	}

	p.lead()

	if got := w.awaitCIDRs("a"); got[1] != "2001:db8:1:2::300/120" {
		t.Errorf("podCIDRs %v, want the only IPv6 block without a machine", got)
	}
}

// TestController_AssignsTheSameBlockAgain: a Node that registers again is not kept from its block by the address of its
// CNI bridge.
func TestController_AssignsTheSameBlockAgain(t *testing.T) {
	t.Parallel()

	w := newWorld(t)
	w.run(setup{Options: cidrs("10.1.0.0/24")})

	m := w.view("a", "10.0.0.1/24", "10.1.0.1/24")
	m.Addresses[1].Link = "cni0"
	w.inventory.Replace(w.node("a"), m)

	for range 2 {
		w.register("a")
		w.wantCIDRs("a", "10.1.0.0/24")
		w.remove("a")
	}
}

// TestController_WaitsForTheMachine: the Node is pending, and never gets IPv6 of another prefix than its machine's.
func TestController_WaitsForTheMachine(t *testing.T) {
	t.Parallel()

	w := newWorld(t)
	w.run(setup{Options: cloud("10.1.0.0/16", "fd00:1::/48")})

	w.inventory.Replace(w.node("a"), w.view("a", "2001:db8:1:2::5/64"))
	w.inventory.MarkUnreachable(w.node("a"), "no route to host")
	w.register("a")

	if message := w.awaitPending("a", nodeipam.ReasonMachineUnknown); !strings.Contains(message, "no route to host") {
		t.Errorf("Event %q does not contain the cause", message)
	}

	w.register("b")
	w.awaitPending("b", nodeipam.ReasonMachineUnknown)

	w.inventory.Replace(w.node("a"), w.view("a", "2001:db8:1:2::5/64"))
	w.wantCIDRs("a", "10.1.0.0/24", "2001:db8:1:2:1::/80")
}

// TestController_ExhaustedFamilyLeaksNothing: Nodes without an IPv6 block hold no IPv4 block either, however often they
// are retried.
func TestController_ExhaustedFamilyLeaksNothing(t *testing.T) {
	t.Parallel()

	w := newWorld(t)
	w.run(setup{Options: cidrs("10.1.0.0/23", "fd00:1::/80")}) // two blocks, and one

	w.register("a")
	w.wantCIDRs("a", "10.1.0.0/24", "fd00:1::/80")

	for i := range 5 {
		name := fmt.Sprintf("pending-%d", i)
		w.register(name)
		w.awaitPending(name, nodeipam.ReasonExhausted)
	}

	w.remove("a")
	w.eventually("a pending Node has the lowest blocks", func() bool {
		list, err := w.client.CoreV1().Nodes().List(t.Context(), metav1.ListOptions{LabelSelector: w.selector()})
		w.require(err)

		return slices.ContainsFunc(list.Items, func(n corev1.Node) bool { return slices.Equal(n.Spec.PodCIDRs, []string{"10.1.0.0/24", "fd00:1::/80"}) })
	})
}

// TestController_ConcurrentChanges: Nodes and machines appear, change and disappear concurrently, for the race
// detector.
func TestController_ConcurrentChanges(t *testing.T) {
	t.Parallel()

	w := newWorld(t)
	w.run(setup{Options: cloud("10.1.0.0/16", "fd00:1::/48")})

	var group sync.WaitGroup

	for i := range 16 {
		name := fmt.Sprintf("n%d", i)
		address := fmt.Sprintf("2001:db8:1:2::%x/64", i+16)

		group.Go(func() {
			for range 3 {
				w.inventory.Replace(w.node(name), w.view(name, address))

				if _, err := w.tryRegister(t.Context(), name); err != nil {
					t.Error(err)
				}

				w.inventory.MarkUnreachable(w.node(name), "for a moment")

				if err := w.client.CoreV1().Nodes().Delete(t.Context(), w.node(name), metav1.DeleteOptions{}); err != nil {
					t.Error(err)
				}

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
			if assigned[block] != "" {
				t.Errorf("%s and %s were both assigned %s", assigned[block], name, block)
			}

			assigned[block] = name
		}
	}
}

// TestController_LeavesNoConnectionOpen: connections that read the control plane are closed.
func TestController_LeavesNoConnectionOpen(t *testing.T) {
	t.Parallel()

	w := newWorld(t)
	clock := newManualClock()
	others := w.controlPlanes("cp-1")

	w.run(setup{Options: cidrs("10.1.0.0/16"), readerClock: clock, dial: w.dial})
	w.register("a")
	w.awaitCIDRs("a")

	for range 5 {
		w.eventually("the machine has been read", clock.HasWaiters)

		asked := len(others[0].Calls())
		w.step(clock, time.Minute)
		w.eventually("the machine is read again", func() bool { return len(others[0].Calls()) > asked })
	}

	w.eventually("no connection is left", func() bool { return others[0].Connections() == 0 })
}

// controlPlanes adds control-plane machines and their Nodes. Their kube-controller-manager does not allocate.
func (w *world) controlPlanes(names ...string) []*talostest.Machine {
	w.Helper()

	var machines []*talostest.Machine

	for _, name := range names {
		m := w.machine(name)
		w.setArguments(m, "--allocate-node-cidrs=true", "--controllers=*,tokencleaner,-node-ipam-controller")

		w.register(name, controlPlane, at(m.Address()), having(fmt.Sprintf("192.168.%d.0/24", len(machines))))

		machines = append(machines, m)
	}

	return machines
}

// dial connects to a control-plane machine like the product.
func (w *world) dial(ctx context.Context, _ string, addr netip.Addr) (talosapi.State, error) {
	config, err := w.talos.ClientTLS(string(role.Reader))
	if err != nil {
		return nil, err
	}

	machine, err := talosapi.Dial(ctx, staticCredentials{config}, addr)
	if err != nil {
		return nil, err
	}

	return talosapi.ControlPlane{State: unhurried{machine}}, nil
}

// unhurried ignores the deadlines of the product, which are too short for a busy test machine.
type unhurried struct{ talosapi.State }

// Get implements talosapi.State.
func (u unhurried) Get(ctx context.Context, pointer resource.Pointer, options ...state.GetOption) (resource.Resource, error) {
	return u.State.Get(context.WithoutCancel(ctx), pointer, options...)
}

// staticCredentials implements talosapi.Credentials with a fixed configuration.
type staticCredentials struct {
	config *tls.Config
}

// TLSConfig implements talosapi.Credentials.
func (c staticCredentials) TLSConfig() (*tls.Config, error) { return c.config.Clone(), nil }

// TestController_BlockedWhileKubeControllerManagerAllocates: until the last control-plane machine is changed; the Event
// contains the change.
func TestController_BlockedWhileKubeControllerManagerAllocates(t *testing.T) {
	t.Parallel()

	w := newWorld(t)
	clock := newManualClock()
	machines := w.controlPlanes("cp-1", "cp-2")

	var unreachable atomic.Bool // cp-2

	dial := func(ctx context.Context, nodename string, addr netip.Addr) (talosapi.State, error) {
		if unreachable.Load() && nodename == w.node("cp-2") {
			return nil, errors.New("no route to host")
		}

		return w.dial(ctx, nodename, addr)
	}

	for _, m := range machines { // the default of Talos
		w.setArguments(m, "--allocate-node-cidrs=true", "--controllers=*,tokencleaner")
	}

	w.run(setup{Options: cidrs("10.1.0.0/16"), readerClock: clock, dial: dial})
	w.register("a")

	message := w.awaitPending("a", nodeipam.ReasonAllocatorConflict)

	for _, part := range []string{w.node("cp-1"), w.node("cp-2"), `cluster: {controllerManager: {extraArgs: {controllers: "-node-ipam-controller"}}}`} {
		if !strings.Contains(message, part) {
			t.Errorf("Event %q does not name %s", message, part)
		}
	}

	w.setArguments(machines[0], "--allocate-node-cidrs=true", "--controllers=*,tokencleaner,-node-ipam-controller")
	w.step(clock, time.Minute)
	w.register("b")

	if message := w.awaitPending("b", nodeipam.ReasonAllocatorConflict); !strings.Contains(message, w.node("cp-2")) {
		t.Errorf("Event %q does not name cp-2", message)
	}

	// The last known configuration of an unreachable machine counts.
	unreachable.Store(true)

	asked := len(machines[0].Calls())
	w.step(clock, time.Minute)
	w.eventually("the other machine has been read", func() bool { return len(machines[0].Calls()) > asked && clock.HasWaiters() })
	w.register("c")
	w.awaitPending("c", nodeipam.ReasonAllocatorConflict)

	unreachable.Store(false)
	w.setArguments(machines[1], "--allocate-node-cidrs=false", "--controllers=*,tokencleaner")
	w.step(clock, time.Minute)

	for _, name := range []string{"a", "b", "c"} {
		w.awaitCIDRs(name)
	}
}

// TestController_BlockedByTheDefaultsOfTalos: with only the local machine to read.
func TestController_BlockedByTheDefaultsOfTalos(t *testing.T) {
	t.Parallel()

	w := newWorld(t)
	w.setArguments(w.controlPlane, "--use-service-account-credentials", "--allocate-node-cidrs=true", "--controllers=*,tokencleaner")
	w.run(setup{Options: cidrs("10.1.0.0/16")})
	w.register("a")
	w.awaitPending("a", nodeipam.ReasonAllocatorConflict)
}

// TestController_IgnoresControlPlaneMachinesWithoutTheLabel: a worker can neither block allocation nor change the
// cluster CIDRs.
func TestController_IgnoresControlPlaneMachinesWithoutTheLabel(t *testing.T) {
	t.Parallel()

	w := newWorld(t)
	w.setCIDRs(w.controlPlane, []string{"10.1.0.0/16"}, []string{"10.96.0.0/12"})

	liar := w.controlPlanes("a-liar")[0]
	w.setCIDRs(liar, []string{"192.0.2.0/24"}, []string{"10.1.0.0/17"})
	w.setArguments(liar, "--allocate-node-cidrs=true")
	w.patch("a-liar", "test", `{"metadata":{"labels":{"node-role.kubernetes.io/control-plane":null}}}`)

	w.run(setup{dial: w.dial})
	w.register("a")
	w.wantCIDRs("a", "10.1.0.0/24")

	if calls := liar.Calls(); len(calls) > 0 {
		t.Errorf("a machine without the label was read: %v", calls)
	}
}

// TestController_BlockedWhilePodSubnetsDiffer: the pod subnets are not taken from one of several machines.
func TestController_BlockedWhilePodSubnetsDiffer(t *testing.T) {
	t.Parallel()

	w := newWorld(t)
	machines := w.controlPlanes("cp-1", "cp-2")
	w.setCIDRs(machines[0], []string{"10.1.0.0/16"}, nil)
	w.setCIDRs(machines[1], []string{"10.2.0.0/16"}, nil)

	clock := newManualClock()
	w.run(setup{readerClock: clock, dial: w.dial})
	w.register("a")
	w.awaitPending("a", nodeipam.ReasonAllocatorUnknown)

	w.setCIDRs(machines[0], []string{"10.2.0.0/16"}, nil)
	w.step(clock, time.Minute)
	w.wantCIDRs("a", "10.2.0.0/24")
}

// TestController_WaitsUntilEveryControlPlaneMachineWasTried: the one that has not been read yet may be the one that
// allocates.
func TestController_BlockedWhileMaskSizesDiffer(t *testing.T) {
	t.Parallel()

	w := newWorld(t)
	machines := w.controlPlanes("cp-1", "cp-2")

	for i, size := range []string{"25", "26"} {
		w.setCIDRs(machines[i], []string{"10.1.0.0/16"}, nil)
		w.setArguments(machines[i], "--allocate-node-cidrs=false", "--node-cidr-mask-size-ipv4="+size)
	}

	clock := newManualClock()
	w.run(setup{readerClock: clock, dial: w.dial})
	w.register("a")

	if message := w.awaitPending("a", nodeipam.ReasonAllocatorUnknown); !strings.Contains(message, "mask size") {
		t.Errorf("Event %q does not name the mask sizes", message)
	}

	w.setArguments(machines[1], "--allocate-node-cidrs=false", "--node-cidr-mask-size-ipv4=25")
	w.step(clock, time.Minute)
	w.wantCIDRs("a", "10.1.0.0/25")
}

func TestController_WaitsUntilEveryControlPlaneMachineWasTried(t *testing.T) {
	t.Parallel()

	w := newWorld(t)
	w.controlPlanes("cp-1", "cp-2")

	dialing, dialed := make(chan struct{}), make(chan struct{})

	options := cidrs("10.1.0.0/16")
	options.MaskSizeIPv4 = 24 // else most machines must have been read

	w.run(setup{Options: options, readerClock: newManualClock(), dial: func(ctx context.Context, nodename string, addr netip.Addr) (talosapi.State, error) {
		if nodename == w.node("cp-2") {
			close(dialing)
			<-dialed

			return nil, errors.New("no route to host")
		}

		return w.dial(ctx, nodename, addr)
	}})
	w.register("a")
	<-dialing

	if got := w.get("a").Spec.PodCIDRs; len(got) > 0 {
		t.Errorf("podCIDRs %v were assigned before cp-2 was tried", got)
	}

	close(dialed)
	w.wantCIDRs("a", "10.1.0.0/24")
}

// TestController_BlockedAfterAnotherControllerAllocates: until it has not done so for a while. One controller assigns
// podCIDRs of many Nodes, a kubelet only those of its own.
func TestController_BlockedAfterAnotherControllerAllocates(t *testing.T) {
	t.Parallel()

	w := newWorld(t)
	clock := newManualClock()
	w.run(setup{Options: cloud("10.1.0.0/16", "fd00:1::/48"), clock: clock})

	for i, name := range []string{"their-first", "their-second"} {
		w.register(name)
		w.awaitPending(name, nodeipam.ReasonMachineUnknown)
		w.patch(name, "cilium-operator", fmt.Sprintf(`{"spec":{"podCIDR":"10.1.%[1]d.0/24","podCIDRs":["10.1.%[1]d.0/24"]}}`, i))
	}

	w.awaitEvent("their-second", nodeipam.ReasonAllocatorConflict)

	blocked := func() bool {
		_, found := w.events.find(w.node("a"), nodeipam.ReasonAllocatorConflict)

		return found
	}

	// The same watch delivers the writes of the other controller before this Node.
	w.join("a", "2001:db8:1:2::5/64")
	w.eventually("allocation is blocked", blocked)

	if message := w.awaitPending("a", nodeipam.ReasonAllocatorConflict); !strings.Contains(message, "cilium-operator") {
		t.Errorf("Event %q does not name the other controller", message)
	}

	w.step(clock, 11*time.Minute)
	w.wantCIDRs("a", "10.1.2.0/24", "2001:db8:1:2:1::/80")
}

// kubelet returns a client with the credentials of a Node's kubelet.
func (w *world) kubelet(name string) kubernetes.Interface {
	w.Helper()

	client, err := kubernetes.NewForConfig(w.kube.KubeletConfig(w.node(name)))
	w.require(err)

	return client
}

// TestController_AllocatesDespiteKubeletThatWritesPodCIDRs: a kubelet can write the podCIDRs of its own Node, under any
// name and again after each registration, and does not block the allocation for others.
func TestController_AllocatesDespiteKubeletThatWritesPodCIDRs(t *testing.T) {
	t.Parallel()

	w := newWorld(t)
	w.run(setup{Options: cloud("10.1.0.0/16", "fd00:1::/48"), clock: newManualClock()})

	for i, name := range []string{"a", "b"} {
		w.register("self-made")
		w.awaitPending("self-made", nodeipam.ReasonMachineUnknown)

		patch := fmt.Appendf(nil, `{"spec":{"podCIDR":"10.1.%[1]d.0/24","podCIDRs":["10.1.%[1]d.0/24"]}}`, i)
		_, err := w.kubelet("self-made").CoreV1().Nodes().Patch(t.Context(), w.node("self-made"), types.MergePatchType, patch,
			metav1.PatchOptions{FieldManager: "cilium-operator"})
		w.require(err)

		// The same watch delivers the write of the kubelet before this Node.
		w.join(name, fmt.Sprintf("2001:db8:1:%d::5/64", i))
		w.wantCIDRs(name, fmt.Sprintf("10.1.%d.0/24", 1-i), fmt.Sprintf("2001:db8:1:%d:1::/80", i))
		w.remove(name)
		w.remove("self-made")
	}
}

// TestController_AllocatesDespiteKubeletThatRegistersWithTheWholePool: its podCIDRs are reported, and are no
// reservation. Those that leave enough to others are.
func TestController_AllocatesDespiteKubeletThatRegistersWithTheWholePool(t *testing.T) {
	t.Parallel()

	w := newWorld(t)
	register := func(name string, cidrs ...string) {
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: w.node(name), Labels: map[string]string{labelWorld: w.name}}}
		having(cidrs...)(node)

		_, err := w.kubelet(name).CoreV1().Nodes().Create(t.Context(), node, metav1.CreateOptions{})
		w.require(err)
	}

	w.register("before", having("10.1.7.0/24", "fd00:1:0:0:7::/80"))
	register("wide", "10.1.0.0/20", "fd00:1::/64")
	register("all", "10.1.0.0/16", "fd00::/16")

	for range 2 {
		p := w.run(setup{Options: cidrs("10.1.0.0/16", "fd00:1::/48")})

		message := w.awaitEvent("all", nodeipam.ReasonTooLarge)
		if !strings.Contains(message, "10.1.0.0/16") || !strings.Contains(message, "fd00::/16") {
			t.Errorf("Event %q does not name the podCIDRs", message)
		}

		w.register("a")
		w.wantCIDRs("a", "10.1.16.0/24", "fd00:1:0:1::/80")
		w.remove("a")
		p.stop()
	}

	if reasons := w.events.of(w.node("wide")); slices.Contains(reasons, nodeipam.ReasonTooLarge) {
		t.Errorf("Events %v on a Node whose podCIDRs leave enough to others", reasons)
	}
}

// TestController_BlockedWhileTheControlPlaneIsUnreachable: and the Event contains the address.
func TestController_BlockedWhileTheControlPlaneIsUnreachable(t *testing.T) {
	t.Parallel()

	w := newWorld(t)
	machines := w.controlPlanes("cp-1")
	reachable := atomic.Bool{}

	w.run(setup{Options: cidrs("10.1.0.0/16"), dial: func(ctx context.Context, nodename string, addr netip.Addr) (talosapi.State, error) {
		if !reachable.Load() {
			return nil, fmt.Errorf("dial %s: no route to host", addr)
		}

		return w.dial(ctx, nodename, addr)
	}})
	w.register("a")

	if message := w.awaitPending("a", nodeipam.ReasonAllocatorUnknown); !strings.Contains(message, machines[0].Address().String()) {
		t.Errorf("Event %q does not contain the address", message)
	}

	reachable.Store(true)
	w.wantCIDRs("a", "10.1.0.0/24")
}

func TestOptions_RefusesInvalidSettings(t *testing.T) {
	t.Parallel()

	for name, options := range map[string]nodeipam.Options{
		"an unknown allocator":                 {Allocator: "Guesswork"},
		"a block larger than the cluster CIDR": {ClusterCIDRs: prefixes("10.0.0.0/26")},
		"an impossible mask size":              {ClusterCIDRs: prefixes("fd00::/64"), MaskSizeIPv6: 129},
	} {
		if err := options.Validate(); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}
