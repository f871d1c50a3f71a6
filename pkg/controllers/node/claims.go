package node

import (
	"maps"
	"slices"
	"sync"
)

// claims remembers which Node was given a providerID, until the Node is gone: the informer shows it only after the write, and two
// Nodes are synced at a time.
type claims struct {
	mu     sync.Mutex
	byID   map[string]string
	byNode map[string]string
	// waiting are the Nodes that want a providerID and have not got it.
	waiting map[string]struct{}
}

func newClaims() *claims {
	return &claims{byID: map[string]string{}, byNode: map[string]string{}, waiting: map[string]struct{}{}}
}

// wait takes note that nodename wants a providerID, until it takes one or is released. To miss nothing, call it before looking
// who has the providerID.
func (c *claims) wait(nodename string) {
	c.mu.Lock()
	defer c.mu.Unlock()

	c.waiting[nodename] = struct{}{}
}

// take claims providerID for nodename and returns empty, or returns the Node that has claimed it before.
func (c *claims) take(providerID, nodename string) (holder string) {
	c.mu.Lock()
	defer c.mu.Unlock()

	if holder, taken := c.byID[providerID]; taken && holder != nodename {
		return holder
	}

	delete(c.byID, c.byNode[nodename])
	delete(c.waiting, nodename)
	c.byID[providerID], c.byNode[nodename] = nodename, providerID

	return ""
}

// release gives up what nodename has claimed and returns the Nodes that may have waited for it.
func (c *claims) release(nodename string) (waiting []string) {
	c.mu.Lock()
	defer c.mu.Unlock()

	delete(c.byID, c.byNode[nodename])
	delete(c.byNode, nodename)
	delete(c.waiting, nodename)

	return slices.Collect(maps.Keys(c.waiting))
}
