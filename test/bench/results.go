package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strings"
)

// measurement is a row of a table.
type measurement struct {
	part, name, goal, unit string
	// tolerance is the part by which a result may exceed the committed one; zero if results are not compared.
	tolerance float64
	// against is the subject that a compared result is divided by; empty if the result itself is compared.
	against string
}

var measurements = []measurement{
	{part: "nodes", name: "register all Nodes", goal: "≤ 2 s", unit: "s"},
	{part: "nodes", name: "initialize all Nodes", goal: "≤ 1.3, 1.6 times", unit: "s", tolerance: 1, against: readsAndWrites},
	{part: "nodes", name: "initialize after registration", unit: "s"},
	{part: "nodes", name: "CPU time to initialize", unit: "s", tolerance: 0.25, against: readsAndWrites},
	{part: "nodes", name: "requests to Talos per Node", goal: "≤ 8", tolerance: 0.02},
	{part: "nodes", name: "writes per Node", tolerance: 0.02},
	{part: "nodes", name: "resident memory", goal: "≤ 200 MiB (5,000: 700)", unit: "MiB"},
	{part: "nodes", name: "heap per machine", goal: "≤ 40 KiB", unit: "KiB", tolerance: 0.2},
	{part: "nodes", name: "goroutines per machine", goal: "≤ 9", tolerance: 0.05},
	{part: "nodes", name: "change to Node, alone, median", goal: "< 30 ms", unit: "ms"},
	{part: "nodes", name: "change to Node, alone, p99", goal: "< 250 ms", unit: "ms"},
	{part: "nodes", name: "change to Node, 50 at once, median", goal: "< 60 ms", unit: "ms"},
	{part: "nodes", name: "change to Node, 50 at once, p99", goal: "< 250 ms", unit: "ms"},
	{part: "nodes", name: "approve one CSR per Node", goal: "≤ 1.25 times", unit: "s"},
	{part: "pod-cidrs", name: "assign dual-stack pod CIDRs", goal: "< 1 times", unit: "s"},
	{part: "election", name: "lease handed over after SIGTERM", goal: "≤ 5 s", unit: "s"},
	{part: "election", name: "lease taken over after SIGKILL", goal: "≤ 24 s", unit: "s"},
}

// key is what was measured, of a subject.
type key struct{ name, subject string }

// results are the values of all repetitions.
type results map[key][]float64

// median returns zero if nothing was measured.
func (r results) median(name, subject string) float64 {
	values := slices.Sorted(slices.Values(r[key{name, subject}]))
	if len(values) == 0 {
		return 0
	}

	return (values[(len(values)-1)/2] + values[len(values)/2]) / 2
}

// print prints a table of each part in Markdown. Values of others are followed by the ratio of talos-ccm to them.
func (r results) print(w io.Writer, machines int, subjects []string) {
	for _, part := range allParts {
		columns := slices.DeleteFunc(slices.Clone(subjects), func(subject string) bool {
			return !slices.ContainsFunc(measurements, func(m measurement) bool { return m.part == part && r.median(m.name, subject) > 0 })
		})
		if len(columns) == 0 {
			continue
		}

		fmt.Fprintf(w, "\n| %d machines | goal | %s |\n|---|---|%s\n", machines, strings.Join(columns, " | "), strings.Repeat("---:|", len(columns)))

		for _, m := range measurements {
			if own := r.median(m.name, talosCCM); m.part == part && own > 0 {
				fmt.Fprintf(w, "| %s | %s |", m.name, m.goal)

				for _, subject := range columns {
					fmt.Fprintf(w, " %s |", m.cell(r.median(m.name, subject), own, subject))
				}

				fmt.Fprintln(w)
			}
		}
	}
}

// cell returns the value of a subject, and for others the ratio of talos-ccm's to it.
func (m measurement) cell(value, own float64, subject string) string {
	switch text := strings.TrimSpace(fmt.Sprintf("%.1f %s", value, m.unit)); {
	case value == 0:
		return ""
	case subject == talosCCM:
		return text
	default:
		return fmt.Sprintf("%s (%.2f)", text, own/value)
	}
}

// compared returns what is compared with a committed file. Values of this computer are divided by those of another
// subject.
func (r results) compared(machines int) map[string]float64 {
	values := map[string]float64{"machines": float64(machines)}

	for _, m := range measurements {
		value := r.median(m.name, talosCCM)
		if m.against != "" {
			value /= r.median(m.name, m.against)
		}

		if m.tolerance > 0 {
			values[m.name] = math.Round(value*100) / 100
		}
	}

	return values
}

// readCommitted reads a file of update.
func readCommitted(file string, machines int) (committed map[string]float64, err error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}

	if err := json.Unmarshal(data, &committed); err != nil {
		return nil, fmt.Errorf("parse %s: %w", file, err)
	}

	if committed["machines"] != float64(machines) {
		return nil, fmt.Errorf("%s has results with %.0f machines", file, committed["machines"])
	}

	return committed, nil
}

// compare returns an error if a result is worse than the committed one by more than its tolerance.
func (r results) compare(committed map[string]float64) (err error) {
	values := r.compared(0)

	for _, m := range measurements {
		// A value that was not measured is zero or no number.
		value, limit := values[m.name], committed[m.name]*(1+m.tolerance)
		if within := value > 0 && value <= limit; m.tolerance > 0 && !within {
			err = errors.Join(err, fmt.Errorf("%s: %.2f is not between 0 and %.2f (committed: %.2f)", m.name, value, limit, committed[m.name]))
		}
	}

	return err
}

// update writes the file that results are compared with.
func (r results) update(file string, machines int) error {
	data, err := json.MarshalIndent(r.compared(machines), "", "  ")
	if err != nil {
		return err
	}

	return os.WriteFile(file, append(data, '\n'), 0o644) //nolint:gosec // not secret
}
