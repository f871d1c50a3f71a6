package backoff_test

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/internal/backoff"
)

// watchLocal runs WatchLocal for ten minutes and returns its messages at the default level, each with its time.
func watchLocal(t *testing.T, f func(ctx context.Context, established func()) error) (messages []string) {
	t.Helper()

	synctest.Test(t, func(t *testing.T) {
		logger := ktesting.NewLogger(ktesting.NopTL{}, ktesting.NewConfig(ktesting.BufferLogs(true)))
		sink, _ := logger.GetSink().(ktesting.Underlier)
		began := time.Now()

		ctx, cancel := context.WithTimeout(klog.NewContext(t.Context(), logger), 10*time.Minute)
		defer cancel()

		backoff.WatchLocal(ctx, clock.RealClock{}, time.Second, 20*time.Second, "machine state", f)

		for _, entry := range sink.GetBuffer().Data() {
			if entry.Verbosity == 0 {
				age := entry.Timestamp.Sub(began).Truncate(30 * time.Second)
				messages = append(messages, fmt.Sprintf("%s %s %v", age, entry.Message, entry.ParameterKVList))
			}
		}
	})

	return messages
}

func TestWatchLocal_LogsLastingOutageOnce(t *testing.T) {
	for _, test := range []struct {
		name string
		f    func(ctx context.Context, age time.Duration, established func()) error
		want []string
	}{
		{
			"established", func(ctx context.Context, _ time.Duration, established func()) error {
				established()
				<-ctx.Done()

				return ctx.Err()
			}, nil,
		},
		{
			"fails for some seconds", func(ctx context.Context, age time.Duration, established func()) error {
				if age < 5*time.Second {
					return errFailed
				}

				established()
				<-ctx.Done()

				return ctx.Err()
			}, nil,
		},
		{
			"ends repeatedly", func(ctx context.Context, _ time.Duration, established func()) error {
				established()
				backoff.Sleep(ctx, clock.RealClock{}, time.Minute)

				return errFailed
			}, nil,
		},
		{
			"fails for minutes", func(ctx context.Context, age time.Duration, established func()) error {
				if age < 5*time.Minute {
					return errFailed
				}

				established()
				<-ctx.Done()

				return ctx.Err()
			}, []string{"30s Failed to watch local machine; retrying [err failed]", "5m0s Watching local machine [resource machine state]"},
		},
		{
			"does not respond", func(ctx context.Context, _ time.Duration, _ func()) error {
				<-ctx.Done()

				return ctx.Err()
			}, []string{"30s Failed to watch local machine; retrying [err watch machine state: no response within 30s]"},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			var began time.Time

			got := watchLocal(t, func(ctx context.Context, established func()) error {
				if began.IsZero() {
					began = time.Now()
				}

				return test.f(ctx, time.Since(began), established)
			})
			assert.Equal(t, test.want, got)
		})
	}
}
