package claims_test

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	cloudproviderapi "k8s.io/cloud-provider/api"

	"github.com/talos-ccm/talos-ccm/pkg/claims"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

const (
	address  = "10.0.0.1"
	second   = "fd00::1"
	unlisted = "10.0.0.2"

	retention = claims.Retention
)

// fixture has an inventory, which sets the claims of machines, and a fake clock. It has no Nodes at first.
type fixture struct {
	*claims.Claims

	t        testing.TB
	machines *inventory.Inventory
	now      time.Time
}

func newFixture(t testing.TB) *fixture {
	t.Helper()

	f := &fixture{t: t, now: time.Now()}
	f.machines = inventory.New(func() time.Time { return f.now })
	f.Claims = f.machines.Claims

	return f
}

// add adds a Node.
func (f *fixture) add(n *corev1.Node) *corev1.Node {
	f.SetNode(n)

	return n
}

// remove deletes a Node and makes the inventory forget its machine.
func (f *fixture) remove(n *corev1.Node) {
	f.DeleteNode(n)
	f.machines.Forget(n.Name)
}

// requester returns the Node as a requester. It has no machine if n is nil.
func (f *fixture) requester(nodename string, n *corev1.Node) claims.Requester {
	if n == nil {
		return claims.Requester{Nodename: nodename}
	}

	by, entry := claims.Requester{Nodename: nodename, UID: n.UID}, f.machines.Get(nodename)
	if by.ObservedAt = entry.ObservedAt; entry.Condition == inventory.Current {
		by.Endpoint = entry.Machine.Endpoint
	}

	return by
}

// owners returns the owners of the subject of a request. The configuration assigns nothing.
func (f *fixture) owners(subject string, by claims.Requester) map[string]time.Time {
	owners, _ := f.Of(subject, by)

	return owners
}

// assertOwned fails unless Node "other", and no other Node, owns the subject of a request of Node requester. If want is
// false, it fails if any Node does.
func (f *fixture) assertOwned(want bool, subject, nodename string, n *corev1.Node) {
	f.t.Helper()

	owners := map[bool][]string{true: {"other"}}
	assert.ElementsMatch(f.t, owners[want], slices.Collect(maps.Keys(f.owners(subject, f.requester(nodename, n)))), subject)
}

// assertOwnedByOther is assertOwned for a request of Node "requesting".
func (f *fixture) assertOwnedByOther(want bool, subject string) {
	f.t.Helper()
	f.assertOwned(want, subject, "requesting", node("requesting"))
}

// until returns when the claim of Node "other" to an address ends; zero if the Node exists.
func (f *fixture) until(nodename string) time.Time {
	f.t.Helper()

	owners := f.owners(address, f.requester(nodename, nil))
	require.Contains(f.t, owners, "other")

	return owners["other"]
}

// node returns a Node that lists addresses.
func node(name string, addresses ...string) *corev1.Node {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{}}}

	for _, a := range addresses {
		n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a})
	}

	return n
}

func labeled(n *corev1.Node) *corev1.Node {
	n.Labels["node-role.kubernetes.io/control-plane"] = ""

	return n
}

// steps change a fixture.
type steps []func(*fixture)

func (f *fixture) do(steps steps) {
	for _, step := range steps {
		step(f)
	}
}

// reports is the step in which the machine of a Node responds.
func reports(m machine.Machine) func(*fixture) {
	return func(f *fixture) { f.machines.Replace(m.Nodename, m) }
}

func passes(d time.Duration) func(*fixture) {
	return func(f *fixture) { f.step(d) }
}

func (f *fixture) step(d time.Duration) { f.now = f.now.Add(d) }

// down and replaced are the steps in which the machine of Node "other" goes silent, and in which a different machine
// responds at its address.
func down(f *fixture) { f.machines.MarkUnreachable("other", "gone") }

func replaced(f *fixture) { f.machines.MarkMismatch("other", "x", "no") }

// view is a machine that responds at endpoint and has addresses.
func view(nodename, endpoint string, addresses ...string) machine.Machine {
	m := machine.Machine{Nodename: nodename, NodeID: "id of " + nodename, Endpoint: netip.MustParseAddr(endpoint)}

	for _, a := range addresses {
		m.Addresses = append(m.Addresses, machine.Address{Link: "eth0", Prefix: netip.MustParsePrefix(a + "/24")})
	}

	return m
}

// named sets the names that a machine reports.
func named(m machine.Machine, hostname, domain string) machine.Machine {
	m.Hostname, m.Domainname = hostname, domain

	return m
}

func withUID(n *corev1.Node, uid types.UID) *corev1.Node {
	n.UID = uid

	return n
}

func TestClaims_OfLiveNodes(t *testing.T) {
	listed, provided := node("other", address), node("other", address)
	provided.Annotations = map[string]string{cloudproviderapi.AnnotationAlphaProvidedIPAddr: "10.0.0.9," + address + "," + second}
	without, other := reports(view("other", "10.0.0.9")), reports(view("other", address, address))

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
		"the other node IP is the first of the kubelet":            {"10.0.0.9", provided, steps{reports(view("other", "fd00::9"))}, true},
		"machine was dialed in the other IP family before": {
			second, provided, steps{reports(view("other", "fd00::9")), without, passes(retention)}, true,
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
			f := newFixture(t)
			f.add(node(test.node.Name)) // an earlier version
			f.add(test.node)
			f.do(test.steps)
			f.assertOwnedByOther(test.want, test.subject)
		})
	}
}

func TestClaims_OfDeletedNodes(t *testing.T) {
	listed, debian := node("other", address), node("other", address)
	debian.Status.NodeInfo.OSImage = "Debian GNU/Linux"

	self, elsewhere := view("other", address, address), view("other", "10.0.0.9", address)
	responds := reports(view("requesting", address, address))
	renamed := view("requesting", address, address)
	renamed.NodeID = self.NodeID

	for what, test := range map[string]struct {
		node    *corev1.Node
		machine machine.Machine // none if the machine has never responded
		before  steps
		after   steps
		want    bool
	}{
		"machine never responded":              {node: listed, want: true},
		"other operating system":               {node: debian, want: true},
		"reported only by the machine":         {node: node("other"), machine: elsewhere, want: true},
		"listed only by the Node":              {node: listed, machine: view("other", "10.0.0.9"), want: true},
		"reported until shortly before":        {node: node("other"), machine: self, before: steps{reports(view("other", "10.0.0.9"))}, want: true},
		"reported until long before":           {node: node("other"), machine: self, before: steps{reports(view("other", "10.0.0.9")), passes(retention)}},
		"machine was down":                     {node: node("other"), machine: self, before: steps{down, passes(retention)}, want: true},
		"a different machine responded":        {node: node("other"), machine: self, before: steps{replaced, passes(retention)}, want: true},
		"neither listed nor reported":          {node: node("other"), machine: view("other", "10.0.0.9")},
		"shortly before the end":               {node: listed, machine: self, after: steps{passes(retention - time.Second)}, want: true},
		"after the end":                        {node: listed, machine: self, after: steps{passes(retention)}},
		"requester responds at the address":    {node: listed, machine: self, after: steps{responds}, want: true},
		"the same, and it was only reported":   {node: listed, machine: elsewhere, after: steps{responds}, want: true},
		"the same, and no machine responded":   {node: listed, after: steps{responds}, want: true},
		"requester has the machine's identity": {node: listed, machine: self, after: steps{reports(renamed)}, want: true},
		"requester has it, and after the end":  {node: listed, machine: self, after: steps{reports(renamed), passes(retention)}},
	} {
		t.Run(what, func(t *testing.T) {
			f := newFixture(t)
			f.add(test.node)

			if test.machine.Nodename != "" {
				f.do(steps{reports(test.machine)})
			}

			f.do(test.before)
			f.remove(test.node)
			f.do(test.after)
			f.assertOwnedByOther(test.want, address)
		})
	}
}

// The informer removes a Node before it calls handlers. The handlers of the controller and of the reflector, which makes
// the inventory forget the machine, run in any order, possibly after the kubelet has registered its Node again.
func TestClaims_HaveNoGapDuringDeletion(t *testing.T) {
	old, recreated := withUID(node("other", address), "old"), withUID(node("other", "10.0.0.9"), "new")
	deletes := func(f *fixture) { f.DeleteNode(old) }
	forgets := func(f *fixture) { f.machines.Forget(old.Name) }

	for _, order := range []steps{{deletes, forgets}, {forgets, deletes}} {
		f := newFixture(t)
		f.add(old)
		f.do(steps{reports(view("other", address, address, unlisted)), passes(time.Second)})

		for i := range len(order) + 1 {
			f.do(order[max(i-1, 0):i])

			for _, subject := range []string{address, unlisted} {
				f.assertOwnedByOther(true, subject)
				f.assertOwned(true, subject, "other", recreated)
			}

			f.assertOwnedByOther(true, "other")
		}
	}
}

// reregistered is a scene: Node "other" was deleted, while its machine responded at address and reported unlisted, and a
// Node of the same name was registered that lists elsewhere.
type reregistered struct {
	subject string          // address if it is empty
	deleted *corev1.Node    // the Node without a label if it is nil
	before  machine.Machine // of the deleted Node; responded if it is empty
	machine machine.Machine // of the new Node
	steps   steps
	want    bool
}

const elsewhere = "10.0.0.9"

var (
	responded    = view("other", address, address, unlisted)
	replacement  = reidentified(view("other", elsewhere, elsewhere, address))
	returned     = view("other", elsewhere, address)
	controlPlane = labeled(node("other", address, elsewhere))
	never        = machine.Machine{Nodename: "never"} // no machine of the deleted Node has responded
)

func reidentified(m machine.Machine) machine.Machine {
	m.NodeID = "id of replacement"

	return m
}

func (r reregistered) check(t *testing.T) {
	t.Helper()

	f := newFixture(t)
	recreated := withUID(node("other", elsewhere), "new")

	switch r.before.Nodename {
	case "":
		f.do(steps{reports(responded)})
	case "other":
		f.do(steps{reports(r.before)})
	}

	f.remove(f.add(withUID(cmp.Or(r.deleted, node("other", address)).DeepCopy(), "old")))
	f.add(recreated)

	if r.machine.Nodename != "" {
		f.do(steps{reports(r.machine)})
	}

	f.do(r.steps)
	f.assertOwned(r.want, cmp.Or(r.subject, address), "other", recreated)
}

// A bootstrap token can register a Node under the name of a deleted one, whose machine still runs.
func TestClaims_KeepNothingFromMachineThatReturned(t *testing.T) {
	for what, test := range map[string]reregistered{
		"same address": {machine: view("other", address, address)},
		"same address, name of a control-plane Node":      {subject: "other", deleted: controlPlane, machine: view("other", address)},
		"same address, a different name":                  {subject: "host.example.org", before: named(responded, "host", "example.org"), machine: responded},
		"another reported address":                        {machine: view("other", unlisted, address)},
		"new address, same identity":                      {machine: returned, want: true},
		"new address, different machine":                  {machine: replacement, want: true},
		"new address, listed by the deleted Node":         {deleted: node("other", address, elsewhere), machine: returned, want: true},
		"new address, what only the old machine reported": {subject: unlisted, machine: replacement, want: true},
		"new address, the address itself":                 {subject: elsewhere, machine: replacement},
		"new address, after the end":                      {machine: replacement, steps: steps{passes(retention)}},
		"new address, a different name":                   {subject: "host.example.org", before: named(responded, "host", "example.org"), machine: replacement, want: true},
		"machine no longer responds":                      {machine: responded, steps: steps{down}, want: true},
		"a different machine responds at the address":     {machine: responded, steps: steps{replaced}, want: true},
		"no machine has responded":                        {want: true},
		"no machine of the deleted Node responded":        {before: never, machine: responded},
		"the same, and responds at an address of no Node": {before: never, machine: returned, want: true},
		"the same, and responds at a listed address":      {deleted: controlPlane, before: never, machine: returned},
	} {
		t.Run(what, func(t *testing.T) { test.check(t) })
	}
}

func TestClaims_ReleaseNodenameOfDeletedWorker(t *testing.T) {
	for what, test := range map[string]reregistered{
		"worker":                               {subject: "other", machine: replacement},
		"worker, no machine has responded":     {subject: "other"},
		"control plane":                        {subject: "other", deleted: controlPlane, machine: replacement, want: true},
		"control plane, no machine":            {subject: "other", deleted: controlPlane, want: true},
		"control plane, after the end":         {subject: "other", deleted: controlPlane, machine: replacement, steps: steps{passes(retention)}},
		"worker, but not what its machine has": {subject: address, machine: replacement, want: true},
		"control plane, its machine returned":  {subject: "other", deleted: controlPlane, machine: view("other", address)},
	} {
		t.Run(what, func(t *testing.T) { test.check(t) })
	}

	f := newFixture(t)
	f.remove(f.add(node("other")))
	f.assertOwnedByOther(true, "other") // a Node with a different name
}

// The nodename may have the form of an address, which stays claimed.
func TestClaims_ReregisteredNodeWithAddressAsName(t *testing.T) {
	f := newFixture(t)
	f.do(steps{reports(view(address, "10.0.0.3", address))})
	f.remove(f.add(withUID(node(address), "old")))

	recreated := f.add(withUID(node(address), "new"))
	assert.Contains(t, f.owners(address, f.requester(address, recreated)), address)
}

// A view of the old machine is no proof that the machine of the new Node is the same. The reflector may handle the
// deletion later than the controller.
func TestClaims_IgnoreViewFromBeforeDeletion(t *testing.T) {
	f := newFixture(t)
	old := f.add(withUID(node("other", address), "old"))
	f.do(steps{reports(view("other", address, address)), passes(time.Second)})
	f.DeleteNode(old)

	recreated := f.add(withUID(node("other", address), "new"))
	f.assertOwned(true, address, "other", recreated)

	f.machines.Forget("other")
	f.assertOwned(true, address, "other", recreated)
	f.do(steps{reports(view("other", address, address))})
	f.assertOwned(false, address, "other", recreated)
}

// A different machine responds at the address of a Node and under its name, and reports less.
func TestClaims_OfWhatMachineStoppedToReport(t *testing.T) {
	for _, deleted := range []bool{false, true} {
		f := newFixture(t)
		n := f.add(node("other", address, second))
		f.do(steps{reports(view("other", address, address, unlisted)), reports(view("other", address, address))})

		if deleted {
			f.remove(n)
		}

		f.assertOwnedByOther(true, unlisted)

		f.step(retention)
		f.assertOwnedByOther(false, unlisted)
	}
}

// A second Node with the name of a deleted one must not shorten the claims of the first.
func TestClaims_ReserveForEachDeletedNode(t *testing.T) {
	f := newFixture(t)
	f.do(steps{reports(view("other", address, address, unlisted))})
	f.remove(f.add(withUID(node("other", address), "old")))
	f.do(steps{passes(retention / 2), reports(view("other", "10.0.0.9"))})
	f.remove(f.add(withUID(node("other", "10.0.0.9"), "new"))) // by the attacker

	for _, subject := range []string{address, unlisted, "10.0.0.9"} {
		f.assertOwnedByOther(true, subject)
	}

	f.assertOwned(true, address, "other", withUID(node("other", "10.0.0.9"), "third"))

	f.step(retention / 2)
	f.assertOwnedByOther(false, address)
	f.assertOwnedByOther(true, "10.0.0.9")
}

func TestClaims_RecreatedNode(t *testing.T) {
	f := newFixture(t)
	f.remove(f.add(withUID(node("other", address), "old")))
	assert.Equal(t, f.now.Add(retention), f.until("requesting"))

	recreated := f.add(withUID(node("other", address, unlisted), "new"))
	assert.Zero(t, f.until("requesting"), "the Node exists")
	assert.Equal(t, f.now.Add(retention), f.until("other"), "a Node of the name was deleted")
	f.assertOwnedByOther(true, unlisted)
	f.assertOwned(false, unlisted, "other", recreated)

	f.step(retention)
	f.assertOwned(false, address, "other", recreated)
	f.assertOwnedByOther(true, address)
}

// The machine of the next Node reported a value for a moment. For people, the deletion is what matters.
func TestClaims_EndAsThatOfDeletedNode(t *testing.T) {
	f := newFixture(t)
	f.remove(f.add(withUID(node("other", address), "old")))
	end := f.now.Add(retention)
	f.do(steps{passes(time.Minute), reports(view("other", address)), reports(view("other", elsewhere))})
	assert.Equal(t, end, f.until("requesting"))

	f.do(steps{passes(retention - time.Minute)})
	assert.Zero(t, f.until("requesting"))
}

// Each name and address of a request is looked up. The cluster has 1,000 Nodes, of which 50 were deleted; the machines of
// another 50 have other addresses than before.
func BenchmarkClaims_Of(b *testing.B) {
	f := newFixture(b)

	for i := range 1000 {
		name, ip := fmt.Sprintf("node-%d", i), fmt.Sprintf("10.1.%d.%d", i/250, i%250)
		n := f.add(withUID(node(name, ip), types.UID(name)))
		f.machines.Replace(name, view(name, ip, ip, "10.2"+ip[4:]))

		switch i % 20 {
		case 0:
			f.machines.Replace(name, view(name, ip, ip))
		case 1:
			f.remove(n)
		}
	}

	requesting := claims.Requester{Nodename: "requesting", UID: "requesting"}

	for _, count := range []int{64, 250, 1000} {
		b.Run(fmt.Sprintf("subjects=%d", count), func(b *testing.B) {
			for b.Loop() {
				for ip := range count {
					require.Empty(b, f.owners(fmt.Sprintf("198.51.%d.%d", 96+ip/250, ip%250), requesting))
				}
			}
		})
	}
}

// The handlers of Nodes and of the inventory run while requests are reviewed.
func TestClaims_AreKeptDuringConcurrentDeletions(t *testing.T) {
	for i := range 400 {
		subject := address
		f := newFixture(t)
		n := f.add(node("other", address))

		if i%4 > 1 {
			subject = unlisted

			f.do(steps{reports(responded)})
		}

		var reviewed, approved, ended atomic.Bool

		done := make(chan struct{})

		go func() {
			defer close(done)

			for !ended.Load() {
				if len(f.owners(subject, claims.Requester{Nodename: "requesting"})) == 0 {
					approved.Store(true)
				}

				reviewed.Store(true)
			}
		}()

		for !reviewed.Load() {
			runtime.Gosched()
		}

		handlers := []func(){func() { f.DeleteNode(n) }, func() { f.machines.Forget("other") }}
		handlers[i%2]()
		handlers[1-i%2]()
		ended.Store(true)
		<-done
		require.False(t, approved.Load(), "%s in round %d", subject, i)
	}
}

// The reflector reads the machine of a new Node before the deletion of the old one is received.
func TestClaims_IgnoreMachineOfNextNode(t *testing.T) {
	f := newFixture(t)
	f.do(steps{reports(view("other", "10.0.0.7"))})
	f.remove(f.add(withUID(node("other"), "first"))) // in the usual order

	old, recreated := f.add(withUID(node("other", address), "old")), withUID(node("other", elsewhere), "new")
	f.do(steps{reports(responded), passes(time.Second)})
	f.machines.Forget("other")
	f.machines.Forget("other")
	f.do(steps{reports(replacement)})
	f.DeleteNode(old)
	f.add(recreated)
	f.do(steps{passes(time.Second), reports(replacement)})

	for _, subject := range []string{address, unlisted} {
		f.assertOwned(true, subject, "other", recreated)
	}

	f.remove(recreated) // in the usual order again: its own machine counts
	f.do(steps{reports(replacement)})
	f.assertOwned(false, elsewhere, "other", f.add(withUID(node("other"), "third")))
}

// A different machine responds at the address of a Node and under its name, and reports less. Then the Node is deleted,
// and a bootstrap token registers it again.
func TestClaims_KeepWhatMachineStoppedToReportFromNextNode(t *testing.T) {
	for _, forgetFirst := range []bool{false, true} {
		f := newFixture(t)
		old, recreated := f.add(withUID(node("other", address), "old")), withUID(node("other", elsewhere), "new")
		f.do(steps{reports(responded), passes(time.Minute), reports(view("other", address, address)), passes(time.Minute)})

		if forgetFirst {
			f.machines.Forget("other")
			f.DeleteNode(old)
		} else {
			f.remove(old)
		}

		f.add(recreated)
		f.do(steps{reports(view("other", elsewhere, elsewhere, unlisted))})
		f.assertOwned(true, unlisted, "other", recreated)

		f.step(retention - time.Minute)
		f.assertOwned(false, unlisted, "other", recreated)
		f.assertOwned(true, address, "other", recreated)
	}
}

// A kubelet can rewrite its Node. That must not block others, or use memory.
func TestClaims_ReleaseListedValueAtOnce(t *testing.T) {
	f := newFixture(t)
	f.add(node("other", address))
	f.assertOwnedByOther(true, address)

	n := f.add(node("other", second))
	f.assertOwnedByOther(false, address)
	f.assertOwnedByOther(true, second)

	f.remove(n)
	f.assertOwnedByOther(true, second)
	f.assertOwnedByOther(false, address)
}

func TestClaims_LimitListedValues(t *testing.T) {
	const limit = 2000

	var list []string
	for i := range 2 * limit {
		list = append(list, netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}).String())
	}

	f := newFixture(t)
	f.add(node("other", list...))
	f.assertOwnedByOther(true, "other")
	f.assertOwnedByOther(true, list[machine.MaxSubjects])
	f.assertOwnedByOther(false, list[limit])

	// No controller corrects the annotation.
	n := node("other", address)
	n.Annotations = map[string]string{cloudproviderapi.AnnotationAlphaProvidedIPAddr: strings.Repeat(second+",", limit)}
	f.add(n)
	f.assertOwnedByOther(true, address)
}

// A machine with as many addresses as it can have reports others.
func TestClaims_KeepAllThatMachineReported(t *testing.T) {
	var list []string
	for i := range machine.MaxSubjects {
		list = append(list, netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}).String())
	}

	f := newFixture(t)
	f.do(steps{reports(named(view("other", address, list...), "host", "example.org")), reports(view("other", address))})

	for _, subject := range append(list, "host", "host.example.org") {
		f.assertOwnedByOther(true, subject)
	}
}

func TestClaims_DeletedReturnsNodes(t *testing.T) {
	f := newFixture(t)
	old, later := withUID(node("other"), "old"), withUID(node("other"), "later")
	f.remove(f.add(old))
	f.do(steps{passes(time.Minute)})
	f.remove(f.add(later))
	f.remove(f.add(node("another")))
	assert.Equal(t, []*corev1.Node{old, later}, f.Deleted(withUID(node("other"), "new")))

	f.step(retention - time.Minute)
	assert.Equal(t, []*corev1.Node{later}, f.Deleted(withUID(node("other"), "new")))

	f.step(time.Minute)
	assert.Empty(t, f.Deleted(withUID(node("other"), "new")))

	// DeleteNode was not called yet.
	f.add(old)
	assert.Empty(t, f.Deleted(old))
	assert.Equal(t, []*corev1.Node{old}, f.Deleted(later))
}

func TestListedBy_ReturnsCanonicalNameAndAddresses(t *testing.T) {
	listed := node("Node-A", "::ffff:10.0.0.1", "Host.example.org.", "10.0.0.1", "FD00::1", "")
	listed.Annotations = map[string]string{cloudproviderapi.AnnotationAlphaProvidedIPAddr: "10.0.0.1,10.0.0.2"}

	assert.ElementsMatch(t, []string{"10.0.0.1", "10.0.0.2", "fd00::1", "host.example.org", "node-a"}, sets.New(claims.ListedBy(listed)...).UnsortedList())
}
