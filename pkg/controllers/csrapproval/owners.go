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
	retention = inventory.Retention

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

	// observed holds the Nodes that the event handlers have received, by name and UID, with indexSubjects: the
	// informer removes a Node from its own indexer before it calls handlers. Deleted Nodes stay until their
	// reservation ends.
	observed cache.Indexer
	// The machines of deleted Nodes, which the reflector watches while they respond. If several Nodes of one name were
	// deleted, it is the machine of the first, so that another one with its name cannot take its place.
	former    *inventory.Inventory
	reflector *reflector.Reflector

	mu       sync.Mutex
	reserved map[string][]reservation // by nodename, in the order of deletion; the lists are never changed
}

// reservation is for a deleted Node.
type reservation struct {
	node  *corev1.Node
	until time.Time
}

func newOwners(cfg Config, nodes cache.Indexer) *owners {
	former := inventory.New(cfg.Clock.Now)
	cfg.Inventory.HandOver(former)

	return &owners{
		nodes: nodes, machines: cfg.Inventory, policy: cfg.Policy, clock: cfg.Clock,
		observed:  cache.NewIndexer(incarnation, cache.Indexers{indexSubjects: subjectsOf}),
		former:    former,
		reflector: reflector.New(former, cfg.Dial, cfg.Clock, cfg.Facts...),
		reserved:  map[string][]reservation{},
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
	o.reserved[node.Name] = append(slices.Clone(o.reserved[node.Name]), reservation{node, o.clock.Now().Add(retention)})
	o.watch(node.Name)
}

// watch watches the machine of the first deleted Node of a name. The caller holds o.mu.
func (o *owners) watch(nodename string) {
	if list := o.reserved[nodename]; len(list) > 0 && nodespec.IsTalos(list[0].node) {
		o.reflector.Track(nodename, nodespec.DialAddresses(list[0].node))
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

// extends reports whether the first reservation of a name is extended: the machine responds, and is not known to be the
// machine of the Node that has the name now.
func (o *owners) extends(node *corev1.Node, former inventory.Entry) bool {
	return former.Condition == inventory.Current && !o.hasReturned(node, former, o.machines.Get(node.Name))
}

// sweep extends reservations and removes those that have ended. It reports whether it has removed any.
func (o *owners) sweep() (removed bool) {
	removed, gone := o.end()

	// Without o.mu: Untrack waits until the connection is closed.
	for _, name := range gone {
		o.reflector.Untrack(name)
		o.former.Forget(name) // the reflector tracks Talos Nodes only

		o.mu.Lock()
		o.watch(name)
		o.mu.Unlock()
	}

	return removed
}

// end extends reservations and removes those that have ended. It returns the nodenames whose former machines do not
// count any more.
func (o *owners) end() (removed bool, gone []string) {
	o.mu.Lock()
	defer o.mu.Unlock()

	now := o.clock.Now()

	for name, list := range o.reserved {
		list = slices.Clone(list)
		first := list[0].node

		if o.extends(first, o.former.Get(name)) {
			list[0].until = now.Add(retention)
		}

		o.reserved[name] = slices.DeleteFunc(slices.Clone(list), func(r reservation) bool { return !now.Before(r.until) })

		for _, r := range list {
			if !now.Before(r.until) {
				_ = o.observed.Delete(r.node) // fails only without a key
				removed = true
			}
		}

		if !now.Before(list[0].until) {
			gone = append(gone, name)
		}

		if len(o.reserved[name]) == 0 {
			delete(o.reserved, name)
		}
	}

	for _, name := range o.nodes.ListKeys() {
		if len(o.reserved[name]) == 0 && o.isLive(name) && o.former.Get(name).Last.Nodename != "" {
			gone = append(gone, name)
		}
	}

	return removed, gone
}

// isLive reports whether a Node exists and the event handlers have received it, so that former Nodes of its name are
// reserved.
func (o *owners) isLive(nodename string) bool {
	obj, registered, _ := o.nodes.GetByKey(nodename) // fails only without a key
	if !registered {
		return false
	}

	key, _ := incarnation(obj)
	_, observed, _ := o.observed.GetByKey(key)

	return observed
}

// reservationsOf returns the reservations for a nodename.
func (o *owners) reservationsOf(nodename string) []reservation {
	o.mu.Lock()
	defer o.mu.Unlock()

	return o.reserved[nodename]
}

// reservedUntil returns until when deleted Nodes of an owner's name keep what they own from the Node nodename; false if
// the owner is a Node that exists.
func (o *owners) reservedUntil(owner, nodename string) (until time.Time, deleted bool) {
	if _, registered, _ := o.nodes.GetByKey(owner); registered && owner != nodename {
		return time.Time{}, false
	}

	for _, r := range o.reservationsOf(owner) {
		if r.until.After(until) {
			until = r.until
		}
	}

	return until, !until.IsZero()
}

// others returns the names of the other Nodes that own a name or an address, sorted: nodename itself if a deleted Node
// of that name does. requester is nil if the Node does not exist.
func (o *owners) others(subject, nodename string, requester *corev1.Node) []string {
	names := slices.Concat(
		o.machines.Owners(subject, nodename), o.machines.DroppedBy(subject, nodename), o.former.DroppedBy(subject, nodename),
	)

	for _, name := range o.former.Owners(subject, "") {
		list := o.reservationsOf(name)

		// A view without a reservation was handed over just before the reservation is made, unless the Node exists.
		if (len(list) == 0 && name != nodename && !o.isLive(name)) ||
			(len(list) > 0 && o.holds(list[0], o.former.Get(name), subject, nodename, requester)) {
			names = append(names, name)
		}
	}

	listed, _ := o.nodes.ByIndex(indexSubjects, subject) // fails only without the index
	observed, _ := o.observed.ByIndex(indexSubjects, subject)

	for _, obj := range append(listed, observed...) {
		if node, ok := obj.(*corev1.Node); ok && o.owns(node, subject, nodename, requester) {
			names = append(names, node.Name)
		}
	}

	slices.Sort(names)

	return slices.Compact(names)
}

// owns reports whether a Node that lists a name or an address owns it as well, and is not the requester.
func (o *owners) owns(node *corev1.Node, subject, nodename string, requester *corev1.Node) bool {
	list := o.reservationsOf(node.Name)

	switch i := slices.IndexFunc(list, func(r reservation) bool { return r.node.UID == node.UID }); i {
	case -1:
		return node.Name != nodename && o.mayClaim(node, o.machines, subject)
	case 0:
		return o.holds(list[i], o.former.Get(node.Name), subject, nodename, requester) && o.mayClaim(node, o.former, subject)
	default:
		return o.holds(list[i], inventory.Entry{}, subject, nodename, requester)
	}
}

// mayClaim reports whether a Node's list counts for a name or an address. Kubelets write their Nodes, so it does not if
// the machine has proven to be the Node's and did not report the subject last. What the machine reports is no proof
// either: another machine may respond at its address. So it cannot disown the address at which it responds, the
// kubelet's node IP of the other IP family, and the names and addresses that the operator assigns.
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

	return slices.ContainsFunc(slices.Concat(policy.ExtraNames, policy.PendingNames), func(name string) bool { return machine.CanonicalName(name) == subject }) ||
		slices.ContainsFunc(policy.ExtraIPs, func(addr netip.Addr) bool { return machine.CanonicalAddress(addr) == subject })
}

// holds reports whether a reservation of a name or an address holds against a requester: until it ends, unless the
// machine of the deleted Node is known to be gone, or the subject is known to be the requester's.
func (o *owners) holds(r reservation, former inventory.Entry, subject, nodename string, requester *corev1.Node) bool {
	node, current := r.node, o.machines.Get(nodename)

	switch {
	case !o.clock.Now().Before(r.until) && !o.extends(node, former), isReset(node, former): // the next sweep extends
		return false
	case node.Name == nodename:
		_, err := netip.ParseAddr(subject)
		isName := err != nil

		return !o.hasReturned(node, former, current) && !(isName && isUnresponsive(former))
	default:
		return !belongs(subject, node, former.Last, requester, current) && !isRenamed(node, former, requester, current)
	}
}

// hasReturned reports whether the machine of a deleted Node is the one that responds under its name now: at one of its
// former addresses, or with its node ID while no machine responds under that name at the former addresses. A machine
// reports its node ID itself.
func (o *owners) hasReturned(node *corev1.Node, former, current inventory.Entry) bool {
	if current.Condition != inventory.Current {
		return false
	}

	if isUnresponsive(former) && former.Last.NodeID != "" && former.Last.NodeID == current.Machine.NodeID {
		return true
	}

	endpoint := machine.CanonicalAddress(current.Machine.Endpoint)

	if former.Last.Nodename != "" {
		return slices.Contains(o.former.Owners(endpoint, ""), node.Name)
	}

	listed, _ := subjectsOf(node)

	return slices.Contains(listed, endpoint)
}

// belongs reports whether the subject is known to be the requester's, so that a machine that reported names and
// addresses of others does not keep them after its Node was deleted: the name of a Node that is older than the deleted
// one, or the address at which the requester's machine responds, while the machine of the deleted Node responded at
// another one, or never and the requester's Node is older.
func belongs(subject string, deleted *corev1.Node, former machine.Machine, requester *corev1.Node, current inventory.Entry) bool {
	if requester == nil || current.Condition != inventory.Current {
		return false
	}

	isOlder := requester.CreationTimestamp.Before(&deleted.CreationTimestamp)

	addr, err := netip.ParseAddr(subject)
	if err != nil {
		return subject == machine.CanonicalName(requester.Name) && isOlder
	}

	if former.Nodename == "" {
		return current.Machine.Endpoint.Unmap() == addr && isOlder
	}

	return current.Machine.Endpoint.Unmap() == addr && former.Endpoint.IsValid() && former.Endpoint.Unmap() != addr
}

// isReset reports whether the machine of a deleted Node announced a reset before it went silent.
func isReset(node *corev1.Node, former inventory.Entry) bool {
	return isSilent(node, former) && former.Last.Stage == runtime.MachineStageResetting
}

// isRenamed reports whether the machine of a deleted Node is the requester's now: it responds at its former address,
// with its identity. A machine reports its identity itself. So the successor of a control-plane Node must have the
// label, which a worker cannot get, and the identity never suffices while the Node exists.
func isRenamed(node *corev1.Node, former inventory.Entry, requester *corev1.Node, current inventory.Entry) bool {
	return requester != nil && isSilent(node, former) && former.Responding == requester.Name && current.Condition == inventory.Current &&
		former.Last.NodeID != "" && former.Last.Identity() == current.Machine.Identity() &&
		(nodespec.IsControlPlane(requester) || !nodespec.IsControlPlane(node))
}

// isSilent reports whether the kubelet of a deleted Node had stopped to report, and its machine does not respond
// either.
func isSilent(node *corev1.Node, former inventory.Entry) bool {
	ready := nodespec.ReadyCondition(node)

	return (ready == nil || ready.Status == corev1.ConditionUnknown) && isUnresponsive(former)
}

// isUnresponsive reports whether the machine of a deleted Node is known not to respond.
func isUnresponsive(former inventory.Entry) bool {
	return former.Condition == inventory.Unreachable || former.Condition == inventory.Mismatch
}
