package nodeipam_test

import (
	"context"
	"crypto/tls"
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
	talosmachine "github.com/siderolabs/talos/pkg/machinery/config/machine"
	"github.com/siderolabs/talos/pkg/machinery/role"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
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

// manualClock is one whose time goes on when the test says so. Only what has failed is tried again by itself, for nothing would ever come of it otherwise.
type manualClock struct{ *clocktesting.FakeClock }

func newManualClock() manualClock { return manualClock{clocktesting.NewFakeClock(time.Now())} }

// After implements clock.Clock.
func (c manualClock) After(d time.Duration) <-chan time.Time {
	if d <= time.Second {
		return time.After(d)
	}

	return c.FakeClock.After(d)
}

// step lets the time go on that a controller waits for between two looks at its environment.
func (w *world) step(clock manualClock, d time.Duration) {
	w.Helper()
	w.eventually("the controller waits", clock.HasWaiters)
	clock.Step(d)
}

func TestGivesBlocksOfEachFamilyInOrder(t *testing.T) {
	t.Parallel()

	w := newWorld(t)
	w.run(setup{Options: cidrs("fd00:1::/48", "10.1.0.0/16")})

	w.register("a")
	w.wantCIDRs("a", "fd00:1::/80", "10.1.0.0/24")
	w.register("b", initialized)
	w.wantCIDRs("b", "fd00:1:0:0:1::/80", "10.1.1.0/24")
}

func TestWritesBothFamiliesAtOnce(t *testing.T) {
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

	t.Fatal("the watch has ended")
}

// TestAWriteIsNotAbandoned: a leader that has to stop knows what has become of its last write.
func TestAWriteIsNotAbandoned(t *testing.T) {
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
		t.Errorf("podCIDRs %v after the controller has stopped, want those that were being written", got)
	}
}

// TestALateWriteIsRefused: one that was given up, and whose block has gone to another Node, comes too late.
func TestALateWriteIsRefused(t *testing.T) {
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
	w.setOSImage("a", "Fedora CoreOS") // which gives the block up, and takes none
	w.register("b")
	w.wantCIDRs("b", "10.1.1.0/24")

	before := sent.Load()

	w.remove("before")
	w.setOSImage("a", kube.DefaultOSImage) // which is decided anew: 10.1.0.0/24
	w.eventually("a has been written to after that", func() bool { return sent.Load() > before })
	wire.land()
	wire.plan(calm)
	w.wantCIDRs("a", "10.1.0.0/24")
}

func TestTakesWhatTalosHasForGranted(t *testing.T) {
	t.Parallel()

	w := newWorld(t)
	w.setCIDRs(w.controlPlane, []string{"10.2.0.0/16", "fd00:2::/48"}, []string{"10.2.0.0/23", "fd00:2::/108"})
	w.run(setup{})
	w.register("a")
	w.wantCIDRs("a", "10.2.2.0/24", "fd00:2:0:0:1::/80")
}

func TestReservesDeclaredServiceCIDRs(t *testing.T) {
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

func TestLeavesOtherSystemsNodesAlone(t *testing.T) {
	t.Parallel()

	w := newWorld(t)
	w.register("other", func(n *corev1.Node) { n.Status.NodeInfo.OSImage = "Fedora CoreOS" })
	w.run(setup{Options: cidrs("10.1.0.0/16")})
	w.register("a")
	w.awaitCIDRs("a")

	if got := w.get("other").Spec.PodCIDRs; len(got) > 0 {
		t.Errorf("podCIDRs %v were given to a Node of another system", got)
	}
}

func TestABlockIsFreeWhenTheNodeIsGone(t *testing.T) {
	t.Parallel()

	w := newWorld(t)
	w.run(setup{Options: cidrs("10.1.0.0/24")})
	w.register("a", func(n *corev1.Node) { n.Finalizers = []string{"test/finalizer"} })
	w.wantCIDRs("a", "10.1.0.0/24")
	w.remove("a")
	w.register("b")
	w.awaitWaiting("b", nodeipam.ReasonExhausted)
	w.patch("a", "test", `{"metadata":{"finalizers":null}}`)
	w.wantCIDRs("b", "10.1.0.0/24")
}

func TestBlocksOfWhateverOriginAreInUse(t *testing.T) {
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
	w.awaitWaiting("c", nodeipam.ReasonExhausted)
	w.remove("twin-a")
	w.wantCIDRs("c", "10.1.2.0/24", "fd00:1:0:0:2::/80")
}

// zone selects machines by the platform's zone.
func zone(name string) *rules.Selector {
	selector, mistakes := rules.CompileNodeSelector([]rules.SelectorTerm{{
		MatchExpressions: []rules.Expression{{Key: "zone", Operator: rules.In, Values: []string{name}}},
	}})
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

func TestLeavesNodesAloneThatAreNotClaimed(t *testing.T) {
	t.Parallel()

	w := newWorld(t)
	w.run(setup{Options: cidrs("10.1.0.0/16"), claim: func() *rules.Selector { return zone("ours") }})
	w.in("theirs", "theirs")
	w.register("unknown")
	w.awaitWaiting("unknown", nodeipam.ReasonMachineUnknown)
	w.in("ours", "ours")
	w.wantCIDRs("ours", "10.1.0.0/24")

	if got := w.get("theirs").Spec.PodCIDRs; len(got) > 0 {
		t.Errorf("podCIDRs %v were given to a Node that is not claimed", got)
	}
}

func TestPoolsChangeWhileNodesKeepTheirBlocks(t *testing.T) {
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
	w.awaitWaiting("c", nodeipam.ReasonExhausted)

	pools.set(
		nodeipam.Pool{Name: "other", Selector: zone("other"), CIDRs: prefixes("10.7.0.0/16")},
		nodeipam.Pool{Name: "one", Selector: zone("one"), CIDRs: prefixes("10.2.0.0/16", "2001:db8:2::/48"), MaskSizeIPv4: 26, MaskSizeIPv6: 64},
	)
	p.resync()
	w.wantCIDRs("c", "10.2.0.0/26", "2001:db8:2::/64")
	w.wantCIDRs("a", "10.1.0.0/24", "fd00:9::/80")
}

// TestI1SingleAddress: a Node whose machine has a /128 only waits, with a reason, and gets both families when there is a prefix.
func TestI1SingleAddress(t *testing.T) {
	t.Parallel()

	w := newWorld(t)
	w.run(setup{Options: cloud("10.1.0.0/16", "fd00:1::/48")})

	w.join("a", "10.0.0.1/24", "2001:db8:1:2::5/128")
	w.awaitWaiting("a", nodeipam.ReasonPrefixMissing)
	w.join("b", "10.0.0.2/24", "2001:db8:1:3::5/64")
	w.wantCIDRs("b", "10.1.0.0/24", "2001:db8:1:3:1::/80")

	w.inventory.Replace(w.node("a"), w.view("a", "10.0.0.1/24", "2001:db8:1:2::5/64"))
	w.wantCIDRs("a", "10.1.1.0/24", "2001:db8:1:2:1::/80")

	if reasons := w.events.of(w.node("a")); len(reasons) != 1 {
		t.Errorf("Events %v, want one", reasons)
	}
}

// TestI2OwnAddressAndGateway: no block holds the address of a machine of the site, or the gateway's.
func TestI2OwnAddressAndGateway(t *testing.T) {
	t.Parallel()

	w := newWorld(t)
	w.run(setup{Options: cloud("10.1.0.0/24", "fd00:1::/48")})

	// Four blocks of /120: of the gateway, of the other machine, of this machine, and one that is free.
	w.inventory.Replace(w.node("neighbor"), w.view("neighbor", "2001:db8:1:2::105/118"))
	w.inventory.Replace(w.node("a"), w.view("a", "2001:db8:1:2::205/118", "10.1.0.7/16"))
	w.register("a")
	w.awaitWaiting("a", nodeipam.ReasonExhausted) // the IPv4 block is the one that the machine is in

	w.inventory.Replace(w.node("a"), w.view("a", "2001:db8:1:2::205/118"))
	w.wantCIDRs("a", "10.1.0.0/24", "2001:db8:1:2::300/120")
}

// TestI2MachinesThatAreThereAlready: a leader that starts knows all machines' addresses before it gives the first Node a block.
func TestI2MachinesThatAreThereAlready(t *testing.T) {
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
		t.Errorf("podCIDRs %v, want the one IPv6 block that no machine is in", got)
	}
}

// TestANodeThatIsRegisteredAgain has its block back, though its CNI has not given up the address that it had from it.
func TestANodeThatIsRegisteredAgain(t *testing.T) {
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

// TestI4TalosDoesNotAnswer: the Node waits, and is never given IPv6 of another prefix than its machine's.
func TestI4TalosDoesNotAnswer(t *testing.T) {
	t.Parallel()

	w := newWorld(t)
	w.run(setup{Options: cloud("10.1.0.0/16", "fd00:1::/48")})

	w.inventory.Replace(w.node("a"), w.view("a", "2001:db8:1:2::5/64"))
	w.inventory.MarkUnreachable(w.node("a"), "no route to host")
	w.register("a")

	if message := w.awaitWaiting("a", nodeipam.ReasonMachineUnknown); !strings.Contains(message, "no route to host") {
		t.Errorf("Event %q does not say why", message)
	}

	w.register("b")
	w.awaitWaiting("b", nodeipam.ReasonMachineUnknown)

	w.inventory.Replace(w.node("a"), w.view("a", "2001:db8:1:2::5/64"))
	w.wantCIDRs("a", "10.1.0.0/24", "2001:db8:1:2:1::/80")
}

// TestI5FailedFamilyLeaksNothing: Nodes that cannot have IPv6 hold no IPv4 either, however often they have been looked at.
func TestI5FailedFamilyLeaksNothing(t *testing.T) {
	t.Parallel()

	w := newWorld(t)
	w.run(setup{Options: cidrs("10.1.0.0/23", "fd00:1::/80")}) // two blocks, and one

	w.register("a")
	w.wantCIDRs("a", "10.1.0.0/24", "fd00:1::/80")

	for i := range 5 {
		name := fmt.Sprintf("waiting-%d", i)
		w.register(name)
		w.awaitWaiting(name, nodeipam.ReasonExhausted)
	}

	w.remove("a")
	w.eventually("one of those that wait has the blocks, and the lowest", func() bool {
		list, err := w.client.CoreV1().Nodes().List(t.Context(), metav1.ListOptions{LabelSelector: w.selector()})
		w.require(err)

		return slices.ContainsFunc(list.Items, func(n corev1.Node) bool { return slices.Equal(n.Spec.PodCIDRs, []string{"10.1.0.0/24", "fd00:1::/80"}) })
	})
}

// TestI9EverythingAtOnce: Nodes and machines come, change and go from many sides. The race detector watches.
func TestI9EverythingAtOnce(t *testing.T) {
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

	given := map[string]string{}

	for i := range 16 {
		name := fmt.Sprintf("n%d", i)
		w.join(name, fmt.Sprintf("2001:db8:1:2::%x/64", i+16))

		for _, block := range w.awaitCIDRs(name) {
			if given[block] != "" {
				t.Errorf("%s and %s were both given %s", given[block], name, block)
			}

			given[block] = name
		}
	}
}

// TestI10NoConnectionIsLeftOpen: what is asked of a machine besides its view is asked over a connection that is closed.
func TestI10NoConnectionIsLeftOpen(t *testing.T) {
	t.Parallel()

	w := newWorld(t)
	clock := newManualClock()
	others := w.controlPlanes("cp-1")

	w.run(setup{Options: cidrs("10.1.0.0/16"), clock: clock, dial: w.dial})
	w.register("a")
	w.awaitCIDRs("a")

	for range 5 {
		w.eventually("the machine has been asked", clock.HasWaiters)

		asked := len(others[0].Calls())
		w.step(clock, time.Minute)
		w.eventually("the machine is asked again", func() bool { return len(others[0].Calls()) > asked })
	}

	w.eventually("no connection is left", func() bool { return others[0].Connections() == 0 })
}

// controlPlanes are machines that the inventory knows as control planes, with their Nodes; kube-controller-manager allocates on none.
func (w *world) controlPlanes(names ...string) []*talostest.Machine {
	w.Helper()

	var machines []*talostest.Machine

	for _, name := range names {
		m := w.machine(name)
		w.setArguments(m, "--allocate-node-cidrs=true", "--controllers=*,tokencleaner,-node-ipam-controller")

		view := w.view(name)
		view.Type, view.NodeIPs = talosmachine.TypeControlPlane, []netip.Addr{m.Address()}
		w.inventory.Replace(w.node(name), view)
		w.register(name, controlPlane, having(fmt.Sprintf("192.168.%d.0/24", len(machines))))

		machines = append(machines, m)
	}

	return machines
}

// dial connects to a machine as the product does.
func (w *world) dial(_ string, addr netip.Addr) (talosapi.State, error) {
	config, err := w.talos.ClientTLS(string(role.Reader))
	if err != nil {
		return nil, err
	}

	machine, err := talosapi.Dial(staticCredentials{config}, addr)
	if err != nil {
		return nil, err
	}

	return unhurried{machine}, nil
}

// unhurried is a machine that may take longer to answer than the product waits: here it does so only because there is much else to do.
type unhurried struct{ talosapi.State }

// Get implements talosapi.State.
func (u unhurried) Get(ctx context.Context, pointer resource.Pointer, options ...state.GetOption) (resource.Resource, error) {
	return u.State.Get(context.WithoutCancel(ctx), pointer, options...)
}

// staticCredentials are talosapi.Credentials that never change.
type staticCredentials struct {
	config *tls.Config
}

// TLSConfig implements talosapi.Credentials.
func (c staticCredentials) TLSConfig() (*tls.Config, error) { return c.config.Clone(), nil }

// TestRefusesWhileKubeControllerManagerAllocates: until the last of the control-plane machines has been changed, and with the lines that change it.
func TestRefusesWhileKubeControllerManagerAllocates(t *testing.T) {
	t.Parallel()

	w := newWorld(t)
	clock := newManualClock()
	machines := w.controlPlanes("cp-1", "cp-2")

	for _, m := range machines { // as Talos has it by itself
		w.setArguments(m, "--allocate-node-cidrs=true", "--controllers=*,tokencleaner")
	}

	w.run(setup{Options: cidrs("10.1.0.0/16"), clock: clock, dial: w.dial})
	w.register("a")

	message := w.awaitWaiting("a", nodeipam.ReasonAllocatorConflict)

	for _, part := range []string{w.node("cp-1"), w.node("cp-2"), `cluster: {controllerManager: {extraArgs: {controllers: "-node-ipam-controller"}}}`} {
		if !strings.Contains(message, part) {
			t.Errorf("Event %q does not name %s", message, part)
		}
	}

	w.setArguments(machines[0], "--allocate-node-cidrs=true", "--controllers=*,tokencleaner,-node-ipam-controller")
	w.step(clock, time.Minute)
	w.register("b")

	if message := w.awaitWaiting("b", nodeipam.ReasonAllocatorConflict); !strings.Contains(message, w.node("cp-2")) {
		t.Errorf("Event %q does not name cp-2", message)
	}

	// One that does not answer says what it has said last.
	w.inventory.MarkUnreachable(w.node("cp-2"), "no route to host")

	asked := len(machines[0].Calls())
	w.step(clock, time.Minute)
	w.eventually("the other machine has been asked", func() bool { return len(machines[0].Calls()) > asked && clock.HasWaiters() })
	w.register("c")
	w.awaitWaiting("c", nodeipam.ReasonAllocatorConflict)

	view := w.view("cp-2")
	view.Type, view.NodeIPs = talosmachine.TypeControlPlane, []netip.Addr{machines[1].Address()}
	w.inventory.Replace(w.node("cp-2"), view)
	w.setArguments(machines[1], "--allocate-node-cidrs=false", "--controllers=*,tokencleaner")
	w.step(clock, time.Minute)

	for _, name := range []string{"a", "b", "c"} {
		w.awaitCIDRs(name)
	}
}

// TestRefusesAsTalosIsByDefault: with nothing said in the machine configuration, and only this machine to ask.
func TestRefusesAsTalosIsByDefault(t *testing.T) {
	t.Parallel()

	w := newWorld(t)
	w.setArguments(w.controlPlane, "--use-service-account-credentials", "--allocate-node-cidrs=true", "--controllers=*,tokencleaner")
	w.run(setup{Options: cidrs("10.1.0.0/16")})
	w.register("a")
	w.awaitWaiting("a", nodeipam.ReasonAllocatorConflict)
}

// TestBelievesNoWorker: a machine that says that it is of the control plane neither stops everybody nor names the cluster CIDRs.
func TestBelievesNoWorker(t *testing.T) {
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
		t.Errorf("a worker was asked: %v", calls)
	}
}

// TestWaitsForControlPlanesThatAgree: pod subnets are not guessed from those of one machine.
func TestWaitsForControlPlanesThatAgree(t *testing.T) {
	t.Parallel()

	w := newWorld(t)
	machines := w.controlPlanes("cp-1", "cp-2")
	w.setCIDRs(machines[0], []string{"10.1.0.0/16"}, nil)
	w.setCIDRs(machines[1], []string{"10.2.0.0/16"}, nil)

	w.run(setup{dial: w.dial})
	w.register("a")
	w.awaitWaiting("a", nodeipam.ReasonAllocatorUnknown)

	w.setCIDRs(machines[0], []string{"10.2.0.0/16"}, nil)
	w.wantCIDRs("a", "10.2.0.0/24")
}

// TestWaitsUntilEveryControlPlaneWasAsked: one of which nothing is known yet may be the one that allocates.
func TestWaitsUntilEveryControlPlaneWasAsked(t *testing.T) {
	t.Parallel()

	w := newWorld(t)
	w.controlPlanes("cp-1", "cp-2")
	w.inventory.Forget(w.node("cp-2"))

	w.run(setup{Options: cidrs("10.1.0.0/16"), dial: w.dial})
	w.register("a")
	w.awaitWaiting("a", nodeipam.ReasonAllocatorUnknown)

	w.inventory.MarkUnreachable(w.node("cp-2"), "no route to host")
	w.wantCIDRs("a", "10.1.0.0/24")
}

// TestStopsWhenSomebodyElseAllocates: whoever it is, and until that has not happened for a while.
func TestStopsWhenSomebodyElseAllocates(t *testing.T) {
	t.Parallel()

	w := newWorld(t)
	clock := newManualClock()
	w.run(setup{Options: cloud("10.1.0.0/16", "fd00:1::/48"), clock: clock})

	w.register("theirs")
	w.awaitWaiting("theirs", nodeipam.ReasonMachineUnknown)
	w.patch("theirs", "cilium-operator", `{"spec":{"podCIDR":"10.1.0.0/24","podCIDRs":["10.1.0.0/24"]}}`)
	w.awaitEvent("theirs", nodeipam.ReasonAllocatorConflict)

	stopped := func() bool {
		_, found := w.events.find(w.node("a"), nodeipam.ReasonAllocatorConflict)

		return found
	}

	// Their write and this Node reach the controller over one watch, one after the other.
	w.join("a", "2001:db8:1:2::5/64")
	w.eventually("nothing is allocated", stopped)

	if message := w.awaitWaiting("a", nodeipam.ReasonAllocatorConflict); !strings.Contains(message, "cilium-operator") {
		t.Errorf("Event %q does not name who it is", message)
	}

	w.step(clock, 11*time.Minute)
	w.wantCIDRs("a", "10.1.1.0/24", "2001:db8:1:2:1::/80")
}

// TestWaitsForWhatCannotBeRead: as long as no control-plane machine says what kube-controller-manager does.
func TestWaitsForWhatCannotBeRead(t *testing.T) {
	t.Parallel()

	w := newWorld(t)
	machines := w.controlPlanes("cp-1")
	reachable := atomic.Bool{}

	w.run(setup{Options: cidrs("10.1.0.0/16"), dial: func(nodename string, addr netip.Addr) (talosapi.State, error) {
		if !reachable.Load() {
			return nil, fmt.Errorf("dial %s: no route to host", addr)
		}

		return w.dial(nodename, addr)
	}})
	w.register("a")

	if message := w.awaitWaiting("a", nodeipam.ReasonAllocatorUnknown); !strings.Contains(message, machines[0].Address().String()) {
		t.Errorf("Event %q does not say whom it could not ask", message)
	}

	reachable.Store(true)
	w.wantCIDRs("a", "10.1.0.0/24")
}

func TestOptionsThatCannotBe(t *testing.T) {
	t.Parallel()

	for name, options := range map[string]nodeipam.Options{
		"an allocator that there is not":  {Allocator: "Guesswork"},
		"a block larger than the cluster": {ClusterCIDRs: prefixes("10.0.0.0/26")},
		"an IPv6 block without addresses": {ClusterCIDRs: prefixes("fd00::/64"), MaskSizeIPv6: 129},
	} {
		if _, err := nodeipam.New(nodeipam.Config{Options: options}); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}
