// Command bench measures talos-ccm against simulated Talos machines and a real API server, beside the least that a
// controller can do. The machines, the API server, and what is measured are processes of their own.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// main keeps its thread: the kernel kills the simulated machines when the thread that started them ends.
func main() {
	runtime.LockOSThread()

	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()

	switch {
	case len(args) == 1 && args[0] == "fleet":
		return serveFleet()
	case len(args) == 1 && args[0] == "barest":
		return runBarest(ctx)
	}

	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	machines := flags.String("machines", "100,1000", "numbers of machines, separated by commas")
	against := flags.String("against", "", "shell command of another controller to measure; it gets KUBECONFIG and TALOSCONFIG")
	approves := flags.Bool("against-approves", false, "whether the other controller approves CSRs")
	profiles := flags.String("profiles", "", "folder for profiles of talos-ccm, with the largest number of machines, or at the first and the last sample of a soak")
	parts := flags.String("parts", "election,nodes,pod-cidrs", "what to measure, separated by commas")
	chart := flags.String("chart", "", "file for a chart (SVG) of the largest number of machines")
	settle := flags.Duration("settle", 15*time.Second, "how long a controller has to become idle before its memory is measured and before changes")
	rounds := flags.Int("rounds", 10, "how often one machine changes, and how often 50 do")
	withFaults := flags.String("faults", "", "run the faults whose names contain this, or all, and print a table, in place of a benchmark")
	duration := flags.Duration("soak", 0, "change machines for this long and print how memory and connections developed, in place of a benchmark")
	timeout := flags.Duration("timeout", 20*time.Minute, "limit for each part")

	if err := flags.Parse(args); err != nil {
		return err
	}

	sizes, err := parseSizes(*machines)
	if err != nil {
		return err
	}

	self, err := os.Executable()
	if err != nil {
		return err
	}

	return withProduct(ctx, func(executable string) error {
		switch {
		case *withFaults != "":
			return runFaults(ctx, os.Stdout, executable, sizes[0], strings.TrimPrefix(*withFaults, "all"))
		case *duration > 0:
			return runSoak(ctx, os.Stdout, executable, sizes[0], *duration, *profiles)
		}

		b := benchmark{
			ctx: ctx, timeout: *timeout, executable: executable, profiles: *profiles, chart: *chart, parts: strings.Split(*parts, ","),
			pace: pace{*settle, *rounds}, others: []subject{command("barest controller", true, self, "barest")},
		}
		if *against != "" {
			b.others = append(b.others, command("other controller", *approves, "sh", "-c", "exec "+*against))
		}

		return b.run(sizes)
	})
}

// withProduct builds talos-ccm and calls do with its executable.
func withProduct(ctx context.Context, do func(executable string) error) (err error) {
	folder, err := os.MkdirTemp("", "talos-ccm-bench-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(folder)) }()

	executable := filepath.Join(folder, "talos-ccm")
	build := exec.CommandContext(ctx, "go", "build", "-o", executable, "github.com/talos-ccm/talos-ccm/cmd/talos-ccm")
	build.Stderr = os.Stderr

	if err := build.Run(); err != nil {
		return fmt.Errorf("build talos-ccm: %w", err)
	}

	return do(executable)
}

func parseSizes(text string) (sizes []int, err error) {
	for part := range strings.SplitSeq(text, ",") {
		size, err := strconv.Atoi(part)
		if err != nil || size < controlPlanes {
			return nil, fmt.Errorf("-machines: %q is not a number of at least %d", part, controlPlanes)
		}

		sizes = append(sizes, size)
	}

	return sizes, nil
}

type benchmark struct {
	ctx        context.Context //nolint:containedctx // of the program
	timeout    time.Duration
	executable string
	profiles   string
	chart      string
	parts      []string
	pace       pace
	others     []subject
}

// run measures the parts for each number of machines, and prints a table for each.
func (b *benchmark) run(sizes []int) error {
	var election []result

	if slices.Contains(b.parts, "election") {
		r, err := b.part(func(ctx context.Context) (result, error) { return b.measureElection(ctx) })
		if err != nil {
			return err
		}

		election = append(election, r)
	}

	for _, size := range sizes {
		results := election

		profiles := ""
		if size == slices.Max(sizes) {
			profiles = b.profiles
		}

		for _, do := range b.measurements(size, profiles) {
			r, err := b.part(do)
			if err != nil {
				return err
			}

			results = append(results, r)
		}

		printTable(os.Stdout, size, results)

		if size == slices.Max(sizes) && b.chart != "" {
			if err := writeChart(b.chart, size, results); err != nil {
				return err
			}
		}
	}

	return nil
}

func writeChart(file string, machines int, results []result) error {
	f, err := os.Create(file)
	if err != nil {
		return err
	}

	return errors.Join(drawChart(f, machines, results), f.Close())
}

// measurements returns the measurements with a number of machines. Profiles of talos-ccm are written to a folder unless
// its name is empty.
func (b *benchmark) measurements(machines int, profiles string) (list []func(context.Context) (result, error)) {
	if slices.Contains(b.parts, "nodes") {
		for _, s := range append([]subject{talosSubject(b.executable)}, b.others...) {
			folder := ""
			if s.name == talosCCM {
				folder = profiles
			}

			list = append(list, func(ctx context.Context) (result, error) { return b.measureNodes(ctx, s, machines, folder) })
		}
	}

	if slices.Contains(b.parts, "pod-cidrs") {
		ipam := talosSubject(b.executable, allocating("node-ipam-controller")...)

		for _, s := range []*subject{&ipam, nil} {
			list = append(list, func(ctx context.Context) (result, error) { return measurePodCIDRs(ctx, s, machines) })
		}
	}

	return list
}

// part runs one measurement with the time limit.
func (b *benchmark) part(do func(context.Context) (result, error)) (result, error) {
	ctx, cancel := context.WithTimeout(b.ctx, b.timeout)
	defer cancel()

	start := time.Now()

	r, err := do(ctx)
	if err != nil {
		return r, fmt.Errorf("%s, %d machines: %w", r.Subject, r.Machines, err)
	}

	fmt.Fprintf(os.Stderr, "measured %s with %d machines in %s\n", r.Subject, r.Machines, time.Since(start).Round(time.Second))

	return r, nil
}
