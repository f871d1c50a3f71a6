package main

import (
	"fmt"
	"io"
	"time"
)

// row is a line of the table.
type row struct {
	name  string
	value func(result) float64 // zero if it was not measured
	unit  string
}

func seconds(d time.Duration) float64      { return d.Seconds() }
func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

var rows = []row{
	{"initialize all Nodes", func(r result) float64 { return seconds(r.Initialize) }, "s"},
	{"requests to Talos per Node", func(r result) float64 { return r.Calls }, ""},
	{"CPU time", func(r result) float64 { return seconds(r.CPU) }, "s"},
	{"resident memory", func(r result) float64 { return float64(r.Resident) / (1 << 20) }, "MiB"},
	{"heap per machine after a collection", func(r result) float64 { return r.Heap / (1 << 10) / float64(r.Machines) }, "KiB"},
	{"goroutines per machine", func(r result) float64 { return r.Goroutines / float64(r.Machines) }, ""},
	{"change to Node, alone, median", func(r result) float64 { return milliseconds(r.Alone) }, "ms"},
	{"change to Node, alone, p99", func(r result) float64 { return milliseconds(r.AloneP99) }, "ms"},
	{"change to Node, 50 at once, median", func(r result) float64 { return milliseconds(r.Burst) }, "ms"},
	{"change to Node, 50 at once, p99", func(r result) float64 { return milliseconds(r.BurstP99) }, "ms"},
	{"approve one CSR per Node", func(r result) float64 { return seconds(r.Approve) }, "s"},
	{"assign dual-stack pod CIDRs", func(r result) float64 { return seconds(r.PodCIDRs) }, "s"},
	{"lease handed over after SIGTERM", func(r result) float64 { return seconds(r.HandOver) }, "s"},
	{"lease taken over after SIGKILL", func(r result) float64 { return seconds(r.TakeOver) }, "s"},
}

// printTable prints the results of one number of machines in Markdown, with the ratio to the first result of each row.
func printTable(w io.Writer, machines int, results []result) {
	fmt.Fprintf(w, "\n%d machines\n\n| | | talos-ccm | other | ratio |\n|---|---|---:|---:|---:|\n", machines)

	for _, row := range rows {
		var own float64

		for _, r := range results {
			if r.Subject == talosCCM && own == 0 {
				own = row.value(r)
			}
		}

		compared := false

		for _, r := range results {
			if value := row.value(r); r.Subject != talosCCM && value > 0 {
				compared = true

				fmt.Fprintf(w, "| %s | %s | %.1f %s | %.1f %s | %.2f |\n", row.name, r.Subject, own, row.unit, value, row.unit, own/value)
			}
		}

		if !compared && own > 0 {
			fmt.Fprintf(w, "| %s | | %.1f %s | | |\n", row.name, own, row.unit)
		}
	}
}
