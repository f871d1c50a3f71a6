// Package backoff paces retries with a capped exponential delay.
package backoff

import (
	"context"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/utils/clock"
)

// New returns a backoff whose delays start at first and double up to limit, plus up to 30 % jitter.
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

// Retry calls f until it returns nil or ctx ends, with delays that grow from first to limit. The delays start over after a call that took
// longer than limit, such as a watch that worked for a while. f logs its own failures. Retry returns nil if f succeeded, else the error of ctx.
func Retry(ctx context.Context, clk clock.Clock, first, limit time.Duration, f func(ctx context.Context) error) error {
	delays := New(first, limit)

	for ctx.Err() == nil {
		started := clk.Now()

		if err := f(ctx); err == nil {
			return nil
		}

		if clk.Since(started) > limit {
			delays = New(first, limit)
		}

		Sleep(ctx, clk, delays.Step())
	}

	return ctx.Err()
}
