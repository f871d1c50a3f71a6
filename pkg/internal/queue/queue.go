// Package queue holds the work queue and the worker loop that all controllers share.
package queue

import (
	"context"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
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

// Worker reconciles one name at a time. Several workers can share a queue.
type Worker struct {
	Queue Queue
	// Subject is the log key of the names: "node", "csr".
	Subject string
	// Failure is the log message for a failed Sync.
	Failure string
	// Sync reconciles a name. After an error, it is retried with backoff. Conflicts are not reported as failures.
	Sync func(ctx context.Context, name string) error
}

// Run processes names until ctx ends or the queue is shut down.
func (w Worker) Run(ctx context.Context) {
	for w.next(ctx) {
	}
}

func (w Worker) next(ctx context.Context) bool {
	name, shutdown := w.Queue.Get()
	if shutdown || ctx.Err() != nil {
		return false
	}

	defer w.Queue.Done(name)

	logger := klog.LoggerWithValues(klog.FromContext(ctx), w.Subject, name)

	err := w.Sync(klog.NewContext(ctx, logger), name)

	switch {
	case err == nil:
		w.Queue.Forget(name)

		return true
	case ctx.Err() != nil:
		return false // canceled, which is not a failure
	case apierrors.IsConflict(err):
		logger.V(4).Info("Object changed during reconciliation; retrying", "err", err)
	default:
		failures.WithLabelValues(w.Queue.controller).Inc()
		logger.Error(err, w.Failure)
	}

	w.Queue.AddRateLimited(name)

	return true
}
