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
// Stats visits every prefix in use in the pool; it is meant for metrics, not for allocation.
package cidrset

import (
	"fmt"
	"net/netip"
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

// maxBlockBits limits the number of blocks of a pool to what a uint64 can count.
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
		return refuse("a block would be larger than the CIDR")
	case length > longest:
		return refuse("a prefix has at most %d bits", longest)
	case length-own > maxBlockBits:
		return refuse("more than 2^%d blocks", maxBlockBits)
	}

	return pool, nil
}

// String returns the pool as text, such as "10.0.0.0/16 (/24 blocks)".
func (p Pool) String() string { return fmt.Sprintf("%s (/%d blocks)", p.cidr, p.bits) }

// CIDR returns the masked CIDR of the pool.
func (p Pool) CIDR() netip.Prefix { return p.cidr }

// Bits returns the prefix length of the blocks.
func (p Pool) Bits() int { return p.bits }

// Size returns the number of blocks, used or free.
func (p Pool) Size() uint64 {
	if !p.cidr.IsValid() {
		return 0
	}

	return 1 << (p.bits - p.cidr.Bits())
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
