package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"syscall"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

// burst is how many machines change at once.
const burst = 50

// pace is how long the measurements take.
type pace struct {
	settle time.Duration // how long a subject has to become idle before its memory is measured and before changes
	rounds int           // how often one machine changes, and how often a burst happens
}

// result is what was measured of a subject. Zero values were not measured.
type result struct {
	Subject            string
	Machines           int
	Initialize         time.Duration // all Nodes, which were registered at once
	Calls              float64       // requests to Talos per Node until then, and while it settled
	CPU                time.Duration // of the subject until all Nodes were initialized, and while it settled
	Resident           int           // bytes
	Heap               float64       // bytes, in use after a garbage collection
	Goroutines         float64
	Alone, AloneP99    time.Duration // from a change of one machine to its Node
	Burst, BurstP99    time.Duration // from a change of several machines to their Nodes
	Approve            time.Duration // one CSR of each machine
	PodCIDRs           time.Duration // of all Nodes, which were registered at once
	HandOver, TakeOver time.Duration // from SIGTERM, and from SIGKILL, to the next leader
}

// cpuProfile is how many seconds of an initialization a profile shows.
const cpuProfile = "8"

// measureNodes measures everything that one instance does, except for pod CIDRs. It writes profiles to a folder unless
// its name is empty.
func (b *benchmark) measureNodes(ctx context.Context, s subject, machines int, profiles string) (r result, err error) {
	r = result{Subject: s.name, Machines: machines}

	bed, err := newBed(ctx, machines, kube.Options{})
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, bed.close()) }()

	run, err := s.start(ctx, bed)
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, run.stop(syscall.SIGTERM)) }()

	if profiles != "" {
		profiled := make(chan error, 1)

		go func() {
			profiled <- run.profile(ctx, profiles, "cpu.pprof", "profile", "seconds", cpuProfile)
		}()
		defer func() { err = errors.Join(err, <-profiled) }()
	}

	if r.Initialize, err = bed.timeInitialization(ctx); err != nil {
		return r, err
	}

	time.Sleep(b.pace.settle)

	used, err := run.usage()
	if err != nil {
		return r, err
	}

	r.CPU, r.Resident = used.cpu, used.resident

	calls, err := bed.calls()
	if err != nil {
		return r, err
	}

	r.Calls = float64(calls) / float64(machines)

	if err := r.measureFootprint(ctx, run, profiles); err != nil {
		return r, err
	}

	if r.Alone, r.AloneP99, err = bed.timeChanges(ctx, netip.MustParseAddr("203.0.113.1"), 1, b.pace.rounds); err != nil {
		return r, err
	}

	if r.Burst, r.BurstP99, err = bed.timeChanges(ctx, publicAddresses.Addr().Next(), min(burst, machines), b.pace.rounds); err != nil {
		return r, err
	}

	if s.approves {
		r.Approve, err = bed.timeApproval(ctx)
	}

	return r, err
}

// measureFootprint measures what the subject needs while it is idle.
func (r *result) measureFootprint(ctx context.Context, run *running, profiles string) (err error) {
	// With gc, the subject collects garbage first.
	err = errors.Join(run.profile(ctx, profiles, "goroutine.pprof", "goroutine"), run.profile(ctx, profiles, "heap.pprof", "heap", "gc", "1"))
	if err != nil {
		return err
	}

	if r.Heap, err = run.metric(ctx, "go_memstats_heap_alloc_bytes"); err != nil {
		return err
	}

	r.Goroutines, err = run.metric(ctx, "go_goroutines")

	return err
}

// timeInitialization registers all Nodes and waits until they are initialized.
func (b *bed) timeInitialization(ctx context.Context) (time.Duration, error) {
	start := time.Now()

	if err := b.register(ctx, b.machines); err != nil {
		return 0, err
	}

	err := b.observer.awaitNodes(ctx, "all Nodes are initialized", len(b.machines), func(node *corev1.Node) bool { return !nodespec.IsUninitialized(node) })

	return time.Since(start), err
}

// timeChanges adds public addresses, from addr on, to some machines at once, several times. It returns the median and the 99th percentile of
// the time until the Node informer sees a change.
func (b *bed) timeChanges(ctx context.Context, addr netip.Addr, machines, rounds int) (median, p99 time.Duration, err error) {
	var latencies []time.Duration

	for round := range rounds {
		order := Order{Action: "add public address", Public: map[string]netip.Addr{}}

		var changing []Machine

		for i := range machines {
			m := b.machines[(round*machines+i)%len(b.machines)]
			changing = append(changing, m)
			order.Public[m.Nodename] = addr
			addr = addr.Next()
		}

		changed, err := b.do(order, changing)
		if err != nil {
			return 0, 0, err
		}

		err = b.observer.await(ctx, "all changes are on their Nodes", func() bool {
			return !slices.ContainsFunc(slices.Collect(maps.Values(order.Public)), func(addr netip.Addr) bool { return b.observer.listed[addr].IsZero() })
		})
		if err != nil {
			return 0, 0, err
		}

		b.observer.mu.Lock()
		for nodename, at := range changed {
			latencies = append(latencies, b.observer.listed[order.Public[nodename]].Sub(at))
		}
		b.observer.mu.Unlock()

		time.Sleep(time.Second) // rounds must not influence each other
	}

	slices.Sort(latencies)

	return latencies[len(latencies)/2], latencies[len(latencies)*99/100], nil
}

// timeApproval creates a serving CSR for each machine and waits until all are approved.
func (b *bed) timeApproval(ctx context.Context) (time.Duration, error) {
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)

	watcher, err := b.client.CertificatesV1().CertificateSigningRequests().Watch(ctx, metav1.ListOptions{})
	if err != nil {
		return 0, err
	}
	defer watcher.Stop()

	start := time.Now()

	go func() {
		err := inParallel(b.machines, func(m Machine) error {
			_, err := b.request(ctx, m)

			return err
		})
		if err != nil {
			fail(err)
		}
	}()

	for approved := map[string]bool{}; len(approved) < len(b.machines); {
		event, ok := <-watcher.ResultChan()
		if !ok {
			return 0, fmt.Errorf("watch of CSRs ended before all were approved: %w", context.Cause(ctx))
		}

		if csr, isCSR := event.Object.(*certificatesv1.CertificateSigningRequest); isCSR && isApproved(csr) {
			approved[csr.Name] = true
		}
	}

	return time.Since(start), nil
}

// request creates a serving CSR as the kubelet of a machine does.
func (b *bed) request(ctx context.Context, m Machine) (*certificatesv1.CertificateSigningRequest, error) {
	return b.cluster.RequestServingCertificate(ctx, m.Nodename, "", m.Nodename, m.Private.String())
}

func isApproved(csr *certificatesv1.CertificateSigningRequest) bool {
	return slices.ContainsFunc(csr.Status.Conditions, func(c certificatesv1.CertificateSigningRequestCondition) bool {
		return c.Type == certificatesv1.CertificateApproved
	})
}

// The CIDRs have room for more Nodes than any benchmark has, and contain no machine.
var podCIDRs = []netip.Prefix{netip.MustParsePrefix("10.64.0.0/11"), netip.MustParsePrefix("fd00:10::/48")}

// selectsNothing is a configuration of talos-ccm.
const selectsNothing = "ipam: {selector: [{matchExpressions: [{key: nodename, operator: In, values: [none]}]}]}"

// measurePodCIDRs measures how long s takes to assign dual-stack pod CIDRs, from the first to the last; nil means
// kube-controller-manager. All Nodes are registered before. talos-ccm selects none of them until it watches all machines.
func measurePodCIDRs(ctx context.Context, s *subject, machines int) (r result, err error) {
	r.Machines, r.Subject = machines, "kube-controller-manager"
	if s != nil {
		r.Subject = s.name
	}

	b, err := newBed(ctx, machines, kube.Options{ControllerManager: kube.ControllerManager{Absent: true}})
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, b.close()) }()

	if err := errors.Join(b.register(ctx, b.machines), b.configure(selectsNothing)); err != nil {
		return r, err
	}

	if s == nil {
		err = b.cluster.StartControllerManager(ctx, kube.ControllerManager{
			PodCIDRs: podCIDRs, Flags: []string{"--kube-api-qps=10000", "--kube-api-burst=10000"},
		})
	} else {
		var run *running
		if run, err = s.start(ctx, b); err != nil {
			return r, err
		}
		defer func() { _ = run.stop(syscall.SIGTERM) }()

		_, err = run.awaitMetric(ctx, `talosccm_machines{condition="Current"}`, func(n float64) bool { return int(n) == machines })
		err = errors.Join(err, b.configure("{}"))
	}

	if err != nil {
		return r, err
	}

	err = b.observer.awaitNodes(ctx, "all Nodes have pod CIDRs", machines, func(node *corev1.Node) bool { return len(node.Spec.PodCIDRs) > 0 })
	r.PodCIDRs = time.Since(b.observer.firstPodCIDR)

	return r, err
}

// measureElection measures how long the next of two instances of talos-ccm takes to lead.
func (b *benchmark) measureElection(ctx context.Context) (r result, err error) {
	r = result{Subject: talosCCM, Machines: controlPlanes}

	bed, err := newBed(ctx, controlPlanes, kube.Options{})
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, bed.close()) }()

	leader, err := talosSubject(b.executable).start(ctx, bed)
	if err != nil {
		return r, err
	}

	first, err := awaitLeader(ctx, bed.client, "")
	if err != nil {
		return r, err
	}

	next, err := startProduct(bed, b.executable, 1)
	if err != nil {
		return r, errors.Join(err, leader.stop(syscall.SIGTERM))
	}

	time.Sleep(b.pace.settle)

	start := time.Now()

	go func() { _ = leader.stop(syscall.SIGTERM) }()

	second, err := awaitLeader(ctx, bed.client, first)
	if err != nil {
		return r, err
	}

	r.HandOver = time.Since(start)

	again, err := startProduct(bed, b.executable, 0)
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, again.stop(syscall.SIGTERM)) }()

	time.Sleep(b.pace.settle)

	start = time.Now()
	_ = next.stop(syscall.SIGKILL)

	_, err = awaitLeader(ctx, bed.client, second)
	r.TakeOver = time.Since(start)

	return r, err
}
