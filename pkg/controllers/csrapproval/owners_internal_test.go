package csrapproval

import (
	"cmp"
	"context"
	"errors"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
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

// ownersFixture has no Nodes at first.
type ownersFixture struct {
	*owners

	t      testing.TB
	clock  *clocktesting.FakeClock
	policy csrpolicy.Policy
}

func newOwnersFixture(t testing.TB) *ownersFixture {
	t.Helper()

	f := &ownersFixture{t: t, clock: clocktesting.NewFakeClock(time.Now())}
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
func (f *ownersFixture) add(n *corev1.Node) *corev1.Node {
	f.t.Helper()
	require.NoError(f.t, f.nodes.Add(n))
	f.observe(n)

	return n
}

// remove deletes a Node as the informer and the reflector do.
func (f *ownersFixture) remove(n *corev1.Node) {
	f.t.Helper()
	require.NoError(f.t, f.nodes.Delete(n))
	f.reserve(n)
	f.machines.Forget(n.Name)
}

// assertOwned fails unless Node "other", and no other Node, owns the subject of a request of Node requester. If want is
// false, it fails if any Node does.
func (f *ownersFixture) assertOwned(want bool, subject, requester string, n *corev1.Node) {
	f.t.Helper()

	owners := map[bool][]string{true: {"other"}}
	assert.ElementsMatch(f.t, owners[want], f.others(subject, requester, n), subject)
}

// assertOwnedByOther is assertOwned for a request of Node "requesting".
func (f *ownersFixture) assertOwnedByOther(want bool, subject string) {
	f.t.Helper()
	f.assertOwned(want, subject, "requesting", node("requesting"))
}

// steps change a fixture.
type steps []func(*ownersFixture)

func (f *ownersFixture) do(steps steps) {
	for _, step := range steps {
		step(f)
	}
}

// reports is the step in which the machine of a Node responds. reportsFormer is the same for a deleted Node.
func reports(m machine.Machine) func(*ownersFixture) {
	return func(f *ownersFixture) { f.machines.Replace(m.Nodename, m) }
}

func reportsFormer(m machine.Machine) func(*ownersFixture) {
	return func(f *ownersFixture) { f.former.Replace(m.Nodename, m) }
}

func passes(d time.Duration) func(*ownersFixture) {
	return func(f *ownersFixture) { f.clock.Step(d) }
}

func sweeps(f *ownersFixture) { f.sweep() }

// down, replaced and formerDown are the steps in which the machine of Node "other" goes silent, another one responds at
// its address, and the machine of a deleted Node of this name goes silent.
func down(f *ownersFixture) { f.machines.MarkUnreachable("other", "gone") }

func replaced(f *ownersFixture) { f.machines.MarkMismatch("other", "x", "no") }

func formerDown(f *ownersFixture) { f.former.MarkUnreachable("other", "gone") }

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

// ready sets whether the kubelet of a Node reports.
func ready(n *corev1.Node, status corev1.ConditionStatus) *corev1.Node {
	n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: status}}

	return n
}

func withUID(n *corev1.Node, uid types.UID) *corev1.Node {
	n.UID = uid

	return n
}

func TestOwners_OfLiveNodes(t *testing.T) {
	const name = "name.example.org"

	listed, assigned, provided := node("other", address), node("other", name), node("other", address)
	provided.Annotations = map[string]string{cloudproviderapi.AnnotationAlphaProvidedIPAddr: "10.0.0.9," + address + "," + second}
	without, other := reports(view("other", "10.0.0.9")), reports(view("other", address, address))
	allows := func(policy csrpolicy.Policy) func(*ownersFixture) {
		return func(f *ownersFixture) { f.policy = policy }
	}

	for what, test := range map[string]struct {
		subject string
		node    *corev1.Node
		steps   steps
		want    bool
	}{
		"machine unknown":                                          {address, listed, nil, true},
		"machine never responded":                                  {address, listed, steps{down}, true},
		"another machine responds from the start":                  {address, listed, steps{replaced}, true},
		"machine does not report the address":                      {address, provided, steps{reports(view("other", "10.0.0.9", "10.0.0.9"))}, false},
		"machine responds at the address that it does not report":  {address, provided, steps{reports(view("other", address))}, true},
		"machine does not report the other node IP of the kubelet": {second, provided, steps{without}, true},
		"machine does not report an address that the operator allows": {
			address, provided, steps{allows(csrpolicy.Policy{ExtraIPs: []netip.Addr{netip.MustParseAddr("::ffff:10.0.0.1")}}), without}, true,
		},
		"machine does not report a name that a rule assigns": {name, assigned, steps{allows(csrpolicy.Policy{ExtraNames: []string{"Name.example.org"}}), without}, true},
		"machine does not report a name that a rule assigns until its identity is known": {
			name, assigned, steps{allows(csrpolicy.Policy{PendingNames: []string{name}}), without}, true,
		},
		"machine reported the address and is down":               {address, listed, steps{other, down}, true},
		"machine reported the address, and another one responds": {address, listed, steps{other, replaced}, true},
		"machine did not report the address, and now the Node leads to another machine": {
			address, provided, steps{reports(view("other", "10.0.0.9", "10.0.0.9")), replaced}, false,
		},
		"Node does not list the address":        {"10.0.0.9", listed, steps{without}, true},
		"name of a Node":                        {"other", node("other"), nil, true},
		"name of a Node whose machine responds": {"other", node("other"), steps{without}, true},
		"requesting Node":                       {address, node("requesting", address), nil, false},
	} {
		t.Run(what, func(t *testing.T) {
			f := newOwnersFixture(t)
			f.add(test.node)
			f.do(test.steps)
			f.assertOwnedByOther(test.want, test.subject)
		})
	}
}

func TestOwners_OfDeletedNodes(t *testing.T) {
	listed := node("other", address)
	silent := func(nodename string, addresses ...string) *corev1.Node {
		return ready(node(nodename, addresses...), corev1.ConditionUnknown)
	}
	reporting := ready(node("other", address), corev1.ConditionFalse)

	debian := node("other", address)
	debian.Status.NodeInfo.OSImage = "Debian GNU/Linux"

	self, elsewhere, requesting := view("other", address, address), view("other", "10.0.0.9", address), view("requesting", address, address)
	reset, same := self, requesting
	reset.Stage, same.NodeID = runtime.MachineStageResetting, self.NodeID

	responds := steps{reports(requesting)} // the requester, at the address
	renamed := steps{reports(same), func(f *ownersFixture) { f.former.MarkMismatch("other", "requesting", "renamed") }}
	extended := steps{reportsFormer(self), passes(retention), sweeps}
	after := func(first steps, more ...func(*ownersFixture)) steps { return slices.Concat(first, more) }

	for what, test := range map[string]struct {
		node      *corev1.Node
		view      machine.Machine // none if the machine has never responded
		requester *corev1.Node
		steps     steps
		want      bool
	}{
		"never responded":              {node: listed, want: true},
		"other operating system":       {node: debian, want: true},
		"reported only by the machine": {node: node("other"), view: elsewhere, want: true},
		"contradicted by the machine":  {node: listed, view: view("other", "10.0.0.9")},
		"reported before another machine responds": {
			node: silent("other"), view: elsewhere, steps: steps{func(f *ownersFixture) { f.former.MarkMismatch("other", "requesting", "no") }}, want: true,
		},
		"shortly before the end":                          {node: listed, view: self, steps: steps{passes(retention - time.Second)}, want: true},
		"after the end, before the sweep":                 {node: listed, view: self, steps: steps{passes(retention)}},
		"after the sweep":                                 {node: listed, view: self, steps: steps{passes(retention), sweeps}},
		"after the end, still responds, before the sweep": {node: listed, view: self, steps: steps{reportsFormer(self), passes(retention)}, want: true},
		"still responds":                                  {node: listed, view: self, steps: extended, want: true},
		"shortly after its last response":                 {node: listed, view: self, steps: after(extended, formerDown, passes(retention-time.Second), sweeps), want: true},
		"long after its last response":                    {node: listed, view: self, steps: after(extended, formerDown, passes(retention), sweeps)},

		"reset":                         {node: silent("other", address), view: reset, steps: steps{formerDown}},
		"reset, not known to be silent": {node: silent("other", address), view: reset, want: true},
		"reset, still responds":         {node: silent("other", address), view: reset, steps: steps{reportsFormer(reset)}, want: true},
		"reset, kubelet reports":        {node: reporting, view: reset, steps: steps{formerDown}, want: true},

		"renamed":                  {node: silent("other", address), view: self, steps: renamed},
		"renamed, kubelet reports": {node: reporting, view: self, steps: renamed, want: true},
		"renamed to another Node": {
			node: silent("other", address), view: self, steps: after(renamed, func(f *ownersFixture) { f.former.MarkMismatch("other", "x", "renamed") }), want: true,
		},
		"renamed, does not respond": {
			node: silent("other", address), view: self, steps: after(renamed, func(f *ownersFixture) { f.machines.MarkUnreachable("requesting", "gone") }), want: true,
		},
		"replaced":                           {node: silent("other", address), view: self, steps: after(renamed, responds...), want: true},
		"same address, identity unknown":     {node: silent("other", address), steps: renamed, want: true},
		"control plane, renamed":             {node: labeled(silent("other", address)), view: self, requester: labeled(node("requesting")), steps: renamed},
		"control plane, claimed by a worker": {node: labeled(silent("other", address)), view: self, steps: renamed, want: true},

		"requester responds at the address, which the former machine only reported": {node: listed, view: elsewhere, steps: responds},
		"requester responds at the address, where the former machine responded":     {node: listed, view: self, steps: responds, want: true},
		"requester responds at the address, and the former machine never responded": {node: listed, steps: responds, want: true},
		"requester no longer responds at the address": {
			node: listed, view: elsewhere, steps: after(responds, func(f *ownersFixture) { f.machines.MarkUnreachable("requesting", "gone") }), want: true,
		},
		"older requester responds at the address, and the former machine never responded": {
			node: created(node("other", address), 1), requester: created(node("requesting"), 0), steps: responds,
		},
		"older requester responds at the address, where the former machine responded": {
			node: created(node("other", address), 1), view: self, requester: created(node("requesting"), 0), steps: responds, want: true,
		},
		"newer requester responds at the address, and the former machine never responded": {
			node: created(node("other", address), 0), requester: created(node("requesting"), 1), steps: responds, want: true,
		},
	} {
		t.Run(what, func(t *testing.T) {
			f := newOwnersFixture(t)
			f.add(test.node)

			if test.view.Nodename != "" {
				f.do(steps{reports(test.view)})
			}

			f.remove(test.node)
			f.do(test.steps)
			f.assertOwned(test.want, address, "requesting", cmp.Or(test.requester, node("requesting")))
		})
	}
}

func TestOwners_OfRequestersOwnName(t *testing.T) {
	for what, test := range map[string]struct {
		nodename  string
		requester *corev1.Node
		want      bool
	}{
		"older Node":                         {"n", created(node("n"), 1), false},
		"newer Node":                         {"n", created(node("n"), 3), true},
		"older Node with an address as name": {address, created(node(address), 1), true},
		"no Node":                            {"n", nil, true},
	} {
		t.Run(what, func(t *testing.T) {
			f := newOwnersFixture(t)
			deleted := f.add(created(node("other"), 2))
			former := view("other", address)
			former.Hostname = "n"
			f.do(steps{reports(former), reports(view(test.nodename, "10.0.0.9"))})
			f.assertOwned(true, test.nodename, test.nodename, test.requester)
			f.remove(deleted)
			f.assertOwned(test.want, test.nodename, test.nodename, test.requester)
		})
	}
}

// The informer removes a Node before it calls handlers, and these run in any order.
func TestOwners_HaveNoGapDuringDeletion(t *testing.T) {
	const unlisted = "10.0.0.2"

	n := node("other", address)
	reserves := func(f *ownersFixture) { f.reserve(n) }
	forgets := func(f *ownersFixture) { f.machines.Forget(n.Name) }

	for _, order := range []steps{{reserves, forgets}, {forgets, reserves}} {
		f := newOwnersFixture(t)
		f.add(n)
		f.do(steps{reports(view("other", address, address, unlisted))})
		require.NoError(t, f.nodes.Delete(n))

		for i := range len(order) + 1 {
			f.do(order[max(i-1, 0):i])

			for _, subject := range []string{"other", address, unlisted} {
				f.assertOwnedByOther(true, subject)
			}
		}
	}
}

// A bootstrap token can register a Node under the name of a deleted one, whose machine still runs.
func TestOwners_ReregisteredNode(t *testing.T) {
	const elsewhere = "10.0.0.9"

	responds := reportsFormer(view("other", address, address, "10.0.0.2"))
	replacement, returned := view("other", elsewhere, elsewhere, address), view("other", elsewhere, address)
	replacement.NodeID = "id of replacement"

	for what, test := range map[string]struct {
		subject string
		machine machine.Machine // of the new Node
		steps   steps
		want    bool
	}{
		"returns at its address":                                  {address, view("other", address, address), steps{responds}, false},
		"returns at another of its addresses":                     {address, view("other", "10.0.0.2", address), steps{responds}, false},
		"returns at a new address":                                {address, returned, steps{formerDown}, false},
		"returns at a new address, former not known to be silent": {address, returned, nil, true},
		"identity of the former machine, which responds":          {address, returned, steps{responds}, true},
		"another machine, former responds":                        {address, replacement, steps{responds}, true},
		"another machine, former silent":                          {address, replacement, steps{formerDown}, true},
		"another machine, what the former only reported":          {"10.0.0.2", replacement, steps{formerDown}, true},
		"another machine, its own address":                        {elsewhere, replacement, steps{responds}, false},
		"another machine, the name, former responds":              {"other", replacement, steps{responds}, true},
		"another machine, the name, former silent":                {"other", replacement, steps{formerDown}, false},
		"another machine, the name, former unknown":               {"other", replacement, nil, true},
		"another machine, former silent, after the end":           {address, replacement, steps{formerDown, passes(retention), sweeps}, false},
		"another machine, former responds, after the end":         {address, replacement, steps{responds, passes(retention), sweeps}, true},
	} {
		t.Run(what, func(t *testing.T) {
			f := newOwnersFixture(t)
			recreated := withUID(node("other", elsewhere), "new")

			f.do(steps{reports(view("other", address, address, "10.0.0.2"))})
			f.remove(f.add(withUID(node("other", address), "old")))
			f.add(recreated)
			f.do(steps{reports(test.machine)})
			f.do(test.steps)
			f.assertOwned(test.want, test.subject, "other", recreated)
		})
	}
}

// Another machine responds at the address of a Node and under its name, and reports less.
func TestOwners_OfWhatMachineStoppedToReport(t *testing.T) {
	for _, deleted := range []bool{false, true} {
		f := newOwnersFixture(t)
		n, report := f.add(node("other", address, second)), reports
		f.do(steps{reports(view("other", address, address, "10.0.0.2"))})

		if deleted {
			f.remove(n)

			report = reportsFormer
		}

		f.do(steps{report(view("other", address, address))})
		f.assertOwnedByOther(true, "10.0.0.2")

		f.clock.Step(retention)
		f.assertOwnedByOther(false, "10.0.0.2")
	}
}

// Another machine with the name of a deleted Node must not shorten the reservation of the Node.
func TestOwners_JudgesEachDeletedNode(t *testing.T) {
	f := newOwnersFixture(t)
	reset := view("other", "10.0.0.9")
	reset.Stage = runtime.MachineStageResetting

	f.do(steps{reports(view("other", address, address, "10.0.0.2"))})
	f.remove(f.add(withUID(node("other", address), "old")))
	f.do(steps{formerDown, passes(retention / 2), reports(reset)})
	f.remove(f.add(withUID(node("other", "10.0.0.9"), "new"))) // by the attacker

	for _, subject := range []string{address, "10.0.0.2", "10.0.0.9"} {
		f.assertOwnedByOther(true, subject)
	}

	f.clock.Step(retention / 2)
	assert.True(t, f.sweep(), "the first reservation has ended")
	f.assertOwnedByOther(false, address)
	f.assertOwnedByOther(false, "10.0.0.2")
	f.assertOwnedByOther(true, "10.0.0.9")
}

// The reflector also forgets the machine of a Node that exists.
func TestOwners_OfHandedOverView(t *testing.T) {
	f := newOwnersFixture(t)
	f.add(node("other", address))
	f.do(steps{reports(view("other", address, address, "10.0.0.2"))})
	f.machines.Forget("other")

	for range 2 {
		f.assertOwnedByOther(false, "10.0.0.2")
		f.sweep()
	}

	assert.Empty(t, f.former.Get("other").Last.Nodename)
}

func TestOwners_RecreatedNode(t *testing.T) {
	f := newOwnersFixture(t)
	f.remove(f.add(withUID(node("other", address), "old")))
	f.add(withUID(node("other", "10.0.0.2"), "new"))
	f.assertOwned(true, address, "requesting", nil)
	f.assertOwned(true, "10.0.0.2", "requesting", nil)

	_, deleted := f.reservedUntil("other", "requesting")
	assert.False(t, deleted, "the Node exists")

	_, deleted = f.reservedUntil("other", "other")
	assert.True(t, deleted, "a Node of the name was deleted")

	// The machine, which now belongs to the new Node, responds.
	f.do(steps{reportsFormer(view("other", "10.0.0.2")), reports(view("other", "10.0.0.2")), passes(retention)})
	assert.True(t, f.sweep(), "a reservation has ended")
	f.assertOwned(false, address, "requesting", nil)
	f.assertOwned(true, "10.0.0.2", "requesting", nil)
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
	f.remove(f.add(node("other", address)))
	<-dialed

	f.clock.Step(retention)
	group.Go(func() { f.sweep() })

	ended := func() bool { return len(f.reservationsOf("other")) == 0 }
	assert.Eventually(t, ended, time.Minute, time.Millisecond, "the sweep blocks others")
	close(release)
}

func TestOwners_ForgetsEverything(t *testing.T) {
	f := newOwnersFixture(t)

	for _, uid := range []types.UID{"1", "2"} {
		f.do(steps{reports(view("other", address, address))})
		f.remove(f.add(withUID(node("other", address), uid)))
	}

	until, deleted := f.reservedUntil("other", "requesting")
	assert.True(t, deleted)
	assert.Equal(t, f.clock.Now().Add(retention), until)
	assert.False(t, f.sweep(), "no reservation has ended yet")

	f.clock.Step(retention)
	f.sweep()
	assert.Empty(t, f.reserved)
	assert.Empty(t, f.observed.List())
	assert.Empty(t, f.former.Get("other").Last.Nodename)
}
