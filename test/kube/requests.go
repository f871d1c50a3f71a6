package kube

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"strconv"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"k8s.io/client-go/kubernetes"
)

// RequestKind is what requests to the API server are counted by.
type RequestKind struct {
	// Verb as in the API server's metrics, in capitals: GET, LIST, WATCH, POST, PUT, PATCH, APPLY, DELETE.
	Verb string
	// Group is empty for the core group.
	Group string
	// Resource includes the subresource, as in nodes/status. For a request that is not for a resource it is the path, as
	// in /readyz.
	Resource string
	// Code is the HTTP status. A watch is counted when it ends, not when it begins.
	Code int
}

// Requests counts requests by kind.
type Requests map[RequestKind]int

// APIServerRequests are the requests that the API server has answered since it was started, from all clients: tests,
// controllers and the API server itself. A restarted API server starts from zero.
func (c *Cluster) APIServerRequests(ctx context.Context) (Requests, error) {
	client, err := kubernetes.NewForConfig(c.Config())
	if err != nil {
		return nil, fmt.Errorf("count API server requests: %w", err)
	}

	metrics, err := client.Discovery().RESTClient().Get().AbsPath("/metrics").DoRaw(ctx)
	if err != nil {
		return nil, fmt.Errorf("count API server requests: %w", err)
	}

	parser := expfmt.NewTextParser(model.LegacyValidation)

	families, err := parser.TextToMetricFamilies(bytes.NewReader(metrics))
	if err != nil {
		return nil, fmt.Errorf("count API server requests: %w", err)
	}

	requests := make(Requests)

	for _, series := range families["apiserver_request_total"].GetMetric() {
		labels := make(map[string]string)
		for _, label := range series.GetLabel() {
			labels[label.GetName()] = label.GetValue()
		}

		resource := labels["resource"]
		if subresource := labels["subresource"]; resource == "" {
			resource = subresource
		} else if subresource != "" {
			resource += "/" + subresource
		}

		// A request that ended without an answer, such as one whose client went away, has code 0.
		code, err := strconv.Atoi(cmp.Or(labels["code"], "0"))
		if err != nil {
			return nil, fmt.Errorf("count API server requests: %w", err)
		}

		requests[RequestKind{Verb: labels["verb"], Group: labels["group"], Resource: resource, Code: code}] += int(series.GetCounter().GetValue())
	}

	return requests, nil
}

// Total is the number of requests of all kinds that match.
func (r Requests) Total(match func(RequestKind) bool) int {
	total := 0

	for kind, count := range r {
		if match(kind) {
			total += count
		}
	}

	return total
}
