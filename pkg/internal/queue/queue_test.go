package queue_test

import (
	"context"
	"crypto/rand"
	"errors"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/component-base/metrics/testutil"

	"github.com/talos-ccm/talos-ccm/pkg/internal/queue"
)

func TestWorker_CountsFailuresButNotConflictsAndCancellations(t *testing.T) {
	// The metric is global; a random name keeps other runs out.
	controller := "test-" + rand.Text()
	q := queue.New(controller)
	outcomes := []error{errors.New("refused"), apierrors.NewConflict(schema.GroupResource{Resource: "nodes"}, "a", nil), errors.New("refused"), nil}

	w := queue.Worker{
		Queue:   q,
		Subject: "node",
		Failure: "Failed to sync; retrying",
		Sync: func(context.Context, string) error {
			outcome := outcomes[0]

			if outcomes = outcomes[1:]; len(outcomes) == 0 {
				q.ShutDown()
			}

			return outcome
		},
	}

	q.Add("a")
	w.Run(t.Context())

	w.Queue = queue.New(controller)
	ctx, cancel := context.WithCancel(t.Context())
	w.Sync = func(context.Context, string) error {
		cancel()
		w.Queue.ShutDown()

		return ctx.Err()
	}

	w.Queue.Add("a")
	w.Run(ctx)

	testutil.AssertVectorCount(t, "talosccm_reconcile_errors_total", map[string]string{"controller": controller}, 2)
}
