package backoff_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/talos-ccm/talos-ccm/pkg/internal/backoff"
)

var errFailed = errors.New("failed")

func TestRetry_RepeatsUntilSuccess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()

		var calls []time.Duration

		require.NoError(t, backoff.Retry(t.Context(), "Failed", func(context.Context) error {
			calls = append(calls, time.Since(began))
			if len(calls) == 100 {
				return nil
			}

			return errFailed
		}))

		assert.Zero(t, calls[0])

		for i := range 99 {
			delay := calls[i+1] - calls[i]
			assert.GreaterOrEqual(t, delay, time.Second, "delay %d", i)
			assert.LessOrEqual(t, delay, 2*time.Second, "delay %d", i)
		}
	})
}

func TestRetry_ReturnsWhenContextEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()

		began := time.Now()

		err := backoff.Retry(ctx, "Failed", func(context.Context) error { return errFailed })
		assert.ErrorIs(t, err, context.DeadlineExceeded)
		assert.Equal(t, time.Hour, time.Since(began))
	})
}

func TestRetry_DoesNotStartAfterContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()

	err := backoff.Retry(ctx, "Failed", func(context.Context) error {
		t.Error("called after the context has ended")

		return nil
	})
	assert.ErrorIs(t, err, context.Canceled)
}

func TestRetry_LogsLastingFailureOnce(t *testing.T) {
	messages := logged(t, 10*time.Minute, func(ctx context.Context) {
		_ = backoff.Retry(ctx, "Failed to try; retrying", func(context.Context) error { return errFailed })
	})

	assert.Equal(t, []string{"30s Failed to try; retrying [err failed]"}, messages)
}
