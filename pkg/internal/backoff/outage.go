package backoff

import (
	"context"
	"errors"
	"fmt"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
)

const (
	// logDelay is how long a problem lasts before it is logged at the default level.
	logDelay = 30 * time.Second

	levelProblem = 0
	levelRetry   = 2
)

// Outage returns the log levels for a problem that is retried. A problem that lasts for 30 seconds is logged at level 0
// once, and so is its end. All other messages have level 2. The zero value is ready for use.
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

// Failed returns the level for the failure of an attempt, or of what an attempt has established.
func (o *Outage) Failed(now time.Time) (level int) {
	o.Try(now)

	if o.logged || now.Sub(o.since) < logDelay {
		return levelRetry
	}

	o.logged = true

	return levelProblem
}

// Succeeded returns the level for the success of an attempt.
func (o *Outage) Succeeded() (level int) {
	level = levelRetry
	if o.logged {
		level = levelProblem
	}

	*o = Outage{}

	return level
}

var errNoResponse = errors.New("no response within " + logDelay.String())

// WatchLocal is Retry for watches of a resource of the local machine, and logs their failures. f calls established when
// the machine has responded. If it does not respond for 30 seconds, f is canceled and called again.
func WatchLocal(
	ctx context.Context, clk clock.Clock, first, limit time.Duration, resource string, f func(ctx context.Context, established func()) error,
) {
	logger := klog.FromContext(ctx)

	var outage Outage

	// Retry fails only when ctx ends.
	_ = Retry(ctx, clk, first, limit, func(ctx context.Context) error {
		watchCtx, cancel := context.WithCancelCause(ctx)
		defer cancel(nil)

		waitCtx, responded := context.WithCancel(watchCtx)
		defer responded()

		outage.Try(clk.Now())

		go func() {
			if Sleep(waitCtx, clk, logDelay) {
				cancel(errNoResponse)
			}
		}()

		err := f(watchCtx, func() {
			responded()
			logger.V(outage.Succeeded()).Info("Watching local machine", "resource", resource)
		})

		if errors.Is(context.Cause(watchCtx), errNoResponse) {
			err = fmt.Errorf("watch %s: %w", resource, errNoResponse)
		}

		if ctx.Err() == nil {
			logger.V(outage.Failed(clk.Now())).Info("Failed to watch local machine; retrying", "err", err)
		}

		return err
	})
}
