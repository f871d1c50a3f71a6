package node

import "sync"

// claims remembers which Node was given a providerID, until the Node is gone: the informer shows it only after the write, and two
// Nodes are synced at a time.
type claims struct {
	mu     sync.Mutex
	byID   map[string]string
	byNode map[string]string
}

func newClaims() *claims {
	return &claims{byID: map[string]string{}, byNode: map[string]string{}}
}

// take claims providerID for nodename and returns empty, or returns the Node that has claimed it before.
func (c *claims) take(providerID, nodename string) (holder string) {
	c.mu.Lock()
	defer c.mu.Unlock()

	if holder, taken := c.byID[providerID]; taken && holder != nodename {
		return holder
	}

	delete(c.byID, c.byNode[nodename])
	c.byID[providerID], c.byNode[nodename] = nodename, providerID

	return ""
}

// release gives up what nodename has claimed.
func (c *claims) release(nodename string) {
	c.mu.Lock()
	defer c.mu.Unlock()

	delete(c.byID, c.byNode[nodename])
	delete(c.byNode, nodename)
}
