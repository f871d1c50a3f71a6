package monitoring_test

import (
	"slices"
	"strings"

	dto "github.com/prometheus/client_model/go"
	"k8s.io/apimachinery/pkg/util/sets"
)

// families are metrics: for each one "name (type)", "name label" for each label, and "name label=value" for each value
// that is listed.
type families struct{ sets.Set[string] }

var (
	// prefixes select the listed metrics; libraries export others that are not worth watching.
	prefixes = []string{"talosccm_", "leader_election_", "workqueue_", "rest_client_", "process_", "go_goroutines", "go_gc_gomemlimit_bytes", "go_memstats_"}
	// open has the labels with unbounded values.
	open = []string{"cidr", "code", "go_version", "method", "node", "pool", "request", "version"}
)

func hasPrefix(name string, prefixes ...string) bool {
	return slices.ContainsFunc(prefixes, func(prefix string) bool { return strings.HasPrefix(name, prefix) })
}

// enumerated tells whether the values of a metric's label are listed: of our own metrics, of queues and of elections, which have names that alerts know.
func enumerated(name, label string) bool {
	return hasPrefix(name, "talosccm_", "workqueue_", "leader_election_") && !slices.Contains(open, label)
}

// add notes what a scrape shows.
func (f families) add(scraped map[string]*dto.MetricFamily) {
	for name, metrics := range scraped {
		if !hasPrefix(name, prefixes...) {
			continue
		}

		f.Insert(name + " (" + strings.ToLower(metrics.GetType().String()) + ")")

		for _, metric := range metrics.GetMetric() {
			for _, pair := range metric.GetLabel() {
				label := pair.GetName()
				f.Insert(name + " " + label)

				if enumerated(name, label) && (label == "name" || happened(metric)) {
					f.Insert(name + " " + label + "=" + pair.GetValue())
				}
			}
		}
	}
}

// happened tells whether anything of what a series counts has.
func happened(metric *dto.Metric) bool {
	return metric.GetHistogram() != nil || metric.GetCounter().GetValue() != 0 || metric.GetGauge().GetValue() != 0
}

// String is the list: for each metric a line with its name, type and labels, and behind a label the values it has.
func (f families) String() string {
	var text strings.Builder

	separator := ""

	for _, entry := range sets.List(f.Set) {
		name, label, _ := strings.Cut(entry, " ")
		_, value, isValue := strings.Cut(label, "=")

		switch {
		case strings.HasPrefix(label, "("):
			text.WriteString("\n" + name + " " + strings.Trim(label, "()"))
		case isValue:
			text.WriteString(separator + value)

			separator = "|"
		default:
			text.WriteString(" " + label)

			separator = "="
		}
	}

	return strings.TrimPrefix(text.String()+"\n", "\n")
}

// parseFamilies reads what String writes.
func parseFamilies(text string) families {
	f := families{sets.New[string]()}

	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		if len(fields) == 0 {
			continue
		}

		f.Insert(fields[0] + " (" + fields[1] + ")")

		for _, field := range fields[2:] {
			label, values, _ := strings.Cut(field, "=")
			f.Insert(fields[0] + " " + label)

			for _, value := range strings.FieldsFunc(values, func(r rune) bool { return r == '|' }) {
				f.Insert(fields[0] + " " + label + "=" + value)
			}
		}
	}

	return f
}

// lacks returns what other has, of metrics, labels and values, that f lacks.
func (f families) lacks(other families) []string { return sets.List(other.Difference(f.Set)) }
