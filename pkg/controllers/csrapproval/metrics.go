package csrapproval

import (
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
)

var (
	// The name is the upstream Talos CCM's.
	decisions = metrics.NewCounterVec(&metrics.CounterOpts{
		Name:           "talosccm_csr_approval_count",
		Help:           "Number of kubelet-serving certificate requests that were decided, by status: approve or deny.",
		StabilityLevel: metrics.ALPHA,
	}, []string{"status"})

	verdicts = metrics.NewCounterVec(&metrics.CounterOpts{
		Name:           "talosccm_csr_verdicts_total",
		Help:           "Number of reasons found for kubelet-serving certificate requests, each once while a request waits and once when it is decided, by what it speaks for (Approve, Defer or Deny).",
		StabilityLevel: metrics.ALPHA,
	}, []string{"decision", "reason"})

	ageAtApproval = metrics.NewHistogram(&metrics.HistogramOpts{
		Name:           "talosccm_csr_approval_age_seconds",
		Help:           "Age of a kubelet-serving certificate request when it was approved.",
		Buckets:        []float64{.5, 1, 2, 5, 10, 30, 60, 300, 900, 3600},
		StabilityLevel: metrics.ALPHA,
	})

	pending = metrics.NewGauge(&metrics.GaugeOpts{
		Name:           "talosccm_csr_pending",
		Help:           "Number of kubelet-serving certificate requests of our machines that are not decided.",
		StabilityLevel: metrics.ALPHA,
	})
)

func init() { legacyregistry.MustRegister(decisions, verdicts, ageAtApproval, pending) }
