package kube

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"strconv"
	"strings"

	"k8s.io/client-go/kubernetes"
)

// RequestKind is what requests to the API server are counted by.
type RequestKind struct {
	// Verb as in the API server's metrics, in capitals: GET, LIST, WATCH, POST, PUT, PATCH, APPLY, DELETE.
	Verb string
	// Group is empty for the core group.
	Group string
	// Resource includes the subresource, as in nodes/status. For a request that is not for a resource it is the path, as in /readyz.
	Resource string
	// Code is the HTTP status. A watch is counted when it ends, not when it begins.
	Code int
}

// Requests counts requests by kind.
type Requests map[RequestKind]int

// APIServerRequests are the requests that the API server has answered since it was started, from all clients: tests, controllers and the
// API server itself. A restarted API server starts from zero.
func (c *Cluster) APIServerRequests(ctx context.Context) (Requests, error) {
	client, err := kubernetes.NewForConfig(c.Config())
	if err != nil {
		return nil, fmt.Errorf("count API server requests: %w", err)
	}

	metrics, err := client.Discovery().RESTClient().Get().AbsPath("/metrics").DoRaw(ctx)
	if err != nil {
		return nil, fmt.Errorf("count API server requests: %w", err)
	}

	requests, err := ParseRequests(metrics)
	if err != nil {
		return nil, fmt.Errorf("count API server requests: %w", err)
	}

	return requests, nil
}

// Since is what was counted after before was.
func (r Requests) Since(before Requests) Requests {
	since := make(Requests)

	for kind, count := range r {
		if added := count - before[kind]; added != 0 {
			since[kind] = added
		}
	}

	return since
}

// Total is the number of requests of all kinds that match; nil matches all.
func (r Requests) Total(match func(RequestKind) bool) int {
	total := 0

	for kind, count := range r {
		if match == nil || match(kind) {
			total += count
		}
	}

	return total
}

// ParseRequests reads the counter apiserver_request_total from an API server's metrics, in Prometheus' text format.
func ParseRequests(metrics []byte) (Requests, error) {
	const series = "apiserver_request_total{"

	requests := make(Requests)
	scanner := bufio.NewScanner(bytes.NewReader(metrics))
	scanner.Buffer(nil, 1<<20)

	for scanner.Scan() {
		sample, found := strings.CutPrefix(scanner.Text(), series)
		if !found {
			continue
		}

		kind, count, err := parseSample(sample)
		if err != nil {
			return nil, fmt.Errorf("parse %s%s: %w", series, sample, err)
		}

		requests[kind] += count
	}

	return requests, scanner.Err()
}

// parseSample parses what follows the brace of a sample: a="b",c="d"} 1.
func parseSample(sample string) (RequestKind, int, error) {
	labels := make(map[string]string)
	rest := sample

	for !strings.HasPrefix(rest, "}") {
		name, quoted, found := strings.Cut(strings.TrimPrefix(rest, ","), "=")
		if !found {
			return RequestKind{}, 0, fmt.Errorf("label without value: %w", strconv.ErrSyntax)
		}

		// Prometheus escapes what Go escapes in strings, and nothing else.
		prefix, err := strconv.QuotedPrefix(quoted)
		if err != nil {
			return RequestKind{}, 0, fmt.Errorf("value of label %s: %w", name, err)
		}

		if labels[name], err = strconv.Unquote(prefix); err != nil {
			return RequestKind{}, 0, fmt.Errorf("value of label %s: %w", name, err)
		}

		rest = quoted[len(prefix):]
	}

	count, err := strconv.ParseFloat(strings.TrimSpace(rest[1:]), 64)
	if err != nil {
		return RequestKind{}, 0, err
	}

	kind, err := requestKind(labels)

	return kind, int(count), err
}

func requestKind(labels map[string]string) (RequestKind, error) {
	// A request that ended without an answer, such as one whose client went away, has code 0.
	code, err := strconv.Atoi(defaulted(labels["code"], "0"))
	if err != nil {
		return RequestKind{}, fmt.Errorf("label code: %w", err)
	}

	resource, subresource := labels["resource"], labels["subresource"]

	switch {
	case resource == "":
		resource = subresource
	case subresource != "":
		resource += "/" + subresource
	}

	return RequestKind{Verb: labels["verb"], Group: labels["group"], Resource: resource, Code: code}, nil
}
