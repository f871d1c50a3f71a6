package cidrset

import (
	"fmt"
	"net/netip"
)

// maxBlockBits limits a pool to as many blocks as a uint64 can count.
const maxBlockBits = 63

// mapped is where IPv6 spells IPv4. Its blocks would be of the other family than their pool.
var mapped = netip.MustParsePrefix("::ffff:0:0/96")

// Pool is a CIDR that is cut into blocks of one size. Pools may overlap each other, with blocks of the same size or of others. A Pool is
// comparable; the zero value has no blocks.
type Pool struct {
	cidr netip.Prefix
	bits int
}

// NewPool cuts a CIDR into blocks with prefixes of the given length. The CIDR is masked, and an IPv4-mapped one unmapped; the length then counts
// as that of an IPv4 prefix. A pool has one block, the CIDR itself, to 2⁶³, and an IPv6 one must not cover the IPv4-mapped space. The error
// names both arguments.
func NewPool(cidr netip.Prefix, length int) (Pool, error) {
	pool := Pool{cidr: canonical(cidr), bits: length}

	switch own := pool.cidr.Bits(); {
	case !pool.cidr.IsValid():
		return Pool{}, fmt.Errorf("cut %s into blocks of /%d: not a CIDR", cidr, length)
	case pool.cidr.Overlaps(mapped):
		return Pool{}, fmt.Errorf("cut %s into blocks of /%d: some of it is IPv4-mapped", pool.cidr, length)
	case length < own:
		return Pool{}, fmt.Errorf("cut %s into blocks of /%d: a block would be larger than the whole", pool.cidr, length)
	case length > pool.cidr.Addr().BitLen():
		return Pool{}, fmt.Errorf("cut %s into blocks of /%d: its addresses have %d bits", pool.cidr, length, pool.cidr.Addr().BitLen())
	case length-own > maxBlockBits:
		return Pool{}, fmt.Errorf("cut %s into blocks of /%d: more than 2^%d blocks", pool.cidr, length, maxBlockBits)
	}

	return pool, nil
}

// CIDR is the whole of the pool, masked.
func (p Pool) CIDR() netip.Prefix { return p.cidr }

// Bits is the length of a block's prefix.
func (p Pool) Bits() int { return p.bits }

// Size is the number of the pool's blocks, in use or not.
func (p Pool) Size() uint64 {
	if !p.cidr.IsValid() {
		return 0
	}

	return 1 << (p.bits - p.cidr.Bits())
}
