package queue_test

import (
	"context"
	"crypto/rand"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/component-base/metrics/testutil"

	"github.com/talos-ccm/talos-ccm/pkg/internal/queue"
)

func TestReconciler_CountsFailuresButNotConflictsAndCancellations(t *testing.T) {
	// The metric is global; a random name keeps other runs out.
	controller := "test-" + rand.Text()
	q := queue.New(controller)
	outcomes := []error{errors.New("refused"), apierrors.NewConflict(schema.GroupResource{Resource: "nodes"}, "a", nil), errors.New("refused"), nil}

	r := queue.Reconciler{
		Queue:   q,
		Subject: "node",
		Failure: "Failed to sync; retrying",
		Sync: func(context.Context, string) (time.Duration, error) {
			outcome := outcomes[0]

			if outcomes = outcomes[1:]; len(outcomes) == 0 {
				q.ShutDown()
			}

			return 0, outcome
		},
	}

	q.Add("a")
	r.Run(t.Context(), 1)

	r.Queue = queue.New(controller)
	ctx, cancel := context.WithCancel(t.Context())
	r.Sync = func(context.Context, string) (time.Duration, error) {
		cancel()

		return 0, ctx.Err()
	}

	r.Queue.Add("a")
	r.Run(ctx, 1)

	testutil.AssertVectorCount(t, "talosccm_reconcile_errors_total", map[string]string{"controller": controller}, 2)
}

func TestReconciler_ReconcilesAgain(t *testing.T) {
	var (
		r     = queue.Reconciler{Queue: queue.New("test-" + rand.Text()), Subject: "node"}
		times atomic.Int32
	)

	r.Sync = func(context.Context, string) (time.Duration, error) {
		if times.Add(1) == 3 {
			r.Queue.ShutDown()
		}

		return time.Millisecond, nil
	}

	r.Queue.Add("a")
	r.Run(t.Context(), 2)
	assert.EqualValues(t, 3, times.Load())
}
