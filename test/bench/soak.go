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

	"github.com/talos-ccm/talos-ccm/pkg/inventory"
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
	settling     = inventory.Retention + time.Minute
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

	profiles   string // folder for heap profiles, if any
	quantities []*quantity
	hours      []float64 // since the start, of each sample

	requests          []openRequest
	requested, missed int
}

// openRequest is a CSR that was created.
type openRequest struct {
	name    string
	created time.Time
}

// runSoak changes one percent of the machines per second for a while and prints how resources developed. It writes heap
// profiles to a folder unless its name is empty.
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

	if err := s.churn(ctx, duration); err != nil {
		return err
	}

	recovered, err := t.recover(ctx, t.managed)
	if err != nil {
		return err
	}

	fmt.Fprintf(w, "\n%d machines, %s\n\n", machines, duration)
	err = s.print(w)

	versions, _, violated := t.verdict()
	fmt.Fprintf(w, "\nAll Nodes were up to date %.1f s after the last change. The auditor checked %d versions of Nodes.\n", recovered.Seconds(), versions)
	fmt.Fprintf(w, "%d CSRs were created, of which %d were not approved within %s.\n", s.requested, s.missed, requestLifetime)

	if _, starts := t.leader.running(); starts != 1 {
		err = errors.Join(err, fmt.Errorf("talos-ccm was started %d times", starts))
	}

	return errors.Join(err, violated)
}

// churn changes machines and takes samples.
func (s *soak) churn(ctx context.Context, duration time.Duration) error {
	var (
		start   = time.Now()
		changes = time.NewTicker(time.Second)
		measure = time.NewTicker(duration / samples)
		workers = s.managed[controlPlanes:]
		turn    int
	)

	defer changes.Stop()
	defer measure.Stop()

	for time.Since(start) < duration {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-changes.C:
			for range max(1, len(s.managed)/100) {
				if err := s.disturb(ctx, turn, workers[rand.IntN(len(workers))]); err != nil { //nolint:gosec // any machine
					return err
				}

				turn++
			}

			if err := s.collectRequests(ctx); err != nil {
				return err
			}
		case <-measure.C:
			if elapsed := time.Since(start); elapsed > min(settling, time.Duration(settlingPart*float64(duration))) {
				if err := s.sample(ctx, elapsed); err != nil {
					return err
				}
			}
		}
	}

	return nil
}

// disturb changes the address of a machine, reboots it, replaces its Node, or creates a CSR, in turn.
func (s *soak) disturb(ctx context.Context, turn int, m Machine) error {
	switch turn % 10 {
	case 0, 1:
		return s.order("reboot", []Machine{m})
	case 2:
		return s.recreateNode(ctx, s.managed[controlPlanes+turn/10%min(recreated, len(s.managed)-controlPlanes)])
	case 3, 4:
		return s.requestCertificate(ctx, m)
	default:
		return s.change([]Machine{m})
	}
}

func (s *soak) requestCertificate(ctx context.Context, m Machine) error {
	created, err := s.request(ctx, m)
	if err != nil {
		return err
	}

	s.requested++
	s.requests = append(s.requests, openRequest{created.Name, time.Now()})

	return nil
}

// collectRequests deletes old CSRs.
func (s *soak) collectRequests(ctx context.Context) error {
	api := s.client.CertificatesV1().CertificateSigningRequests()

	for len(s.requests) > 0 && time.Since(s.requests[0].created) > requestLifetime {
		name := s.requests[0].name
		s.requests = s.requests[1:]

		csr, err := api.Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}

		if !isApproved(csr) {
			s.missed++
		}

		if err := api.Delete(ctx, name, metav1.DeleteOptions{}); err != nil {
			return err
		}
	}

	return nil
}

// sample appends a value to each quantity.
func (s *soak) sample(ctx context.Context, elapsed time.Duration) error {
	process, _ := s.leader.running()

	file := "heap-last.pprof"
	if len(s.hours) == 0 {
		file = "heap-first.pprof"
	}

	// The profile makes talos-ccm collect garbage.
	if err := process.profile(ctx, s.profiles, file, "heap", "gc", "1"); err != nil {
		return err
	}

	heap, heapErr := process.metric(ctx, "go_memstats_heap_alloc_bytes")
	goroutines, goroutinesErr := process.metric(ctx, "go_goroutines")
	used, usageErr := process.usage()

	if err := errors.Join(heapErr, goroutinesErr, usageErr); err != nil {
		return err
	}

	s.hours = append(s.hours, elapsed.Hours())

	for i, value := range []float64{heap / (1 << 20), goroutines, float64(used.sockets), float64(used.files), float64(used.resident) / (1 << 20)} {
		s.quantities[i].values = append(s.quantities[i].values, value)
	}

	return nil
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

	var sumX, sumY, sumXX, sumXY, residuals float64

	for i := range x {
		sumX += x[i]
		sumY += y[i]
	}

	meanX, mean := sumX/n, sumY/n

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
