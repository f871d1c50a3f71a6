package node

import (
	"maps"
	"slices"
	"sync"
)

// reservations assign each providerID to one Node before it is written: the cache shows it only after the write, and
// several Nodes are synced at the same time. A reservation lasts until the Node is deleted, reserves another
// providerID or is released.
type reservations struct {
	mu     sync.Mutex
	byID   map[string]string
	byNode map[string]string
	// waiting are the Nodes that have requested a providerID but not reserved one.
	waiting map[string]struct{}
}

func newReservations() *reservations {
	return &reservations{byID: map[string]string{}, byNode: map[string]string{}, waiting: map[string]struct{}{}}
}

// request makes release return the Node until it has a reservation.
func (r *reservations) request(nodename string) {
	r.mu.Lock()
	defer r.mu.Unlock()

	r.waiting[nodename] = struct{}{}
}

// reserve reserves a providerID for the Node in place of its present reservation, or returns the other Node that has
// reserved it.
func (r *reservations) reserve(providerID, nodename string) (owner string) {
	r.mu.Lock()
	defer r.mu.Unlock()

	if owner, reserved := r.byID[providerID]; reserved && owner != nodename {
		return owner
	}

	delete(r.byID, r.byNode[nodename])
	delete(r.waiting, nodename)
	r.byID[providerID], r.byNode[nodename] = nodename, providerID

	return ""
}

// release removes the Node's reservation and request. It returns the Nodes that are waiting for a reservation.
func (r *reservations) release(nodename string) (waiting []string) {
	r.mu.Lock()
	defer r.mu.Unlock()

	delete(r.byID, r.byNode[nodename])
	delete(r.byNode, nodename)
	delete(r.waiting, nodename)

	return slices.Collect(maps.Keys(r.waiting))
}
