package backoff_test

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cosi-project/runtime/pkg/state"
	"github.com/stretchr/testify/assert"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/internal/backoff"
)

// logged runs f for the given time and returns its messages at the default level, each with its time.
func logged(t *testing.T, limit time.Duration, f func(ctx context.Context)) (messages []string) {
	t.Helper()

	synctest.Test(t, func(t *testing.T) {
		logger := ktesting.NewLogger(ktesting.NopTL{}, ktesting.NewConfig(ktesting.BufferLogs(true)))
		sink, _ := logger.GetSink().(ktesting.Underlier)
		began := time.Now()

		ctx, cancel := context.WithTimeout(klog.NewContext(t.Context(), logger), limit)
		defer cancel()

		f(ctx)

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
	type events = chan<- state.Event

	fail := func(ctx context.Context, events events) {
		select {
		case events <- state.Event{Type: state.Errored, Error: errFailed}:
		case <-ctx.Done():
		}
	}

	for _, test := range []struct {
		name  string
		watch func(ctx context.Context, age time.Duration, events events) error
		want  []string
	}{
		{
			"works", func(context.Context, time.Duration, events) error { return nil }, nil,
		},
		{
			"fails for some seconds", func(_ context.Context, age time.Duration, _ events) error {
				if age < 5*time.Second {
					return errFailed
				}

				return nil
			}, nil,
		},
		{
			"ends repeatedly", func(ctx context.Context, _ time.Duration, events events) error {
				time.AfterFunc(time.Minute, func() { fail(ctx, events) })

				return nil
			}, nil,
		},
		{
			"fails for minutes", func(_ context.Context, age time.Duration, _ events) error {
				if age < 5*time.Minute {
					return errFailed
				}

				return nil
			}, []string{"30s Failed to watch local machine; retrying [resource machine state err failed]", "5m0s Watching local machine [resource machine state]"},
		},
		{
			"does not respond", func(ctx context.Context, _ time.Duration, _ events) error {
				<-ctx.Done()

				return ctx.Err()
			}, []string{"30s Failed to watch local machine; retrying [resource machine state err no response within 30s]"},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			got := logged(t, 10*time.Minute, func(ctx context.Context) {
				began := time.Now()
				watch := func(ctx context.Context, events events) error { return test.watch(ctx, time.Since(began), events) }

				backoff.WatchLocal(ctx, clock.RealClock{}, "machine state", watch, func(state.Event) bool { return false })
			})
			assert.Equal(t, test.want, got)
		})
	}
}

func TestWatchLocal_HandlesEventsUntilDone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		watches := 0
		watch := func(ctx context.Context, events chan<- state.Event) error {
			watches++
			kinds := [][]state.EventType{{state.Created, state.Errored}, {state.Bootstrapped, state.Updated, state.Created}}[watches-1]

			go func() {
				for _, kind := range kinds {
					select {
					case events <- state.Event{Type: kind}:
					case <-ctx.Done():
					}
				}
			}()

			return nil
		}

		var got []state.EventType

		backoff.WatchLocal(t.Context(), clock.RealClock{}, "machine state", watch, func(event state.Event) bool {
			got = append(got, event.Type)

			return event.Type == state.Updated
		})

		assert.Equal(t, []state.EventType{state.Created, state.Bootstrapped, state.Updated}, got)
	})
}
