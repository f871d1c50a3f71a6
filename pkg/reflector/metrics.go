package reflector

import (
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
)

var restarts = metrics.NewCounter(&metrics.CounterOpts{
	Name:           "talosccm_watch_restarts_total",
	Help:           "Number of times the watches of a machine ended and were started over.",
	StabilityLevel: metrics.ALPHA,
})

func init() { legacyregistry.MustRegister(restarts) }
