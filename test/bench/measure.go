package main

import (
	"net/netip"
	"slices"
	"syscall"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

// burst is how many machines change at once.
const burst = 50

// measureNodes measures everything that one instance does, except for pod CIDRs. It writes profiles if there is a
// directory for them.
func (b *benchmark) measureNodes(bed *bed, s subject) {
	run := bed.run(s)

	// The first Node shows that the subject works.
	bed.initialize(0, 1)

	if b.profiles != "" {
		profiled := make(chan error, 1)

		go func() { profiled <- run.profile(b.profiles, "cpu.pprof", "profile?seconds=8") }()
		defer func() { bed.fail(<-profiled) }()
	}

	machines := float64(len(bed.machines))

	start := run.usage()
	registered, initialized := bed.initialize(1, len(bed.machines))
	bed.record("register all Nodes", registered.Seconds())
	bed.record("initialize all Nodes", initialized.Seconds())
	bed.record("initialize after registration", (initialized - registered).Seconds())
	bed.pause(b.settle)
	bed.record("requests to Talos per Node", float64(bed.talos.CallCount())/machines)
	bed.record("writes per Node", bed.countWrites()/machines)

	used := run.usage()
	bed.record("CPU time to initialize", used.cpu-start.cpu)
	bed.record("resident memory", used.resident)

	bed.try(func() error { return run.profile(b.profiles, "goroutine.pprof", "goroutine") })
	bed.record("heap per machine", run.heap(b.profiles, "heap.pprof")*1024/machines)
	bed.record("goroutines per machine", run.metric("go_goroutines")/machines)

	if s.follows {
		alone, aloneP99 := bed.timeChanges(netip.MustParseAddr("203.0.113.1"), 1, b.rounds)
		bed.record("change to Node, alone, median", alone)
		bed.record("change to Node, alone, p99", aloneP99)

		several, severalP99 := bed.timeChanges(publicAddresses.Addr().Next(), min(burst, len(bed.machines)), b.rounds)
		bed.record("change to Node, 50 at once, median", several)
		bed.record("change to Node, 50 at once, p99", severalP99)
	}

	if s.approves {
		bed.record("approve one CSR per Node", bed.timeApproval().Seconds())
	}
}

// initialize registers the Nodes of some machines, those before are registered, and waits until all are initialized. It
// returns how long either took.
func (b *bed) initialize(from, to int) (registered, initialized time.Duration) {
	start := time.Now()

	b.each(b.machines[from:to], b.register)

	registered = time.Since(start)

	b.awaitNodes("all Nodes are initialized", to, nodespec.IsUninitialized)

	return registered, time.Since(start)
}

// countWrites returns how often Nodes were changed and Events written.
func (b *bed) countWrites() float64 {
	return float64(value(b, func() (int, error) {
		return b.cluster.CountRequests(b.ctx, func(r kube.Request) bool {
			read := slices.Contains([]string{"GET", "LIST", "WATCH"}, r["verb"])

			return !read && (r["resource"] == "events" || r["resource"] == "nodes" && r["verb"] != "POST")
		})
	}))
}

// change is an address that a machine gets.
type change struct {
	machine

	addr  netip.Addr
	began time.Time
}

// timeChanges adds public addresses, from addr on, to some machines at once, several times. It returns the median and
// the 99th percentile of the time until the Node informer sees a change, in milliseconds.
func (b *bed) timeChanges(addr netip.Addr, machines, rounds int) (median, p99 float64) {
	var latencies []float64

	for round := range rounds {
		var changes []*change

		for i := range machines {
			changes = append(changes, &change{machine: b.machines[(round*machines+i)%len(b.machines)], addr: addr})
			addr = addr.Next()
		}

		b.try(func() error {
			return inParallel(changes, func(c *change) error {
				c.began = time.Now()

				return c.AddAddress(b.ctx, talostest.LinkExternal, host(c.addr))
			})
		})
		b.await("all changes are on their Nodes", pollInterval, func() bool {
			return !slices.ContainsFunc(changes, func(c *change) bool { return b.firstSeen(c.addr).IsZero() })
		})

		for _, c := range changes {
			latencies = append(latencies, b.firstSeen(c.addr).Sub(c.began).Seconds()*1000)
		}

		b.pause(time.Second) // rounds must not influence each other
	}

	slices.Sort(latencies)

	return latencies[len(latencies)/2], latencies[len(latencies)*99/100]
}

// timeApproval creates a serving CSR for each machine and waits until all are approved.
func (b *bed) timeApproval() time.Duration {
	requests := b.informers.Certificates().V1().CertificateSigningRequests().Lister()

	b.try(b.startInformers)

	start := time.Now()

	b.each(b.machines, b.requestCertificate)
	b.await("all CSRs are approved", pollInterval, func() bool {
		list, err := requests.List(labels.Everything())

		return err == nil && len(list) == len(b.machines) && !slices.ContainsFunc(list, isPending)
	})

	return time.Since(start)
}

// requestCertificate creates a serving CSR as the kubelet of a machine does.
func (b *bed) requestCertificate(m machine) error {
	_, err := b.cluster.RequestServingCertificate(b.ctx, m.Nodename(), "", m.Nodename(), m.private.String())

	return err
}

func isPending(csr *certificatesv1.CertificateSigningRequest) bool {
	return !slices.ContainsFunc(csr.Status.Conditions, func(c certificatesv1.CertificateSigningRequestCondition) bool {
		return c.Type == certificatesv1.CertificateApproved
	})
}

// The CIDRs have room for more Nodes than any benchmark has, and contain no machine.
var podCIDRs = []netip.Prefix{netip.MustParsePrefix("10.64.0.0/11"), netip.MustParsePrefix("fd00:10::/48")}

// selectsNothing is a configuration whose IPAM selector matches no Node.
const selectsNothing = "ipam: {selector: [{matchExpressions: [{key: nodename, operator: In, values: [none]}]}]}"

// measurePodCIDRs measures how long kube-controller-manager or talos-ccm takes to assign dual-stack pod CIDRs, from the
// first to the last. All Nodes are registered before. talos-ccm selects none of them until it watches all machines.
func (b *benchmark) measurePodCIDRs(bed *bed) {
	bed.each(bed.machines, bed.register)
	bed.configure(selectsNothing)

	if bed.subject == talosCCM {
		run := bed.run(talosSubject(b.executable, allocating("node-ipam-controller")...))
		bed.awaitLeader("") // metrics are served then
		run.awaitMetric(`talosccm_machines{condition="Current"}`, len(bed.machines))
		bed.configure("{}")
	} else {
		bed.try(func() error {
			return bed.cluster.StartControllerManager(bed.ctx, kube.ControllerManager{
				PodCIDRs: podCIDRs, Flags: []string{"--kube-api-qps=10000", "--kube-api-burst=10000"},
			})
		})
	}

	bed.awaitNodes("all Nodes have pod CIDRs", len(bed.machines), func(node *corev1.Node) bool { return len(node.Spec.PodCIDRs) == 0 || bed.firstSeen(podCIDR).IsZero() })

	bed.record("assign dual-stack pod CIDRs", time.Since(bed.firstSeen(podCIDR)).Seconds())
}

// measureElection measures how long the next of two instances of talos-ccm takes to lead.
func (b *benchmark) measureElection(bed *bed) {
	start := func(machine int) *running {
		return value(bed, func() (*running, error) { return bed.startProduct(b.executable, machine) })
	}

	leader, first := start(0), bed.awaitLeader("")
	next := start(1)

	bed.pause(b.settle)

	began := time.Now()

	bed.try(func() error { return leader.signal(syscall.SIGTERM) })

	second := bed.awaitLeader(first)
	bed.record("lease handed over after SIGTERM", time.Since(began).Seconds())

	last := start(0)

	bed.pause(b.settle)

	began = time.Now()

	bed.try(func() error { return next.signal(syscall.SIGKILL) })
	bed.awaitLeader(second)
	bed.record("lease taken over after SIGKILL", time.Since(began).Seconds())
	bed.try(last.stop)
}
