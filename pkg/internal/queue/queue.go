// Package queue holds the work queue and the reconcile loop that all controllers share.
package queue

import (
	"context"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"

	"github.com/talos-ccm/talos-ccm/pkg/internal/metric"
)

// Bounds of the per-key delay before a failed reconciliation is retried.
const (
	retryFirst = 100 * time.Millisecond
	retryMax   = time.Minute
)

var failures = metric.NewCounterVec("talosccm_reconcile_errors_total",
	"Number of failed reconciliations by controller, excluding conflicts.", "controller")

// Queue is a rate-limited queue of object names. Use New.
type Queue struct {
	workqueue.TypedRateLimitingInterface[string]

	controller string
}

// New returns an empty queue. The work queue metrics and talosccm_reconcile_errors_total carry the controller's name.
func New(controller string) Queue {
	return Queue{
		controller: controller,
		TypedRateLimitingInterface: workqueue.NewTypedRateLimitingQueueWithConfig(
			workqueue.NewTypedItemExponentialFailureRateLimiter[string](retryFirst, retryMax),
			workqueue.TypedRateLimitingQueueConfig[string]{Name: controller},
		),
	}
}

// Reconciler reconciles the names in a queue.
type Reconciler struct {
	Queue Queue
	// Subject is the log key of the names: "node", "csr".
	Subject string
	// Failure is the log message for a failed Sync.
	Failure string
	// Sync reconciles a name, and again after a time unless that is zero. After an error, it is retried with backoff.
	// Conflicts are not reported as failures.
	Sync func(ctx context.Context, name string) (again time.Duration, err error)
}

// Run reconciles names with a number of workers until ctx ends or the queue is shut down, and then returns when all
// workers have ended.
func (r Reconciler) Run(ctx context.Context, workers int) {
	defer context.AfterFunc(ctx, r.Queue.ShutDown)()

	var group wait.Group

	for range workers {
		group.Start(func() {
			for r.next(ctx) {
			}
		})
	}

	group.Wait()
}

func (r Reconciler) next(ctx context.Context) bool {
	name, shutdown := r.Queue.Get()
	if shutdown || ctx.Err() != nil {
		return false
	}

	defer r.Queue.Done(name)

	logger := klog.LoggerWithValues(klog.FromContext(ctx), r.Subject, name)

	again, err := r.Sync(klog.NewContext(ctx, logger), name)

	switch {
	case err == nil:
		r.Queue.Forget(name)

		if again > 0 {
			r.Queue.AddAfter(name, again)
		}

		return true
	case ctx.Err() != nil:
		return false // canceled, which is not a failure
	case apierrors.IsConflict(err):
		logger.V(4).Info("Object changed during reconciliation; retrying", "err", err)
	default:
		failures.WithLabelValues(r.Queue.controller).Inc()
		logger.Error(err, r.Failure)
	}

	r.Queue.AddRateLimited(name)

	return true
}
