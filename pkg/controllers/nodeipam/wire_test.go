package nodeipam_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// fault is how a write fails.
type fault int

const (
	// none: the write succeeds.
	none fault = iota
	// refused: the write is not sent, and the controller gets an error.
	refused
	// unanswered: the write succeeds, and the controller gets an error.
	unanswered
	// late: the controller gets an error, and the write arrives some time later.
	late
	// killBefore: the process is killed before the write is sent.
	killBefore
	// killAfter: the process is killed after the write succeeded, before the response.
	killAfter
)

var (
	errBroken = errors.New("the connection broke")
	errKilled = errors.New("the process was killed")
)

// wire is the connection of one process to the API server, with faults.
type wire struct {
	base     http.RoundTripper
	selector string

	// faults returns the fault of a write to a path. It may block.
	faults atomic.Pointer[func(path string) fault]
	// kill ends the process as far as the API server can observe, and closes dead.
	kill func()
	dead <-chan struct{}

	mu     sync.Mutex
	paused chan struct{}   // closed unless watch events are delayed
	late   []*http.Request // until land
}

func newWire(selector string) *wire {
	dead, flowing := make(chan struct{}), make(chan struct{})
	close(flowing)

	w := &wire{selector: selector, kill: sync.OnceFunc(func() { close(dead) }), dead: dead, paused: flowing}
	w.plan(calm)

	return w
}

// calm plans no faults.
func calm(string) fault { return none }

// plan sets the faults of later writes.
func (w *wire) plan(faults func(path string) fault) { w.faults.Store(&faults) }

func (w *wire) killed() bool { return isClosed(w.dead) }

func isClosed(ch <-chan struct{}) bool {
	select {
	case <-ch:
		return true
	default:
		return false
	}
}

// roundTripper implements http.RoundTripper with a function.
type roundTripper func(*http.Request) (*http.Response, error)

// RoundTrip implements http.RoundTripper.
func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func (w *wire) wrap(base http.RoundTripper) http.RoundTripper {
	w.base = base

	return roundTripper(w.roundTrip)
}

// roundTrip restricts lists and watches to the Nodes of the process's world, and applies the faults to writes.
func (w *wire) roundTrip(r *http.Request) (*http.Response, error) {
	if w.killed() {
		return nil, errKilled
	}

	if strings.HasSuffix(r.URL.Path, "/nodes") {
		r = r.Clone(r.Context())
		query := r.URL.Query()
		query.Set("labelSelector", w.selector)
		r.URL.RawQuery = query.Encode()
	}

	if r.Method == http.MethodPatch {
		return w.write(r)
	}

	response, err := w.pass(r)
	if err == nil && r.URL.Query().Get("watch") != "" {
		response.Body = &stream{ReadCloser: response.Body, wire: w, done: r.Context().Done()}
	}

	return response, err
}

// pass sends a request without its timeouts, so that only the faults decide the result of a write, not the load of the
// test machine: in these tests another process takes over at once, whereas a real leader that gives up a write first
// waits for the rest of its lease. Cancellation still works.
func (w *wire) pass(r *http.Request) (*http.Response, error) {
	bounded := r.Context()
	ctx, cancel := context.WithCancel(context.WithoutCancel(bounded))

	context.AfterFunc(bounded, func() {
		if errors.Is(bounded.Err(), context.Canceled) {
			cancel()
		}
	})

	r = r.Clone(ctx)
	query := r.URL.Query()
	query.Del("timeout")
	r.URL.RawQuery = query.Encode()

	return w.base.RoundTrip(r)
}

// checkBounds returns an error unless a write has timeouts at client and API server: the next leader's list relies on
// them.
func checkBounds(r *http.Request) error {
	const longest = 3 * time.Second

	if _, bounded := r.Context().Deadline(); !bounded {
		return errors.New("a write is not bounded here")
	}

	if timeout, err := time.ParseDuration(r.URL.Query().Get("timeout")); err != nil || timeout > longest {
		return fmt.Errorf("a write is not bounded at the API server: %s", r.URL)
	}

	return nil
}

func (w *wire) write(r *http.Request) (*http.Response, error) {
	if strings.HasPrefix(r.URL.Path, "/api/v1/nodes/") {
		if err := checkBounds(r); err != nil {
			return nil, err
		}
	}

	switch planned := (*w.faults.Load())(r.URL.Path); {
	case errors.Is(r.Context().Err(), context.Canceled):
		return nil, r.Context().Err()
	case planned == refused:
		return nil, errBroken
	case planned == unanswered:
		return nil, errors.Join(errBroken, w.deliver(r))
	case planned == late:
		w.mu.Lock()
		defer w.mu.Unlock()

		w.late = append(w.late, r.Clone(context.WithoutCancel(r.Context())))

		return nil, errBroken
	case planned == killBefore:
		w.kill()

		return nil, errKilled
	case planned == killAfter:
		defer w.kill()

		return nil, errors.Join(errKilled, w.deliver(r))
	}

	return w.pass(r)
}

// deliver sends a write whose response does not arrive.
func (w *wire) deliver(r *http.Request) error {
	response, err := w.pass(r)
	if err != nil {
		return err
	}

	_, err = io.Copy(io.Discard, response.Body)

	return errors.Join(err, response.Body.Close())
}

// land sends the late writes.
func (w *wire) land() {
	w.mu.Lock()
	defer w.mu.Unlock()

	for _, r := range w.late {
		_ = w.deliver(r)
	}

	w.late = nil
}

// pause delays watch events until resume.
func (w *wire) pause() {
	w.mu.Lock()
	defer w.mu.Unlock()

	if isClosed(w.paused) {
		w.paused = make(chan struct{})
	}
}

func (w *wire) resume() {
	w.mu.Lock()
	defer w.mu.Unlock()

	if !isClosed(w.paused) {
		close(w.paused)
	}
}

// stream is the body of a watch.
type stream struct {
	io.ReadCloser

	wire *wire
	done <-chan struct{} // of the request
}

// Read implements io.Reader. Data that arrives while the wire is paused is delivered on resume.
func (s *stream) Read(p []byte) (int, error) {
	n, err := s.ReadCloser.Read(p)

	s.wire.mu.Lock()
	flowing := s.wire.paused
	s.wire.mu.Unlock()

	select {
	case <-flowing:
		return n, err
	case <-s.wire.dead:
		return 0, errKilled
	case <-s.done:
		return 0, context.Canceled
	}
}
