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

// reserve reserves a providerID for the Node in place of its present reservation, and returns the Nodes that may be
// waiting for that one. If another Node has reserved the providerID, it changes nothing and returns that Node.
func (r *reservations) reserve(providerID, nodename string) (owner string, waiting []string) {
	r.mu.Lock()
	defer r.mu.Unlock()

	if owner, reserved := r.byID[providerID]; reserved && owner != nodename {
		return owner, nil
	}

	delete(r.waiting, nodename)

	if former, reserved := r.byNode[nodename]; reserved && former != providerID {
		delete(r.byID, former)

		waiting = slices.Sorted(maps.Keys(r.waiting))
	}

	r.byID[providerID], r.byNode[nodename] = nodename, providerID

	return "", waiting
}

// release removes the Node's reservation and request. It returns the Nodes that are waiting for a reservation.
func (r *reservations) release(nodename string) (waiting []string) {
	r.mu.Lock()
	defer r.mu.Unlock()

	delete(r.byID, r.byNode[nodename])
	delete(r.byNode, nodename)
	delete(r.waiting, nodename)

	return slices.Sorted(maps.Keys(r.waiting))
}
