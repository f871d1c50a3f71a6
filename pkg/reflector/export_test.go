package reflector

// LimitShares replaces the limits of what the machines of unknown Nodes send. Call it before the first Track.
func (r *Reflector) LimitShares(own, common int) { r.budget.Own, r.budget.Common = own, common }
