package inventory

// Displaced returns the number of nodenames that are known to have responded at another Node's address.
func (i *Inventory) Displaced() int { return i.displaced.Len() }
