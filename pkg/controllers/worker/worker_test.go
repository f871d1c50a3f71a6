package worker_test

import (
	"context"
	"crypto/rand"
	"errors"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/component-base/metrics/testutil"

	"github.com/talos-ccm/talos-ccm/pkg/controllers/worker"
)

func TestFailuresAreCountedAndConflictsAndWhatIsBrokenOffAreNot(t *testing.T) {
	// The metric is the process's: with a name of this run's own, what is counted is of this run.
	controller := "test-" + rand.Text()
	queue := worker.NewQueue(controller)
	outcomes := []error{errors.New("refused"), apierrors.NewConflict(schema.GroupResource{Resource: "nodes"}, "a", nil), errors.New("refused"), nil}

	w := worker.Worker{
		Queue:   queue,
		Subject: "node",
		Failure: "Could not do it",
		Sync: func(context.Context, string) error {
			outcome := outcomes[0]

			if outcomes = outcomes[1:]; len(outcomes) == 0 {
				queue.ShutDown()
			}

			return outcome
		},
	}

	queue.Add("a")
	w.Run(t.Context())

	w.Queue = worker.NewQueue(controller)
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
