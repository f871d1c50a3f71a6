package node

import (
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
)

var (
	syncs = metrics.NewCounterVec(&metrics.CounterOpts{
		Name:           "talosccm_node_syncs_total",
		Help:           "Number of times a Node was compared with its machine, by result: unchanged, changed, pending, conflict or error.",
		StabilityLevel: metrics.ALPHA,
	}, []string{"result"})

	initialization = metrics.NewHistogram(&metrics.HistogramOpts{
		Name:           "talosccm_node_initialization_duration_seconds",
		Help:           "Time from the creation of a Node to the removal of its uninitialized taint.",
		Buckets:        []float64{.25, .5, 1, 2.5, 5, 10, 30, 60, 300, 1800},
		StabilityLevel: metrics.ALPHA,
	})

	// The two names of the upstream Talos CCM.
	transformation = metrics.NewHistogram(&metrics.HistogramOpts{
		Name:           "talosccm_transformer_duration_seconds",
		Help:           "Time it takes to say what a Node should carry, rules included.",
		Buckets:        []float64{.0001, .00025, .0005, .001, .0025, .005, .01, .05, .1, 1},
		StabilityLevel: metrics.ALPHA,
	})

	transformationErrors = metrics.NewCounterVec(&metrics.CounterOpts{
		Name:           "talosccm_transformer_errors_total",
		Help:           "Number of values that could not be put on a Node, by type: labels, annotations, taints, platformMetadata or machine. One that stays wrong is counted once.",
		StabilityLevel: metrics.ALPHA,
	}, []string{"type"})
)

func init() {
	legacyregistry.MustRegister(syncs, initialization, transformation, transformationErrors)
}
