package main

import (
	"cmp"
	"fmt"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	corev1 "k8s.io/api/core/v1"
)

const (
	columns = 8
	// maxRows is how many Nodes of a large fleet are printed.
	maxRows = 40
)

// printTable prints the Nodes.
func printTable(records []record) {
	table := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "\nNODE\tPROVIDERID\tZONE\tCAPACITY\tINTERNAL\tEXTERNAL\tPOD CIDR\tCERTIFICATE")

	for _, r := range records[:min(maxRows, len(records))] {
		fmt.Fprintln(table, strings.Join(cells(r), "\t"))
	}

	_ = table.Flush()

	if more := len(records) - maxRows; more > 0 {
		printf("… and %d more", more)
	}
}

func cells(r record) []string {
	row := make([]string, columns)
	row[0] = r.title

	switch {
	case r.reached(deleted):
		row[1] = "deleted"
	case r.node == nil:
		row[1] = "not registered"
	default:
		copy(row[1:], []string{
			r.node.Spec.ProviderID, r.node.Labels[corev1.LabelTopologyZone], r.node.Labels[labelCapacity],
			strings.Join(addressesOf(r.node, corev1.NodeInternalIP), ","), strings.Join(addressesOf(r.node, corev1.NodeExternalIP), ","),
			strings.Join(r.node.Spec.PodCIDRs, ","),
		})
	}

	switch {
	case r.reached(deleted):
	case r.reached(issued):
		row[columns-1] = "issued"
	case r.reached(approved):
		row[columns-1] = "approved"
	case r.reached(requested):
		row[columns-1] = "requested"
	}

	for i := range row {
		row[i] = cmp.Or(row[i], "-")
	}

	return row
}

// printTimes prints the latency of each step.
func printTimes(records []record) {
	table := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "\nLATENCY\tP50\tP95\tMAX")

	// The slow and the late machine delay their Nodes.
	ordinary := slices.Concat(records[:min(lateIndex, len(records))], records[min(slowIndex+1, len(records)):])

	for _, row := range []struct {
		title    string
		from, to stage
		records  []record
	}{
		{"Node registered → taint removed", registered, initialized, records},
		{"  without the slow and the late machine", registered, initialized, ordinary},
		{"Node registered → pod CIDR assigned", registered, allocated, records},
		{"CSR created → approved", requested, approved, records},
		{"CSR created → certificate issued", requested, issued, records},
	} {
		var times []time.Duration
		for _, r := range row.records {
			times = append(times, max(0, r.times[row.to].Sub(r.times[row.from])))
		}

		slices.Sort(times)
		fmt.Fprintf(table, "%s\t%s\t%s\t%s\n", row.title,
			inSeconds(percentile(times, 50)), inSeconds(percentile(times, 95)), inSeconds(percentile(times, 100)))
	}

	_ = table.Flush()

	if len(records) > slowIndex && records[controlPlaneIndex].times[approved].Sub(records[controlPlaneIndex].times[requested]) > slowness {
		printf("CSR approval waited for the slow machine: a new leader reads all machines before it approves a CSR.")
	}
}

// percentile returns the smallest of the sorted times that is not exceeded by percent of them.
func percentile(sorted []time.Duration, percent int) time.Duration {
	return sorted[(len(sorted)*percent+99)/100-1]
}

func inSeconds(d time.Duration) string {
	if d < time.Second {
		return fmt.Sprintf("%d ms", d.Milliseconds())
	}

	return fmt.Sprintf("%.2f s", d.Seconds())
}
