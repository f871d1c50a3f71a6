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

// maxRows is how many Nodes of a large fleet are printed.
const maxRows = 40

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
	row := []string{r.title, "not registered", "", "", "", "", "", ""}

	switch {
	case r.reached(deleted):
		row[1] = "deleted"
	case r.node != nil:
		copy(row[1:], []string{
			r.node.Spec.ProviderID, r.node.Labels[corev1.LabelTopologyZone], r.node.Labels[labelCapacity],
			strings.Join(addressesOf(r.node, corev1.NodeInternalIP), ","), strings.Join(addressesOf(r.node, corev1.NodeExternalIP), ","),
			strings.Join(r.node.Spec.PodCIDRs, ","),
		})

		if r.reached(issued) {
			row[len(row)-1] = "issued"
		}
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
			times = append(times, r.took(row.from, row.to))
		}

		slices.Sort(times)

		// percentile returns the smallest of the times that is not exceeded by percent of them.
		percentile := func(percent int) time.Duration { return times[(len(times)*percent+99)/100-1] }
		fmt.Fprintf(table, "%s\t%s\t%s\t%s\n", row.title, percentile(50), percentile(95), percentile(100))
	}

	_ = table.Flush()

	if len(records) > slowIndex && records[controlPlaneIndex].took(requested, approved) > slowness {
		printf("CSR approval waited for the slow machine: a new leader reads all machines before it approves a CSR.")
	}
}
