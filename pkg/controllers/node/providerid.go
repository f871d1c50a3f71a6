package node

import (
	"fmt"
	"net/netip"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/talos-ccm/talos-ccm/pkg/internal/events"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
)

// providerID returns the providerID of the Node, and a problem to report. A Node without a providerID gets the desired
// one unless another Node owns it. If the problem is ReasonProviderIDInUse, the Node must not be written.
//
// A renamed machine leaves behind its old Node, which has the providerID. The new Node is written without a providerID,
// and gets it after the old Node is deleted.
func (p planner) providerID(s state, owner string) (string, *events.Problem) {
	node, desired := s.node, s.spec.ProviderID

	if actual := node.Spec.ProviderID; actual != "" {
		if rivals := p.inventory.Rivals(node.Name); len(rivals) > 0 {
			return actual, &events.Problem{Reason: ReasonProviderIDMismatch, Subject: "hostname", Message: fmt.Sprintf("Two machines have the hostname of "+
				"node %s, at %s and %s, and its providerID is %s; change the hostname of one of them", node.Name, rivals[0], rivals[1], actual)}
		}

		if s.entry.Condition == inventory.Current && differentInstances(actual, desired) {
			return actual, &events.Problem{Reason: ReasonProviderIDMismatch, Message: fmt.Sprintf("Node has providerID %s, but its machine is %s now; "+
				"drain and delete the node, and then reboot the machine, so that it registers again", actual, desired)}
		}

		return actual, nil
	}

	switch {
	case owner == "":
		return desired, nil
	case p.inventory.RenamedTo(owner) == node.Name, p.inventory.Get(owner).Condition == inventory.Mismatch:
		return "", &events.Problem{Reason: ReasonRenamed, Message: fmt.Sprintf("ProviderID %s is not set yet: it is used by node %s, "+
			"probably the former name of this machine; the lifecycle controller deletes that node after its grace period if it has seen the "+
			"renaming, or delete it yourself", desired, owner)}
	default:
		return "", &events.Problem{Reason: ReasonProviderIDInUse, Message: fmt.Sprintf(
			"ProviderID %s is already used by node %s; delete that node if its machine no longer exists", desired, owner)}
	}
}

// counts reports whether the Node is known, or its machine has responded to this leader, or may do so once it is dialed.
// With only the bootstrap token, anyone can register other Nodes, with any providerID.
func (p planner) counts(node *corev1.Node) bool {
	entry := p.inventory.Get(node.Name)

	return nodespec.IsKnown(node) || entry.Last.Nodename != "" || (entry.Condition == inventory.Unknown && nodespec.IsTalos(node))
}

// indexProviderID is an index of Nodes.
const indexProviderID = "providerID"

var indexers = cache.Indexers{indexProviderID: func(obj any) ([]string, error) {
	if node, ok := obj.(*corev1.Node); ok && node.Spec.ProviderID != "" {
		return []string{node.Spec.ProviderID}, nil
	}

	return nil, nil
}}

// providerIDs ensure that no two Nodes get one providerID.
type providerIDs struct {
	// nodes has indexProviderID.
	nodes cache.Indexer
	// counts reports whether the providerID of a Node counts.
	counts func(*corev1.Node) bool

	mu sync.Mutex
	// reserved are the providerIDs that Nodes will get, by nodename. The cache shows a providerID only after it is
	// written, and several Nodes are synced at the same time.
	reserved map[string]string
}

func newProviderIDs(nodes cache.Indexer, counts func(*corev1.Node) bool) *providerIDs {
	return &providerIDs{nodes: nodes, counts: counts, reserved: map[string]string{}}
}

// assign reserves the desired providerID for a Node without one, and returns the Node that already owns it, if any. It
// ends the reservation of a Node that must not get one. For a Node with a providerID, it returns another Node that has it.
func (p *providerIDs) assign(s state) (owner string) {
	switch {
	case s.node.Spec.ProviderID != "": // the reservation ends when the cache shows it
		if others := p.others(s.node.Spec.ProviderID, s.node.Name); len(others) > 0 {
			return others[0].Name
		}
	case s.spec != nil:
		return p.reserve(s.spec.ProviderID, s.node.Name)
	case !s.managed || s.entry.Condition == inventory.Mismatch:
		p.release(s.node.Name)
	}

	return ""
}

// others returns the other Nodes with the providerID.
func (p *providerIDs) others(providerID, nodename string) (list []*corev1.Node) {
	objs, _ := p.nodes.ByIndex(indexProviderID, providerID) // fails for an unknown index only

	for _, obj := range objs {
		if other, isNode := obj.(*corev1.Node); isNode && other.Name != nodename {
			list = append(list, other)
		}
	}

	return list
}

// reserve reserves the providerID for the Node, in place of an earlier reservation. If another Node has the providerID,
// and it counts, or has reserved it, reserve changes no reservation and returns the name of that Node.
func (p *providerIDs) reserve(providerID, nodename string) (owner string) {
	p.mu.Lock()
	defer p.mu.Unlock()

	for _, other := range p.others(providerID, nodename) {
		if p.counts(other) {
			return other.Name
		}
	}

	for other, reserved := range p.reserved {
		if reserved == providerID && other != nodename {
			return other
		}
	}

	p.reserved[nodename] = providerID

	return ""
}

// release ends the reservation of a Node. Nodes that wait for the providerID are synced again within a minute.
func (p *providerIDs) release(nodename string) {
	p.mu.Lock()
	defer p.mu.Unlock()

	delete(p.reserved, nodename)
}

// differentInstances reports whether two providerIDs certainly name two instances. It compares only providerIDs of one
// form: the upstream Talos CCM and --provider-id-fallback=node-ip name the same machine in different ways, such as
// talos://metal/10.0.0.1 and talos://metal/<UUID>. Addresses do not identify instances.
func differentInstances(a, b string) bool {
	prefixA, idA := splitProviderID(a)
	prefixB, idB := splitProviderID(b)

	if strings.Count(prefixA, "/") != strings.Count(prefixB, "/") || scheme(prefixA) != scheme(prefixB) || strings.EqualFold(idA, idB) {
		return false
	}

	return !isAddress(idA) && !isAddress(idB) && isUUID(idA) == isUUID(idB)
}

// splitProviderID returns the providerID up to its last slash, and the rest, which identifies the instance.
func splitProviderID(providerID string) (prefix, id string) {
	i := strings.LastIndex(providerID, "/") + 1

	return providerID[:i], providerID[i:]
}

// scheme returns the scheme, with the platform of a providerID of this program.
func scheme(prefix string) string {
	if strings.HasPrefix(prefix, "talos://") {
		return prefix
	}

	name, _, _ := strings.Cut(prefix, "://")

	return name
}

func isAddress(id string) bool {
	_, err := netip.ParseAddr(id)

	return err == nil
}

func isUUID(id string) bool {
	const length = 36

	return len(id) == length && strings.Count(id, "-") == 4
}
