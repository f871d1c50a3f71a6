package worker_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/component-base/metrics/legacyregistry"
	"k8s.io/component-base/metrics/testutil"

	"github.com/talos-ccm/talos-ccm/pkg/controllers/worker"
)

func TestFailuresAreCountedAndConflictsAndWhatIsBrokenOffAreNot(t *testing.T) {
	queue := worker.NewQueue("test")
	outcomes := []error{errors.New("refused"), apierrors.NewConflict(schema.GroupResource{Resource: "nodes"}, "a", nil), errors.New("refused"), nil}

	w := worker.Worker{
		Queue:      queue,
		Controller: "test",
		Subject:    "node",
		Failure:    "Could not do it",
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

	w.Queue = worker.NewQueue("test")
	ctx, cancel := context.WithCancel(t.Context())
	w.Sync = func(context.Context, string) error {
		cancel()
		w.Queue.ShutDown()

		return ctx.Err()
	}

	w.Queue.Add("a")
	w.Run(ctx)

	const want = `
# HELP talosccm_sync_failures_total [ALPHA] Number of times that a controller could not do what was to be done about a Node or a request, conflicts not counted.
# TYPE talosccm_sync_failures_total counter
talosccm_sync_failures_total{controller="test"} 2
`
	if err := testutil.GatherAndCompare(legacyregistry.DefaultGatherer, strings.NewReader(want), "talosccm_sync_failures_total"); err != nil {
		t.Error(err)
	}
}
