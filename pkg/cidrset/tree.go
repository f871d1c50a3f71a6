package cidrset

import (
	"encoding/binary"
	"math/bits"
	"net/netip"
)

const (
	// addrBits is the length of an address as 16 bytes, in which an IPv4 address follows mappedBits others.
	addrBits, mappedBits = 128, 96
	// nothing is longer than any prefix: what it is the length of does not exist.
	nothing = addrBits + 1
)

// node is a node of a binary tree of prefixes in which every node is in use itself or forks: one without entries has two children. An absent
// node, nil, is an empty tree.
type node struct {
	prefix  netip.Prefix
	entries int // how often the prefix was inserted
	// free is the length of the largest free block's prefix in here. It is what lets lowestFree decide at every fork without a look below.
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

	n.measure()

	return n
}

// remove returns the tree without one entry of the prefix, and whether there was one.
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
		n.measure()

		return n, removed
	case n.children[0] != nil:
		return n.children[0], removed
	default:
		return n.children[1], removed
	}
}

// below returns the part of the tree that is inside a prefix, or that a prefix in use covers all of it.
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

// lowestFree is the lowest free block with a prefix of the given length in space, of which the tree is the content.
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

// used counts the blocks with prefixes of the given length that overlap anything in the tree.
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

func (n *node) measure() {
	if n.entries > 0 {
		n.free = nothing

		return
	}

	depth := n.prefix.Bits() + 1
	n.free = min(n.children[0].largestFree(depth), n.children[1].largestFree(depth))
}

// largestFree is the length of the largest free block's prefix in a space with a prefix of the given length, of which the tree is
// the content.
func (n *node) largestFree(length int) int {
	switch {
	case n == nil:
		return length
	case n.prefix.Bits() > length:
		return length + 1 // the half in which the tree is not
	default:
		return n.free
	}
}

// halves divides the content of a space with a prefix of the given length.
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

// bit is one bit of a prefix's address, 0 the highest.
func bit(prefix netip.Prefix, i int) byte {
	addr := prefix.Addr().As16()
	i += addrBits - prefix.Addr().BitLen()

	return addr[i/8] >> (7 - i%8) & 1
}

// common is the longest prefix that covers both, which are of one family.
func common(a, b netip.Prefix) netip.Prefix {
	x, y := a.Addr().As16(), b.Addr().As16()

	same := bits.LeadingZeros64(binary.BigEndian.Uint64(x[:8]) ^ binary.BigEndian.Uint64(y[:8]))
	if same == addrBits/2 {
		same += bits.LeadingZeros64(binary.BigEndian.Uint64(x[8:]) ^ binary.BigEndian.Uint64(y[8:]))
	}

	same -= addrBits - a.Addr().BitLen()

	return netip.PrefixFrom(a.Addr(), min(same, a.Bits(), b.Bits())).Masked()
}
