package bootstrap

import (
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
)

var tokenExpiry = metrics.NewGauge(&metrics.GaugeOpts{
	Name:           "talosccm_token_expiry_timestamp_seconds",
	Help:           "When the ServiceAccount token in use expires, in seconds since 1970; 0 if none has been made.",
	StabilityLevel: metrics.ALPHA,
})

func init() { legacyregistry.MustRegister(tokenExpiry) }
