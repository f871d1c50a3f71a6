// Package worker works off a queue of names, as every controller does.
//
// It decides when a name's turn is, and never what is done then.
package worker

import (
	"context"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
	"k8s.io/klog/v2"
)

// How soon a name comes back whose sync has failed: at first, and at most.
const (
	RetryFirst = 100 * time.Millisecond
	RetryMax   = time.Minute
)

var failures = metrics.NewCounterVec(&metrics.CounterOpts{
	Name:           "talosccm_reconcile_errors_total",
	Help:           "Number of times that a controller could not do what was to be done about a Node or a request, conflicts not counted.",
	StabilityLevel: metrics.ALPHA,
}, []string{"controller"})

func init() { legacyregistry.MustRegister(failures) }

// Queue holds names whose turn is to come, each once. Use NewQueue.
type Queue struct {
	workqueue.TypedRateLimitingInterface[string]

	controller string
}

// NewQueue makes an empty queue; controller is what the metrics, the framework's and that of failures, call it.
func NewQueue(controller string) Queue {
	return Queue{
		controller: controller,
		TypedRateLimitingInterface: workqueue.NewTypedRateLimitingQueueWithConfig(
			workqueue.NewTypedItemExponentialFailureRateLimiter[string](RetryFirst, RetryMax),
			workqueue.TypedRateLimitingQueueConfig[string]{Name: controller},
		),
	}
}

// Worker syncs one name after the other. Several can share a queue.
type Worker struct {
	Queue Queue
	// Subject is what the names are of, as logs call it: "node", "csr".
	Subject string
	// Failure says in the log what could not be done.
	Failure string
	// Sync does what is to be done about a name. If it fails the name comes back; a conflict is nothing that an operator must know.
	Sync func(ctx context.Context, name string) error
}

// Run works until ctx ends or the queue is shut down.
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
		return false // broken off, which is no failure
	case apierrors.IsConflict(err):
		logger.V(4).Info("Changed meanwhile, trying again", "err", err)
	default:
		failures.WithLabelValues(w.Queue.controller).Inc()
		logger.Error(err, w.Failure)
	}

	w.Queue.AddRateLimited(name)

	return true
}
