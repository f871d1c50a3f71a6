package monitoring_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	dto "github.com/prometheus/client_model/go"
)

// families are metrics by name.
type families map[string]family

// family is what is known of a metric: its type, and its labels with the values that they have been seen with.
type family struct {
	kind   string
	labels map[string]map[string]struct{}
}

var (
	// prefixes select the listed metrics; libraries export others that are not worth watching.
	prefixes = []string{"talosccm_", "leader_election_", "workqueue_", "rest_client_", "process_", "go_goroutines", "go_gc_gomemlimit_bytes", "go_memstats_"}
	// open has the labels with unbounded values.
	open = []string{"cidr", "code", "go_version", "method", "node", "pool", "request", "version"}
)

func listed(name string) bool {
	return slices.ContainsFunc(prefixes, func(prefix string) bool { return strings.HasPrefix(name, prefix) })
}

// enumerated tells whether the values of a metric's label are listed: of our own metrics, of queues and of elections, which have names that alerts know.
func enumerated(name, label string) bool {
	own := strings.HasPrefix(name, "talosccm_") || strings.HasPrefix(name, "workqueue_") || strings.HasPrefix(name, "leader_election_")

	return own && !slices.Contains(open, label)
}

// add notes what a scrape shows.
func (f families) add(scraped map[string]*dto.MetricFamily) {
	for name, metrics := range scraped {
		if !listed(name) {
			continue
		}

		if _, known := f[name]; !known {
			f[name] = family{kind: strings.ToLower(metrics.GetType().String()), labels: map[string]map[string]struct{}{}}
		}

		for _, metric := range metrics.GetMetric() {
			f[name].add(name, metric)
		}
	}
}

func (f family) add(name string, metric *dto.Metric) {
	for _, pair := range metric.GetLabel() {
		label := pair.GetName()

		if f.labels[label] == nil {
			f.labels[label] = map[string]struct{}{}
		}

		if enumerated(name, label) && (label == "name" || happened(metric)) {
			f.labels[label][pair.GetValue()] = struct{}{}
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

	for _, name := range slices.Sorted(maps.Keys(f)) {
		fmt.Fprintf(&text, "%s %s", name, f[name].kind)

		for _, label := range slices.Sorted(maps.Keys(f[name].labels)) {
			fmt.Fprintf(&text, " %s", label)

			if values := slices.Sorted(maps.Keys(f[name].labels[label])); len(values) > 0 {
				fmt.Fprintf(&text, "=%s", strings.Join(values, "|"))
			}
		}

		text.WriteByte('\n')
	}

	return text.String()
}

// parseFamilies reads what String writes.
func parseFamilies(text string) families {
	f := families{}

	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		if len(fields) == 0 {
			continue
		}

		labels := map[string]map[string]struct{}{}

		for _, field := range fields[2:] {
			label, values, _ := strings.Cut(field, "=")
			labels[label] = map[string]struct{}{}

			for value := range strings.SplitSeq(values, "|") {
				if value != "" {
					labels[label][value] = struct{}{}
				}
			}
		}

		f[fields[0]] = family{kind: fields[1], labels: labels}
	}

	return f
}

// lacks returns what other has, of metrics, labels and values, that f lacks; empty: nothing.
func (f families) lacks(other families) []string {
	var missing []string

	for name, wanted := range other {
		if have, known := f[name]; !known || have.kind != wanted.kind {
			missing = append(missing, name+" "+wanted.kind)
		} else {
			missing = append(missing, have.lacks(name, wanted)...)
		}
	}

	slices.Sort(missing)

	return missing
}

func (f family) lacks(name string, other family) []string {
	var missing []string

	for label, values := range other.labels {
		if _, known := f.labels[label]; !known {
			missing = append(missing, name+" "+label)
		}

		for value := range values {
			if _, known := f.labels[label][value]; !known {
				missing = append(missing, fmt.Sprintf("%s %s=%s", name, label, value))
			}
		}
	}

	return missing
}
