package backoff

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/cosi-project/runtime/pkg/state"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
)

// logDelay is how long failures last before one is logged at the default level.
const logDelay = 30 * time.Second

// Outage logs that an operation fails: once at level 0 after it has failed for 30 seconds, and then its next success.
// All other messages have level 2. The zero value is ready for use.
type Outage struct {
	since  time.Time // of the first attempt after the last success; zero if there was none
	logged bool
}

// Try records the beginning of an attempt.
func (o *Outage) Try(now time.Time) {
	if o.since.IsZero() {
		o.since = now
	}
}

// Failed returns the logger for a failed attempt or an ended watch.
func (o *Outage) Failed(logger klog.Logger, now time.Time) klog.Logger {
	o.Try(now)

	if o.logged || now.Sub(o.since) < logDelay {
		return logger.V(2)
	}

	o.logged = true

	return logger
}

// Succeeded returns the logger for a success.
func (o *Outage) Succeeded(logger klog.Logger) klog.Logger {
	if !o.logged {
		logger = logger.V(2)
	}

	*o = Outage{}

	return logger
}

// responseTimeout is how long the local machine may take to accept a watch.
const responseTimeout = 30 * time.Second

// WatchLocal watches a resource of the local machine until handle returns true or ctx ends. watch starts the watch, also
// after a failure, and handle receives the events.
func WatchLocal(
	ctx context.Context, clk clock.Clock, resource string,
	watch func(ctx context.Context, events chan<- state.Event) error, handle func(event state.Event) (done bool),
) {
	logger := klog.FromContext(ctx)

	var outage Outage

	accepted := func() { outage.Succeeded(logger).Info("Watching local machine", "resource", resource) }

	_ = repeat(ctx, func() error { // fails only when ctx ends
		outage.Try(clk.Now())

		err := watchOnce(ctx, clk, watch, accepted, handle)
		if err != nil && ctx.Err() == nil {
			outage.Failed(logger, clk.Now()).Info("Failed to watch local machine; retrying", "resource", resource, "err", err)
		}

		return err
	})
}

// watchOnce is WatchLocal up to the first failure.
func watchOnce(
	ctx context.Context, clk clock.Clock,
	watch func(ctx context.Context, events chan<- state.Event) error, accepted func(), handle func(event state.Event) (done bool),
) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)

	waiting, responded := context.WithCancel(ctx)
	defer responded()

	go func() {
		if Sleep(waiting, clk, responseTimeout) {
			cancel(fmt.Errorf("no response within %s", responseTimeout))
		}
	}()

	events := make(chan state.Event)

	if err := watch(ctx, events); err != nil {
		return cmp.Or(context.Cause(ctx), err)
	}

	responded()
	accepted()

	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case event := <-events:
			switch {
			case event.Type == state.Errored:
				return fmt.Errorf("watch ended: %w", event.Error)
			case handle(event):
				return nil
			}
		}
	}
}
