package lifecycle

import (
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
)

var (
	deletionsTotal = metrics.NewCounterVec(&metrics.CounterOpts{
		Name:           "talosccm_lifecycle_deletions_total",
		Help:           "Number of Nodes that were deleted by proof: reset, renamed or discovery.",
		StabilityLevel: metrics.ALPHA,
	}, []string{"proof"})

	affectedNodes = metrics.NewGaugeVec(&metrics.GaugeOpts{
		Name:           "talosccm_lifecycle_nodes",
		Help:           "Number of Nodes by Event reason: NodeShutdown, NodeGone, DeletionLimited, DeletionPaused or DeletionDryRun.",
		StabilityLevel: metrics.ALPHA,
	}, []string{"reason"})
)

func init() { legacyregistry.MustRegister(deletionsTotal, affectedNodes) }

// updateGauges counts the Nodes with each verdict.
func (c *Controller) updateGauges() {
	affectedNodes.Reset()

	for reason, count := range c.reporter.CountByReason() {
		affectedNodes.WithLabelValues(reason).Set(float64(count))
	}
}
