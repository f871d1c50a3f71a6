package csrapproval

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
)

// owners tracks which Nodes own a name or an address. A Node owns the names and addresses that its machine reports, and
// those that it lists (see owns). A deleted Node keeps them for inventory.Retention: its machine may still run, and its
// kubelet does not register the Node again until it restarts. After a change of leader, deleted Nodes own nothing.
type owners struct {
	machines *inventory.Inventory
	policy   func(node *corev1.Node, m machine.Machine) csrpolicy.Policy
	clock    clock.Clock

	// nodes holds the Nodes that the event handlers have received, with indexSubjects. The informer's own store drops a
	// deleted Node before it calls the handlers.
	nodes cache.Indexer

	mu       sync.Mutex
	reserved map[types.UID]reservation
}

// reservation is a snapshot of a deleted Node.
type reservation struct {
	nodename       string
	isControlPlane bool
	listed         []string // names and addresses of the Node
	reported       []string // names and addresses of its machine; empty if it never responded
	pin            csrpolicy.Record
	deletedAt      time.Time
}

func (r reservation) until() time.Time { return r.deletedAt.Add(inventory.Retention) }

func newOwners(cfg Config) *owners {
	return &owners{
		machines: cfg.Inventory, policy: cfg.Policy, clock: cfg.Clock,
		nodes:    cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{indexSubjects: subjectsOf}),
		reserved: map[types.UID]reservation{},
	}
}

// observe records the present version of a Node.
func (o *owners) observe(node *corev1.Node) {
	_ = o.nodes.Update(node) // fails only without a key
}

// reserve replaces a deleted Node with its reservation. It also removes reservations that have ended.
func (o *owners) reserve(node *corev1.Node) {
	now := o.clock.Now()
	listed, _ := subjectsOf(node)

	o.mu.Lock()
	maps.DeleteFunc(o.reserved, func(_ types.UID, r reservation) bool { return !now.Before(r.until()) })
	o.reserved[node.UID] = reservation{node.Name, nodespec.IsControlPlane(node), listed, o.machines.Reported(node.Name), pinOf(node), now}
	o.mu.Unlock()

	_ = o.nodes.Delete(node) // fails only without a key
}

// pin returns the last pin of the deleted Nodes with a name whose reservations have not ended; the zero value if there is
// none.
func (o *owners) pin(nodename string) csrpolicy.Record {
	var pin csrpolicy.Record

	for _, reserved := range o.reservations(func(r reservation) bool { return r.nodename == nodename }) {
		pin = cmp.Or(reserved.pin, pin)
	}

	return pin
}

// requester is the Node of the kubelet that made a request.
type requester struct {
	nodename string
	node     *corev1.Node // nil if it does not exist
	machine  inventory.Entry
	policies map[string]csrpolicy.Policy // of other Nodes, as far as they were evaluated for the request
}

func newRequester(nodename string, node *corev1.Node, entry inventory.Entry) requester {
	return requester{nodename, node, entry, map[string]csrpolicy.Policy{}}
}

// of returns the names of the Nodes that own a name or an address, except the requester's Node. A deleted Node with the
// same name is a different Node and is included. The map values are the times when the reservations of deleted Nodes
// end; they are zero for all other owners.
func (o *owners) of(subject string, r requester) map[string]time.Time {
	existing := o.machines.Owners(subject, r.nodename)
	listing, _ := o.nodes.ByIndex(indexSubjects, subject) // fails only without the index

	for _, obj := range listing {
		if node, ok := obj.(*corev1.Node); ok && node.Name != r.nodename && o.owns(node, subject, r) {
			existing = append(existing, node.Name)
		}
	}

	obj, _, _ := o.nodes.GetByKey(r.nodename) // fails only without a key
	if node, ok := obj.(*corev1.Node); ok && r.node != nil && node.UID != r.node.UID {
		existing = append(existing, node.Name) // was deleted, and the event handler has not received that yet
	}

	// Read these after the Nodes and machines that exist, so that a deletion during this call does not hide an owner.
	owners := map[string]time.Time{}

	for _, reserved := range o.reservations(func(reserved reservation) bool { return reserved.holds(subject, r) }) {
		owners[reserved.nodename] = reserved.until()
	}

	for _, name := range o.machines.DroppedBy(subject, r.nodename) {
		if _, deleted := owners[name]; !deleted {
			owners[name] = time.Time{}
		}
	}

	for _, name := range existing {
		owners[name] = time.Time{}
	}

	return owners
}

// owns reports whether a Node owns a name or an address that it lists. Kubelets write their Nodes, so a listed value does
// not count if the machine has responded and did not report the value. But an attacker who took over the Node's address
// could respond in place of the machine and omit values. Two kinds of values therefore always count: the kubelet's node
// IP of the IP family that was not dialed, and names and addresses that the operator assigns.
func (o *owners) owns(node *corev1.Node, subject string, by requester) bool {
	if !o.machines.Contradicts(node.Name, subject) {
		return true
	}

	last := o.machines.Get(node.Name).Last
	isOther := func(addr netip.Addr) bool { return addr.Is4() != last.Endpoint.Is4() }

	provided := nodespec.ProvidedNodeIPs(node)
	if i := slices.IndexFunc(provided, isOther); i >= 0 && last.Endpoint.IsValid() && machine.CanonicalAddress(provided[i]) == subject {
		return true
	}

	policy, evaluated := by.policies[node.Name]
	if !evaluated {
		policy = o.policy(node, last)
		by.policies[node.Name] = policy
	}

	return slices.ContainsFunc(slices.Concat(policy.ExtraNames, policy.PendingNames), func(name string) bool { return machine.CanonicalName(name) == subject }) ||
		slices.ContainsFunc(policy.ExtraIPs, func(addr netip.Addr) bool { return machine.CanonicalAddress(addr) == subject })
}

// reservations returns the reservations that have not ended and for which matches returns true, the oldest first.
func (o *owners) reservations(matches func(reservation) bool) []reservation {
	now := o.clock.Now()

	o.mu.Lock()
	defer o.mu.Unlock()

	var found []reservation

	for _, r := range o.reserved {
		if now.Before(r.until()) && matches(r) {
			found = append(found, r)
		}
	}

	slices.SortFunc(found, func(a, b reservation) int { return a.deletedAt.Compare(b.deletedAt) })

	return found
}

// holds reports whether the reservation blocks a requester from a name or an address. A requester with a different
// nodename is always blocked. A requester with the deleted Node's name gets everything if the same machine responds. If
// the machine differs, the requester gets only its nodename, and only if the deleted Node was a worker.
func (r reservation) holds(subject string, by requester) bool {
	_, err := netip.ParseAddr(subject)
	isName := err != nil

	switch {
	case !slices.Contains(r.listed, subject) && !slices.Contains(r.reported, subject):
		return false
	case r.nodename != by.nodename:
		return true
	case isName && subject == machine.CanonicalName(r.nodename) && !r.isControlPlane:
		return false
	default:
		return !r.hasReturned(by.machine)
	}
}

// hasReturned reports whether the deleted Node's machine responds under the same name again. The machine must respond at
// an address that the old machine reported. If the old machine never responded, the addresses of the deleted Node count
// instead. Views from before the deletion do not count: the inventory may still have the deleted Node's entry.
func (r reservation) hasReturned(current inventory.Entry) bool {
	addresses := r.reported
	if len(addresses) == 0 {
		addresses = r.listed
	}

	return current.Condition == inventory.Current && !current.ObservedAt.Before(r.deletedAt) &&
		slices.Contains(addresses, machine.CanonicalAddress(current.Machine.Endpoint))
}
