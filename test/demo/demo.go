package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/util/workqueue"

	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

const (
	// parallel is how many Nodes register at a time.
	parallel = 16

	// From the registration of the first Node all has to be done within baseLimit and limitPerNode for each.
	baseLimit    = 2 * time.Minute
	limitPerNode = 100 * time.Millisecond

	leadTimeout = time.Minute
	maxMissing  = 20
)

// demo is one run from nothing to nothing.
type demo struct {
	screen   *screen
	fleet    *fleet
	observer *observer

	folder   string // of all files; it is removed with the cluster
	cluster  *kube.Cluster
	client   kubernetes.Interface
	talos    *talostest.Cluster
	product  *product
	before   samples // talos-ccm's metrics before there were Nodes
	up       atomic.Int64
	unwatch  func()
	duration time.Duration // from the first registration until all were right
}

func newDemo(nodes int, s *screen) *demo {
	f := newFleet(nodes)

	return &demo{screen: s, fleet: f, observer: newObserver(f), unwatch: func() {}}
}

// run does everything, and stops and removes everything, whatever happens.
func (d *demo) run(ctx context.Context) (err error) {
	defer func() { err = errors.Join(err, d.stop()) }()

	d.screen.printf("%s: %d simulated Talos machines, a real Kubernetes control plane, the real talos-ccm\n",
		d.screen.in(bold, "talos-ccm demo"), len(d.fleet.members))

	for _, step := range []func(context.Context) error{d.startKubernetes, d.startMachines, d.startProduct, d.show} {
		if err := step(ctx); err != nil {
			return d.explain(ctx, err)
		}
	}

	return nil
}

// explain adds the end of talos-ccm's log to an error that is not an interruption.
func (d *demo) explain(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}

	if d.product == nil {
		return err
	}

	return fmt.Errorf("%w\n--- end of talos-ccm's log ---\n%s", err, logTail(d.product.log, logTailLines))
}

// stop ends clients before their servers.
func (d *demo) stop() error {
	d.screen.erase()
	d.unwatch()

	err := d.product.stop()

	if d.talos != nil {
		d.talos.Close()
	}

	if d.cluster != nil {
		err = errors.Join(err, d.cluster.Stop())
	}

	return err
}

func (d *demo) startKubernetes(ctx context.Context) (err error) {
	if d.cluster, err = kube.Start(ctx, kube.Options{Progress: d.screen.file}); err != nil {
		return err
	}

	if d.client, err = kubernetes.NewForConfig(d.cluster.Config()); err != nil {
		return fmt.Errorf("make a client for the control plane: %w", err)
	}

	// In the cluster's folder our files go when the cluster goes: if this process is killed, with the next start.
	d.folder = filepath.Join(d.cluster.LogDir(), "demo")

	if err := os.Mkdir(d.folder, 0o700); err != nil {
		return fmt.Errorf("make a folder for the demo: %w", err)
	}

	return nil
}

func (d *demo) startMachines(ctx context.Context) (err error) {
	if d.talos, err = talostest.New(talostest.Options{Name: "demo", Dir: d.folder}); err != nil {
		return err
	}

	began := time.Now()
	state := func(s *screen) []string {
		return []string{"Talos machines up: " + s.bar(int(d.up.Load()), len(d.fleet.members))}
	}

	// One after the other: it takes no time, and their addresses follow each other.
	err = d.screen.during(state, func() error {
		for index := range d.fleet.members {
			if err := errors.Join(ctx.Err(), d.fleet.boot(d.talos, index, d.cluster.Kubeconfig())); err != nil {
				return err
			}

			d.up.Add(1)
		}

		return nil
	})
	if err != nil {
		return err
	}

	d.screen.printf("%d Talos machines up after %s", len(d.fleet.members), inSeconds(time.Since(began)))

	return nil
}

// forEach calls work with the index of every machine, a few at a time, until ctx ends. It returns the first errors.
func (d *demo) forEach(ctx context.Context, work func(index int) error) error {
	var (
		mu   sync.Mutex
		errs []error
	)

	ctx, cancel := context.WithCancel(ctx)
	defer cancel()

	workqueue.ParallelizeUntil(ctx, parallel, len(d.fleet.members), func(index int) {
		if err := work(index); err != nil {
			cancel() // what fails for one is likely to fail for the others

			mu.Lock()
			defer mu.Unlock()

			errs = append(errs, err)
		}
	})

	return errors.Join(errs...)
}

func (d *demo) startProduct(ctx context.Context) (err error) {
	b := &build{folder: d.folder, began: time.Now()}

	if err := d.screen.during(b.progress, func() error { return b.run(ctx) }); err != nil {
		return err
	}

	d.screen.printf("talos-ccm built after %s", inSeconds(time.Since(b.began)))

	began := time.Now()

	if d.product, err = startProduct(ctx, b.executable(), d.fleet.controlPlane().machine.Socket(), d.folder); err != nil {
		return err
	}

	leading, cancel := context.WithTimeout(ctx, leadTimeout)
	defer cancel()

	if err := d.product.awaitLeading(leading, d.client); err != nil {
		return err
	}

	d.screen.printf("talos-ccm (process %d) leads after %s", d.product.process.pid(), inSeconds(time.Since(began)))

	d.before, err = d.product.metrics(ctx)

	return err
}

// show is what all the rest was for.
func (d *demo) show(ctx context.Context) error {
	watching, cancel := context.WithCancel(ctx)
	shutdown, err := d.observer.start(watching, d.client)

	d.unwatch = func() {
		cancel()

		if shutdown != nil {
			shutdown()
		}
	}

	if err != nil {
		return err
	}

	limit := baseLimit + time.Duration(len(d.fleet.members))*limitPerNode

	ctx, stop := context.WithTimeoutCause(ctx, limit, fmt.Errorf("not done within %s", limit))
	defer stop()

	err = d.initialise(ctx)
	if errors.Is(context.Cause(ctx), context.Canceled) {
		return err // interrupted: nobody waits for a table
	}

	records := d.observer.list(d.fleet)

	d.screen.printTable(records)
	d.screen.printTimes(records)
	d.screen.printVerdict(records)

	if err = errors.Join(err, missing(records)); err != nil {
		return err
	}

	if err := d.change(ctx); err != nil {
		return err
	}

	return d.printCosts(ctx)
}

// initialise registers all Nodes and returns when all are right.
func (d *demo) initialise(ctx context.Context) error {
	began := time.Now()
	defer func() { d.duration = time.Since(began) }()

	return d.screen.during(d.progress, func() error {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()

		var late sync.WaitGroup
		defer late.Wait()
		defer cancel()

		resolved := make(chan error, 1)

		err := d.forEach(ctx, func(index int) error {
			m := d.fleet.members[index]
			if err := m.register(ctx, d.cluster); err != nil {
				return err
			}

			d.observer.noteRegistered(m.name)

			if m.pending {
				late.Go(func() { resolved <- resolveLater(ctx, m) })
			}

			return nil
		})
		if err != nil {
			return err
		}

		return d.await(ctx, resolved, func() bool { return d.counts().done == len(d.fleet.members) })
	})
}

// resolveLater lets the late machine's metadata come.
func resolveLater(ctx context.Context, m *member) error {
	select {
	case <-time.After(lateness):
		return m.resolve(ctx)
	case <-ctx.Done():
		return ctx.Err()
	}
}

// await returns when the condition holds. It fails when ctx ends, when talos-ccm does, and when failures brings an error.
func (d *demo) await(ctx context.Context, failures <-chan error, condition func() bool) error {
	for !condition() {
		select {
		case <-d.observer.changed:
		case err := <-failures:
			if err != nil {
				return err
			}
		case <-d.product.process.done:
			return d.product.ended()
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}

	return nil
}

// counts are how many Nodes have come how far.
type counts struct {
	registered, done int
	waiting          []record // registered and not done
}

func (d *demo) counts() counts {
	var c counts

	for _, r := range d.observer.list(d.fleet) {
		switch {
		case r.done():
			c.registered++
			c.done++
		case !r.registered.IsZero():
			c.registered++
			c.waiting = append(c.waiting, r)
		}
	}

	return c
}

func (d *demo) progress(s *screen) []string {
	var (
		c     = d.counts()
		total = len(d.fleet.members)
		lines = []string{
			s.label("machines up") + s.bar(int(d.up.Load()), total),
			s.label("nodes registered") + s.bar(c.registered, total),
			s.label("nodes initialised") + s.bar(c.done, total),
		}
	)

	named := worthNaming(c.waiting)
	for _, r := range named {
		lines = append(lines, "waiting: "+reason(r))
	}

	if more := len(c.waiting) - len(named); more > 0 {
		lines = append(lines, fmt.Sprintf("waiting: %d more", more))
	}

	return lines
}

// worthNaming are the first of those of which there is something to tell; if only a few wait, all of them.
func worthNaming(waiting []record) []record {
	const most = 4

	if len(waiting) <= most {
		return waiting
	}

	var named []record

	for _, r := range waiting {
		if len(named) < most && (r.said != "" || r.member.remark != "") {
			named = append(named, r)
		}
	}

	return named
}

// reason says why the Node waits, as its Events tell.
func reason(r record) string {
	name := r.member.name
	if r.member.remark != "" {
		name += " (" + r.member.remark + ")"
	}

	if r.said == "" {
		return name
	}

	return name + ": " + r.said
}

// errMissing is what a demo ends with that did not show what it should.
var errMissing = errors.New("not all nodes are as their machines say")

// missing lists what is wrong with the Nodes, or was when they were released.
func missing(records []record) error {
	var lines []string

	for _, r := range records {
		if !r.done() {
			lines = append(lines, "node "+reason(r)+": "+strings.Join(r.wrong, "; "))
		}

		if len(r.early) > 0 {
			lines = append(lines, "node "+r.member.name+" lost its taint too early: "+strings.Join(r.early, "; "))
		}
	}

	switch {
	case len(lines) == 0:
		return nil
	case len(lines) > maxMissing:
		lines = append(lines[:maxMissing], fmt.Sprintf("and %d more", len(lines)-maxMissing))
	}

	return fmt.Errorf("%w:\n  %s", errMissing, strings.Join(lines, "\n  "))
}

// change changes one machine and shows how fast its Node follows.
func (d *demo) change(ctx context.Context) error {
	m := d.fleet.changing

	d.screen.printf("\nChanges of machine %s, and when its Node had followed:", m.name)

	for _, change := range []func(context.Context, *member) error{d.move, d.addAddress} {
		if err := change(ctx, m); err != nil {
			return fmt.Errorf("change machine %s: %w", m.name, err)
		}
	}

	return nil
}

// move puts the machine into another zone.
func (d *demo) move(ctx context.Context, m *member) error {
	zone, next := m.origin.platform.Zone, "rack-9"
	if zone != "" {
		next = zone[:len(zone)-1] + "9"
	}

	took, err := d.follow(ctx,
		func(e *expectation) {
			e.labels[corev1.LabelTopologyZone], e.labels[corev1.LabelFailureDomainBetaZone] = next, next
		},
		func() error {
			return m.machine.UpdatePlatform(ctx, func(spec *runtime.PlatformMetadataSpec) { spec.Zone = next })
		})
	if err != nil {
		return err
	}

	d.screen.printFollowed("zone", orDash(zone), d.observer.get(m.name).node.Labels[corev1.LabelTopologyZone], took)

	return nil
}

// addAddress gives the machine one more public address.
func (d *demo) addAddress(ctx context.Context, m *member) error {
	var (
		link    = m.origin.addresses[0].Link
		address = netip.MustParseAddr("203.0.113.250")
		before  = addressesOf(d.observer.get(m.name).node, corev1.NodeExternalIP)
	)

	took, err := d.follow(ctx,
		func(e *expectation) {
			e.addresses[corev1.NodeExternalIP] = append(e.addresses[corev1.NodeExternalIP], address.String())
		},
		func() error { return m.machine.AddAddress(ctx, link, netip.PrefixFrom(address, address.BitLen())) })
	if err != nil {
		return err
	}

	after := addressesOf(d.observer.get(m.name).node, corev1.NodeExternalIP)
	d.screen.printFollowed("external", orDash(strings.Join(before, ",")), strings.Join(after, ","), took)

	return nil
}

// follow makes a change to the changing machine and returns how long it took until its Node was as it should be.
func (d *demo) follow(ctx context.Context, should func(*expectation), change func() error) (time.Duration, error) {
	name := d.fleet.changing.name
	d.observer.expect(name, should)

	began := time.Now()

	if err := change(); err != nil {
		return 0, err
	}

	err := d.await(ctx, nil, func() bool { return len(d.observer.get(name).wrong) == 0 })
	if err != nil {
		return 0, fmt.Errorf("%w: %s", err, strings.Join(d.observer.get(name).wrong, "; "))
	}

	return time.Since(began), nil
}

// printCosts shows what all this took talos-ccm: time, memory, requests.
func (d *demo) printCosts(ctx context.Context) error {
	after, err := d.product.metrics(ctx)
	if err != nil {
		return err
	}

	occupied, err := readMemory(d.product.process.pid())
	if err != nil {
		return err
	}

	var (
		nodes    = float64(len(d.fleet.members))
		requests = func(labels ...string) float64 {
			const name = "rest_client_requests_total"

			return after.sum(name, labels...) - d.before.sum(name, labels...)
		}
		all, patches, posts = requests(), requests(`method="PATCH"`), requests(`method="POST"`)
		talos               = after.sum("talosccm_api_requests_total") - d.before.sum("talosccm_api_requests_total")
	)

	const mebibyte = 1 << 20

	d.screen.printf("\nWhat it took talos-ccm:")
	d.screen.printf("  time      %s from the first registration until all %.0f nodes were right", inSeconds(d.duration), nodes)
	d.screen.printf("  memory    %d MiB resident, %d MiB at most", occupied.resident/mebibyte, occupied.highest/mebibyte)
	d.screen.printf("  requests  %.1f to the API server per node (%.2f writes to Nodes, %.2f Events; %.0f others in all), %.1f to Talos per node",
		all/nodes, patches/nodes, posts/nodes, all-patches-posts, talos/nodes)

	return nil
}
