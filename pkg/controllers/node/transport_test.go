package node_test

import (
	"context"
	"net/http"
	"strings"
	"sync"

	"github.com/stretchr/testify/require"

	"github.com/talos-ccm/talos-ccm/test/ctest"
)

// transport is the controller's connection to the API server. It counts write requests for Nodes, including those that
// change nothing, and can call a function before a write request.
type transport struct {
	base http.RoundTripper

	mu     sync.Mutex
	writes map[string]int    // by Node
	before map[string]func() // by Node, for its next write request
}

func newTransport() *transport {
	return &transport{writes: map[string]int{}, before: map[string]func(){}}
}

func (t *transport) wrap(base http.RoundTripper) http.RoundTripper {
	t.base = base

	return t
}

// RoundTrip implements http.RoundTripper.
func (t *transport) RoundTrip(r *http.Request) (*http.Response, error) {
	if path, isNode := strings.CutPrefix(r.URL.Path, "/api/v1/nodes/"); isNode && r.Method != http.MethodGet {
		nodename, _, _ := strings.Cut(path, "/")

		if before := t.count(nodename); before != nil {
			before()
		}
	}

	return t.base.RoundTrip(r)
}

// count counts a write request for a Node, and removes and returns the function to call before it.
func (t *transport) count(nodename string) (before func()) {
	t.mu.Lock()
	defer t.mu.Unlock()

	before = t.before[nodename]
	delete(t.before, nodename)
	t.writes[nodename]++

	return before
}

// writesTo returns the number of write requests for the Node.
func (t *transport) writesTo(nodename string) int {
	t.mu.Lock()
	defer t.mu.Unlock()

	return t.writes[nodename]
}

// beforeNextWrite calls f before the next write request for the Node.
func (t *transport) beforeNextWrite(nodename string, f func()) {
	t.mu.Lock()
	defer t.mu.Unlock()

	t.before[nodename] = f
}

// overtake calls change after the controller has read the Node and before it writes. The returned function waits for
// that.
func (s suite) overtake(nodename string, change func(context.Context) error) (wait func()) {
	return s.overtakeRequest(nodename, 1, change)
}

// overtakeRequest calls change before the n-th write request for the Node from now on.
func (s suite) overtakeRequest(nodename string, n int, change func(context.Context) error) (wait func()) {
	done := make(chan error, 1)
	before := func() { done <- change(s.Context()) }

	for range n - 1 {
		next := before
		before = func() { s.transport.beforeNextWrite(nodename, next) }
	}

	s.transport.beforeNextWrite(nodename, before)

	return func() {
		s.Helper()

		require.NoError(s, ctest.Receive(s, done, nodename+" is written"))
	}
}
