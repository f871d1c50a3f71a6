// Package cidrset finds the next free block of addresses for a node's pods.
//
// A Set holds what is in use or reserved, prefixes of any length and both families, and Next names the lowest block of a Pool that
// overlaps none of it. It knows no nodes and no time, and keeps nothing but what was inserted: two sets with the same content
// answer alike, whatever became of them before. So a new leader, which starts from a list of Nodes, continues where the old one was.
//
// # Lowest first
//
// kube-controller-manager goes round its pool, so that a block is used again late; but where it was is lost with every restart, and
// what is only sometimes so cannot be relied on. Here the lowest free block is next, which makes the answer a function of the content,
// and keeps the addresses in use together. A freed block is free at once. Whoever wants it to rest removes it later.
//
// # Costs
//
// Next takes a step for each bit by which the pool's blocks are smaller than the pool, Insert, Remove and Overlaps at most one for each bit of an
// address: the number of prefixes, of blocks and of pools does not matter. Memory grows with the number of distinct prefixes, and a
// pool itself needs none. Stats alone walks what is in use in a pool: it is for metrics, not for every allocation.
package cidrset

import "net/netip"

// Set is what is in use or reserved. The zero value is empty and ready. A Set is not safe for concurrent use and must not be copied.
//
// Prefixes may be of any length and overlap each other in any way. They are masked, IPv4-mapped ones are unmapped, and invalid ones, which
// name no address, are ignored.
type Set struct {
	v4, v6 *node
}

// Insert puts a prefix into use. The set counts: what is inserted twice, say for two nodes that were given the same block, is in use until
// it has been removed twice.
func (s *Set) Insert(prefix netip.Prefix) {
	if prefix = canonical(prefix); prefix.IsValid() {
		root := s.root(prefix)
		*root = (*root).insert(prefix)
	}
}

// Remove undoes one Insert of exactly this prefix, and reports whether there was one.
func (s *Set) Remove(prefix netip.Prefix) bool {
	prefix = canonical(prefix)
	if !prefix.IsValid() {
		return false
	}

	root := s.root(prefix)
	rest, removed := (*root).remove(prefix)
	*root = rest

	return removed
}

// Overlaps reports whether any address of the prefix is in use.
func (s *Set) Overlaps(prefix netip.Prefix) bool {
	prefix = canonical(prefix)
	if !prefix.IsValid() {
		return false
	}

	inside, covered := (*s.root(prefix)).below(prefix)

	return covered || inside != nil
}

// Next is the lowest block of the pool of which no address is in use; false means that the pool is exhausted. It does not take the block: until
// that is inserted, Next stays the same.
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

// Stats counts a pool's blocks. A block is used if any of its addresses is: used and free add up to the size.
type Stats struct {
	Size, Used, Free uint64
}

// Stats counts the blocks of a pool. It takes as long as there are prefixes in use in the pool.
func (s *Set) Stats(pool Pool) Stats {
	stats := Stats{Size: pool.Size()}
	if stats.Size == 0 {
		return stats
	}

	inside, covered := (*s.root(pool.cidr)).below(pool.cidr)
	if covered {
		stats.Used = stats.Size
	} else {
		stats.Used = inside.used(pool.bits)
	}

	stats.Free = stats.Size - stats.Used

	return stats
}

func (s *Set) root(prefix netip.Prefix) **node {
	if prefix.Addr().Is4() {
		return &s.v4
	}

	return &s.v6
}

// canonical is the one spelling of a prefix: masked, and IPv4 if that is what it maps. A prefix that is still IPv4-mapped when masked has no fewer than
// mappedBits.
func canonical(prefix netip.Prefix) netip.Prefix {
	prefix = prefix.Masked()
	if prefix.Addr().Is4In6() {
		return netip.PrefixFrom(prefix.Addr().Unmap(), prefix.Bits()-mappedBits)
	}

	return prefix
}
