package cidrset

// Bits returns the prefix length of the blocks.
func (p Pool) Bits() int { return p.bits }

// Size returns the number of blocks, used or free.
func (p Pool) Size() uint64 { return new(Set).Stats(p).Size }
