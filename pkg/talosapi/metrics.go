package talosapi

import (
	"path"
	"time"

	"google.golang.org/grpc/status"
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
)

// The first two keep the names and the meaning they have in the upstream Talos CCM.
var (
	requestDuration = metrics.NewHistogramVec(&metrics.HistogramOpts{
		Name:           "talosccm_api_request_duration_seconds",
		Help:           "Latency of a Talos API call; for a watch, until its first answer.",
		Buckets:        []float64{.01, .05, .1, .25, .5, 1, 2.5, 5, 10, 30},
		StabilityLevel: metrics.ALPHA,
	}, []string{"request"})

	requestErrors = metrics.NewCounterVec(&metrics.CounterOpts{
		Name:           "talosccm_api_request_errors_total",
		Help:           "Number of Talos API calls that failed.",
		StabilityLevel: metrics.ALPHA,
	}, []string{"request"})

	readerExpiry = metrics.NewGauge(&metrics.GaugeOpts{
		Name:           "talosccm_reader_certificate_expiry_timestamp_seconds",
		Help:           "When the os:reader certificate in use expires, in seconds since 1970; 0 if none has been minted.",
		StabilityLevel: metrics.ALPHA,
	})

	requests = metrics.NewCounterVec(&metrics.CounterOpts{
		Name:           "talosccm_api_requests_total",
		Help:           "Number of Talos API calls by method and gRPC status code.",
		StabilityLevel: metrics.ALPHA,
	}, []string{"method", "code"})
)

func init() { legacyregistry.MustRegister(requestDuration, requestErrors, requests, readerExpiry) }

// observe records one call of a full gRPC method such as /cosi.resource.State/List.
func observe(method string, start time.Time, err error) {
	name := path.Base(method)

	requestDuration.WithLabelValues(name).Observe(time.Since(start).Seconds())
	requests.WithLabelValues(name, status.Code(err).String()).Inc()

	if err != nil {
		requestErrors.WithLabelValues(name).Inc()
	}
}
