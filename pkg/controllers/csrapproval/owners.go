package csrapproval

import (
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

// owners returns the Nodes that own a name or an address. A Node owns what its machine reports and what the Node lists.
// A deleted Node owns both for the retention: its machine may still run, since a kubelet registers its Node only when it
// starts. A new leader does not know which Nodes were deleted.
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
	o.reserved[node.UID] = reservation{node.Name, nodespec.IsControlPlane(node), listed, o.machines.Reported(node.Name), now}
	o.mu.Unlock()

	_ = o.nodes.Delete(node) // fails only without a key
}

// of returns the names of the other Nodes that own a name or an address, and when the reservation of a deleted Node
// ends; zero for Nodes that exist. It returns nodename itself if a deleted Node had the same name. requester is the Node
// nodename; nil if it does not exist.
func (o *owners) of(subject, nodename string, requester *corev1.Node) map[string]time.Time {
	existing := o.machines.Owners(subject, nodename)
	listing, _ := o.nodes.ByIndex(indexSubjects, subject) // fails only without the index

	for _, obj := range listing {
		if node, ok := obj.(*corev1.Node); ok && node.Name != nodename && o.owns(node, subject) {
			existing = append(existing, node.Name)
		}
	}

	obj, _, _ := o.nodes.GetByKey(nodename) // fails only without a key
	if node, ok := obj.(*corev1.Node); ok && requester != nil && node.UID != requester.UID {
		existing = append(existing, nodename) // the handler has not received the deletion of this Node yet
	}

	// Reservations are read last: a Node that was deleted since the first line has one.
	found := o.reservations(subject, nodename)

	for _, name := range append(existing, o.machines.DroppedBy(subject, nodename)...) {
		if until := found[name]; until.IsZero() || slices.Contains(existing, name) {
			found[name] = time.Time{}
		}
	}

	return found
}

// owns reports whether a Node owns a name or an address that it lists. Kubelets write their Nodes, so the Node does not
// own it if its machine has responded and did not report it last. But a different machine may respond at the Node's
// address. So these belong to the Node even if the machine does not report them: the kubelet's node IP of the other IP
// family, and the names and addresses that the operator assigns.
func (o *owners) owns(node *corev1.Node, subject string) bool {
	if !o.machines.Contradicts(node.Name, subject) {
		return true
	}

	last := o.machines.Get(node.Name).Last
	isOther := func(addr netip.Addr) bool { return addr.Is4() != last.Endpoint.Is4() }

	provided := nodespec.ProvidedNodeIPs(node)
	if i := slices.IndexFunc(provided, isOther); i >= 0 && last.Endpoint.IsValid() && machine.CanonicalAddress(provided[i]) == subject {
		return true
	}

	policy := o.policy(node, last)

	return slices.ContainsFunc(slices.Concat(policy.ExtraNames, policy.PendingNames), func(name string) bool { return machine.CanonicalName(name) == subject }) ||
		slices.ContainsFunc(policy.ExtraIPs, func(addr netip.Addr) bool { return machine.CanonicalAddress(addr) == subject })
}

// reservations returns the names of the deleted Nodes that own a name or an address, and when their reservations end.
func (o *owners) reservations(subject, nodename string) map[string]time.Time {
	current, now, found := o.machines.Get(nodename), o.clock.Now(), map[string]time.Time{}

	o.mu.Lock()
	defer o.mu.Unlock()

	for _, r := range o.reserved {
		until := r.until()
		if now.Before(until) && until.After(found[r.nodename]) && r.holds(subject, nodename, current) {
			found[r.nodename] = until
		}
	}

	return found
}

// holds reports whether a name or an address is reserved against the Node nodename, whose machine is current. A Node
// with the name of the deleted one gets everything if it has the same machine. Otherwise it gets only its own name, if
// the deleted Node was a worker's.
func (r reservation) holds(subject, nodename string, current inventory.Entry) bool {
	_, err := netip.ParseAddr(subject)
	isName := err != nil

	switch {
	case !slices.Contains(r.listed, subject) && !slices.Contains(r.reported, subject):
		return false
	case r.nodename != nodename:
		return true
	case isName && subject == machine.CanonicalName(nodename) && !r.isControlPlane:
		return false
	default:
		return !r.hasReturned(current)
	}
}

// hasReturned reports whether the machine that responds under the name of the deleted Node is that Node's machine: it
// responds at an address that the deleted Node's machine reported, or that the deleted Node listed if its machine never
// responded. A machine that was observed before the deletion is no proof: it is the view of the deleted Node's machine.
func (r reservation) hasReturned(current inventory.Entry) bool {
	addresses := r.reported
	if len(addresses) == 0 {
		addresses = r.listed
	}

	return current.Condition == inventory.Current && !current.ObservedAt.Before(r.deletedAt) &&
		slices.Contains(addresses, machine.CanonicalAddress(current.Machine.Endpoint))
}
