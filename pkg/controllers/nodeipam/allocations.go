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
	netutils "k8s.io/utils/net"

	"github.com/talos-ccm/talos-ccm/pkg/cidrset"
	"github.com/talos-ccm/talos-ccm/pkg/internal/events"
)

// allocations records which blocks are in use. It is derived from the Nodes and never saved: a block belongs to a Node
// from its allocation until the Node is deleted. Nothing else releases a block.
//
// It is safe for concurrent use: the informer observes Nodes while the workers allocate.
type allocations struct {
	mu      sync.Mutex
	entries map[string]entry // by nodename
	// reservations are prefixes that are never allocated, by owner.
	reservations map[string][]netip.Prefix
	// used contains blocks and reservations, blocks only the blocks.
	used, blocks cidrset.Set
	// released is called after a block or a reservation was released, with mu held.
	released func()
}

// entry holds the blocks of one Node.
type entry struct {
	uid    types.UID
	blocks []netip.Prefix
	state  state
	// version is the resourceVersion of the Node in which the state was seen.
	version string
}

// state is how the blocks of an entry are known. All but the first are expectations that the cache has yet to confirm.
type state int

const (
	// cached: the cache shows the blocks, and will show the deletion of the Node.
	cached state = iota
	// listed: the API server listed the blocks.
	listed
	// allocated: the blocks may have been written or not; version is the version of the Node without them.
	allocated
	// written: the API server confirmed the write.
	written
)

func newAllocations(released func()) *allocations {
	return &allocations{entries: map[string]entry{}, reservations: map[string][]netip.Prefix{}, released: released}
}

// observe records a Node from the cache, which may be older than what is recorded.
func (a *allocations) observe(node *corev1.Node) { a.record(node, cached) }

func (a *allocations) record(node *corev1.Node, from state) {
	a.mu.Lock()
	defer a.mu.Unlock()

	known, isKnown := a.entries[node.Name]
	if isKnown && known.uid != node.UID {
		if !newer(node.ResourceVersion, known.version) {
			return // an earlier Node of the same name
		}

		a.free(node.Name)

		isKnown = false
	}

	blocks, _ := podCIDRs(node)
	if len(blocks) == 0 || isKnown && known.state == cached {
		return
	}

	a.remove(node.Name)
	a.insert(node.Name, entry{uid: node.UID, blocks: blocks, state: from, version: node.ResourceVersion})
}

// release records the deletion of a Node.
func (a *allocations) release(nodename string, uid types.UID) {
	a.mu.Lock()
	defer a.mu.Unlock()

	if known, ok := a.entries[nodename]; ok && known.uid == uid {
		a.free(nodename)
	}
}

// observeList records a list from the API server. Nodes that are not listed are deleted, unless they are newer than the
// list. The cache may be older than the list, and may never show a Node that existed only for a short time.
func (a *allocations) observeList(list *corev1.NodeList) {
	uids := map[types.UID]bool{}

	for i := range list.Items {
		uids[list.Items[i].UID] = true
		a.record(&list.Items[i], listed)
	}

	a.mu.Lock()
	defer a.mu.Unlock()

	for nodename, known := range a.entries {
		if !uids[known.uid] && !newer(known.version, list.ResourceVersion) {
			a.free(nodename)
		}
	}
}

// anyListed reports whether the cache has yet to show a Node that was listed.
func (a *allocations) anyListed() bool {
	a.mu.Lock()
	defer a.mu.Unlock()

	for _, known := range a.entries {
		if known.state == listed {
			return true
		}
	}

	return false
}

// resolve compares the record of a Node with the cache's version of it, nil if there is none, and drops a stale
// allocation. It reports whether podCIDRs have to be written, and returns the blocks if they are already allocated.
func (a *allocations) resolve(nodename string, node *corev1.Node) (blocks []netip.Prefix, pending bool) {
	a.mu.Lock()
	defer a.mu.Unlock()

	known, isKnown := a.entries[nodename]
	if isKnown && known.stale(node) {
		a.free(nodename)

		known, isKnown = entry{}, false
	}

	if node == nil || len(node.Spec.PodCIDRs) > 0 {
		return nil, false
	}

	return known.blocks, !isKnown || known.state == allocated
}

// stale reports whether allocated blocks can no longer become the Node's podCIDRs.
func (e entry) stale(node *corev1.Node) bool {
	switch {
	case e.state < allocated:
		return false // the source of the entry also reports its end
	case node == nil || node.UID != e.uid:
		return true // the cache showed the Node when the blocks were allocated, and never goes back
	default:
		// A write carries the version that it was decided for. It has not been applied to a later version, and never
		// will be.
		return e.state == allocated && len(node.Spec.PodCIDRs) == 0 && newer(node.ResourceVersion, e.version)
	}
}

// allocate allocates a block for each of the requests. If one of them cannot be met, it allocates nothing and returns
// the reason. It allocates nothing, without a reason, if an entry was recorded since resolve; the change that recorded
// it has requeued the Node.
func (a *allocations) allocate(node *corev1.Node, requests []request) ([]netip.Prefix, *events.Condition) {
	a.mu.Lock()
	defer a.mu.Unlock()

	if _, known := a.entries[node.Name]; known {
		return nil, nil
	}

	var blocks []netip.Prefix

	for _, r := range requests {
		block, found := a.next(r)
		if !found {
			block, found = a.nextDespiteTooLarge(r)
		}

		if !found {
			return nil, newCondition(ReasonExhausted, "Pool %q is exhausted: no free %s block in %v", r.pool, r.family, r.pools)
		}

		blocks = append(blocks, block)
	}

	a.insert(node.Name, entry{uid: node.UID, blocks: blocks, state: allocated, version: node.ResourceVersion})

	return blocks, nil
}

// next returns the lowest free block of the first pool that has one.
func (a *allocations) next(r request) (block netip.Prefix, found bool) {
	for _, pool := range r.pools {
		if block, found = a.used.Next(pool); found {
			break
		}
	}

	return block, found
}

// nextDespiteTooLarge is next if podCIDRs that are too large exclude no blocks. Otherwise a single kubelet could exhaust
// a pool.
func (a *allocations) nextDespiteTooLarge(r request) (block netip.Prefix, found bool) {
	var ignored []netip.Prefix

	for _, e := range a.entries {
		for _, podCIDR := range e.blocks {
			if slices.ContainsFunc(r.pools, func(pool cidrset.Pool) bool { return a.isTooLarge(podCIDR, pool.CIDR(), r.largest) }) {
				ignored = append(ignored, podCIDR)
			}
		}
	}

	for _, podCIDR := range ignored {
		a.used.Remove(podCIDR)
		defer a.used.Insert(podCIDR)
	}

	return a.next(r)
}

// isTooLarge reports whether a podCIDR overlaps a pool, and is larger than any block that is assigned of the pool, than its
// share of the pool, and than the podCIDRs of most Nodes there. Kubelets can set such podCIDRs on their own Nodes. Others
// can be from another allocator, or from before a change of the configuration. The caller must hold mu.
func (a *allocations) isTooLarge(podCIDR, pool netip.Prefix, largest int) bool {
	if !podCIDR.Overlaps(pool) || podCIDR.Bits() >= min(largest, pool.Bits()+shareBits) {
		return false
	}

	all, asLarge := 0, 0

	for _, e := range a.entries {
		for _, other := range e.blocks {
			if other.Overlaps(pool) {
				all++

				if other.Bits() <= podCIDR.Bits() {
					asLarge++
				}
			}
		}
	}

	return asLarge <= 1 || 2*asLarge <= all // one Node alone proves nothing
}

// confirm records that the API server has confirmed the write of a Node's blocks.
func (a *allocations) confirm(node *corev1.Node) {
	a.mu.Lock()
	defer a.mu.Unlock()

	// The cache may already have shown the write, or the deletion of the Node.
	if known, ok := a.entries[node.Name]; ok && known.uid == node.UID && known.state == allocated {
		known.state, known.version = written, node.ResourceVersion
		a.entries[node.Name] = known
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

// review returns what is wrong with the podCIDRs that a Node has; nil if nothing is.
func (a *allocations) review(node *corev1.Node, p plan) *events.Condition {
	blocks, invalid := podCIDRs(node)
	if len(invalid) > 0 {
		return newCondition(ReasonInvalid, "podCIDRs %q are not CIDRs; delete the Node and let it register again to have others assigned", invalid)
	}

	a.mu.Lock()
	defer a.mu.Unlock()

	if tooLarge := p.tooLarge(blocks, a); len(tooLarge) > 0 {
		return newCondition(ReasonTooLarge, "podCIDRs %v are larger than all blocks of a pool and than a sixteenth of it, and are assigned to other Nodes "+
			"when the pool has no other free block; delete the Node and let it register again without podCIDRs", tooLarge)
	}

	own, known := a.entries[node.Name]
	if !known {
		return nil
	}

	a.remove(node.Name)
	defer a.insert(node.Name, own)

	if !slices.ContainsFunc(own.blocks, a.blocks.Overlaps) {
		return nil // the usual case, without looking at every other Node
	}

	var others []string

	for name, other := range a.entries {
		if slices.ContainsFunc(other.blocks, func(p netip.Prefix) bool { return slices.ContainsFunc(own.blocks, p.Overlaps) }) {
			others = append(others, fmt.Sprintf("%s %v", name, other.blocks))
		}
	}

	slices.Sort(others)

	if len(others) == 1 {
		return newCondition(ReasonOverlap, "podCIDRs %v overlap those of Node %s; delete the Node whose podCIDRs are wrong, "+
			"or one of them, and let it register again to have others assigned", node.Spec.PodCIDRs, others[0])
	}

	return newCondition(ReasonOverlap, "podCIDRs %v overlap those of %d Nodes; delete this Node and let it register again to have others assigned; the Nodes are %s",
		node.Spec.PodCIDRs, len(others), strings.Join(others, ", "))
}

// stats counts the blocks of a pool.
func (a *allocations) stats(pool cidrset.Pool) cidrset.Stats {
	a.mu.Lock()
	defer a.mu.Unlock()

	return a.used.Stats(pool)
}

func (a *allocations) insert(nodename string, e entry) {
	a.entries[nodename] = e

	for _, p := range e.blocks {
		a.used.Insert(p)
		a.blocks.Insert(p)
	}
}

func (a *allocations) free(nodename string) {
	a.remove(nodename)
	a.released()
}

func (a *allocations) remove(nodename string) {
	for _, p := range a.entries[nodename].blocks {
		a.used.Remove(p)
		a.blocks.Remove(p)
	}

	delete(a.entries, nodename)
}

// podCIDRs returns the parsed and the invalid podCIDRs of a Node. Old clusters contain spellings that the API server
// rejects today.
func podCIDRs(node *corev1.Node) (blocks []netip.Prefix, invalid []string) {
	list := node.Spec.PodCIDRs
	if len(list) == 0 && node.Spec.PodCIDR != "" {
		list = []string{node.Spec.PodCIDR}
	}

	for _, s := range list {
		if _, network, err := netutils.ParseCIDRSloppy(s); err == nil {
			if block, ok := netipx.FromStdIPNet(network); ok {
				blocks = append(blocks, block)

				continue
			}
		}

		invalid = append(invalid, s)
	}

	return blocks, invalid
}

// newer reports whether a resourceVersion is later than another.
func newer(version, than string) bool {
	order, err := resourceversion.CompareResourceVersion(version, than)

	return err == nil && order > 0
}
