package main

import (
	"fmt"
	"io"
	"slices"
	"time"
)

// row is a line of the table.
type row struct {
	name  string
	goal  string
	value func(result) float64 // zero if it was not measured
	unit  string
}

func seconds(d time.Duration) float64      { return d.Seconds() }
func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

var rows = []row{
	{"initialize all Nodes", "ratio ≤ 1.3", func(r result) float64 { return seconds(r.Initialize) }, "s"},
	{"requests to Talos per Node", "≤ 9", func(r result) float64 { return r.Calls }, ""},
	{"CPU time until idle", "", func(r result) float64 { return seconds(r.CPU) }, "s"},
	{"resident memory", "≤ 60, 200, 900 MiB at 20, 1,000, 5,000", func(r result) float64 { return float64(r.Resident) / (1 << 20) }, "MiB"},
	{"heap per machine", "≤ 40 KiB", func(r result) float64 { return r.Heap / (1 << 10) / float64(r.Machines) }, "KiB"},
	{"goroutines per machine", "≤ 9", func(r result) float64 { return r.Goroutines / float64(r.Machines) }, ""},
	{"change to Node, alone, median", "< 30 ms", func(r result) float64 { return milliseconds(r.Alone) }, "ms"},
	{"change to Node, alone, p99", "< 250 ms", func(r result) float64 { return milliseconds(r.AloneP99) }, "ms"},
	{"change to Node, 50 at once, median", "< 60 ms", func(r result) float64 { return milliseconds(r.Burst) }, "ms"},
	{"change to Node, 50 at once, p99", "< 250 ms", func(r result) float64 { return milliseconds(r.BurstP99) }, "ms"},
	{"approve one CSR per Node", "ratio ≤ 1.25", func(r result) float64 { return seconds(r.Approve) }, "s"},
	{"assign dual-stack pod CIDRs", "ratio < 1", func(r result) float64 { return seconds(r.PodCIDRs) }, "s"},
	{"lease handed over after SIGTERM", "< 1 s", func(r result) float64 { return seconds(r.HandOver) }, "s"},
	{"lease taken over after SIGKILL", "≤ 17 s", func(r result) float64 { return seconds(r.TakeOver) }, "s"},
}

// comparison is a measured row.
type comparison struct {
	row

	own   float64 // of talos-ccm
	other float64 // zero if nothing else was measured
	name  string  // of the other
}

// compare returns the rows that were measured, once for each other subject.
func compare(results []result) (list []comparison) {
	for _, row := range rows {
		i := slices.IndexFunc(results, func(r result) bool { return r.Subject == talosCCM && row.value(r) > 0 })
		if i < 0 {
			continue
		}

		own, compared := row.value(results[i]), false

		for _, r := range results {
			if value := row.value(r); r.Subject != talosCCM && value > 0 {
				compared = true

				list = append(list, comparison{row, own, value, r.Subject})
			}
		}

		if !compared {
			list = append(list, comparison{row: row, own: own})
		}
	}

	return list
}

// printTable prints the results of one number of machines in Markdown, with the ratios to the others of the same run.
func printTable(w io.Writer, machines int, results []result) {
	fmt.Fprintf(w, "\n%d machines\n\n| | goal | talos-ccm | | | ratio |\n|---|---|---:|---|---:|---:|\n", machines)

	for _, c := range compare(results) {
		other, ratio := "", ""
		if c.other > 0 {
			other, ratio = fmt.Sprintf("%.1f %s", c.other, c.unit), fmt.Sprintf("%.2f", c.own/c.other)
		}

		fmt.Fprintf(w, "| %s | %s | %.1f %s | %s | %s | %s |\n", c.row.name, c.goal, c.own, c.unit, c.name, other, ratio)
	}
}
