// Package prometheus_test tests the alerts and the dashboard of docs/monitoring with Prometheus' own code: alerts fire when
// they should and only then, and expressions use only metrics that talos-ccm exports, which ../metrics.txt lists.
//
// It is a module of its own, so that the product's go.mod does not depend on Prometheus. It starts no processes and makes
// no network requests.
package prometheus_test

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql/parser"
	"google.golang.org/grpc/codes"
)

// target has the labels that Prometheus adds to scraped series: cluster only if it is configured.
var target = []string{"cluster", "job", "instance"}

// exported are metrics by name.
type exported map[string]metric

// metric is a line of metrics.txt: a type, and the labels with their values, or nil for labels with unbounded values.
type metric struct {
	kind   string
	labels map[string][]string
}

func readExported(t *testing.T) exported {
	t.Helper()

	content, err := os.ReadFile("../metrics.txt")
	if err != nil {
		t.Fatal(err)
	}

	// Prometheus adds it for every target.
	metrics := exported{"up": {kind: "gauge"}}

	for line := range strings.Lines(string(content)) {
		fields := strings.Fields(line)
		m := metric{kind: fields[1], labels: map[string][]string{}}

		for _, field := range fields[2:] {
			label, values, enumerated := strings.Cut(field, "=")
			m.labels[label] = nil

			if enumerated {
				m.labels[label] = strings.Split(values, "|")
			}
		}

		metrics[fields[0]] = m
	}

	for code := codes.OK; code <= codes.Unauthenticated; code++ {
		request := metrics["talosccm_api_requests_total"].labels
		request["code"] = append(request["code"], code.String())
	}

	return metrics
}

// find returns the metric of a series. A histogram has series with three suffixes.
func (e exported) find(series string) (metric, bool) {
	if m, known := e[series]; known {
		return m, m.kind != "histogram"
	}

	for _, suffix := range []string{"_bucket", "_sum", "_count"} {
		if m, known := e[strings.TrimSuffix(series, suffix)]; known && m.kind == "histogram" && strings.HasSuffix(series, suffix) {
			m.labels = maps.Clone(m.labels)
			if suffix == "_bucket" {
				m.labels["le"] = nil
			}

			return metric{kind: "counter", labels: m.labels}, true
		}
	}

	return metric{}, false
}

// check returns the problems of an expression, and the labels that its results can have.
func (e exported) check(expression string) (problems, known []string) {
	expr, err := parser.NewParser(parser.Options{}).ParseExpr(expression)
	if err != nil {
		return []string{err.Error()}, nil
	}

	parser.Inspect(expr, func(node parser.Node, path []parser.Node) error {
		switch node := node.(type) {
		case *parser.VectorSelector:
			problems = append(problems, e.selector(node, path)...)
		case *parser.AggregateExpr:
			for _, label := range node.Grouping {
				if !slices.Contains(e.labelsIn(node.Expr), label) {
					problems = append(problems, fmt.Sprintf("%s: grouped by %s, which none of its metrics has", node, label))
				}
			}
		}

		return nil
	})

	return problems, e.labelsOf(expr)
}

// labelsOf returns the labels that the results of an expression can have.
func (e exported) labelsOf(expr parser.Expr) []string {
	switch expr := expr.(type) {
	case *parser.AggregateExpr:
		return expr.Grouping
	case *parser.BinaryExpr:
		return e.labelsOf(expr.LHS)
	case *parser.ParenExpr:
		return e.labelsOf(expr.Expr)
	case *parser.Call:
		if len(expr.Args) > 0 {
			return e.labelsOf(expr.Args[len(expr.Args)-1])
		}
	}

	return e.labelsIn(expr)
}

// labelsIn returns the labels of all metrics in an expression.
func (e exported) labelsIn(expr parser.Expr) []string {
	found := slices.Clone(target)

	parser.Inspect(expr, func(node parser.Node, _ []parser.Node) error {
		if selector, ok := node.(*parser.VectorSelector); ok {
			m, _ := e.find(selector.Name)
			found = slices.AppendSeq(found, maps.Keys(m.labels))
		}

		return nil
	})

	return found
}

// selector returns the problems of a selector at the end of a path.
func (e exported) selector(selector *parser.VectorSelector, path []parser.Node) (problems []string) {
	m, known := e.find(selector.Name)
	if !known {
		return []string{selector.Name + " is not exported"}
	}

	for _, matcher := range selector.LabelMatchers {
		if problem := m.match(matcher); problem != "" {
			problems = append(problems, selector.Name+": "+problem)
		}
	}

	if !slices.ContainsFunc(selector.LabelMatchers, func(m *labels.Matcher) bool { return m.Name == "job" }) {
		problems = append(problems, selector.Name+": of any job")
	}

	for _, node := range path {
		if call, ok := node.(*parser.Call); ok && slices.Contains([]string{"rate", "irate", "increase"}, call.Func.Name) && m.kind != "counter" {
			problems = append(problems, fmt.Sprintf("%s: %s of a %s", selector.Name, call.Func.Name, m.kind))
		}
	}

	return problems
}

// match returns the problem of a matcher, or nothing.
func (m metric) match(matcher *labels.Matcher) string {
	if matcher.Name == model.MetricNameLabel || slices.Contains(target, matcher.Name) {
		return ""
	}

	values, known := m.labels[matcher.Name]
	if !known {
		return "no label " + matcher.Name
	}

	wanted := matcher.SetMatches()
	if matcher.Type == labels.MatchEqual || matcher.Type == labels.MatchNotEqual {
		wanted = []string{matcher.Value}
	}

	for _, value := range wanted {
		if len(values) > 0 && !slices.Contains(values, value) {
			return fmt.Sprintf("no %s %q", matcher.Name, value)
		}
	}

	return ""
}

func TestExpressions_ReportsErrors(t *testing.T) {
	metrics := readExported(t)

	for _, test := range []struct{ expression, want string }{
		{`sum(`, "parse error"},
		{`talosccm_machine{job="talos-ccm"}`, "talosccm_machine is not exported"},
		{`talosccm_machines{job="talos-ccm", state="Unreachable"}`, "no label state"},
		{`talosccm_machines{job="talos-ccm", condition="Unreachabel"}`, `no condition "Unreachabel"`},
		{`talosccm_machines{job="talos-ccm", condition=~"Unreachable|Mismtach"}`, `no condition "Mismtach"`},
		{`talosccm_api_requests_total{job="talos-ccm", code="Unreachable"}`, `no code "Unreachable"`},
		{`talosccm_machines`, "of any job"},
		{`rate(talosccm_machines{job="talos-ccm"}[5m])`, "rate of a gauge"},
		{`sum by (state) (talosccm_machines{job="talos-ccm"})`, "grouped by state"},
		{`talosccm_csr_approval_age_seconds{job="talos-ccm"}`, "is not exported"},
		{`talosccm_machines_bucket{job="talos-ccm"}`, "is not exported"},
		{`sum by (le) (rate(talosccm_csr_approval_age_seconds_count{job="talos-ccm"}[5m]))`, "grouped by le"},
	} {
		problems, _ := metrics.check(test.expression)
		if len(problems) != 1 || !strings.Contains(problems[0], test.want) {
			t.Errorf("%s: found %q, want %q", test.expression, problems, test.want)
		}
	}

	for _, expression := range []string{
		`histogram_quantile(0.9, sum by (le, job) (rate(talosccm_csr_approval_age_seconds_bucket{job="talos-ccm"}[5m])))`,
		`sum by (condition) (talosccm_machines{job="talos-ccm", condition!="Current"})`,
	} {
		if problems, _ := metrics.check(expression); len(problems) > 0 {
			t.Errorf("%s: %q", expression, problems)
		}
	}
}
