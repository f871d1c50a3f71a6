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
)

// book says what is in use. It is recomputed from the Nodes and never saved: a block is a Node's from the moment it is taken for it, until the
// Node is gone from the API. Nothing else gives a block back.
//
// It is safe for concurrent use: the informer tells it of the Nodes, the worker takes blocks.
type book struct {
	mu      sync.Mutex
	entries map[string]entry // by nodename
	// reservations are what no Node may get, by who needs it.
	reservations map[string][]netip.Prefix
	// used are the blocks and the reservations, blocks the blocks alone.
	used, blocks cidrset.Set
	// freed is called when something was given back; it must not call the book.
	freed func()
}

// entry is one Node's blocks.
type entry struct {
	uid    types.UID
	blocks []netip.Prefix
	source source
	// version is the Node's resourceVersion with which this became known.
	version string
}

// source says from where an entry is known.
type source int

const (
	// shown by the cache, which will tell when the Node is gone.
	shown source = iota
	// listed at the API server, and not shown by the cache yet.
	listed
	// taken for the Node, and not shown by the cache yet; version is that of the Node without them. Perhaps they were written, perhaps not.
	taken
	// written to the Node, and not shown by the cache yet.
	written
)

func newBook(freed func()) *book {
	return &book{entries: map[string]entry{}, reservations: map[string][]netip.Prefix{}, freed: freed}
}

// show notes a Node as the cache has it. It may be older than what is known already.
func (b *book) show(node *corev1.Node) { b.note(node, shown) }

// note notes a Node as the source has it.
func (b *book) note(node *corev1.Node, from source) {
	b.mu.Lock()
	defer b.mu.Unlock()

	known, isKnown := b.entries[node.Name]
	if isKnown && known.uid != node.UID {
		if !newer(node.ResourceVersion, known.version) {
			return // a predecessor
		}

		b.free(node.Name)

		isKnown = false
	}

	blocks, _ := podCIDRs(node)
	if len(blocks) == 0 || isKnown && known.source == shown {
		return
	}

	b.drop(node.Name)
	b.put(node.Name, entry{uid: node.UID, blocks: blocks, source: from, version: node.ResourceVersion})
}

// gone notes that a Node is gone from the API.
func (b *book) gone(nodename string, uid types.UID) {
	b.mu.Lock()
	defer b.mu.Unlock()

	if known, ok := b.entries[nodename]; ok && known.uid == uid {
		b.free(nodename)
	}
}

// list notes what a list from the API server has shown: the Nodes on it, and that all others are gone that are not younger than the list. The cache may
// be behind, and need never show a Node that came and went.
func (b *book) list(list *corev1.NodeList) {
	uids := map[types.UID]bool{}

	for i := range list.Items {
		uids[list.Items[i].UID] = true
		b.note(&list.Items[i], listed)
	}

	b.mu.Lock()
	defer b.mu.Unlock()

	for nodename, known := range b.entries {
		if !uids[known.uid] && !newer(known.version, list.ResourceVersion) {
			b.free(nodename)
		}
	}
}

// unseen tells whether there are Nodes that only a list has shown.
func (b *book) unseen() bool {
	b.mu.Lock()
	defer b.mu.Unlock()

	for _, known := range b.entries {
		if known.source == listed {
			return true
		}
	}

	return false
}

// settle compares what is known of a Node with what the cache has of it now, nil if nothing. It tells whether the Node is waiting for a write, and of
// which blocks if those have been decided on before.
func (b *book) settle(nodename string, node *corev1.Node) (blocks []netip.Prefix, waiting bool) {
	b.mu.Lock()
	defer b.mu.Unlock()

	known, isKnown := b.entries[nodename]
	if isKnown && known.outlived(node) {
		b.free(nodename)

		known, isKnown = entry{}, false
	}

	if node == nil || len(node.Spec.PodCIDRs) > 0 {
		return nil, false
	}

	return known.blocks, !isKnown || known.source == taken
}

// outlived tells whether what was taken for a Node can no longer become its own.
func (e entry) outlived(node *corev1.Node) bool {
	switch {
	case e.source < taken:
		return false // what has told of it tells when it is over
	case node == nil || node.UID != e.uid:
		return true // blocks are taken for what the cache shows, and it never goes back
	default:
		// A write names the version that it was decided for: it has not been done to a later one, and never will be.
		return e.source == taken && len(node.Spec.PodCIDRs) == 0 && newer(node.ResourceVersion, e.version)
	}
}

// take takes a block for each of the requests, or nothing and says which of them cannot be met. It takes nothing, and says nothing, if the book has learned of
// the Node since settle: whoever told it has the Node looked at again.
func (b *book) take(node *corev1.Node, requests []request) ([]netip.Prefix, *finding) {
	b.mu.Lock()
	defer b.mu.Unlock()

	if _, known := b.entries[node.Name]; known {
		return nil, nil
	}

	var blocks []netip.Prefix

	for _, r := range requests {
		block, ok := b.next(r.pools)
		if !ok {
			return nil, &finding{reason: ReasonExhausted, message: fmt.Sprintf("No %s block is free in %s", r.family, describe(r))}
		}

		blocks = append(blocks, block)
	}

	b.put(node.Name, entry{uid: node.UID, blocks: blocks, source: taken, version: node.ResourceVersion})

	return blocks, nil
}

func describe(r request) string {
	var cidrs []string
	for _, pool := range r.pools {
		cidrs = append(cidrs, fmt.Sprintf("%s (blocks of /%d)", pool.CIDR(), pool.Bits()))
	}

	return fmt.Sprintf("pool %s: %s", r.pool, strings.Join(cidrs, ", "))
}

func (b *book) next(pools []cidrset.Pool) (netip.Prefix, bool) {
	for _, pool := range pools {
		if block, ok := b.used.Next(pool); ok {
			return block, true
		}
	}

	return netip.Prefix{}, false
}

// wrote notes that the API server has confirmed what was taken for a Node.
func (b *book) wrote(node *corev1.Node) {
	b.mu.Lock()
	defer b.mu.Unlock()

	// The cache may have been faster, with this Node or with its end.
	if known, ok := b.entries[node.Name]; ok && known.uid == node.UID && known.source == taken {
		known.source, known.version = written, node.ResourceVersion
		b.entries[node.Name] = known
	}
}

// reserve makes prefixes all that is kept free for owner.
func (b *book) reserve(owner string, prefixes []netip.Prefix) {
	b.mu.Lock()
	defer b.mu.Unlock()

	before := b.reservations[owner]
	if slices.Equal(before, prefixes) {
		return
	}

	for _, p := range prefixes {
		b.used.Insert(p)
	}

	for _, p := range before {
		b.used.Remove(p)
	}

	b.reservations[owner] = prefixes

	if len(prefixes) == 0 {
		delete(b.reservations, owner)
	}

	if len(before) > 0 {
		b.freed()
	}
}

// overlap names another Node whose blocks overlap those of nodename.
func (b *book) overlap(nodename string) (other string, found bool) {
	b.mu.Lock()
	defer b.mu.Unlock()

	own, known := b.entries[nodename]
	if !known {
		return "", false
	}

	b.drop(nodename)
	defer b.put(nodename, own)

	if !slices.ContainsFunc(own.blocks, b.blocks.Overlaps) {
		return "", false
	}

	for name, theirs := range b.entries {
		if slices.ContainsFunc(theirs.blocks, func(p netip.Prefix) bool { return slices.ContainsFunc(own.blocks, p.Overlaps) }) {
			return name, true
		}
	}

	return "", false
}

// stats counts the blocks of a pool.
func (b *book) stats(pool cidrset.Pool) cidrset.Stats {
	b.mu.Lock()
	defer b.mu.Unlock()

	return b.used.Stats(pool)
}

func (b *book) put(nodename string, e entry) {
	b.entries[nodename] = e

	for _, p := range e.blocks {
		b.used.Insert(p)
		b.blocks.Insert(p)
	}
}

func (b *book) free(nodename string) {
	b.drop(nodename)
	b.freed()
}

func (b *book) drop(nodename string) {
	for _, p := range b.entries[nodename].blocks {
		b.used.Remove(p)
		b.blocks.Remove(p)
	}

	delete(b.entries, nodename)
}

// podCIDRs are those of a Node, and what of them is none: clusters that are old enough have spellings that would be refused today.
func podCIDRs(node *corev1.Node) (blocks []netip.Prefix, invalid []string) {
	texts := node.Spec.PodCIDRs
	if len(texts) == 0 && node.Spec.PodCIDR != "" {
		texts = []string{node.Spec.PodCIDR}
	}

	for _, text := range texts {
		block, ok := parseSloppy(text)
		if !ok {
			invalid = append(invalid, text)

			continue
		}

		blocks = append(blocks, block)
	}

	return blocks, invalid
}

func parseSloppy(text string) (netip.Prefix, bool) {
	_, network, err := netutils.ParseCIDRSloppy(text)
	if err != nil {
		return netip.Prefix{}, false
	}

	prefix, ok := netipx.FromStdIPNet(network)

	return prefix, ok && prefix.IsValid()
}

// newer tells whether a resourceVersion is of a later time than another.
func newer(version, than string) bool {
	order, err := resourceversion.CompareResourceVersion(version, than)

	return err == nil && order > 0
}
