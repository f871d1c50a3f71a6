package csrapproval

import (
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
)

var (
	// The upstream Talos CCM has a metric of the same name.
	decisions = metrics.NewCounterVec(&metrics.CounterOpts{
		Name:           "talosccm_csr_approval_count",
		Help:           "Kubelet-serving CSRs decided, by status (approve or deny).",
		StabilityLevel: metrics.ALPHA,
	}, []string{"status"})

	verdicts = metrics.NewCounterVec(&metrics.CounterOpts{
		Name:           "talosccm_csr_verdicts_total",
		Help:           "Reasons of verdicts on kubelet-serving CSRs, by decision (Approve, Defer or Deny) and reason. A pending CSR counts when a reason appears, a decided one once for each reason.",
		StabilityLevel: metrics.ALPHA,
	}, []string{"decision", "reason"})

	ageAtApproval = metrics.NewHistogram(&metrics.HistogramOpts{
		Name:           "talosccm_csr_approval_age_seconds",
		Help:           "Age of kubelet-serving CSRs at approval.",
		Buckets:        []float64{.5, 1, 2, 5, 10, 30, 60, 300, 900, 3600},
		StabilityLevel: metrics.ALPHA,
	})

	pendingGauge = metrics.NewGauge(&metrics.GaugeOpts{
		Name:           "talosccm_csr_pending",
		Help:           "Kubelet-serving CSRs waiting for a decision.",
		StabilityLevel: metrics.ALPHA,
	})
)

func init() { legacyregistry.MustRegister(decisions, verdicts, ageAtApproval, pendingGauge) }
