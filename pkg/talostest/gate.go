package talostest

import "sync"

// gate blocks callers while it is shut. The zero value is open.
type gate struct {
	mu      sync.Mutex
	barrier chan struct{} // nil while open; closed by open
}

func (g *gate) shut() {
	g.mu.Lock()
	defer g.mu.Unlock()

	if g.barrier == nil {
		g.barrier = make(chan struct{})
	}
}

func (g *gate) open() {
	g.mu.Lock()
	defer g.mu.Unlock()

	if g.barrier != nil {
		close(g.barrier)
		g.barrier = nil
	}
}

func (g *gate) isShut() bool {
	g.mu.Lock()
	defer g.mu.Unlock()

	return g.barrier != nil
}

// wait blocks until the gate is open and returns true. It returns false if done is closed first.
func (g *gate) wait(done <-chan struct{}) bool {
	for {
		g.mu.Lock()
		barrier := g.barrier
		g.mu.Unlock()

		if barrier == nil {
			return true
		}

		select {
		case <-barrier:
		case <-done:
			return false
		}
	}
}
