package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/talos-ccm/talos-ccm/pkg/claims"
)

const (
	// samples is how often resources are measured.
	samples = 75

	// recreated is how many machines have Nodes that are deleted again and again. After a deletion, a machine has a second
	// connection for the retention. With all machines, their number would grow for longer than a soak.
	recreated = 20

	// requestLifetime is how long a CSR exists. It must be approved by then.
	requestLifetime = time.Minute

	// settling is how long samples do not count: talos-ccm remembers the Nodes that were deleted, and watches their
	// machines, for the retention. In a short soak it is settlingPart of it, which says little about memory.
	settling     = claims.Retention + time.Minute
	settlingPart = 0.62
)

// quantity is something that must not grow while the cluster does not.
type quantity struct {
	name, unit string
	// bound is by how much of its mean it may grow per hour; zero if it is only printed.
	bound  float64
	values []float64
}

// soak observes talos-ccm while machines change.
type soak struct {
	*trial

	profiles   string // directory for heap profiles, if any
	quantities []*quantity
	hours      []float64 // since the start, of each sample

	requested, missed int // CSRs
}

// runSoak changes one percent of the machines per second for a while and prints how resources developed. It writes heap
// profiles to a directory unless its name is empty.
func runSoak(ctx context.Context, w io.Writer, executable string, machines int, duration time.Duration, profiles string) (err error) {
	t, err := newTrial(ctx, executable, machines, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, t.close()) }()

	s := &soak{trial: t, profiles: profiles, quantities: []*quantity{
		{name: "heap after a collection", unit: "MiB", bound: 0.1},
		{name: "goroutines", bound: 0.05},
		{name: "open sockets", bound: 0.05},
		{name: "open files", bound: 0.05},
		{name: "resident memory", unit: "MiB"},
	}}

	s.churn(duration)

	recovered := t.recover(t.managed)
	if t.err != nil {
		return nil // close returns it
	}

	fmt.Fprintf(w, "\n%d machines, %s\n\n", machines, duration)
	err = s.print(w)

	versions, _, violated := t.verdict()
	fmt.Fprintf(w, "\nAll Nodes were up to date %.1f s after the last change. The auditor checked %d versions of Nodes.\n", recovered.Seconds(), versions)
	fmt.Fprintf(w, "%d CSRs were created, of which %d were not approved within %s.\n", s.requested, s.missed, requestLifetime)

	if starts := t.leader.running().starts; starts != 1 {
		err = errors.Join(err, fmt.Errorf("talos-ccm was started %d times", starts))
	}

	return errors.Join(err, violated)
}

// churn changes machines and takes samples.
func (s *soak) churn(duration time.Duration) {
	ctx, cancel := context.WithTimeout(s.ctx, duration)
	defer cancel()

	start, turn := time.Now(), 0
	next := min(settling, time.Duration(settlingPart*float64(duration)))

	wait.NonSlidingUntilWithContext(ctx, func(context.Context) {
		for range max(1, len(s.managed)/100) {
			s.disturb(turn)

			turn++
		}

		s.try(s.collectRequests)

		if elapsed := time.Since(start); elapsed > next {
			s.sample(elapsed)

			next += duration / samples
		}

		if s.err != nil {
			cancel()
		}
	}, time.Second)
}

// disturb changes the address of a machine, reboots it, replaces its Node, or creates a CSR, in turn.
func (s *soak) disturb(turn int) {
	workers := s.managed[controlPlanes:]
	m := workers[rand.IntN(len(workers))] //nolint:gosec // any machine

	switch turn % 10 {
	case 0, 1:
		s.try(func() error { return m.Reboot(s.ctx) })
	case 2:
		i := turn / 10 % min(recreated, len(workers))
		s.recreate(workers[i : i+1])
	case 3, 4:
		s.requested++
		s.try(func() error { return s.requestCertificate(m) })
	default:
		s.change([]machine{m})
	}
}

// collectRequests deletes old CSRs.
func (s *soak) collectRequests() error {
	api := s.client.CertificatesV1().CertificateSigningRequests()

	list, err := api.List(s.ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}

	for i := range list.Items {
		csr := &list.Items[i]
		if time.Since(csr.CreationTimestamp.Time) < requestLifetime {
			continue
		}

		if isPending(csr) {
			s.missed++
		}

		if err := api.Delete(s.ctx, csr.Name, metav1.DeleteOptions{}); err != nil {
			return err
		}
	}

	return nil
}

// sample appends a value to each quantity.
func (s *soak) sample(elapsed time.Duration) {
	process := s.leader.running()

	file := "heap-last.pprof"
	if len(s.hours) == 0 {
		file = "heap-first.pprof"
	}

	heap, goroutines, used := process.heap(s.profiles, file), process.metric("go_goroutines"), process.usage()
	s.hours = append(s.hours, elapsed.Hours())

	for i, value := range []float64{heap, goroutines, used.sockets, used.files, used.resident} {
		s.quantities[i].values = append(s.quantities[i].values, value)
	}
}

// print prints the slopes, and returns an error if one is beyond its bound by more than chance explains.
func (s *soak) print(w io.Writer) (err error) {
	fmt.Fprintf(w, "| of %d samples | mean | growth per hour | standard error | bound |\n|---|---:|---:|---:|---:|\n", len(s.hours))

	for _, q := range s.quantities {
		mean, slope, deviation := regress(s.hours, q.values)
		bound := ""

		if q.bound > 0 {
			bound = fmt.Sprintf("%.1f", q.bound*mean)

			if slope-2*deviation > q.bound*mean {
				err = errors.Join(err, fmt.Errorf("%s: grows by %.1f per hour, more than %s", q.name, slope, bound))
			}
		}

		fmt.Fprintf(w, "| %s | %.1f %s | %+.1f | %.1f | %s |\n", q.name, mean, q.unit, slope, deviation, bound)
	}

	return err
}

// regress returns the mean of y, and the slope of y over x by least squares with its standard error.
func regress(x, y []float64) (mean, slope, deviation float64) {
	n := float64(len(x))

	var meanX, sumXX, sumXY, residuals float64

	for i := range x {
		meanX += x[i] / n
		mean += y[i] / n
	}

	for i := range x {
		sumXX += (x[i] - meanX) * (x[i] - meanX)
		sumXY += (x[i] - meanX) * (y[i] - mean)
	}

	slope = sumXY / sumXX

	for i := range x {
		residual := y[i] - mean - slope*(x[i]-meanX)
		residuals += residual * residual
	}

	return mean, slope, math.Sqrt(residuals / (n - 2) / sumXX)
}
