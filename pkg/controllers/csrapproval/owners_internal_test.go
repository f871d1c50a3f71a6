package csrapproval

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
	cloudproviderapi "k8s.io/cloud-provider/api"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

const (
	address  = "10.0.0.1"
	second   = "fd00::1"
	unlisted = "10.0.0.2"

	retention = inventory.Retention
)

// ownersFixture has no Nodes at first.
type ownersFixture struct {
	*owners

	t      testing.TB
	clock  *clocktesting.FakeClock
	policy csrpolicy.Policy
	// evaluated counts evaluations of the policy.
	evaluated int
}

func newOwnersFixture(t testing.TB) *ownersFixture {
	t.Helper()

	f := &ownersFixture{t: t, clock: clocktesting.NewFakeClock(time.Now())}
	f.owners = newOwners(Config{
		Inventory: inventory.New(f.clock.Now),
		Clock:     f.clock,
		Policy: func(*corev1.Node, machine.Machine) csrpolicy.Policy {
			f.evaluated++

			return f.policy
		},
	})

	return f
}

// add adds a Node as the informer does.
func (f *ownersFixture) add(n *corev1.Node) *corev1.Node {
	f.observe(n)

	return n
}

// remove deletes a Node as the informer and the reflector do.
func (f *ownersFixture) remove(n *corev1.Node) {
	f.reserve(n)
	f.machines.Forget(n.Name)
}

// assertOwned fails unless Node "other", and no other Node, owns the subject of a request of Node requester. If want is
// false, it fails if any Node does.
func (f *ownersFixture) assertOwned(want bool, subject, nodename string, n *corev1.Node) {
	f.t.Helper()

	owners := map[bool][]string{true: {"other"}}
	found := f.of(subject, newRequester(nodename, n, f.machines.Get(nodename)))
	assert.ElementsMatch(f.t, owners[want], slices.Collect(maps.Keys(found)), subject)
}

// assertOwnedByOther is assertOwned for a request of Node "requesting".
func (f *ownersFixture) assertOwnedByOther(want bool, subject string) {
	f.t.Helper()
	f.assertOwned(want, subject, "requesting", node("requesting"))
}

// until returns when the reservation of an address for Node "other" ends; zero if the Node exists.
func (f *ownersFixture) until(nodename string) time.Time {
	f.t.Helper()

	owners := f.of(address, newRequester(nodename, nil, inventory.Entry{}))
	require.Contains(f.t, owners, "other")

	return owners["other"]
}

// steps change a fixture.
type steps []func(*ownersFixture)

func (f *ownersFixture) do(steps steps) {
	for _, step := range steps {
		step(f)
	}
}

// reports is the step in which the machine of a Node responds.
func reports(m machine.Machine) func(*ownersFixture) {
	return func(f *ownersFixture) { f.machines.Replace(m.Nodename, m) }
}

func passes(d time.Duration) func(*ownersFixture) {
	return func(f *ownersFixture) { f.clock.Step(d) }
}

// down and replaced are the steps in which the machine of Node "other" goes silent, and in which a different machine
// responds at its address.
func down(f *ownersFixture) { f.machines.MarkUnreachable("other", "gone") }

func replaced(f *ownersFixture) { f.machines.MarkMismatch("other", "x", "no") }

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
			f := newOwnersFixture(t)
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
func TestOwners_HaveNoGapDuringDeletion(t *testing.T) {
	old, recreated := withUID(node("other", address), "old"), withUID(node("other", "10.0.0.9"), "new")
	reserves := func(f *ownersFixture) { f.reserve(old) }
	forgets := func(f *ownersFixture) { f.machines.Forget(old.Name) }

	for _, order := range []steps{{reserves, forgets}, {forgets, reserves}} {
		f := newOwnersFixture(t)
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

// A bootstrap token can register a Node under the name of a deleted one, whose machine still runs.
func TestOwners_ReregisteredNode(t *testing.T) {
	const elsewhere = "10.0.0.9"

	responded := view("other", address, address, unlisted)
	replacement, returned := view("other", elsewhere, elsewhere, address), view("other", elsewhere, address)
	replacement.NodeID = "id of replacement"

	controlPlane := labeled(node("other", address, elsewhere))

	for what, test := range map[string]struct {
		subject string
		deleted *corev1.Node    // the Node without a label if it is nil
		before  machine.Machine // of the deleted Node; responded if it is empty
		machine machine.Machine // of the new Node
		steps   steps
		want    bool
	}{
		"same address": {subject: address, machine: view("other", address, address)},
		"same address, name of a control-plane Node":        {subject: "other", deleted: controlPlane, machine: view("other", address)},
		"another reported address":                          {subject: address, machine: view("other", unlisted, address)},
		"new address, same identity":                        {subject: address, machine: returned, want: true},
		"new address, different machine":                    {subject: address, machine: replacement, want: true},
		"new address, listed by the deleted Node":           {subject: address, deleted: node("other", address, elsewhere), machine: returned, want: true},
		"new address, what only the old machine reported":   {subject: unlisted, machine: replacement, want: true},
		"new address, the address itself":                   {subject: elsewhere, machine: replacement},
		"new address, after the end":                        {subject: address, machine: replacement, steps: steps{passes(retention)}},
		"new address, the nodename":                         {subject: "other", machine: replacement},
		"new address, the nodename of a control-plane Node": {subject: "other", deleted: controlPlane, machine: replacement, want: true},
		"new address, a different name":                     {subject: "host.example.org", before: named(responded, "host", "example.org"), machine: replacement, want: true},
		"same address, a different name":                    {subject: "host.example.org", before: named(responded, "host", "example.org"), machine: responded},
		"machine no longer responds":                        {subject: address, machine: responded, steps: steps{down}, want: true},
		"a different machine responds at the address":       {subject: address, machine: responded, steps: steps{replaced}, want: true},
		"no machine has responded":                          {subject: address, want: true},
		"no machine of the deleted Node responded":          {subject: address, before: machine.Machine{Nodename: "never"}, machine: responded},
		"the same, and responds at an address of no Node":   {subject: address, before: machine.Machine{Nodename: "never"}, machine: returned, want: true},
		"the same, and responds at a listed address":        {subject: address, deleted: controlPlane, before: machine.Machine{Nodename: "never"}, machine: returned},
	} {
		t.Run(what, func(t *testing.T) {
			f := newOwnersFixture(t)
			recreated := withUID(node("other", elsewhere), "new")
			before := test.before

			if before.Nodename == "" {
				before = responded
			}

			if before.Nodename == "other" {
				f.do(steps{reports(before)})
			}

			f.remove(f.add(withUID(cmp.Or(test.deleted, node("other", address)).DeepCopy(), "old")))
			f.add(recreated)

			if test.machine.Nodename != "" {
				f.do(steps{reports(test.machine)})
			}

			f.do(test.steps)
			f.assertOwned(test.want, test.subject, "other", recreated)
		})
	}
}

// The nodename may have the form of an address, which is reserved.
func TestOwners_ReregisteredNodeWithAddressAsName(t *testing.T) {
	f := newOwnersFixture(t)
	f.do(steps{reports(view(address, "10.0.0.3", address))})
	f.remove(f.add(withUID(node(address), "old")))

	recreated := f.add(withUID(node(address), "new"))
	assert.Contains(t, f.of(address, newRequester(address, recreated, inventory.Entry{})), address)
}

// A view of the old machine is no proof that the machine of the new Node is the same. The reflector may handle the
// deletion later than the controller.
func TestOwners_IgnoreViewFromBeforeDeletion(t *testing.T) {
	f := newOwnersFixture(t)
	old := f.add(withUID(node("other", address), "old"))
	f.do(steps{reports(view("other", address, address)), passes(time.Second)})
	f.reserve(old)

	recreated := f.add(withUID(node("other", address), "new"))
	f.assertOwned(true, address, "other", recreated)

	f.machines.Forget("other")
	f.assertOwned(true, address, "other", recreated)
	f.do(steps{reports(view("other", address, address))})
	f.assertOwned(false, address, "other", recreated)
}

// A different machine responds at the address of a Node and under its name, and reports less.
func TestOwners_OfWhatMachineStoppedToReport(t *testing.T) {
	for _, deleted := range []bool{false, true} {
		f := newOwnersFixture(t)
		n := f.add(node("other", address, second))
		f.do(steps{reports(view("other", address, address, unlisted)), reports(view("other", address, address))})

		if deleted {
			f.remove(n)
		}

		f.assertOwnedByOther(true, unlisted)

		f.clock.Step(retention)
		f.assertOwnedByOther(false, unlisted)
	}
}

// A second Node with the name of a deleted one must not shorten the reservation of the first.
func TestOwners_ReserveForEachDeletedNode(t *testing.T) {
	f := newOwnersFixture(t)
	f.do(steps{reports(view("other", address, address, unlisted))})
	f.remove(f.add(withUID(node("other", address), "old")))
	f.do(steps{passes(retention / 2), reports(view("other", "10.0.0.9"))})
	f.remove(f.add(withUID(node("other", "10.0.0.9"), "new"))) // by the attacker

	for _, subject := range []string{address, unlisted, "10.0.0.9"} {
		f.assertOwnedByOther(true, subject)
	}

	f.assertOwned(true, address, "other", withUID(node("other", "10.0.0.9"), "third"))

	f.clock.Step(retention / 2)
	f.assertOwnedByOther(false, address)
	f.assertOwnedByOther(true, "10.0.0.9")
}

func TestOwners_RecreatedNode(t *testing.T) {
	f := newOwnersFixture(t)
	f.remove(f.add(withUID(node("other", address), "old")))
	assert.Equal(t, f.clock.Now().Add(retention), f.until("requesting"))

	recreated := f.add(withUID(node("other", address, unlisted), "new"))
	assert.Zero(t, f.until("requesting"), "the Node exists")
	assert.Equal(t, f.clock.Now().Add(retention), f.until("other"), "a Node of the name was deleted")
	f.assertOwnedByOther(true, unlisted)
	f.assertOwned(false, unlisted, "other", recreated)

	f.clock.Step(retention)
	f.assertOwned(false, address, "other", recreated)
	f.assertOwnedByOther(true, address)
}

func TestController_ReservesForNodeThatWasDeleted(t *testing.T) {
	f := newOwnersFixture(t)
	c := &Controller{owners: f.owners, requests: cache.NewSharedIndexInformer(nil, &certificatesv1.CertificateSigningRequest{}, 0, cache.Indexers{})}
	old, updated, recreated := withUID(node("other", address), "old"), withUID(node("other", address), "old"), withUID(node("other", "10.0.0.9"), "new")

	c.nodeChanged(nil, old)
	c.nodeChanged(old, updated)
	assert.Empty(t, f.reserved)

	c.nodeChanged(updated, nil)
	c.nodeChanged(nil, recreated)
	f.assertOwnedByOther(true, address)
	assert.Equal(t, f.clock.Now().Add(retention), f.until("requesting"))
}

func TestOwners_ForgetEverything(t *testing.T) {
	f := newOwnersFixture(t)

	for _, uid := range []types.UID{"1", "2"} {
		f.do(steps{reports(view("other", address, address))})
		f.remove(f.add(withUID(node("other", address), uid)))
	}

	f.clock.Step(retention)
	f.remove(f.add(withUID(node("last"), "3")))
	assert.Equal(t, []types.UID{"3"}, slices.Collect(maps.Keys(f.reserved)))
	assert.Empty(t, f.nodes.List())
}

// A Node can list the addresses of a request that its machine does not report. To evaluate a policy takes milliseconds.
func TestOwners_EvaluatePolicyOncePerRequest(t *testing.T) {
	f := newOwnersFixture(t)
	f.add(node("other", address, second, unlisted))
	f.machines.Replace("other", view("other", "10.0.0.9", "10.0.0.9"))

	r := newRequester("requesting", node("requesting"), inventory.Entry{})
	for _, subject := range []string{address, second, unlisted} {
		assert.Empty(t, f.of(subject, r), subject)
	}

	assert.Equal(t, 1, f.evaluated)
}

// Each name and address of a request is looked up. The cluster has 1,000 Nodes, of which 50 were deleted; the machines of
// another 50 have other addresses than before.
func BenchmarkOwners(b *testing.B) {
	f := newOwnersFixture(b)

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

	requesting := newRequester("requesting", node("requesting"), inventory.Entry{})

	for _, count := range []int{64, 250, 1000} {
		b.Run(fmt.Sprintf("subjects=%d", count), func(b *testing.B) {
			for b.Loop() {
				for ip := range count {
					require.Empty(b, f.of(fmt.Sprintf("198.51.%d.%d", 96+ip/250, ip%250), requesting))
				}
			}
		})
	}
}
