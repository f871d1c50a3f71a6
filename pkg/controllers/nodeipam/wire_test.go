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

// fault is what becomes of a write.
type fault int

const (
	// none: it is done and answered.
	none fault = iota
	// refused: it is not done, and the controller learns that something went wrong.
	refused
	// unanswered: it is done, and the controller learns only that something went wrong.
	unanswered
	// slow: it is done some time after it was sent, unless it is canceled before that.
	slow
	// late: the controller learns that something went wrong, and some time after that it is done.
	late
	// killBefore: the process is killed before it writes.
	killBefore
	// killAfter: the process is killed when it has written, before it knows.
	killAfter
)

var (
	errBroken = errors.New("the connection broke")
	errKilled = errors.New("the process was killed")
)

// wire is one process's connection to the API server, which can break in many ways.
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
	// postponed are the writes that are late.
	postponed []*http.Request
}

func newWire() *wire {
	flowing := make(chan struct{})
	close(flowing)

	return &wire{next: calm, deaths: make(chan struct{}), paused: flowing, tide: make(chan struct{})}
}

// calm is a life without faults.
func calm(string) fault { return none }

// plan says what becomes of writes from now on.
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

// roundTrip shows the process its own world's Nodes alone, and does to its writes what is to be done to them.
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

// pass has the API server answer a request, for which it has all the time it needs: the bounds that the request has here and there are taken away. A process that has
// given up a write leads no more until nobody can do that write any longer, for which a real one has the rest of its lease; here another takes over at once.
// So what becomes of a write is for the faults to say, and not for how busy the machine is. It can be canceled as ever.
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

// requireBounds fails unless a write is bounded here and at the API server: that none is done late is what the next leader's list rests on.
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

// deliver has a write done, and keeps the answer for itself.
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

// postpone has a write done when the tide comes.
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

// slowed is how many writes wait or have waited for the tide.
func (w *wire) slowed() int {
	w.mu.Lock()
	defer w.mu.Unlock()

	return w.waiting
}

// land has done what is slow or late.
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

// kill ends the process as far as the API server can see.
func (w *wire) kill() {
	w.mu.Lock()
	defer w.mu.Unlock()

	if !w.dead {
		w.dead = true
		close(w.deaths)
	}
}

// pause holds up what the watches bring, until resume.
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

// Read implements io.Reader. What came while the wire was paused is read when it is not.
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
