package monitoring_test

import (
	"slices"
	"strings"

	dto "github.com/prometheus/client_model/go"
	"k8s.io/apimachinery/pkg/util/sets"
)

// families has the entries "name (type)" for each metric, "name label" for each label, and "name label=value" for each
// listed value.
type families struct{ sets.Set[string] }

var (
	// prefixes select the listed metrics. Libraries export others that are not of interest.
	prefixes = []string{"talosccm_", "leader_election_", "workqueue_", "rest_client_", "process_", "go_goroutines", "go_gc_gomemlimit_bytes", "go_memstats_"}
	// open are the labels with unbounded values.
	open = []string{"cidr", "code", "go_version", "method", "node", "pool", "request", "version"}
)

func hasPrefix(name string, prefixes ...string) bool {
	return slices.ContainsFunc(prefixes, func(prefix string) bool { return strings.HasPrefix(name, prefix) })
}

// enumerated reports whether the values of a metric's label are listed: those of our own metrics, and the names of
// queues and elections, which alerts use.
func enumerated(name, label string) bool {
	return hasPrefix(name, "talosccm_", "workqueue_", "leader_election_") && !slices.Contains(open, label)
}

// add adds the metrics of a scrape.
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

				if enumerated(name, label) && (label == "name" || happened(metric) || name == "talosccm_ipam_pool_blocks_free") { // may be zero from the start
					f.Insert(name + " " + label + "=" + pair.GetValue())
				}
			}
		}
	}
}

// happened reports whether a series has ever had another value than zero.
func happened(metric *dto.Metric) bool {
	return metric.GetHistogram() != nil || metric.GetCounter().GetValue() != 0 || metric.GetGauge().GetValue() != 0
}

// String returns a line for each metric with its name, type and labels, and the values of labels.
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

// parseFamilies parses the result of String.
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

// lacks returns the entries of other that f does not have.
func (f families) lacks(other families) []string { return sets.List(other.Difference(f.Set)) }
