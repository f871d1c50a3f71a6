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

	"github.com/talos-ccm/talos-ccm/test/ctest"
)

// fault is how a write fails.
type fault int

const (
	// none: the write succeeds.
	none fault = iota
	// refused: the write is not sent, and the controller gets an error.
	refused
	// late: the controller gets an error, and the write arrives some time later.
	late
)

var errBroken = errors.New("the connection broke")

// wire is the connection of one process to the API server, with faults.
type wire struct {
	base     http.RoundTripper
	selector string

	// faults returns the fault of a write to a path. It may block.
	faults atomic.Pointer[func(path string) fault]

	mu   sync.Mutex
	late []*http.Request // until land
}

func newWire(selector string) *wire {
	w := &wire{selector: selector}
	w.plan(calm)

	return w
}

// calm plans no faults.
func calm(string) fault { return none }

// plan sets the faults of later writes.
func (w *wire) plan(faults func(path string) fault) { w.faults.Store(&faults) }

func (w *wire) wrap(base http.RoundTripper) http.RoundTripper {
	w.base = base

	return ctest.RoundTripper(w.roundTrip)
}

// roundTrip restricts lists and watches to the Nodes of the process's world, and applies the faults to writes. Only the
// controller's list, which has no resourceVersion, contains Nodes with labelUncached.
func (w *wire) roundTrip(r *http.Request) (*http.Response, error) {
	if strings.HasSuffix(r.URL.Path, "/nodes") {
		r = r.Clone(r.Context())
		query := r.URL.Query()

		selector := w.selector
		if query.Has("resourceVersion") || query.Has("watch") {
			selector += ",!" + labelUncached
		}

		query.Set("labelSelector", selector)
		r.URL.RawQuery = query.Encode()
	}

	if r.Method == http.MethodPatch {
		return w.write(r)
	}

	return w.pass(r)
}

// pass sends a request without its timeouts, so that only the faults decide the result of a write, not the load of the
// test machine. Cancellation still works.
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
	case planned == late:
		w.mu.Lock()
		defer w.mu.Unlock()

		w.late = append(w.late, r.Clone(context.WithoutCancel(r.Context())))

		return nil, errBroken
	}

	return w.pass(r)
}

// land sends the late writes, whose responses do not arrive.
func (w *wire) land() {
	w.mu.Lock()
	defer w.mu.Unlock()

	for _, r := range w.late {
		if response, err := w.pass(r); err == nil {
			_, _ = io.Copy(io.Discard, response.Body)
			_ = response.Body.Close()
		}
	}

	w.late = nil
}
