package cidrset

// Size returns the number of blocks, used or free.
func (p Pool) Size() uint64 { return new(Set).Stats(p).Size }
