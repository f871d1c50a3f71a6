// Package metric creates and registers talos-ccm's metrics. Their stability level is ALPHA: they may change between minor
// versions.
package metric

import (
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
)

// NewCounter returns a registered counter.
func NewCounter(name, help string) *metrics.Counter {
	return register(metrics.NewCounter(&metrics.CounterOpts{Name: name, Help: help, StabilityLevel: metrics.ALPHA}))
}

// NewCounterVec returns a registered counter with labels.
func NewCounterVec(name, help string, labels ...string) *metrics.CounterVec {
	return register(metrics.NewCounterVec(&metrics.CounterOpts{Name: name, Help: help, StabilityLevel: metrics.ALPHA}, labels))
}

// Zero returns the counter, which has one label, with series of the given values. Queries with increase() miss the first
// increment of a series that did not exist before.
func Zero[T ~string](counter *metrics.CounterVec, values ...T) *metrics.CounterVec {
	for _, value := range values {
		counter.WithLabelValues(string(value))
	}

	return counter
}

// NewGauge returns a registered gauge.
func NewGauge(name, help string) *metrics.Gauge {
	return register(metrics.NewGauge(&metrics.GaugeOpts{Name: name, Help: help, StabilityLevel: metrics.ALPHA}))
}

// NewGaugeVec returns a registered gauge with labels.
func NewGaugeVec(name, help string, labels ...string) *metrics.GaugeVec {
	return register(metrics.NewGaugeVec(&metrics.GaugeOpts{Name: name, Help: help, StabilityLevel: metrics.ALPHA}, labels))
}

// NewHistogram returns a registered histogram with the given upper bounds of buckets.
func NewHistogram(name, help string, buckets []float64) *metrics.Histogram {
	return register(metrics.NewHistogram(&metrics.HistogramOpts{Name: name, Help: help, Buckets: buckets, StabilityLevel: metrics.ALPHA}))
}

// NewHistogramVec returns a registered histogram with the given upper bounds of buckets, and labels.
func NewHistogramVec(name, help string, buckets []float64, labels ...string) *metrics.HistogramVec {
	return register(metrics.NewHistogramVec(&metrics.HistogramOpts{Name: name, Help: help, Buckets: buckets, StabilityLevel: metrics.ALPHA}, labels))
}

func register[M metrics.Registerable](m M) M {
	legacyregistry.MustRegister(m)

	return m
}
