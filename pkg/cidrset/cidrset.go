// Package cidrset finds free blocks of addresses for pods.
//
// A Set contains the prefixes in use, of any length and both IP families; Next returns the lowest block of a Pool that
// overlaps none of them. The answer depends only on the content of the set, not on its history: a new leader that
// starts from a list of Nodes continues where the previous one stopped.
//
// # Lowest block first
//
// kube-controller-manager allocates round-robin, so that a released block is reused late, but it loses its position at
// every restart. Here the lowest free block is always next: this makes Next a function of the content and keeps blocks
// together. A released block is free at once; a caller that wants to delay its reuse removes it later.
//
// # Complexity
//
// Insert, Remove and Overlaps take at most one step per address bit, and Next one per bit between the prefix lengths of
// pool and block, whatever the number of prefixes, blocks and pools. Memory grows with the number of distinct prefixes.
// Larger visits the prefixes that it returns, and one more per address bit. Stats visits every prefix in use in the pool;
// it is meant for metrics, not for allocation.
package cidrset

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"net/netip"
	"slices"
	"strings"
)

// Set is a multiset of prefixes in use. The zero value is empty and ready to use. A Set is not safe for concurrent use
// and must not be copied.
//
// Prefixes may be of any length and may overlap. They are masked, IPv4-mapped IPv6 prefixes are converted to IPv4, and
// invalid prefixes are ignored.
type Set struct {
	v4, v6 *node
}

// Insert adds a prefix. A prefix that is inserted twice, for example for two nodes with the same block, must be removed
// twice.
func (s *Set) Insert(prefix netip.Prefix) {
	if prefix = canonical(prefix); prefix.IsValid() {
		root := s.root(prefix)
		*root = (*root).insert(prefix)
	}
}

// Remove undoes one Insert of the same prefix, and reports whether there was one.
func (s *Set) Remove(prefix netip.Prefix) (removed bool) {
	prefix = canonical(prefix)
	root := s.root(prefix)
	*root, removed = (*root).remove(prefix)

	return removed
}

// Overlaps reports whether any address of the prefix is in use.
func (s *Set) Overlaps(prefix netip.Prefix) bool {
	prefix = canonical(prefix)
	inside, covered := (*s.root(prefix)).below(prefix)

	return covered || inside != nil
}

// Larger returns the prefixes in use that overlap the given prefix and are shorter than length, each as often as it was
// inserted.
func (s *Set) Larger(prefix netip.Prefix, length int) []netip.Prefix {
	prefix = canonical(prefix)

	return (*s.root(prefix)).larger(prefix, length, nil)
}

// Next returns the lowest free block of the pool, or false if the pool is exhausted. It does not insert the block.
func (s *Set) Next(pool Pool) (netip.Prefix, bool) {
	if !pool.cidr.IsValid() {
		return netip.Prefix{}, false
	}

	inside, covered := (*s.root(pool.cidr)).below(pool.cidr)
	if covered {
		return netip.Prefix{}, false
	}

	return inside.lowestFree(pool.cidr, pool.bits)
}

// Stats counts the blocks of a pool. A block is used if any of its addresses is. Used and Free add up to Size.
type Stats struct {
	Size, Used, Free uint64
}

// Stats counts the blocks of a pool, in time linear in the number of prefixes in use in the pool.
func (s *Set) Stats(pool Pool) Stats {
	if !pool.cidr.IsValid() {
		return Stats{}
	}

	stats := Stats{Size: 1 << (pool.bits - pool.cidr.Bits())}

	inside, covered := (*s.root(pool.cidr)).below(pool.cidr)
	if covered {
		stats.Used = stats.Size
	} else {
		stats.Used = inside.used(pool.bits)
	}

	stats.Free = stats.Size - stats.Used

	return stats
}

// maxBlockBits limits the number of blocks of a pool to the range of uint64.
const maxBlockBits = 63

// mapped contains the IPv4-mapped IPv6 addresses. Blocks in it would not be of the same IP family as their pool.
var mapped = netip.MustParsePrefix("::ffff:0:0/96")

// Pool is a CIDR divided into blocks of one size. Pools with blocks of different sizes may overlap. A Pool is
// comparable; the zero value has no blocks.
type Pool struct {
	cidr netip.Prefix
	bits int
}

// NewPool divides a CIDR into blocks with the given prefix length. The CIDR is masked. If it is IPv4-mapped it is
// converted to IPv4, and length is that of an IPv4 prefix. A pool has 1 to 2⁶³ blocks, and must not overlap the
// IPv4-mapped addresses otherwise. The error names both arguments.
func NewPool(cidr netip.Prefix, length int) (Pool, error) {
	pool := Pool{cidr: canonical(cidr), bits: length}
	refuse := func(format string, args ...any) (Pool, error) {
		return Pool{}, fmt.Errorf("divide %s into /%d blocks: "+format, append([]any{cidr, length}, args...)...)
	}

	switch own, longest := pool.cidr.Bits(), pool.cidr.Addr().BitLen(); {
	case !pool.cidr.IsValid():
		return refuse("not a CIDR")
	case pool.cidr.Overlaps(mapped):
		return refuse("overlaps the IPv4-mapped IPv6 addresses %s", mapped)
	case length < own:
		return refuse("a block would be larger than the CIDR; set a larger mask size")
	case length > longest:
		return refuse("a prefix has at most %d bits", longest)
	case length-own > maxBlockBits:
		return refuse("more than 2^%d blocks; set a smaller mask size", maxBlockBits)
	}

	return pool, nil
}

// CIDR returns the masked CIDR of the pool.
func (p Pool) CIDR() netip.Prefix { return p.cidr }

// Bits returns the prefix length of the pool's blocks.
func (p Pool) Bits() int { return p.bits }

// String returns the pool as text, such as "10.0.0.0/16 (/24 blocks)".
func (p Pool) String() string { return fmt.Sprintf("%s (/%d blocks)", p.cidr, p.bits) }

var special = []struct {
	kind string
	cidr netip.Prefix
}{
	{"multicast", netip.MustParsePrefix("224.0.0.0/4")},
	{"multicast", netip.MustParsePrefix("ff00::/8")},
	{"loopback", netip.MustParsePrefix("127.0.0.0/8")},
	{"loopback", netip.MustParsePrefix("::1/128")},
	{"link-local", netip.MustParsePrefix("169.254.0.0/16")},
	{"link-local", netip.MustParsePrefix("fe80::/10")},
}

// CheckPods returns an error if a prefix contains addresses that no pod can have.
func CheckPods(prefix netip.Prefix) error {
	for _, s := range special {
		if prefix.Overlaps(s.cidr) {
			return fmt.Errorf("%s contains %s addresses", prefix, s.kind)
		}
	}

	return nil
}

// ParsePrefix parses a CIDR such as "10.244.0.0/16", ignoring surrounding space. It refuses host bits and IPv4-mapped
// IPv6 addresses. The error quotes s.
func ParsePrefix(s string) (netip.Prefix, error) {
	prefix, err := parsePrefix(s)

	switch {
	case err != nil:
		return netip.Prefix{}, err
	case prefix != prefix.Masked():
		return netip.Prefix{}, fmt.Errorf("%q has host bits set; did you mean %s?", s, prefix.Masked())
	}

	return prefix, nil
}

// ParsePrefixes parses a list of CIDRs that Kubernetes has accepted or would accept. It differs from ParsePrefix in
// that it masks host bits, as Kubernetes does.
func ParsePrefixes(list []string) ([]netip.Prefix, error) {
	var prefixes []netip.Prefix

	for _, s := range list {
		prefix, err := parsePrefix(s)
		if err != nil {
			return nil, err
		}

		prefixes = append(prefixes, prefix.Masked())
	}

	return prefixes, nil
}

func parsePrefix(s string) (netip.Prefix, error) {
	prefix, err := netip.ParsePrefix(strings.TrimSpace(s))

	switch {
	case err != nil:
		return netip.Prefix{}, fmt.Errorf("%q is not a CIDR such as 10.244.0.0/16", s)
	case prefix.Addr().Is4In6():
		return netip.Prefix{}, fmt.Errorf("%q is an IPv4-mapped IPv6 CIDR; write it as IPv4", s)
	}

	return prefix, nil
}

func (s *Set) root(prefix netip.Prefix) **node {
	if prefix.Addr().Is4() {
		return &s.v4
	}

	return &s.v6
}

// canonical returns the masked prefix, as IPv4 if it is IPv4-mapped. A prefix that is IPv4-mapped after masking has at
// least mappedBits bits.
func canonical(prefix netip.Prefix) netip.Prefix {
	prefix = prefix.Masked()
	if prefix.Addr().Is4In6() {
		return netip.PrefixFrom(prefix.Addr().Unmap(), prefix.Bits()-mappedBits)
	}

	return prefix
}

const (
	// Addresses are handled as 16 bytes, in which an IPv4 address follows mappedBits other bits.
	addrBits, mappedBits = 128, 96
	// noFree is longer than any prefix: there is no free block.
	noFree = addrBits + 1
)

// node is the root of a path-compressed binary tree of prefixes: a node without entries has two children. Nil is an
// empty tree.
type node struct {
	prefix  netip.Prefix
	entries int // number of insertions of the prefix
	// free is the prefix length of the largest free block below the prefix. With it lowestFree decides at every node
	// without visiting the children.
	free     int
	children [2]*node
}

func (n *node) insert(prefix netip.Prefix) *node {
	switch {
	case n == nil:
		n = &node{prefix: prefix, entries: 1}
	case n.prefix == prefix:
		n.entries++
	case covers(n.prefix, prefix):
		side := &n.children[bit(prefix, n.prefix.Bits())]
		*side = (*side).insert(prefix)
	default:
		fork := &node{prefix: common(n.prefix, prefix)}
		fork.children[bit(n.prefix, fork.prefix.Bits())] = n

		return fork.insert(prefix)
	}

	n.updateFree()

	return n
}

// remove returns the tree without one entry of the prefix, and reports whether there was one.
func (n *node) remove(prefix netip.Prefix) (*node, bool) {
	removed := false

	switch {
	case n == nil:
		return nil, false
	case n.prefix == prefix && n.entries > 0:
		n.entries--
		removed = true
	case covers(n.prefix, prefix):
		side := &n.children[bit(prefix, n.prefix.Bits())]
		*side, removed = (*side).remove(prefix)
	}

	switch {
	case n.entries > 0 || n.children[0] != nil && n.children[1] != nil:
		n.updateFree()

		return n, removed
	case n.children[0] != nil:
		return n.children[0], removed
	default:
		return n.children[1], removed
	}
}

// below returns the subtree within a prefix, or reports that an entry covers the whole prefix.
func (n *node) below(prefix netip.Prefix) (inside *node, covered bool) {
	for n != nil && n.prefix.Overlaps(prefix) {
		switch {
		case n.prefix.Bits() >= prefix.Bits():
			return n, false
		case n.entries > 0:
			return nil, true
		}

		n = n.children[bit(prefix, n.prefix.Bits())]
	}

	return nil, false
}

// larger appends the entries that overlap a prefix and are shorter than length.
func (n *node) larger(prefix netip.Prefix, length int, found []netip.Prefix) []netip.Prefix {
	if n == nil || n.prefix.Bits() >= length || !n.prefix.Overlaps(prefix) {
		return found
	}

	found = append(found, slices.Repeat([]netip.Prefix{n.prefix}, n.entries)...)
	found = n.children[0].larger(prefix, length, found)

	return n.children[1].larger(prefix, length, found)
}

// lowestFree returns the lowest free block of the given prefix length in space. The tree is the content of space.
func (n *node) lowestFree(space netip.Prefix, length int) (netip.Prefix, bool) {
	if n.largestFree(space.Bits()) > length {
		return netip.Prefix{}, false
	}

	addr := space.Addr().As16()
	offset := addrBits - space.Addr().BitLen()

	for depth := space.Bits(); n != nil; depth++ {
		if lower := n.half(depth, 0); lower.largestFree(depth+1) <= length {
			n = lower

			continue
		}

		n = n.half(depth, 1)
		addr[(offset+depth)/8] |= 0x80 >> ((offset + depth) % 8)
	}

	return netip.PrefixFrom(netip.AddrFrom16(addr).Unmap(), length), true
}

// used counts the blocks of the given prefix length that overlap an entry.
func (n *node) used(length int) uint64 {
	switch {
	case n == nil:
		return 0
	case n.prefix.Bits() >= length:
		return 1
	case n.entries > 0:
		return 1 << (length - n.prefix.Bits())
	default:
		return n.children[0].used(length) + n.children[1].used(length)
	}
}

func (n *node) updateFree() {
	if n.entries > 0 {
		n.free = noFree

		return
	}

	depth := n.prefix.Bits() + 1
	n.free = min(n.children[0].largestFree(depth), n.children[1].largestFree(depth))
}

// largestFree returns the prefix length of the largest free block in a space of the given prefix length. The tree is
// the content of the space.
func (n *node) largestFree(length int) int {
	switch {
	case n == nil:
		return length
	case n.prefix.Bits() > length:
		return length + 1 // the half without the tree
	default:
		return n.free
	}
}

// half returns the content of the lower half of a space of the given prefix length, or the upper half for side 1. The
// tree is the content of the space.
func (n *node) half(length int, side byte) *node {
	switch {
	case n.prefix.Bits() == length:
		return n.children[side]
	case bit(n.prefix, length) == side:
		return n
	default:
		return nil
	}
}

func covers(a, b netip.Prefix) bool { return a.Bits() <= b.Bits() && a.Overlaps(b) }

// bit returns bit i of the address, counted from the highest.
func bit(prefix netip.Prefix, i int) byte {
	addr := prefix.Addr().As16()
	i += addrBits - prefix.Addr().BitLen()

	return addr[i/8] >> (7 - i%8) & 1
}

// common returns the longest prefix that covers both; they must be of the same IP family.
func common(a, b netip.Prefix) netip.Prefix {
	x, y := a.Addr().As16(), b.Addr().As16()

	same := bits.LeadingZeros64(binary.BigEndian.Uint64(x[:8]) ^ binary.BigEndian.Uint64(y[:8]))
	if same == addrBits/2 {
		same += bits.LeadingZeros64(binary.BigEndian.Uint64(x[8:]) ^ binary.BigEndian.Uint64(y[8:]))
	}

	same -= addrBits - a.Addr().BitLen()

	return netip.PrefixFrom(a.Addr(), min(same, a.Bits(), b.Bits())).Masked()
}
