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
)

func init() { legacyregistry.MustRegister(syncs, initialization) }
