package kube_test

import (
	"maps"
	"testing"

	"github.com/talos-ccm/talos-ccm/test/kube"
)

func TestParseRequests(t *testing.T) {
	for _, test := range []struct {
		name    string
		metrics string
		want    kube.Requests
	}{
		{"nothing is nothing", "", kube.Requests{}},
		{"comments and other series are left out", "# TYPE apiserver_request_total counter\napiserver_request_duration_seconds_sum{verb=\"GET\"} 5\n", kube.Requests{}},
		{
			"a subresource is part of the resource",
			`apiserver_request_total{code="200",component="apiserver",dry_run="",group="",resource="nodes",scope="resource",subresource="status",verb="PATCH",version="v1"} 7`,
			kube.Requests{{Verb: "PATCH", Resource: "nodes/status", Code: 200}: 7},
		},
		{
			"what differs in other labels is added up",
			`apiserver_request_total{code="200",group="apps",resource="x",scope="cluster",verb="LIST",version="v1"} 2` + "\n" +
				`apiserver_request_total{code="200",group="apps",resource="x",scope="namespace",verb="LIST",version="v2"} 1e+06`,
			kube.Requests{{Verb: "LIST", Group: "apps", Resource: "x", Code: 200}: 1000002},
		},
		{
			"without a resource, the path counts",
			`apiserver_request_total{code="500",resource="",subresource="/readyz",verb="GET"} 3`,
			kube.Requests{{Verb: "GET", Resource: "/readyz", Code: 500}: 3},
		},
		{
			"an escaped quote does not end a value",
			`apiserver_request_total{code="0",resource="a\"} 9",verb="GET"} 1`,
			kube.Requests{{Verb: "GET", Resource: `a"} 9`}: 1},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := kube.ParseRequests([]byte(test.metrics))
			if err != nil || !maps.Equal(got, test.want) {
				t.Errorf("got %v, %v, want %v", got, err, test.want)
			}
		})
	}
}

func TestParseRequests_RejectsInvalidInput(t *testing.T) {
	for _, metrics := range []string{
		`apiserver_request_total{`,
		`apiserver_request_total{code`,
		`apiserver_request_total{code="200"`,
		`apiserver_request_total{code="200"} many`,
		`apiserver_request_total{code="ok"} 1`,
		`apiserver_request_total{code=200} 1`,
	} {
		if got, err := kube.ParseRequests([]byte(metrics)); err == nil {
			t.Errorf("%s: got %v, want an error", metrics, got)
		}
	}
}

func FuzzParseRequests(f *testing.F) {
	f.Add([]byte(`apiserver_request_total{code="200",resource="nodes",subresource="status",verb="PATCH"} 7`))
	f.Add([]byte(`apiserver_request_total{} 1`))

	f.Fuzz(func(t *testing.T, metrics []byte) {
		requests, err := kube.ParseRequests(metrics)
		if err != nil {
			return
		}

		if total := requests.Since(requests).Total(nil); total != 0 {
			t.Errorf("%q: %d requests since now", metrics, total)
		}
	})
}

func TestRequests_Since(t *testing.T) {
	get := kube.RequestKind{Verb: "GET", Resource: "nodes", Code: 200}
	patch := kube.RequestKind{Verb: "PATCH", Resource: "nodes", Code: 200}
	list := kube.RequestKind{Verb: "LIST", Resource: "nodes", Code: 200}

	since := kube.Requests{get: 5, patch: 2, list: 1}.Since(kube.Requests{get: 5, patch: 1})
	if want := (kube.Requests{patch: 1, list: 1}); !maps.Equal(since, want) {
		t.Errorf("got %v, want %v", since, want)
	}

	if got := since.Total(func(kind kube.RequestKind) bool { return kind.Verb == "PATCH" }); got != 1 {
		t.Errorf("%d PATCH requests, want 1", got)
	}
}
