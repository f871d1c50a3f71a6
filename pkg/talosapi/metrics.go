package talosapi

import (
	"context"
	"errors"
	"io"
	"path"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/status"

	"github.com/talos-ccm/talos-ccm/pkg/internal/metric"
)

// requestDuration and requestErrors keep the names and meaning that they have in the upstream Talos CCM.
var (
	requestDuration = metric.NewHistogramVec("talosccm_api_request_duration_seconds",
		"Latency of Talos API calls; of a watch, until its first response.", []float64{.01, .05, .1, .25, .5, 1, 2.5, 5, 10, 30}, "request")

	requestErrors = metric.NewCounterVec("talosccm_api_request_errors_total",
		"Number of failed Talos API calls.", "request")

	readerExpiry = metric.NewGauge("talosccm_reader_certificate_expiry_timestamp_seconds",
		"Unix time at which the current os:reader certificate expires; 0 if there is none.")

	requests = metric.NewCounterVec("talosccm_api_requests_total",
		"Number of Talos API calls by method and gRPC status code.", "method", "code")
)

// observe records one call. method is a full gRPC method such as /cosi.resource.State/List.
func observe(method string, start time.Time, err error) {
	name := path.Base(method)

	requestDuration.WithLabelValues(name).Observe(time.Since(start).Seconds())
	requests.WithLabelValues(name, status.Code(err).String()).Inc()

	if err != nil {
		requestErrors.WithLabelValues(name).Inc()
	}
}

func measureUnary(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	start := time.Now()
	err := invoke(ctx, method, req, reply, cc, opts...)

	observe(method, start, err)

	return err
}

// measureStream records each stream with the result of its first RecvMsg, because gRPC opens a stream before the server has
// received it.
func measureStream(
	ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, open grpc.Streamer, opts ...grpc.CallOption,
) (grpc.ClientStream, error) {
	start := time.Now()

	stream, err := open(ctx, desc, cc, method, opts...)
	if err != nil {
		observe(method, start, err)

		return nil, err
	}

	return &measuredStream{ClientStream: stream, answered: func(err error) { observe(method, start, err) }}, nil
}

type measuredStream struct {
	grpc.ClientStream

	answered func(error)
	once     sync.Once
}

// RecvMsg implements grpc.ClientStream.
func (s *measuredStream) RecvMsg(message any) error {
	err := s.ClientStream.RecvMsg(message)

	s.once.Do(func() {
		if errors.Is(err, io.EOF) { // an empty list
			s.answered(nil)
		} else {
			s.answered(err)
		}
	})

	return err
}
