package backoff_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/internal/backoff"
)

var errFailed = errors.New("failed")

// delays retries f until it succeeds, and returns the delays between calls.
func delays(t *testing.T, f func(call int) error) (list []time.Duration) {
	t.Helper()

	var last time.Time

	calls := 0

	err := backoff.Retry(t.Context(), clock.RealClock{}, time.Second, 4*time.Second, func(context.Context) error {
		if !last.IsZero() {
			list = append(list, time.Since(last))
		}

		err := f(calls)
		last = time.Now()
		calls++

		return err
	})
	assert.NoError(t, err)

	return list
}

func TestRetry_DoublesDelaysUpToLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		got := delays(t, func(call int) error {
			if call == 5 {
				return nil
			}

			return errFailed
		})

		for i, seconds := range []int{1, 2, 4, 4, 4} {
			least := time.Duration(seconds) * time.Second
			assert.GreaterOrEqual(t, got[i], least, "delay %d", i)
			assert.LessOrEqual(t, got[i], least*13/10, "delay %d", i)
		}
	})
}

func TestRetry_ResetsDelaysAfterLongCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		got := delays(t, func(call int) error {
			switch call {
			case 3:
				time.Sleep(5 * time.Second)
			case 4:
				return nil
			}

			return errFailed
		})

		assert.LessOrEqual(t, got[3], 1300*time.Millisecond)
	})
}

func TestRetry_ReturnsWhenContextEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()

		err := backoff.Retry(ctx, clock.RealClock{}, time.Second, time.Hour, func(context.Context) error { return errFailed })
		assert.ErrorIs(t, err, context.DeadlineExceeded)
	})
}
