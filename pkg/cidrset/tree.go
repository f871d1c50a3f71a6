package cidrset

import (
	"encoding/binary"
	"math/bits"
	"net/netip"
)

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

// lowestFree returns the lowest free block of the given prefix length in space. The tree is the content of space.
func (n *node) lowestFree(space netip.Prefix, length int) (netip.Prefix, bool) {
	if n.largestFree(space.Bits()) > length {
		return netip.Prefix{}, false
	}

	addr := space.Addr().As16()
	offset := addrBits - space.Addr().BitLen()

	for depth := space.Bits(); n != nil; depth++ {
		lower, upper := n.halves(depth)
		if lower.largestFree(depth+1) <= length {
			n = lower

			continue
		}

		n = upper
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

// updateFree recomputes free after a change of the entries or the children.
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

// halves splits the content of a space of the given prefix length.
func (n *node) halves(length int) (lower, upper *node) {
	switch {
	case n.prefix.Bits() == length:
		return n.children[0], n.children[1]
	case bit(n.prefix, length) == 0:
		return n, nil
	default:
		return nil, n
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
