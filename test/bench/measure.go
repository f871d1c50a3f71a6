package main

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	certutil "k8s.io/client-go/util/cert"

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
	Resident           int64         // bytes
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
			profiled <- run.profile(ctx, filepath.Join(profiles, "cpu.pprof"), "profile", "seconds", cpuProfile)
		}()
		defer func() { err = errors.Join(err, <-profiled) }()
	}

	if r.Initialize, err = bed.timeInitialization(ctx); err != nil {
		return r, err
	}

	time.Sleep(b.pace.settle)

	if r.CPU, err = run.cpu(); err != nil {
		return r, err
	}

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

	if r.Burst, r.BurstP99, err = bed.timeChanges(ctx, netip.MustParseAddr("198.18.0.1"), min(burst, machines), b.pace.rounds); err != nil {
		return r, err
	}

	if s.approves {
		r.Approve, err = bed.timeApproval(ctx)
	}

	return r, err
}

// measureFootprint measures what the subject needs while it is idle.
func (r *result) measureFootprint(ctx context.Context, run *running, profiles string) (err error) {
	if r.Resident, err = run.resident(); err != nil {
		return err
	}

	heap, goroutines := os.DevNull, os.DevNull
	if profiles != "" {
		heap, goroutines = filepath.Join(profiles, "heap.pprof"), filepath.Join(profiles, "goroutine.pprof")
	}

	// With gc, the subject collects garbage first.
	if err := errors.Join(run.profile(ctx, goroutines, "goroutine"), run.profile(ctx, heap, "heap", "gc", "1")); err != nil {
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

	err := b.observer.await(ctx, "all Nodes are initialized", func() bool { return b.observer.initialized == len(b.machines) })

	return time.Since(start), err
}

// timeChanges adds public addresses, from addr on, to some machines at once, several times. It returns the median and the 99th percentile of
// the time until the Node informer sees a change.
func (b *bed) timeChanges(ctx context.Context, addr netip.Addr, machines, rounds int) (median, p99 time.Duration, err error) {
	var latencies []time.Duration

	for round := range rounds {
		change := Change{Addresses: map[string]netip.Addr{}}

		for i := range machines {
			nodename := b.machines[(round*machines+i)%len(b.machines)].Nodename
			change.Addresses[nodename] = addr
			addr = addr.Next()
		}

		var changed map[string]time.Time
		if err := b.fleet.Call("Fleet.Change", change, &changed); err != nil {
			return 0, 0, err
		}

		err := b.observer.await(ctx, "all changes are on their Nodes", func() bool {
			for nodename, addr := range change.Addresses {
				if _, seen := b.observer.nodes[nodename].addresses[addr]; !seen {
					return false
				}
			}

			return true
		})
		if err != nil {
			return 0, 0, err
		}

		b.observer.mu.Lock()
		for nodename, at := range changed {
			latencies = append(latencies, b.observer.nodes[nodename].addresses[change.Addresses[nodename]].Sub(at))
		}
		b.observer.mu.Unlock()

		time.Sleep(time.Second) // rounds must not influence each other
	}

	slices.Sort(latencies)

	return latencies[len(latencies)/2], latencies[len(latencies)*99/100], nil
}

// timeApproval creates a serving CSR for each machine and waits until all are approved.
func (b *bed) timeApproval(ctx context.Context) (time.Duration, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()

	factory := informers.NewSharedInformerFactory(b.client, 0)
	informer := factory.Certificates().V1().CertificateSigningRequests().Informer()
	approved := make(chan struct{}, len(b.machines))

	isApproved := func(obj any) bool {
		csr, _ := obj.(*certificatesv1.CertificateSigningRequest)

		return slices.ContainsFunc(csr.Status.Conditions, func(c certificatesv1.CertificateSigningRequestCondition) bool {
			return c.Type == certificatesv1.CertificateApproved
		})
	}
	observe := func(before bool, after any) {
		if !before && isApproved(after) {
			approved <- struct{}{}
		}
	}

	_, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(obj any) { observe(false, obj) },
		UpdateFunc: func(before, after any) { observe(isApproved(before), after) },
	})
	if err != nil {
		return 0, err
	}

	factory.Start(ctx.Done())
	cache.WaitForCacheSync(ctx.Done(), informer.HasSynced)

	requests, err := requestsFor(b.machines)
	if err != nil {
		return 0, err
	}

	start := time.Now()

	err = inParallel(requests, func(r request) error {
		client, err := kubernetes.NewForConfig(b.cluster.KubeletConfig(r.nodename))
		if err != nil {
			return err
		}

		_, err = client.CertificatesV1().CertificateSigningRequests().Create(ctx, r.csr, metav1.CreateOptions{})

		return err
	})
	if err != nil {
		return 0, err
	}

	for range b.machines {
		select {
		case <-approved:
		case <-ctx.Done():
			return 0, fmt.Errorf("wait until all CSRs are approved: %w", ctx.Err())
		}
	}

	return time.Since(start), nil
}

type request struct {
	nodename string
	csr      *certificatesv1.CertificateSigningRequest
}

func requestsFor(machines []Machine) ([]request, error) {
	var requests []request

	for _, m := range machines {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			return nil, err
		}

		subject := pkix.Name{CommonName: "system:node:" + m.Nodename, Organization: []string{"system:nodes"}}

		text, err := certutil.MakeCSR(key, &subject, []string{m.Nodename}, []net.IP{m.Private.AsSlice()})
		if err != nil {
			return nil, err
		}

		requests = append(requests, request{m.Nodename, &certificatesv1.CertificateSigningRequest{
			ObjectMeta: metav1.ObjectMeta{GenerateName: "csr-"},
			Spec: certificatesv1.CertificateSigningRequestSpec{
				Request: text, SignerName: certificatesv1.KubeletServingSignerName,
				Usages: []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageServerAuth},
			},
		}})
	}

	return requests, nil
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

		err = errors.Join(run.awaitMachines(ctx, machines), b.configure("{}"))
	}

	if err != nil {
		return r, err
	}

	err = b.observer.await(ctx, "all Nodes have pod CIDRs", func() bool { return b.observer.podCIDRed == machines })
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

	leader, err := product(b.executable).start(ctx, bed)
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
