package csrapproval

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
	cloudproviderapi "k8s.io/cloud-provider/api"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/reflector"
	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
)

const (
	address = "10.0.0.1"
	second  = "fd00::1"
)

// ownersFixture has the Nodes "other" and "requesting", whose machine reports address.
type ownersFixture struct {
	*owners

	clock  *clocktesting.FakeClock
	policy csrpolicy.Policy
}

func newOwnersFixture(t *testing.T) *ownersFixture {
	t.Helper()

	f := &ownersFixture{clock: clocktesting.NewFakeClock(time.Now())}
	f.owners = newOwners(Config{
		Inventory: inventory.New(f.clock.Now),
		Clock:     f.clock,
		Dial: func(context.Context, string, netip.Addr) (talosapi.State, error) {
			return nil, errors.New("no machine")
		},
		Policy: func(*corev1.Node, machine.Machine) csrpolicy.Policy { return f.policy },
	}, cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{indexSubjects: subjectsOf}))

	return f
}

// add adds a Node as the informer does.
func (f *ownersFixture) add(t *testing.T, n *corev1.Node) *corev1.Node {
	t.Helper()

	if err := f.nodes.Add(n); err != nil {
		t.Fatal(err)
	}

	f.observe(n)

	return n
}

// remove deletes a Node as the informer and the reflector do.
func (f *ownersFixture) remove(t *testing.T, n *corev1.Node) {
	t.Helper()

	if err := f.nodes.Delete(n); err != nil {
		t.Fatal(err)
	}

	f.reserve(n)
	f.machines.Forget(n.Name)
}

// view is a machine that responds at endpoint and has addresses.
func view(nodename, endpoint string, addresses ...string) machine.Machine {
	m := machine.Machine{Nodename: nodename, NodeID: "id of " + nodename, Endpoint: netip.MustParseAddr(endpoint)}

	for _, a := range addresses {
		m.Addresses = append(m.Addresses, machine.Address{Link: "eth0", Prefix: netip.MustParsePrefix(a + "/24")})
	}

	return m
}

// created sets the time at which a Node was created.
func created(n *corev1.Node, unix int64) *corev1.Node {
	n.CreationTimestamp = metav1.Unix(unix, 0)

	return n
}

func TestOwners_OfLiveNodes(t *testing.T) {
	provided := node("other", address)
	provided.Annotations = map[string]string{cloudproviderapi.AnnotationAlphaProvidedIPAddr: "10.0.0.9," + address + "," + second}

	for _, test := range []struct {
		name    string
		subject string
		node    *corev1.Node
		update  func(*ownersFixture)
		want    []string
	}{
		{"machine unknown", address, node("other", address), func(*ownersFixture) {}, []string{"other"}},
		{"machine never responded", address, node("other", address), func(f *ownersFixture) { f.machines.MarkUnreachable("other", "gone") }, []string{"other"}},
		{"another machine responds from the start", address, node("other", address), func(f *ownersFixture) { f.machines.MarkMismatch("other", "x", "no") }, []string{"other"}},
		{"machine does not report the address", address, provided, func(f *ownersFixture) { f.machines.Replace("other", view("other", "10.0.0.9", "10.0.0.9")) }, nil},
		{"machine responds at the address that it does not report", address, provided, func(f *ownersFixture) { f.machines.Replace("other", view("other", address)) }, []string{"other"}},
		{"machine does not report the other node IP of the kubelet", second, provided, func(f *ownersFixture) { f.machines.Replace("other", view("other", "10.0.0.9")) }, []string{"other"}},
		{"machine does not report an address that the operator allows", address, provided, func(f *ownersFixture) {
			f.policy.ExtraIPs = []netip.Addr{netip.MustParseAddr("::ffff:10.0.0.1")}
			f.machines.Replace("other", view("other", "10.0.0.9"))
		}, []string{"other"}},
		{"machine does not report a name that a rule assigns", "name.example.org", node("other", "name.example.org"), func(f *ownersFixture) {
			f.policy.ExtraNames = []string{"Name.example.org"}
			f.machines.Replace("other", view("other", "10.0.0.9"))
		}, []string{"other"}},
		{"machine does not report a name that a rule assigns until its identity is known", "name.example.org", node("other", "name.example.org"), func(f *ownersFixture) {
			f.policy.PendingNames = []string{"name.example.org"}
			f.machines.Replace("other", view("other", "10.0.0.9"))
		}, []string{"other"}},
		{"machine reported the address and is down", address, node("other", address), func(f *ownersFixture) {
			f.machines.Replace("other", view("other", address, address))
			f.machines.MarkUnreachable("other", "gone")
		}, []string{"other"}},
		{"machine reported the address, and another one responds", address, node("other", address), func(f *ownersFixture) {
			f.machines.Replace("other", view("other", address, address))
			f.machines.MarkMismatch("other", "x", "no")
		}, []string{"other"}},
		{"machine did not report the address, and now the Node leads to another machine", address, provided, func(f *ownersFixture) {
			f.machines.Replace("other", view("other", "10.0.0.9", "10.0.0.9"))
			f.machines.MarkMismatch("other", "x", "no")
		}, nil},
		{"Node does not list the address", "10.0.0.9", node("other", address), func(f *ownersFixture) { f.machines.Replace("other", view("other", "10.0.0.9")) }, []string{"other"}},
		{"name of a Node", "other", node("other"), func(*ownersFixture) {}, []string{"other"}},
		{"name of a Node whose machine responds", "other", node("other"), func(f *ownersFixture) { f.machines.Replace("other", view("other", "10.0.0.9")) }, []string{"other"}},
		{"requesting Node", address, node("requesting", address), func(*ownersFixture) {}, nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			f := newOwnersFixture(t)
			f.add(t, test.node)
			test.update(f)

			if got := f.others(test.subject, "requesting", node("requesting")); !slices.Equal(got, test.want) {
				t.Errorf("got %v, want %v", got, test.want)
			}
		})
	}
}

func TestOwners_OfDeletedNodes(t *testing.T) {
	unreported := func(n *corev1.Node) *corev1.Node {
		n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionUnknown}}

		return n
	}
	reporting := func(n *corev1.Node) *corev1.Node {
		n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionFalse}}

		return n
	}
	renamed := func(f *ownersFixture) {
		m := view("requesting", address, address)
		m.NodeID = "id of other"
		f.machines.Replace("requesting", m)
		f.former.MarkMismatch("other", "requesting", "renamed")
	}
	reset := view("other", address, address)
	reset.Stage = runtime.MachineStageResetting

	for _, test := range []struct {
		name      string
		node      *corev1.Node
		view      machine.Machine // zero if the machine has never responded
		requester *corev1.Node
		after     func(*ownersFixture)
		want      bool
	}{
		{name: "never responded", node: node("other", address), want: true},
		{name: "other operating system", node: func() *corev1.Node {
			n := node("other", address)
			n.Status.NodeInfo.OSImage = "Debian GNU/Linux"

			return n
		}(), want: true},
		{name: "reported only by the machine", node: node("other"), view: view("other", "10.0.0.9", address), want: true},
		{name: "contradicted by the machine", node: node("other", address), view: view("other", "10.0.0.9")},
		{
			name: "reported before another machine responds", node: unreported(node("other")), view: view("other", "10.0.0.9", address),
			after: func(f *ownersFixture) { f.former.MarkMismatch("other", "requesting", "no") }, want: true,
		},
		{
			name: "shortly before the end", node: node("other", address), view: view("other", address, address),
			after: func(f *ownersFixture) { f.clock.Step(retention - time.Second) }, want: true,
		},
		{
			name: "after the end, before the sweep", node: node("other", address), view: view("other", address, address),
			after: func(f *ownersFixture) { f.clock.Step(retention) },
		},
		{
			name: "after the sweep", node: node("other", address), view: view("other", address, address),
			after: func(f *ownersFixture) { f.clock.Step(retention); f.sweep() },
		},
		{name: "still responds", node: node("other", address), view: view("other", address, address), after: func(f *ownersFixture) {
			f.former.Replace("other", view("other", address, address))
			f.clock.Step(retention)
			f.sweep()
		}, want: true},
		{name: "shortly after its last response", node: node("other", address), view: view("other", address, address), after: func(f *ownersFixture) {
			f.former.Replace("other", view("other", address, address))
			f.clock.Step(retention)
			f.sweep()
			f.former.MarkUnreachable("other", "gone")
			f.clock.Step(retention - time.Second)
			f.sweep()
		}, want: true},
		{name: "long after its last response", node: node("other", address), view: view("other", address, address), after: func(f *ownersFixture) {
			f.former.Replace("other", view("other", address, address))
			f.clock.Step(retention)
			f.sweep()
			f.former.MarkUnreachable("other", "gone")
			f.clock.Step(retention)
			f.sweep()
		}},
		{
			name: "reset", node: unreported(node("other", address)), view: reset,
			after: func(f *ownersFixture) { f.former.MarkUnreachable("other", "gone") },
		},
		{name: "reset, not known to be silent", node: unreported(node("other", address)), view: reset, want: true},
		{
			name: "reset, still responds", node: unreported(node("other", address)), view: reset,
			after: func(f *ownersFixture) { f.former.Replace("other", reset) }, want: true,
		},
		{
			name: "reset, kubelet reports", node: reporting(node("other", address)), view: reset,
			after: func(f *ownersFixture) { f.former.MarkUnreachable("other", "gone") }, want: true,
		},
		{name: "renamed", node: unreported(node("other", address)), view: view("other", address, address), after: renamed},
		{name: "renamed, kubelet reports", node: reporting(node("other", address)), view: view("other", address, address), after: renamed, want: true},
		{name: "renamed to another Node", node: unreported(node("other", address)), view: view("other", address, address), after: func(f *ownersFixture) {
			renamed(f)
			f.former.MarkMismatch("other", "x", "renamed")
		}, want: true},
		{name: "renamed, does not respond", node: unreported(node("other", address)), view: view("other", address, address), after: func(f *ownersFixture) {
			renamed(f)
			f.machines.MarkUnreachable("requesting", "gone")
		}, want: true},
		{name: "replaced", node: unreported(node("other", address)), view: view("other", address, address), after: func(f *ownersFixture) {
			renamed(f)
			f.machines.Replace("requesting", view("requesting", address, address))
		}, want: true},
		{
			name: "requester responds at the address, which the former machine only reported", node: node("other", address), view: view("other", "10.0.0.9", address),
			after: func(f *ownersFixture) { f.machines.Replace("requesting", view("requesting", address, address)) },
		},
		{
			name: "requester responds at the address, where the former machine responded", node: node("other", address), view: view("other", address, address),
			after: func(f *ownersFixture) { f.machines.Replace("requesting", view("requesting", address, address)) }, want: true,
		},
		{
			name: "requester responds at the address, and the former machine never responded", node: node("other", address),
			after: func(f *ownersFixture) { f.machines.Replace("requesting", view("requesting", address, address)) }, want: true,
		},
		{
			name: "older requester responds at the address, and the former machine never responded", node: created(node("other", address), 1),
			requester: created(node("requesting"), 0),
			after:     func(f *ownersFixture) { f.machines.Replace("requesting", view("requesting", address, address)) },
		},
		{
			name: "older requester responds at the address, where the former machine responded", node: created(node("other", address), 1),
			view: view("other", address, address), requester: created(node("requesting"), 0),
			after: func(f *ownersFixture) { f.machines.Replace("requesting", view("requesting", address, address)) }, want: true,
		},
		{
			name: "newer requester responds at the address, and the former machine never responded", node: created(node("other", address), 0),
			requester: created(node("requesting"), 1),
			after:     func(f *ownersFixture) { f.machines.Replace("requesting", view("requesting", address, address)) }, want: true,
		},
		{name: "requester no longer responds at the address", node: node("other", address), view: view("other", "10.0.0.9", address), after: func(f *ownersFixture) {
			f.machines.Replace("requesting", view("requesting", address, address))
			f.machines.MarkUnreachable("requesting", "gone")
		}, want: true},
		{name: "after the end, still responds, before the sweep", node: node("other", address), view: view("other", address, address), after: func(f *ownersFixture) {
			f.former.Replace("other", view("other", address, address))
			f.clock.Step(retention)
		}, want: true},
		{name: "same address, identity unknown", node: unreported(node("other", address)), after: renamed, want: true},
		{
			name: "control plane, renamed", node: labeled(unreported(node("other", address))), view: view("other", address, address),
			requester: labeled(node("requesting")), after: renamed,
		},
		{name: "control plane, claimed by a worker", node: labeled(unreported(node("other", address))), view: view("other", address, address), after: renamed, want: true},
	} {
		t.Run(test.name, func(t *testing.T) {
			f := newOwnersFixture(t)
			n := f.add(t, test.node)

			if test.view.Nodename != "" {
				f.machines.Replace("other", test.view)
			}

			f.remove(t, n)

			if test.after != nil {
				test.after(f)
			}

			requester := test.requester
			if requester == nil {
				requester = node("requesting")
			}

			if got := slices.Contains(f.others(address, "requesting", requester), "other"); got != test.want {
				t.Errorf("got %v, want %v", got, test.want)
			}
		})
	}
}

func TestOwners_OfRequestersOwnName(t *testing.T) {
	now := time.Now()
	at := func(n *corev1.Node, created time.Time) *corev1.Node {
		n.CreationTimestamp = metav1.NewTime(created)

		return n
	}

	for _, test := range []struct {
		name      string
		requester *corev1.Node
		want      bool
	}{
		{"older Node", at(node("n"), now.Add(-time.Minute)), false},
		{"newer Node", at(node("n"), now.Add(time.Minute)), true},
		{"older Node with an address as name", at(node(address), now.Add(-time.Minute)), true},
		{"no Node", nil, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			nodename := "n"
			if test.requester != nil {
				nodename = test.requester.Name
			}

			f := newOwnersFixture(t)
			deleted := f.add(t, at(node("other"), now))
			former := view("other", address)
			former.Hostname = "n"
			f.machines.Replace("other", former)
			f.machines.Replace(nodename, view(nodename, "10.0.0.9"))

			if got := f.others(nodename, nodename, test.requester); !slices.Equal(got, []string{"other"}) {
				t.Errorf("before the deletion: %v", got)
			}

			f.remove(t, deleted)

			if got := f.others(nodename, nodename, test.requester); slices.Contains(got, "other") != test.want {
				t.Errorf("after the deletion: %v", got)
			}
		})
	}
}

// The informer removes a Node before it calls handlers, and these run in any order.
func TestOwners_HaveNoGapDuringDeletion(t *testing.T) {
	const unlisted = "10.0.0.2"

	steps := map[string]func(*ownersFixture, *corev1.Node){
		"reserve": func(f *ownersFixture, n *corev1.Node) { f.reserve(n) },
		"forget":  func(f *ownersFixture, n *corev1.Node) { f.machines.Forget(n.Name) },
	}

	for _, order := range [][]string{{"reserve", "forget"}, {"forget", "reserve"}} {
		f := newOwnersFixture(t)
		n := f.add(t, node("other", address))
		f.machines.Replace("other", view("other", address, address, unlisted))

		if err := f.nodes.Delete(n); err != nil {
			t.Fatal(err)
		}

		for _, step := range append([]string{""}, order...) {
			if step != "" {
				steps[step](f, n)
			}

			for _, subject := range []string{"other", address, unlisted} {
				if got := f.others(subject, "requesting", node("requesting")); !slices.Equal(got, []string{"other"}) {
					t.Errorf("%v, after %q: %s is owned by %v", order, step, subject, got)
				}
			}
		}
	}
}

// A bootstrap token can register a Node under the name of a deleted one, whose machine still runs.
func TestOwners_ReregisteredNode(t *testing.T) {
	const elsewhere = "10.0.0.9"

	silent := func(f *ownersFixture) { f.former.MarkUnreachable("other", "gone") }
	responds := func(f *ownersFixture) { f.former.Replace("other", view("other", address, address, "10.0.0.2")) }
	replacement := view("other", elsewhere, elsewhere, address)
	replacement.NodeID = "id of replacement"

	for _, test := range []struct {
		name    string
		subject string
		machine machine.Machine // of the new Node
		after   func(*ownersFixture)
		want    bool
	}{
		{"returns at its address", address, view("other", address, address), responds, false},
		{"returns at another of its addresses", address, view("other", "10.0.0.2", address), responds, false},
		{"returns at a new address", address, view("other", elsewhere, address), silent, false},
		{"returns at a new address, former not known to be silent", address, view("other", elsewhere, address), func(*ownersFixture) {}, true},
		{"identity of the former machine, which responds", address, view("other", elsewhere, address), responds, true},
		{"another machine, former responds", address, replacement, responds, true},
		{"another machine, former silent", address, replacement, silent, true},
		{"another machine, what the former only reported", "10.0.0.2", replacement, silent, true},
		{"another machine, its own address", elsewhere, replacement, responds, false},
		{"another machine, the name, former responds", "other", replacement, responds, true},
		{"another machine, the name, former silent", "other", replacement, silent, false},
		{"another machine, the name, former unknown", "other", replacement, func(*ownersFixture) {}, true},
		{"another machine, former silent, after the end", address, replacement, func(f *ownersFixture) { silent(f); f.clock.Step(retention); f.sweep() }, false},
		{"another machine, former responds, after the end", address, replacement, func(f *ownersFixture) { responds(f); f.clock.Step(retention); f.sweep() }, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			f := newOwnersFixture(t)
			old, recreated := node("other", address), node("other", elsewhere)
			old.UID, recreated.UID = "old", "new"

			f.machines.Replace("other", view("other", address, address, "10.0.0.2"))
			f.remove(t, f.add(t, old))
			f.add(t, recreated)
			f.machines.Replace("other", test.machine)
			test.after(f)

			if got := slices.Contains(f.others(test.subject, "other", recreated), "other"); got != test.want {
				t.Errorf("got %v, want %v", got, test.want)
			}
		})
	}
}

// Another machine responds at the address of a Node and under its name, and reports less.
func TestOwners_OfWhatMachineStoppedToReport(t *testing.T) {
	for _, deleted := range []bool{false, true} {
		f := newOwnersFixture(t)
		n := f.add(t, node("other", address, second))
		machines := f.machines

		f.machines.Replace("other", view("other", address, address, "10.0.0.2"))

		if deleted {
			f.remove(t, n)

			machines = f.former
		}

		machines.Replace("other", view("other", address, address))

		if got := f.others("10.0.0.2", "requesting", node("requesting")); !slices.Equal(got, []string{"other"}) {
			t.Errorf("deleted: %v: owned by %v", deleted, got)
		}

		f.clock.Step(retention)

		if got := f.others("10.0.0.2", "requesting", node("requesting")); len(got) > 0 {
			t.Errorf("deleted: %v: after the retention, owned by %v", deleted, got)
		}
	}
}

// What another machine does under the name of a deleted Node must not shorten its reservation.
func TestOwners_JudgesEachDeletedNode(t *testing.T) {
	f := newOwnersFixture(t)
	old, attacker := node("other", address), node("other", "10.0.0.9")
	old.UID, attacker.UID = "old", "new"

	f.machines.Replace("other", view("other", address, address, "10.0.0.2"))
	f.remove(t, f.add(t, old))
	f.former.MarkUnreachable("other", "gone")
	f.clock.Step(retention / 2)

	reset := view("other", "10.0.0.9")
	reset.Stage = runtime.MachineStageResetting
	f.machines.Replace("other", reset)
	f.remove(t, f.add(t, attacker))

	owned := func(subject string) bool {
		return slices.Contains(f.others(subject, "requesting", node("requesting")), "other")
	}

	for _, subject := range []string{address, "10.0.0.2", "10.0.0.9"} {
		if !owned(subject) {
			t.Errorf("%s is not owned", subject)
		}
	}

	f.clock.Step(retention / 2)

	if !f.sweep() {
		t.Error("no reservation has ended")
	}

	for subject, want := range map[string]bool{address: false, "10.0.0.2": false, "10.0.0.9": true} {
		if got := owned(subject); got != want {
			t.Errorf("after the first has ended, %s is owned: %v, want %v", subject, got, want)
		}
	}
}

// The reflector also forgets the machine of a Node that exists.
func TestOwners_OfHandedOverView(t *testing.T) {
	f := newOwnersFixture(t)
	f.add(t, node("other", address))
	f.machines.Replace("other", view("other", address, address, "10.0.0.2"))
	f.machines.Forget("other")

	for range 2 {
		if got := f.others("10.0.0.2", "requesting", node("requesting")); len(got) > 0 {
			t.Errorf("owned by %v", got)
		}

		f.sweep()
	}

	if entry := f.former.Get("other"); entry.Last.Nodename != "" {
		t.Errorf("left: %v", entry)
	}
}

func TestOwners_RecreatedNode(t *testing.T) {
	f := newOwnersFixture(t)
	old, recreated := node("other", address), node("other", "10.0.0.2")
	old.UID, recreated.UID = "old", "new"

	f.add(t, old)
	f.remove(t, old)
	f.add(t, recreated)

	for _, subject := range []string{address, "10.0.0.2"} {
		if got := f.others(subject, "requesting", nil); !slices.Equal(got, []string{"other"}) {
			t.Errorf("%s is owned by %v", subject, got)
		}
	}

	if _, deleted := f.reservedUntil("other", "requesting"); deleted {
		t.Error("the Node exists")
	}

	if _, deleted := f.reservedUntil("other", "other"); !deleted {
		t.Error("a Node of the name was deleted")
	}

	// The machine responds, which is now the new Node's.
	f.former.Replace("other", view("other", "10.0.0.2"))
	f.machines.Replace("other", view("other", "10.0.0.2"))
	f.clock.Step(retention)

	if !f.sweep() {
		t.Error("no reservation has ended")
	}

	if got := f.others(address, "requesting", nil); len(got) > 0 {
		t.Errorf("owned by %v", got)
	}

	if got := f.others("10.0.0.2", "requesting", nil); !slices.Equal(got, []string{"other"}) {
		t.Errorf("the new Node's address is owned by %v", got)
	}
}

// Connecting to a machine takes seconds. Reviews and event handlers must not wait for that.
func TestOwners_SweepBlocksNoOthers(t *testing.T) {
	dialed, release := make(chan struct{}), make(chan struct{})
	f := newOwnersFixture(t)
	f.reflector = reflector.New(f.former, func(context.Context, string, netip.Addr) (talosapi.State, error) {
		close(dialed)
		<-release

		return nil, errors.New("no machine")
	}, f.clock)

	var group sync.WaitGroup
	defer group.Wait()

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()

	group.Go(func() { f.reflector.Run(ctx) })
	f.remove(t, f.add(t, node("other", address)))
	<-dialed

	f.clock.Step(retention)
	group.Go(func() { f.sweep() })

	ended := make(chan struct{})

	group.Go(func() {
		defer close(ended)

		for len(f.reservationsOf("other")) > 0 {
			time.Sleep(time.Millisecond)
		}
	})

	select {
	case <-ended:
	case <-time.After(time.Minute):
		t.Error("the sweep blocks others")
	}

	close(release)
}

func TestOwners_ForgetsEverything(t *testing.T) {
	f := newOwnersFixture(t)

	for _, uid := range []types.UID{"1", "2"} {
		n := node("other", address)
		n.UID = uid
		f.machines.Replace("other", view("other", address, address))
		f.remove(t, f.add(t, n))
	}

	if until, deleted := f.reservedUntil("other", "requesting"); !deleted || !until.Equal(f.clock.Now().Add(retention)) {
		t.Errorf("reserved until %v, %v", until, deleted)
	}

	if f.sweep() {
		t.Error("a reservation has ended early")
	}

	f.clock.Step(retention)
	f.sweep()

	if entry := f.former.Get("other"); len(f.reserved) > 0 || len(f.observed.List()) > 0 || entry.Last.Nodename != "" {
		t.Errorf("left: %v, %v, %v", f.reserved, f.observed.List(), entry)
	}
}
