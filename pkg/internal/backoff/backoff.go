// Package backoff retries operations that may fail for long, and logs that once.
package backoff

import (
	"context"
	"errors"
	"math"
	"time"

	"github.com/siderolabs/go-retry/retry"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
)

// retryDelay is the shortest delay of Retry and WatchLocal; the longest is twice as long. The delays do not grow: few
// operations are retried, and go-retry does not limit an exponential delay.
const retryDelay = time.Second

// New returns a backoff. Its delays start at first and double up to limit, plus up to 30 % jitter.
func New(first, limit time.Duration) wait.Backoff {
	return wait.Backoff{Duration: first, Factor: 2, Jitter: 0.3, Steps: 10, Cap: limit}
}

// Sleep blocks for d and reports whether d has passed; it returns false as soon as ctx ends.
func Sleep(ctx context.Context, clk clock.Clock, d time.Duration) bool {
	timer := clk.NewTimer(d)
	defer timer.Stop()

	select {
	case <-ctx.Done():
		return false
	case <-timer.C():
		return ctx.Err() == nil
	}
}

// Retry calls f until it returns nil or ctx ends. It returns nil or the error of ctx. failure is the message of an
// Outage.
func Retry(ctx context.Context, failure string, f func(ctx context.Context) error) error {
	var outage Outage

	return repeat(ctx, func() error {
		outage.Try(time.Now())

		err := f(ctx)
		if err != nil && ctx.Err() == nil {
			outage.Failed(klog.FromContext(ctx), time.Now()).Info(failure, "err", err)
		}

		return err
	})
}

// errFailed replaces the errors of f, because go-retry collects all errors with different texts.
var errFailed = errors.New("failed")

// repeat is Retry without messages.
func repeat(ctx context.Context, f func() error) error {
	_ = retry.Constant(math.MaxInt64, retry.WithUnits(retryDelay), retry.WithJitter(retryDelay)).RetryWithContext(ctx, func(context.Context) error {
		if ctx.Err() == nil && f() != nil {
			return retry.ExpectedError(errFailed)
		}

		return nil
	})

	return ctx.Err()
}
