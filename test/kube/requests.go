package kube

import (
	"bytes"
	"context"
	"fmt"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"k8s.io/client-go/kubernetes"
)

// Request has the labels of a kind of requests in the API server's metric apiserver_request_total, such as verb (GET,
// LIST, WATCH, POST, PUT, PATCH, APPLY or DELETE), group, resource, subresource and code.
type Request map[string]string

// CountRequests returns the number of matching requests that the API server has answered since it was started, from all
// clients: tests, controllers and the API server itself. A watch is counted when it ends, not when it begins.
func (c *Cluster) CountRequests(ctx context.Context, matches func(Request) bool) (count int, err error) {
	metrics, err := kubernetes.NewForConfigOrDie(c.Config()).Discovery().RESTClient().Get().AbsPath("/metrics").DoRaw(ctx)
	if err != nil {
		return 0, fmt.Errorf("count API server requests: %w", err)
	}

	parser := expfmt.NewTextParser(model.LegacyValidation)

	families, err := parser.TextToMetricFamilies(bytes.NewReader(metrics))
	if err != nil {
		return 0, fmt.Errorf("count API server requests: %w", err)
	}

	for _, series := range families["apiserver_request_total"].GetMetric() {
		request := make(Request)
		for _, label := range series.GetLabel() {
			request[label.GetName()] = label.GetValue()
		}

		if matches(request) {
			count += int(series.GetCounter().GetValue())
		}
	}

	return count, nil
}
