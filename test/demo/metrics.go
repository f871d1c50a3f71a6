package main

import (
	"slices"
	"strconv"
	"strings"
)

// samples are a process's metrics in Prometheus' text format.
type samples string

// sum adds up the series of a name. Labels, if any, are those that a series must have, such as `method="PATCH"`.
func (s samples) sum(name string, labels ...string) float64 {
	var total float64

	for line := range strings.Lines(string(s)) {
		rest, found := strings.CutPrefix(strings.TrimSpace(line), name)
		if !found || (rest[:1] != "{" && rest[:1] != " ") || slices.ContainsFunc(labels, func(label string) bool { return !strings.Contains(rest, label) }) {
			continue
		}

		if value, err := strconv.ParseFloat(rest[strings.LastIndexByte(rest, ' ')+1:], 64); err == nil {
			total += value
		}
	}

	return total
}

// approvals is how many certificate requests talos-ccm has approved.
func (s samples) approvals() float64 { return s.sum("talosccm_csr_approval_count", `status="approve"`) }
