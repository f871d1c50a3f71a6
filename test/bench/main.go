// Command bench measures talos-ccm against simulated Talos machines and a real API server, next to a baseline
// controller. Machines and measurements run in this process; the API server and the measured controllers are child
// processes.
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
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/talos-ccm/talos-ccm/test/kube"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// allParts are what a benchmark can measure.
var allParts = []string{"election", "nodes", "pod-cidrs"}

func run(args []string) (err error) {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()

	if len(args) == 1 && args[0] == "baseline" {
		return runBaseline(ctx)
	}

	b := &benchmark{ctx: ctx}
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	machines := flags.String("machines", "100,1000", "numbers of machines, separated by commas")
	against := flags.String("against", "", "shell command of another controller to measure; it gets KUBECONFIG and TALOSCONFIG")
	approves := flags.Bool("against-approves", false, "whether the other controller approves CSRs")
	flags.StringVar(&b.profiles, "profiles", "", "directory for profiles of talos-ccm, with the last number of machines, or at the first and the last sample of a soak")
	flags.StringVar(&b.parts, "parts", strings.Join(allParts, ","), "what to measure, separated by commas")
	flags.StringVar(&b.chart, "chart", "", "file for a chart (SVG) of the last number of machines")
	flags.DurationVar(&b.settle, "settle", 15*time.Second, "how long a controller has to become idle before its memory is measured and before changes")
	flags.IntVar(&b.rounds, "rounds", 10, "how often one machine changes, and how often 50 do")
	withFaults := flags.String("faults", "", "run the faults whose names contain this, or all, and print a table, in place of a benchmark")
	duration := flags.Duration("soak", 0, "change machines for this long and print how memory and connections developed, in place of a benchmark")

	if err := flags.Parse(args); err != nil {
		return err
	}

	if err := b.validate(flags.Args()); err != nil {
		return err
	}

	sizes, err := parseSizes(*machines)
	if err != nil {
		return err
	}

	dir, err := os.MkdirTemp("", "talos-ccm-bench-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()

	if b.executable, err = build(ctx, dir, "talos-ccm"); err != nil {
		return err
	}

	switch {
	case *withFaults != "":
		return runFaults(ctx, os.Stdout, b.executable, sizes[0], *withFaults)
	case *duration > 0:
		return runSoak(ctx, os.Stdout, b.executable, sizes[0], *duration, b.profiles)
	}

	b.subjects = []subject{talosSubject(b.executable), command("baseline", true, "/proc/self/exe", "baseline")}
	if *against != "" {
		b.subjects = append(b.subjects, command("other controller", *approves, "sh", "-c", "exec "+*against))
	}

	return b.run(sizes)
}

func (b *benchmark) validate(args []string) error {
	switch {
	case len(args) > 0:
		return fmt.Errorf("unexpected argument %q", args[0])
	case b.rounds < 1:
		return fmt.Errorf("-rounds: %d is less than 1", b.rounds)
	}

	for part := range strings.SplitSeq(b.parts, ",") {
		if !slices.Contains(allParts, part) {
			return fmt.Errorf("-parts: %q is none of %s", part, strings.Join(allParts, ", "))
		}
	}

	return nil
}

// build builds talos-ccm in a directory. Its version contains the name of the file.
func build(ctx context.Context, dir, name string) (executable string, err error) {
	const module = "github.com/talos-ccm/talos-ccm"

	executable = filepath.Join(dir, name)
	build := exec.CommandContext(ctx, "go", "build", "-ldflags=-X "+module+"/pkg/version.version=v0.0.0-"+name, "-o", executable, module+"/cmd/talos-ccm")
	build.Stderr = os.Stderr

	if err := build.Run(); err != nil {
		return "", fmt.Errorf("build talos-ccm: %w", err)
	}

	return executable, nil
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

// benchmark has the settings of all measurements.
type benchmark struct {
	ctx context.Context //nolint:containedctx // of the program
	err error           // after which nothing is measured

	executable string
	profiles   string // directory, if any
	chart      string // file, if any
	parts      string
	settle     time.Duration // how long a subject has to become idle before its memory is measured and before changes
	rounds     int           // how often one machine changes, and how often a burst happens
	subjects   []subject
}

// run measures the parts for each number of machines, and prints a table for each.
func (b *benchmark) run(sizes []int) error {
	election := b.measure("election", talosCCM, controlPlanes, kube.Options{}, b.measureElection)

	for _, size := range sizes {
		var rows []row

		for _, s := range b.subjects {
			rows = append(rows, b.measure("nodes", s.name, size, kube.Options{}, func(bed *bed) { b.measureNodes(bed, s) })...)
		}

		for _, name := range []string{talosCCM, "kube-controller-manager"} {
			absent := kube.Options{ControllerManager: kube.ControllerManager{Absent: true}}
			rows = append(rows, b.measure("pod-cidrs", name, size, absent, b.measurePodCIDRs)...)
		}

		if b.err != nil {
			break
		}

		rows = append(rows, election...)
		printTable(os.Stdout, size, rows)

		if b.chart != "" {
			b.err = os.WriteFile(b.chart, drawChart(size, rows), 0o600)
		}
	}

	return b.err
}

// measure measures a part on a bed, if the part was selected.
func (b *benchmark) measure(part, subject string, machines int, options kube.Options, do func(*bed)) []row {
	if b.err != nil || !slices.Contains(strings.Split(b.parts, ","), part) {
		return nil
	}

	start := time.Now()

	bed, err := newBed(b.ctx, machines, options)
	if err == nil {
		bed.subject = subject
		do(bed)
		err = bed.close()
	}

	if err != nil {
		b.err = fmt.Errorf("%s, %d machines: %w", subject, machines, err)

		return nil
	}

	fmt.Fprintf(os.Stderr, "measured %s with %d machines in %s\n", subject, machines, time.Since(start).Round(time.Second))

	return bed.rows
}
