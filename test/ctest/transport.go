package ctest

import (
	"net/http"
	"strings"
	"sync"
	"testing"

	"k8s.io/client-go/rest"
)

// RoundTripper implements http.RoundTripper with a function.
type RoundTripper func(*http.Request) (*http.Response, error)

// RoundTrip implements http.RoundTripper.
func (f RoundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// Transport is the connection of a controller to the API server. It counts write requests for Nodes, including those that
// change nothing, and can call a function before a request for a Node.
type Transport struct {
	base http.RoundTripper

	mu     sync.Mutex
	writes map[string]int    // by Node
	before map[string]func() // by method and Node
}

// NewTransport returns the transport of clients with the configuration, which it changes.
func NewTransport(config *rest.Config) *Transport {
	t := &Transport{writes: map[string]int{}, before: map[string]func(){}}

	config.Wrap(func(base http.RoundTripper) http.RoundTripper {
		t.base = base

		return t
	})

	return t
}

// RoundTrip implements http.RoundTripper.
func (t *Transport) RoundTrip(r *http.Request) (*http.Response, error) {
	if path, isNode := strings.CutPrefix(r.URL.Path, "/api/v1/nodes/"); isNode {
		nodename, _, _ := strings.Cut(path, "/")

		if before := t.count(r.Method, nodename); before != nil {
			before()
		}
	}

	return t.base.RoundTrip(r)
}

// count counts a write request for a Node. It removes and returns the function to call before the request.
func (t *Transport) count(method, nodename string) (before func()) {
	t.mu.Lock()
	defer t.mu.Unlock()

	before = t.before[method+nodename]
	delete(t.before, method+nodename)

	if method != http.MethodGet {
		t.writes[nodename]++
	}

	return before
}

// Writes returns the number of write requests for the Node.
func (t *Transport) Writes(nodename string) int {
	t.mu.Lock()
	defer t.mu.Unlock()

	return t.writes[nodename]
}

// Overtake calls change before the n-th request for the Node with the method from now on. wait returns after that.
func (t *Transport) Overtake(tb testing.TB, method, nodename string, n int, change func()) (wait func()) {
	done := make(chan struct{})
	call := func() { change(); close(done) }

	for range n - 1 {
		next := call
		call = func() { t.callBefore(method, nodename, next) }
	}

	t.callBefore(method, nodename, call)

	return func() {
		tb.Helper()
		Receive(tb, done, method+" request for "+nodename)
	}
}

func (t *Transport) callBefore(method, nodename string, f func()) {
	t.mu.Lock()
	defer t.mu.Unlock()

	t.before[method+nodename] = f
}
