package csrapproval

import (
	"context"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/internal/backoff"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/pkg/reflector"
)

const (
	// retention is how long a Node owns its names and addresses after it was deleted and its machine has gone silent.
	retention = 15 * time.Minute

	// sweepInterval is how often reservations are extended or removed.
	sweepInterval = 10 * time.Second
)

// owners returns who owns a name or an address: by what the machines report, and by the Node objects. A deleted Node
// stays an owner for the retention: its machine may still run, since a kubelet registers its Node only when it starts.
// Reservations are lost with the leadership.
type owners struct {
	nodes    cache.Indexer // the informer's, with indexSubjects
	machines *inventory.Inventory
	policy   func(node *corev1.Node, m machine.Machine) csrpolicy.Policy
	clock    clock.Clock

	// observed holds the Nodes that the event handlers have received, by name and UID, with indexSubjects: the informer
	// removes a Node from its own indexer before it calls handlers. Deleted Nodes stay until their reservation ends.
	observed cache.Indexer
	// The machines of deleted Nodes, which the reflector watches while they respond.
	former    *inventory.Inventory
	reflector *reflector.Reflector

	mu       sync.Mutex
	reserved map[string]reservation // by nodename
}

// reservation is for the deleted Nodes of one name.
type reservation struct {
	nodes []*corev1.Node
	until time.Time
}

func newOwners(cfg Config, nodes cache.Indexer) *owners {
	former := inventory.New(cfg.Clock.Now)
	cfg.Inventory.HandOver(former)

	return &owners{
		nodes: nodes, machines: cfg.Inventory, policy: cfg.Policy, clock: cfg.Clock,
		observed:  cache.NewIndexer(incarnation, cache.Indexers{indexSubjects: subjectsOf}),
		former:    former,
		reflector: reflector.New(former, cfg.Dial, cfg.Clock),
		reserved:  map[string]reservation{},
	}
}

// incarnation is the key of observed Nodes.
func incarnation(obj any) (string, error) {
	node, ok := obj.(*corev1.Node)
	if !ok {
		return "", cache.KeyError{Obj: obj}
	}

	return node.Name + "/" + string(node.UID), nil
}

// observe records the present version of a Node.
func (o *owners) observe(node *corev1.Node) {
	_ = o.observed.Update(node) // fails only without a key
}

// reserve records that a Node was deleted. Its machine is watched from now on by other means.
func (o *owners) reserve(node *corev1.Node) {
	o.mu.Lock()
	defer o.mu.Unlock()

	o.observe(node)

	r := o.reserved[node.Name]
	o.reserved[node.Name] = reservation{append(slices.Clone(r.nodes), node), o.clock.Now().Add(retention)}

	if nodespec.IsTalos(node) {
		o.reflector.Track(node.Name, nodespec.DialAddresses(node))
	}
}

// run watches the machines of deleted Nodes, and calls released after reservations have ended.
func (o *owners) run(ctx context.Context, released func()) {
	var group sync.WaitGroup
	defer group.Wait()

	group.Go(func() { o.reflector.Run(ctx) })

	for backoff.Sleep(ctx, o.clock, sweepInterval) {
		if o.sweep() {
			released()
		}
	}
}

// extends reports whether a reservation is extended: the machine responds, and no new Node has the name.
func (o *owners) extends(nodename string) bool {
	_, registered, _ := o.nodes.GetByKey(nodename) // fails only without a key

	return !registered && o.former.Get(nodename).Condition == inventory.Current
}

// sweep extends reservations and removes those that have ended. It reports whether it has removed any.
func (o *owners) sweep() (removed bool) {
	o.mu.Lock()
	defer o.mu.Unlock()

	now := o.clock.Now()

	for name, r := range o.reserved {
		switch {
		case o.extends(name):
			o.reserved[name] = reservation{r.nodes, now.Add(retention)}
		case !now.Before(r.until):
			delete(o.reserved, name)

			for _, node := range r.nodes {
				_ = o.observed.Delete(node) // fails only without a key
			}

			o.reflector.Untrack(name)
			o.former.Forget(name) // the reflector tracks Talos Nodes only

			removed = true
		}
	}

	return removed
}

// reservationOf returns the reservation of a nodename, or the zero value.
func (o *owners) reservationOf(nodename string) reservation {
	o.mu.Lock()
	defer o.mu.Unlock()

	return o.reserved[nodename]
}

// reservedUntil returns until when a Node that does not exist any more keeps what it owns; false if it exists.
func (o *owners) reservedUntil(nodename string) (until time.Time, deleted bool) {
	if _, registered, _ := o.nodes.GetByKey(nodename); registered {
		return time.Time{}, false
	}

	until = o.reservationOf(nodename).until

	return until, !until.IsZero()
}

// others returns the names of the other Nodes that own a name or an address, sorted. requester is nil if the Node does
// not exist.
func (o *owners) others(subject, nodename string, requester *corev1.Node) []string {
	names := o.machines.Owners(subject, nodename)

	for _, name := range o.former.Owners(subject, nodename) {
		if r := o.reservationOf(name); len(r.nodes) == 0 || o.holds(r, subject, nodename, requester) {
			names = append(names, name)
		}
	}

	listed, _ := o.nodes.ByIndex(indexSubjects, subject) // fails only without the index
	observed, _ := o.observed.ByIndex(indexSubjects, subject)

	for _, obj := range append(listed, observed...) {
		if node, ok := obj.(*corev1.Node); ok && node.Name != nodename && o.owns(node, subject, nodename, requester) {
			names = append(names, node.Name)
		}
	}

	slices.Sort(names)

	return slices.Compact(names)
}

// owns reports whether a Node that lists a name or an address owns it as well.
func (o *owners) owns(node *corev1.Node, subject, nodename string, requester *corev1.Node) bool {
	r := o.reservationOf(node.Name)
	isDeleted := slices.ContainsFunc(r.nodes, func(n *corev1.Node) bool { return n.UID == node.UID })

	if isDeleted {
		return o.holds(r, subject, nodename, requester) && o.mayClaim(node, o.former, subject)
	}

	return o.mayClaim(node, o.machines, subject)
}

// mayClaim reports whether a Node's list counts for a name or an address. Kubelets write their Nodes, so it does not if
// the machine has proven to be the Node's and did not report the subject last. What the machine reports is no proof
// either: another machine may respond at its address. So it cannot disown the address at which it responds, the kubelet's
// node IP of the other IP family, and the names and addresses that the operator assigns.
func (o *owners) mayClaim(node *corev1.Node, machines *inventory.Inventory, subject string) bool {
	if !machines.Contradicts(node.Name, subject) {
		return true
	}

	last := machines.Get(node.Name).Last
	isOther := func(addr netip.Addr) bool { return addr.Is4() != last.Endpoint.Is4() }

	provided := nodespec.ProvidedNodeIPs(node)
	if i := slices.IndexFunc(provided, isOther); i >= 0 && last.Endpoint.IsValid() && machine.CanonicalAddress(provided[i]) == subject {
		return true
	}

	policy := o.policy(node, last)

	return slices.ContainsFunc(policy.ExtraNames, func(name string) bool { return machine.CanonicalName(name) == subject }) ||
		slices.ContainsFunc(policy.ExtraIPs, func(addr netip.Addr) bool { return machine.CanonicalAddress(addr) == subject })
}

// holds reports whether a reservation of a name or an address holds against a requester: until it ends, unless the
// machine of the deleted Node is known to be gone, or the subject is known to be the requester's.
func (o *owners) holds(r reservation, subject, nodename string, requester *corev1.Node) bool {
	node := r.nodes[len(r.nodes)-1]

	if !o.clock.Now().Before(r.until) {
		return o.extends(node.Name) // the next sweep does
	}

	former, current := o.former.Get(node.Name), o.machines.Get(nodename)

	return !belongs(subject, node, former.Last, requester, current) && !isReset(node, former) && !isRenamed(node, former, requester, current)
}

// belongs reports whether the subject is known to be the requester's, so that a machine that reported names and addresses
// of others does not keep them after its Node was deleted: the name of a Node that is older than the deleted one, or the
// address at which the requester's machine responds while the machine of the deleted Node responded at another one.
func belongs(subject string, deleted *corev1.Node, former machine.Machine, requester *corev1.Node, current inventory.Entry) bool {
	if requester == nil || current.Condition != inventory.Current {
		return false
	}

	addr, err := netip.ParseAddr(subject)
	if err != nil {
		return subject == machine.CanonicalName(requester.Name) && requester.CreationTimestamp.Before(&deleted.CreationTimestamp)
	}

	return current.Machine.Endpoint.Unmap() == addr && former.Endpoint.IsValid() && former.Endpoint.Unmap() != addr
}

// isReset reports whether the machine of a deleted Node announced a reset before it went silent.
func isReset(node *corev1.Node, former inventory.Entry) bool {
	return isSilent(node, former) && former.Last.Stage == runtime.MachineStageResetting
}

// isRenamed reports whether the machine of a deleted Node is the requester's now: it responds at its former address, with
// its identity. A machine reports its identity itself. So the successor of a control-plane Node must have the label,
// which a worker cannot get, and the identity never suffices while the Node exists.
func isRenamed(node *corev1.Node, former inventory.Entry, requester *corev1.Node, current inventory.Entry) bool {
	return requester != nil && isSilent(node, former) && former.Responding == requester.Name && current.Condition == inventory.Current &&
		former.Last.NodeID != "" && former.Last.Identity() == current.Machine.Identity() &&
		(nodespec.IsControlPlane(requester) || !nodespec.IsControlPlane(node))
}

// isSilent reports whether the kubelet of a deleted Node had stopped to report, and its machine does not respond either.
func isSilent(node *corev1.Node, former inventory.Entry) bool {
	ready := nodespec.ReadyCondition(node)

	return (ready == nil || ready.Status == corev1.ConditionUnknown) &&
		(former.Condition == inventory.Unreachable || former.Condition == inventory.Mismatch)
}
