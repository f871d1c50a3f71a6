// Package claims holds the owners of names and addresses.
//
// A machine claims the names and addresses that it reports, and a Node those that it lists, the addresses in its record
// (package noderecord), and those that rules set. The inventory sets the claims of machines, and NodeChanged those of
// Nodes. One lock covers all claims, so that a name or address has an owner at each moment of a deletion. A claim ends
//   - Retention after a machine stopped reporting the value, or the rules no longer set the address of the Node;
//   - at once if a Node stops listing the value, because kubelets write their Nodes;
//   - at once if the record of a Node no longer has the address, which no kubelet can change;
//   - Retention after the Node was deleted, for all that it listed and its machine reported: the machine may still run, and
//     its kubelet does not register the Node again until it restarts.
//
// After a change of leader, deleted Nodes have no claims. Claims are not verified: use them to refuse a name or address,
// never to grant one.
package claims

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/noderecord"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
)

const (
	// Retention is how long a claim lasts after a machine stops reporting the value, or after the Node is deleted.
	Retention = 15 * time.Minute

	// maxValues limits what one Node lists, and what one machine no longer reports. Machines report fewer at once.
	maxValues = 2 * machine.MaxSubjects

	// purgeInterval keeps the deletion of many Nodes at once cheap.
	purgeInterval = time.Minute
)

// Claims is safe for concurrent use. Use New.
type Claims struct {
	now func() time.Time

	mu       sync.RWMutex
	owners   map[string][]*owner // by name or address in canonical form; most have one or two
	machines map[string]*owner   // by the names of their Nodes
	nodes    map[string]*owner   // that exist, by name
	rules    map[string]*owner   // of the addresses that rules set, by the names of the Nodes
	deleted  []*owner            // Nodes that were deleted, the oldest first
	purged   time.Time           // when claims that have ended were last removed
}

// owner is a machine, a Node, a deleted Node, or the rules for a Node.
type owner struct {
	nodename string
	node     *corev1.Node         // nil for a machine and for rules
	machine  machine.Machine      // as it last responded
	live     []string             // what the machine reports (at least its nodename), or what the Node lists or its record has
	ended    map[string]time.Time // when claims end to what the machine no longer reports
	until    time.Time            // when the claims of a deleted Node end, except those in ended; zero for all others

	// isDeleted is true for a machine whose Node was deleted, and which the inventory has not forgotten yet.
	isDeleted bool
	// last is, for a machine that the inventory has forgotten, what it reported, until DeleteNode takes it. For a deleted
	// Node, it is what its machine reported, or what the Node listed if its machine has never responded.
	last []string
}

// New returns empty Claims that read the time from now.
func New(now func() time.Time) *Claims {
	return &Claims{
		now: now, owners: map[string][]*owner{},
		machines: map[string]*owner{}, nodes: map[string]*owner{}, rules: map[string]*owner{},
	}
}

// SetMachine replaces the claims of the machine of a Node. The zero Machine ends them: the inventory has forgotten it.
func (c *Claims) SetMachine(nodename string, m machine.Machine) {
	c.mu.Lock()
	defer c.mu.Unlock()

	c.purge()

	o, reported := ownerOf(c.machines, nodename), append(m.ReportedNames(), addressesOf(m)...)
	if len(reported) == 0 {
		if !o.isDeleted && len(o.live) > 0 {
			o.last = o.live
		}

		o.isDeleted = false
	}

	o.machine = m
	c.replace(o, reported)
}

// NodeChanged sets the claims of a Node after each change; see nodes.Watch.
func (c *Claims) NodeChanged(before, after *corev1.Node) {
	if after == nil {
		c.DeleteNode(before)
	} else {
		c.SetNode(after)
	}
}

// SetNode replaces the claims of a Node that exists.
func (c *Claims) SetNode(node *corev1.Node) {
	c.mu.Lock()
	defer c.mu.Unlock()

	o := ownerOf(c.nodes, node.Name)
	o.node = node
	c.replace(o, append(ListedBy(node), recordedFor(node)...))
	c.setRules(node.Name, noderecord.RuleAddresses(node))
}

func (c *Claims) setRules(nodename string, addresses []netip.Addr) {
	if len(addresses) > 0 || c.rules[nodename] != nil {
		c.replace(ownerOf(c.rules, nodename), canonical(addresses...))
	}
}

// DeleteNode replaces the claims of a Node that exists with those of a deleted Node.
func (c *Claims) DeleteNode(node *corev1.Node) {
	c.mu.Lock()
	defer c.mu.Unlock()

	c.purge()

	o, m := ownerOf(c.nodes, node.Name), ownerOf(c.machines, node.Name)
	delete(c.nodes, node.Name)
	c.setRules(node.Name, nil)
	c.deleted = append(c.deleted, o)

	listed, reported := append(ListedBy(node), recordedFor(node)...), m.last
	if len(reported) == 0 {
		reported, m.isDeleted = m.live, len(m.live) > 0
	}

	o.node, o.until, o.last, m.last = node, c.now().Add(Retention), reported, nil
	if len(reported) == 0 {
		o.last = listed
	}

	c.replace(o, append(listed, reported...))

	for subject, until := range m.ended {
		if !slices.Contains(c.owners[subject], o) {
			o.ended[subject] = until
			c.owners[subject] = append(c.owners[subject], o)
		}
	}
}

func ownerOf(owners map[string]*owner, nodename string) *owner {
	if owners[nodename] == nil {
		owners[nodename] = &owner{nodename: nodename, ended: map[string]time.Time{}}
	}

	return owners[nodename]
}

// replace replaces the live claims of an owner. It requires c.mu, as all private methods do.
func (c *Claims) replace(o *owner, subjects []string) {
	before, after := sets.New(o.live...), sets.New(subjects...)
	o.live = after.UnsortedList()

	for subject := range before.Difference(after) {
		if o.node == nil && len(o.ended) < maxValues { // evicting an earlier value would free what may be another machine's
			o.ended[subject] = c.now().Add(Retention)
		} else {
			c.remove(o, subject)
		}
	}

	for subject := range after.Difference(before) {
		if _, isOwner := o.ended[subject]; isOwner {
			delete(o.ended, subject)
		} else {
			c.owners[subject] = append(c.owners[subject], o)
		}
	}
}

func (c *Claims) remove(o *owner, subject string) {
	c.owners[subject] = slices.DeleteFunc(c.owners[subject], func(other *owner) bool { return other == o })

	if len(c.owners[subject]) == 0 {
		delete(c.owners, subject)
	}
}

// purge removes claims that have ended.
func (c *Claims) purge() {
	now := c.now()
	if now.Sub(c.purged) < purgeInterval {
		return
	}

	c.purged = now

	purge := func(_ string, o *owner) (isEmpty bool) {
		for subject, until := range o.ended {
			if !now.Before(until) {
				delete(o.ended, subject)
				c.remove(o, subject)
			}
		}

		if !o.until.IsZero() && !now.Before(o.until) {
			c.replace(o, nil)
		}

		return len(o.live)+len(o.ended) == 0
	}

	maps.DeleteFunc(c.machines, purge)
	maps.DeleteFunc(c.rules, purge)
	c.deleted = slices.DeleteFunc(c.deleted, func(o *owner) bool { return purge("", o) })
}

// Requester is the Node that requests a name or an address.
type Requester struct {
	Nodename   string
	UID        types.UID  // empty if the Node does not exist
	Endpoint   netip.Addr // at which the machine responds; the zero value if it does not
	ObservedAt time.Time  // when the machine was last read
}

// Of returns the Nodes that own a name or an address, given in canonical form. owners maps each to the time when its claim
// ends if its Node was deleted, else to zero. The requester's own Node is omitted, but not a deleted Node of its name.
// contradicted are Nodes that list the value, and whose machines did not report it: they own it only if the configuration
// assigns it to them.
func (c *Claims) Of(subject string, by Requester) (owners map[string]time.Time, contradicted []*corev1.Node) {
	c.mu.RLock()
	defer c.mu.RUnlock()

	return c.of(c.owners[subject], subject, by)
}

// Reserve reserves an address that a rule sets for the requester, for at least Retention. The Node keeps it with the label
// that records it. Reserve returns another owner instead if there is one. With only the bootstrap token, anyone can register
// Nodes and list addresses in them: Nodes that are not known do not count.
func (c *Claims) Reserve(addr netip.Addr, by Requester) (nodename string) {
	c.mu.Lock()
	defer c.mu.Unlock()

	c.purge()

	subject := machine.CanonicalAddress(addr)

	counting := slices.DeleteFunc(slices.Clone(c.owners[subject]), func(o *owner) bool { return o.node != nil && !nodespec.IsKnown(o.node) })
	if owners, _ := c.of(counting, subject, by); len(owners) > 0 {
		return slices.Min(slices.Collect(maps.Keys(owners)))
	}

	o := ownerOf(c.rules, by.Nodename)
	if !slices.Contains(c.owners[subject], o) {
		if len(o.ended) >= maxValues { // such as of a Node that is not written
			return by.Nodename
		}

		c.owners[subject] = append(c.owners[subject], o)
	}

	if !slices.Contains(o.live, subject) {
		o.ended[subject] = c.now().Add(Retention)
	}

	return ""
}

// of is Of with the given owners.
func (c *Claims) of(all []*owner, subject string, by Requester) (owners map[string]time.Time, contradicted []*corev1.Node) {
	owners = map[string]time.Time{}

	var existing []string

	if o := c.nodes[by.Nodename]; o != nil && by.UID != "" && by.UID != o.node.UID { // replaced, and DeleteNode was not called yet
		existing = append(existing, o.nodename)
	}

	for _, o := range all {
		until := cmp.Or(o.ended[subject], o.until)

		switch {
		case !o.blocks(by, subject, until, c.now()):
		case !o.until.IsZero():
			owners[o.nodename] = until
		case !until.IsZero():
			if owners[o.nodename].IsZero() { // no deleted Node of the same name
				owners[o.nodename] = time.Time{}
			}
		case c.contradicts(o, subject):
			contradicted = append(contradicted, o.node)
		default:
			existing = append(existing, o.nodename)
		}
	}

	for _, nodename := range existing {
		owners[nodename] = time.Time{}
	}

	return owners, contradicted
}

// blocks reports whether an owner keeps a requester from a value, until its claim ends. Of Nodes with the requester's name,
// only deleted ones do. If the requester has the machine of a deleted Node, it gets everything. If its machine differs, it
// gets only its nodename, and only if the deleted Node was a worker. The machine is the same if it responds at an address of
// the deleted Node's. Views from before the deletion do not count: the inventory may not have forgotten that machine yet.
func (o *owner) blocks(by Requester, subject string, until, now time.Time) bool {
	_, err := netip.ParseAddr(subject)
	isNodename := err != nil && subject == machine.CanonicalName(o.nodename)

	switch {
	case !until.IsZero() && !now.Before(until):
		return false
	case o.nodename != by.Nodename:
		return true
	case o.until.IsZero(), isNodename && !nodespec.IsControlPlane(o.node):
		return false
	default:
		return !by.Endpoint.IsValid() || by.ObservedAt.Before(o.until.Add(-Retention)) || !slices.Contains(o.last, machine.CanonicalAddress(by.Endpoint))
	}
}

// contradicts reports whether the machine of a Node has responded and did not report a value that the Node lists. Kubelets
// write their Nodes. But an attacker who took over the Node's address could respond in place of the machine and omit
// values. Therefore, nothing contradicts the kubelet's node IP of the IP family that was not dialed. The dialed one is the
// endpoint, which counts as reported. Nothing contradicts the record of a Node, which follows its machine (package recorder).
func (c *Claims) contradicts(o *owner, subject string) bool {
	m := c.machines[o.nodename]
	if o.node == nil || m == nil || len(m.live) == 0 {
		return false
	}

	isReported := m.ended[subject].IsZero() && slices.Contains(c.owners[subject], m)
	if isReported || slices.Contains(recordedFor(o.node), subject) {
		return false
	}

	provided, endpoint := nodespec.ProvidedNodeIPs(o.node), m.machine.Endpoint
	i := slices.IndexFunc(provided, func(addr netip.Addr) bool { return addr.Is4() != endpoint.Is4() })

	return i < 0 || !endpoint.IsValid() || machine.CanonicalAddress(provided[i]) != subject
}

// ReportedBy returns the other nodenames with machines that report a name or an address, given in canonical form, as far
// as is known: it includes machines that no longer respond.
func (c *Claims) ReportedBy(subject, nodename string) (nodenames []string) {
	c.mu.RLock()
	defer c.mu.RUnlock()

	for _, o := range c.owners[subject] {
		if o == c.machines[o.nodename] && o.nodename != nodename && o.ended[subject].IsZero() {
			nodenames = append(nodenames, o.nodename)
		}
	}

	return nodenames
}

// Deleted returns the Nodes with the name of a Node that were deleted less than Retention ago, the oldest first.
func (c *Claims) Deleted(node *corev1.Node) (nodes []*corev1.Node) {
	c.mu.RLock()
	defer c.mu.RUnlock()

	for _, o := range c.deleted {
		if o.nodename == node.Name && c.now().Before(o.until) {
			nodes = append(nodes, o.node)
		}
	}

	if o := c.nodes[node.Name]; o != nil && o.node.UID != node.UID { // replaced, and DeleteNode was not called yet
		nodes = append(nodes, o.node)
	}

	return nodes
}

// ListedBy returns a Node's name and addresses in canonical form. It includes the node IPs that its kubelet was started
// with even if the status does not list them. The node controller also writes the status, and a different machine may
// respond at the Node's address. If the Node lists more than maxValues, the annotation with the node IPs is cut off: the node
// controller corrects the status, but nobody the annotation.
func ListedBy(node *corev1.Node) []string {
	list := []string{machine.CanonicalName(node.Name)}

	for _, a := range node.Status.Addresses {
		if addr, err := netip.ParseAddr(a.Address); err == nil {
			list = append(list, machine.CanonicalAddress(addr))
		} else if name := machine.CanonicalName(a.Address); name != "" {
			list = append(list, name)
		}
	}

	for _, addr := range nodespec.ProvidedNodeIPs(node) {
		list = append(list, machine.CanonicalAddress(addr))
	}

	return list[:min(len(list), maxValues)]
}

// recordedFor returns the addresses in the record of a Node and those that rules set, in canonical form.
func recordedFor(node *corev1.Node) []string {
	record := noderecord.Of(node)

	return canonical(append(noderecord.RuleAddresses(node), record.Address, record.OtherAddress)...)
}

// canonical returns the valid addresses in canonical form.
func canonical(addresses ...netip.Addr) (list []string) {
	for _, addr := range addresses {
		if addr.IsValid() {
			list = append(list, machine.CanonicalAddress(addr))
		}
	}

	return list
}

// addressesOf returns the addresses that m reports as its own, and the address at which it responds, in canonical form. It
// omits the addresses of Services, of which kube-proxy puts thousands on every machine. It includes addresses that the
// machine must not use as node IP.
func addressesOf(m machine.Machine) []string {
	list := make([]string, 0, len(m.Addresses)+len(m.NodeIPs)+1)

	if m.Endpoint.IsValid() {
		list = append(list, machine.CanonicalAddress(m.Endpoint))
	}

	for _, addr := range m.NodeIPs {
		list = append(list, machine.CanonicalAddress(addr))
	}

	for _, a := range m.Addresses {
		if addr := a.Prefix.Addr(); addr.Unmap().IsGlobalUnicast() && !m.IsService(a) {
			list = append(list, machine.CanonicalAddress(addr))
		}
	}

	return list
}
