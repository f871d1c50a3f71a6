package nodeipam_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
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
	// slow: the write succeeds after a delay, unless it is canceled before.
	slow
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

	mu      sync.Mutex
	next    func(path string) fault // what becomes of the next write
	dead    bool
	deaths  chan struct{} // closed with the process
	paused  chan struct{} // closed unless the watches are held up
	tide    chan struct{} // closed when what is slow is done
	waiting int           // for the tide
	// postponed are the late writes.
	postponed []*http.Request
}

func newWire() *wire {
	flowing := make(chan struct{})
	close(flowing)

	return &wire{next: calm, deaths: make(chan struct{}), paused: flowing, tide: make(chan struct{})}
}

// calm plans no faults.
func calm(string) fault { return none }

// plan sets the faults of later writes.
func (w *wire) plan(next func(path string) fault) {
	w.mu.Lock()
	defer w.mu.Unlock()

	w.next = next
}

func (w *wire) fault(path string) fault {
	w.mu.Lock()
	defer w.mu.Unlock()

	return w.next(path)
}

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
		response.Body = &stream{ReadCloser: response.Body, wire: w, ctx: r.Context()}
	}

	return response, err
}

// pass sends a request without its timeouts, so that only the faults decide the result of a write, not the load of the test
// machine: in these tests another process takes over at once, whereas a real leader that gives up a write first waits for
// the rest of its lease. Cancellation still works.
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

// requireBounds returns an error unless a write has timeouts at client and API server: the next leader's list relies
// on them.
func requireBounds(r *http.Request) error {
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
		if err := requireBounds(r); err != nil {
			return nil, err
		}
	}

	switch w.fault(r.URL.Path) {
	case refused:
		return nil, errBroken
	case unanswered:
		return nil, w.deliver(r, errBroken)
	case slow:
		<-w.coming()

		if err := r.Context().Err(); errors.Is(err, context.Canceled) {
			return nil, err
		}

		return w.pass(r)
	case late:
		w.postpone(r.Clone(context.WithoutCancel(r.Context())))

		return nil, errBroken
	case killBefore:
		w.kill()

		return nil, errKilled
	case killAfter:
		err := w.deliver(r, errKilled)
		w.kill()

		return nil, err
	default:
		return w.pass(r)
	}
}

// deliver sends a write and replaces the response by an error.
func (w *wire) deliver(r *http.Request, answer error) error {
	response, err := w.pass(r)
	if err != nil {
		return err
	}

	if _, err := io.Copy(io.Discard, response.Body); err != nil {
		return err
	}

	return errors.Join(answer, response.Body.Close())
}

// postpone delays a write until land.
func (w *wire) postpone(r *http.Request) {
	w.mu.Lock()
	defer w.mu.Unlock()

	w.postponed = append(w.postponed, r)
}

func (w *wire) coming() <-chan struct{} {
	w.mu.Lock()
	defer w.mu.Unlock()

	w.waiting++

	return w.tide
}

// slowed returns the number of slow writes so far.
func (w *wire) slowed() int {
	w.mu.Lock()
	defer w.mu.Unlock()

	return w.waiting
}

// land completes the slow and the late writes.
func (w *wire) land() {
	w.mu.Lock()
	close(w.tide)
	w.tide = make(chan struct{})
	postponed := w.postponed
	w.postponed = nil
	w.mu.Unlock()

	for _, r := range postponed {
		_ = w.deliver(r, nil)
	}
}

func (w *wire) killed() bool {
	w.mu.Lock()
	defer w.mu.Unlock()

	return w.dead
}

// kill ends the process as far as the API server can observe.
func (w *wire) kill() {
	w.mu.Lock()
	defer w.mu.Unlock()

	if !w.dead {
		w.dead = true
		close(w.deaths)
	}
}

// pause delays watch events until resume.
func (w *wire) pause() {
	w.mu.Lock()
	defer w.mu.Unlock()

	select {
	case <-w.paused:
		w.paused = make(chan struct{})
	default:
	}
}

func (w *wire) resume() {
	w.mu.Lock()
	defer w.mu.Unlock()

	select {
	case <-w.paused:
	default:
		close(w.paused)
	}
}

func (w *wire) flowing() <-chan struct{} {
	w.mu.Lock()
	defer w.mu.Unlock()

	return w.paused
}

// stream is the body of a watch.
type stream struct {
	io.ReadCloser

	wire *wire
	ctx  context.Context //nolint:containedctx // the request's
}

// Read implements io.Reader. Data that arrives while the wire is paused is delivered on resume.
func (s *stream) Read(p []byte) (int, error) {
	n, err := s.ReadCloser.Read(p)

	select {
	case <-s.wire.flowing():
		return n, err
	case <-s.wire.deaths:
		return 0, errKilled
	case <-s.ctx.Done():
		return 0, s.ctx.Err()
	}
}
