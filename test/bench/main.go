// Command bench measures talos-ccm against simulated Talos machines and a real API server, next to two baseline
// controllers. Machines and measurements run in this process; the API server and the measured controllers are child
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

	"github.com/siderolabs/gen/xslices"

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

	if len(args) == 1 && slices.Contains(baselines, args[0]) {
		return runBaseline(ctx, args[0])
	}

	b := &benchmark{ctx: ctx}
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	machines := flags.String("machines", "100,1000", "numbers of machines, separated by commas")
	against := flags.String("against", "", "shell command of another controller to measure; it gets KUBECONFIG and TALOSCONFIG")
	approves := flags.Bool("against-approves", false, "whether the other controller approves CSRs")
	follows := flags.Bool("against-follows", false, "whether the other controller watches machines")
	flags.StringVar(&b.profiles, "profiles", "", "directory for profiles of talos-ccm, with the last number of machines, or at the first and the last sample of a soak")
	flags.StringVar(&b.parts, "parts", strings.Join(allParts, ","), "what to measure, separated by commas")
	flags.StringVar(&b.committed, "compare", "", "file with expected results; fail if a result exceeds its tolerance")
	flags.BoolVar(&b.update, "update", false, "replace the file of -compare")
	flags.DurationVar(&b.settle, "settle", 15*time.Second, "how long a controller has to become idle before its memory is measured and before changes")
	flags.IntVar(&b.rounds, "rounds", 10, "how often one machine changes, and how often 50 do")
	flags.IntVar(&b.repeat, "repeat", 1, "how often everything is measured; results are medians")
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

	b.subjects = []subject{
		talosSubject(b.executable),
		command(subject{name: readsAndWrites, approves: true, follows: true}, "/proc/self/exe", readsAndWrites),
		command(subject{name: writesOnly, approves: true}, "/proc/self/exe", writesOnly),
	}
	if *against != "" {
		b.subjects = append(b.subjects, command(subject{name: "other controller", approves: *approves, follows: *follows}, "sh", "-c", "exec "+*against))
	}

	return b.run(sizes)
}

func (b *benchmark) validate(args []string) error {
	switch {
	case len(args) > 0:
		return fmt.Errorf("unexpected argument %q", args[0])
	case b.rounds < 1, b.repeat < 1:
		return errors.New("-rounds and -repeat must be at least 1")
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
	committed  string // file, if any
	update     bool
	parts      string
	settle     time.Duration // how long a subject has to become idle before its memory is measured and before changes
	rounds     int           // how often one machine changes, and how often a burst happens
	repeat     int
	subjects   []subject
	results    results // of one number of machines
}

// run measures the parts for each number of machines, and prints tables.
func (b *benchmark) run(sizes []int) error {
	last := sizes[len(sizes)-1]

	var committed map[string]float64

	if b.committed != "" && !b.update {
		var err error
		if committed, err = readCommitted(b.committed, last); err != nil {
			return err
		}
	}

	for _, size := range sizes {
		b.results = results{}

		if err := b.measureAndPrint(size); err != nil {
			return err
		}
	}

	switch {
	case b.committed == "":
		return nil
	case b.update:
		return b.results.update(b.committed, last)
	}

	err := b.results.compare(committed)
	if err == nil {
		return nil
	}

	fmt.Fprintln(os.Stderr, "bench: measuring again, in case the computer was busy:", err)

	if err := b.measureAndPrint(last); err != nil {
		return err
	}

	return b.results.compare(committed)
}

// measureAndPrint adds repetitions to the results.
func (b *benchmark) measureAndPrint(size int) error {
	for range b.repeat {
		b.measureAll(size)
	}

	if b.err != nil {
		return b.err
	}

	columns := xslices.Map(b.subjects, func(s subject) string { return s.name })
	b.results.print(os.Stdout, size, append(columns, kubeControllerManager))

	return nil
}

// measureAll measures all parts and subjects once, so that what disturbs the computer for a while does not change the
// medians.
func (b *benchmark) measureAll(size int) {
	for _, s := range b.subjects {
		b.measure("nodes", s.name, size, kube.Options{}, func(bed *bed) { b.measureNodes(bed, s) })
	}

	for _, name := range []string{talosCCM, kubeControllerManager} {
		absent := kube.Options{ControllerManager: kube.ControllerManager{Absent: true}}
		b.measure("pod-cidrs", name, size, absent, b.measurePodCIDRs)
	}

	b.measure("election", talosCCM, controlPlanes, kube.Options{}, b.measureElection)
}

// measure measures a part on a bed, if the part was selected.
func (b *benchmark) measure(part, subject string, machines int, options kube.Options, do func(*bed)) {
	if b.err != nil || !slices.Contains(strings.Split(b.parts, ","), part) {
		return
	}

	start := time.Now()

	bed, err := newBed(b.ctx, machines, options)
	if err == nil {
		bed.subject, bed.results = subject, b.results
		do(bed)
		err = bed.close()
	}

	if err != nil {
		b.err = fmt.Errorf("%s, %d machines: %w", subject, machines, err)

		return
	}

	fmt.Fprintf(os.Stderr, "measured %s with %d machines in %s\n", subject, machines, time.Since(start).Round(time.Second))
}
