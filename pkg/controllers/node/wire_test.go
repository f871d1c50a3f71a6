package node_test

import (
	"context"
	"net/http"
	"strings"
	"sync"
	"time"
)

// wire is the controller's connection to the API server. It counts what the controller writes to Nodes, whether or not that changes
// anything, and lets a test do something just before a write.
type wire struct {
	base http.RoundTripper

	mu     sync.Mutex
	writes map[string]int    // by the Node's name
	first  map[string]func() // what comes before the next write to the Node of that name
}

func newWire() *wire { return &wire{writes: map[string]int{}, first: map[string]func(){}} }

func (w *wire) wrap(base http.RoundTripper) http.RoundTripper {
	w.base = base

	return w
}

// RoundTrip implements http.RoundTripper.
func (w *wire) RoundTrip(r *http.Request) (*http.Response, error) {
	if path, isNode := strings.CutPrefix(r.URL.Path, "/api/v1/nodes/"); isNode && r.Method != http.MethodGet {
		nodename, _, _ := strings.Cut(path, "/")

		if first := w.note(nodename); first != nil {
			first()
		}
	}

	return w.base.RoundTrip(r)
}

// note counts a write to a Node, and takes what is to come before it.
func (w *wire) note(nodename string) (first func()) {
	w.mu.Lock()
	defer w.mu.Unlock()

	first = w.first[nodename]
	delete(w.first, nodename)
	w.writes[nodename]++

	return first
}

// written is how often the controller has sent a write to the Node, ever.
func (w *wire) written(nodename string) int {
	w.mu.Lock()
	defer w.mu.Unlock()

	return w.writes[nodename]
}

func (w *wire) precede(nodename string, first func()) {
	w.mu.Lock()
	defer w.mu.Unlock()

	w.first[nodename] = first
}

// overtake has do done when the controller has looked at the Node and before it writes what it made up its mind to. The returned function waits
// until that has happened.
func (s suite) overtake(nodename string, do func(context.Context) error) (happened func()) {
	done := make(chan error, 1)
	s.wire.precede(nodename, func() { done <- do(s.Context()) })

	return func() {
		s.Helper()

		select {
		case err := <-done:
			s.require(err)
		case <-time.After(patience):
			s.Fatalf("node %s was not written within %s", nodename, patience)
		}
	}
}
