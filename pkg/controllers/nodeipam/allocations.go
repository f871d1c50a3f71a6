package nodeipam

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"

	"go4.org/netipx"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/apimachinery/pkg/util/sets"
	netutils "k8s.io/utils/net"

	"github.com/talos-ccm/talos-ccm/pkg/cidrset"
	"github.com/talos-ccm/talos-ccm/pkg/internal/events"
)

// allocations records the blocks of all Nodes. It is derived from the Nodes and never saved. A block belongs to a Node
// from its allocation until the Node is deleted; nothing else releases a block.
//
// It is safe for concurrent use: the informer's handlers record Nodes while the workers allocate.
type allocations struct {
	mu     sync.Mutex
	byNode map[string]allocation
	// reservations are prefixes that are never allocated, by owner.
	reservations map[string][]netip.Prefix
	// used contains blocks and reservations, blocks only the blocks, and unproven the blocks that a kubelet may have chosen.
	used, blocks, unproven cidrset.Set
	// released is called after a block or a reservation was released, with mu held.
	released func()
}

type allocation struct {
	uid    types.UID
	blocks []netip.Prefix
	// assigned is true if a kubelet cannot have chosen the blocks.
	assigned bool
	// written is false while the result of the write is not known.
	written bool
	// version is the resourceVersion of the Node with the blocks, or without them if written is false.
	version string
}

func newAllocations(released func()) *allocations {
	return &allocations{byNode: map[string]allocation{}, reservations: map[string][]netip.Prefix{}, released: released}
}

// record records the blocks of a Node from the cache or a list. The Node may be older than the record.
func (a *allocations) record(node *corev1.Node) {
	a.mu.Lock()
	defer a.mu.Unlock()

	known, isKnown := a.byNode[node.Name]
	if isKnown && known.uid != node.UID {
		if !newer(node.ResourceVersion, known.version) {
			return // an earlier Node of the same name
		}

		a.free(node.Name)

		isKnown = false
	}

	blocks := podCIDRs(node)
	if len(blocks) == 0 || isKnown && known.written {
		return
	}

	a.remove(node.Name)
	a.insert(node.Name, allocation{uid: node.UID, blocks: blocks, assigned: isAssigned(node), written: true, version: node.ResourceVersion})
}

func (a *allocations) release(nodename string, uid types.UID) {
	a.mu.Lock()
	defer a.mu.Unlock()

	if known, ok := a.byNode[nodename]; ok && known.uid == uid {
		a.free(nodename)
	}
}

// recordList records a list from the API server. A Node that is not listed is deleted, unless it is newer than the list.
// The cache may be older than the list, and may never contain a Node that existed only for a short time.
func (a *allocations) recordList(list *corev1.NodeList) {
	uids := map[types.UID]bool{}

	for i := range list.Items {
		uids[list.Items[i].UID] = true
		a.record(&list.Items[i])
	}

	a.mu.Lock()
	defer a.mu.Unlock()

	for nodename, known := range a.byNode {
		if !uids[known.uid] && !newer(known.version, list.ResourceVersion) {
			a.free(nodename)
		}
	}
}

func (a *allocations) nodenames() sets.Set[string] {
	a.mu.Lock()
	defer a.mu.Unlock()

	return sets.KeySet(a.byNode)
}

// resolve reports whether podCIDRs must be written to a Node, and returns the blocks if they are already allocated. node
// is the Node in the cache, or nil. resolve releases blocks that can no longer be written to the Node.
func (a *allocations) resolve(nodename string, node *corev1.Node) (blocks []netip.Prefix, pending bool) {
	a.mu.Lock()
	defer a.mu.Unlock()

	known, isKnown := a.byNode[nodename]

	if isKnown && !known.written {
		// The cache has contained the Node for which the blocks were allocated.
		isReplaced := node == nil || node.UID != known.uid
		// A write contains the version of the Node that it was decided for, so it cannot change a later version.
		if isReplaced || len(node.Spec.PodCIDRs) == 0 && newer(node.ResourceVersion, known.version) {
			a.free(nodename)

			known, isKnown = allocation{}, false
		}
	}

	if node == nil || len(node.Spec.PodCIDRs) > 0 {
		return nil, false
	}

	return known.blocks, !isKnown || !known.written
}

// allocate allocates a block of each IP family. If one has no source with a free block, it allocates nothing and returns
// the reason. It also allocates nothing, without a reason, if blocks of the Node were recorded after resolve: the change
// of the Node has queued it again.
func (a *allocations) allocate(node *corev1.Node, sources []familySources) ([]netip.Prefix, *events.Problem) {
	a.mu.Lock()
	defer a.mu.Unlock()

	if _, known := a.byNode[node.Name]; known {
		return nil, nil
	}

	var blocks []netip.Prefix

	for _, r := range sources {
		var (
			block netip.Prefix
			found bool
		)

		for _, s := range r.sources {
			a.withoutTooLarge(s, func() { block, found = a.used.Next(s.Pool) })

			if found {
				break
			}
		}

		if !found {
			problem := newProblem(ReasonExhausted, "Pool %q is exhausted: no free %s block in %v", r.sources[0].name, r.family, r.sources)

			for _, s := range r.sources {
				if larger := a.blocks.Larger(s.CIDR(), s.Bits()); len(larger) > 0 {
					problem.Message += fmt.Sprintf("; Nodes have larger podCIDRs %v in %s", larger, s.CIDR())
				}
			}

			return nil, problem
		}

		blocks = append(blocks, block)
	}

	a.insert(node.Name, allocation{uid: node.UID, blocks: blocks, assigned: true, version: node.ResourceVersion})

	return blocks, nil
}

// withoutTooLarge calls f while used does not contain the podCIDRs that a kubelet may have chosen and that are too large
// for the source. The caller must hold mu.
func (a *allocations) withoutTooLarge(s source, f func()) {
	tooLarge := a.unproven.Larger(s.CIDR(), s.limit)

	for _, podCIDR := range tooLarge {
		a.used.Remove(podCIDR)
	}

	f()

	for _, podCIDR := range tooLarge {
		a.used.Insert(podCIDR)
	}
}

// confirm records that the API server has written the blocks of a Node.
func (a *allocations) confirm(node *corev1.Node) {
	a.mu.Lock()
	defer a.mu.Unlock()

	// The informer may already have reported the write, or the deletion of the Node.
	if known, ok := a.byNode[node.Name]; ok && known.uid == node.UID && !known.written {
		known.written, known.version = true, node.ResourceVersion
		a.byNode[node.Name] = known
	}
}

// reserve replaces the prefixes reserved for owner. They need not be free.
func (a *allocations) reserve(owner string, prefixes []netip.Prefix) {
	a.mu.Lock()
	defer a.mu.Unlock()

	before := a.reservations[owner]
	if slices.Equal(before, prefixes) {
		return
	}

	for _, p := range prefixes {
		a.used.Insert(p)
	}

	for _, p := range before {
		a.used.Remove(p)
	}

	a.reservations[owner] = prefixes

	if len(prefixes) == 0 {
		delete(a.reservations, owner)
	}

	if len(before) > 0 {
		a.released()
	}
}

// overlap returns a problem if blocks of other Nodes overlap those of the Node.
func (a *allocations) overlap(node *corev1.Node) *events.Problem {
	a.mu.Lock()
	defer a.mu.Unlock()

	own, known := a.byNode[node.Name]
	if !known {
		return nil
	}

	a.remove(node.Name)
	defer a.insert(node.Name, own)

	if !slices.ContainsFunc(own.blocks, a.blocks.Overlaps) {
		return nil // the usual case, without a search of all Nodes
	}

	var others []string

	for name, other := range a.byNode {
		if slices.ContainsFunc(other.blocks, func(p netip.Prefix) bool { return slices.ContainsFunc(own.blocks, p.Overlaps) }) {
			others = append(others, fmt.Sprintf("%s %v", name, other.blocks))
		}
	}

	slices.Sort(others)

	return newProblem(ReasonOverlap, "podCIDRs %v overlap those of other Nodes: %s; delete the Node with the wrong podCIDRs, and let it register again to have others assigned",
		node.Spec.PodCIDRs, strings.Join(others, ", "))
}

func (a *allocations) stats(s source) (stats cidrset.Stats) {
	a.mu.Lock()
	defer a.mu.Unlock()

	a.withoutTooLarge(s, func() { stats = a.used.Stats(s.Pool) })

	return stats
}

func (a *allocations) insert(nodename string, added allocation) {
	a.byNode[nodename] = added

	for _, p := range added.blocks {
		a.used.Insert(p)
		a.blocks.Insert(p)

		if !added.assigned {
			a.unproven.Insert(p)
		}
	}
}

func (a *allocations) free(nodename string) {
	a.remove(nodename)
	a.released()
}

func (a *allocations) remove(nodename string) {
	for _, p := range a.byNode[nodename].blocks {
		a.used.Remove(p)
		a.blocks.Remove(p)

		if !a.byNode[nodename].assigned {
			a.unproven.Remove(p)
		}
	}

	delete(a.byNode, nodename)
}

// isAssigned reports whether this controller has written the podCIDRs of a Node, which cannot be changed.
func isAssigned(node *corev1.Node) bool { return node.Labels[labelAssigned] != "" }

// podCIDRs returns the podCIDRs of a Node. The API server accepts no others, and old clusters contain spellings that it
// rejects today. It fills in podCIDRs if only podCIDR is set.
func podCIDRs(node *corev1.Node) (blocks []netip.Prefix) {
	for _, s := range node.Spec.PodCIDRs {
		if _, network, err := netutils.ParseCIDRSloppy(s); err == nil {
			if block, ok := netipx.FromStdIPNet(network); ok {
				blocks = append(blocks, block)
			}
		}
	}

	return blocks
}

// newer reports whether the first resourceVersion is later.
func newer(version, than string) bool {
	order, err := resourceversion.CompareResourceVersion(version, than)

	return err == nil && order > 0
}
