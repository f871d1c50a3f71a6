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

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/util/workqueue"

	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

const (
	// parallel is how many Nodes register at a time.
	parallel = 16

	// From the registration of the first Node all has to be done within baseLimit and limitPerNode for each.
	baseLimit    = 6 * time.Minute
	limitPerNode = 100 * time.Millisecond

	leadTimeout = 2 * time.Minute
	maxMissing  = 20

	// poll is the interval for state that cannot be watched.
	poll = 50 * time.Millisecond
)

// demo is one run from nothing to nothing.
type demo struct {
	keep     bool // until interrupted
	screen   *screen
	fleet    *fleet
	observer *observer

	folder   string // of all files; it is removed with the cluster
	cluster  *kube.Cluster
	client   kubernetes.Interface
	talos    *talostest.Cluster
	service  service // talos-ccm, in the machine configuration
	product  *product
	before   samples // talos-ccm's metrics before there were Nodes
	up       atomic.Int64
	kubelets *kubelets
	failures chan error // of what goes on beside run
	unwatch  func()
	duration time.Duration // from the first registration until all were right
	leaving  []string      // Nodes that talos-ccm has to delete
}

func newDemo(nodes int, s *screen) *demo {
	f := newFleet(nodes)

	return &demo{screen: s, fleet: f, observer: newObserver(f), failures: make(chan error, 1), unwatch: func() {}}
}

// run does everything, and stops and removes everything, whatever happens.
func (d *demo) run(ctx context.Context) (err error) {
	defer func() { err = errors.Join(err, d.stop()) }()

	d.screen.printf("%s: %d simulated Talos machines, a real Kubernetes control plane and a real talos-ccm\n",
		d.screen.in(bold, "talos-ccm demo"), len(d.fleet.members))

	for _, step := range []func(context.Context) error{d.startKubernetes, d.startMachines, d.startProduct, d.show, d.hold} {
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
	options := kube.Options{Progress: d.screen.file}
	// By default it makes 20 requests a second, and would be what issuing certificates waits for.
	options.ControllerManager.Flags = []string{"--kube-api-qps=1000", "--kube-api-burst=1000"}

	if d.cluster, err = kube.Start(ctx, options); err != nil {
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
	if d.service, err = readDocument(); err != nil {
		return err
	}

	if d.talos, err = talostest.New(talostest.Options{Name: "demo", Dir: d.folder, PodCIDRs: []netip.Prefix{podCIDR}}); err != nil {
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

	if scenario := d.fleet.scenario(); scenario != "" {
		d.screen.printf("Scenario: %s.", scenario)
	}

	d.screen.printf("Machine configuration document of %s:\n\n%s", d.fleet.controlPlane().name, indented(document))

	return d.fleet.controlPlane().machine.SetExtensionServiceDocument(ctx, d.service.name, d.service.spec)
}

func (d *demo) startProduct(ctx context.Context) (err error) {
	b := &build{folder: d.folder, began: time.Now()}

	if err := d.screen.during(b.progress, func() error { return b.run(ctx) }); err != nil {
		return err
	}

	d.screen.printf("talos-ccm built after %s", inSeconds(time.Since(b.began)))

	began := time.Now()

	if d.product, err = startProduct(ctx, b.executable(), d.fleet.controlPlane().machine.Socket(), d.service.spec.Environment, d.folder); err != nil {
		return err
	}

	d.screen.printf("Log of talos-ccm, removed when the demo ends: %s", d.product.log)

	leading, cancel := context.WithTimeout(ctx, leadTimeout)
	defer cancel()

	if err := d.product.awaitLeading(leading, d.client); err != nil {
		return err
	}

	d.screen.printf("talos-ccm (process %d) became leader after %s", d.product.process.pid(), inSeconds(time.Since(began)))

	d.before, err = d.product.metrics(ctx)

	return err
}

// show is what all the rest was for.
func (d *demo) show(ctx context.Context) error {
	if err := d.watch(ctx); err != nil {
		return err
	}

	limit := baseLimit + time.Duration(len(d.fleet.members))*limitPerNode

	ctx, stop := context.WithTimeoutCause(ctx, limit, fmt.Errorf("timed out after %s", limit))
	defer stop()

	err := d.initialize(ctx)
	if errors.Is(context.Cause(ctx), context.Canceled) {
		return err // interrupted: skip the table
	}

	records := d.observer.list(d.fleet)

	d.screen.printTimes(records)

	if err == nil {
		d.screen.printf("  %-42s  %s", "first Node registered → all Nodes verified", inSeconds(d.duration))
	}

	d.screen.printApprovalDelay(records)

	d.screen.printVerdict(records)

	if err = errors.Join(err, missing(records)); err != nil {
		d.screen.printTable(records)

		return err
	}

	for _, step := range []func(context.Context) error{d.printCosts, d.retire, d.change, d.intrude, d.expose, d.awaitDeletions} {
		if err := step(ctx); err != nil {
			return err
		}
	}

	d.screen.printTable(d.observer.list(d.fleet))

	_, err = d.countedMetrics(ctx)

	return err
}

// hold prints how to use the cluster and keeps it until an interruption, which is then no error.
func (d *demo) hold(ctx context.Context) error {
	if !d.keep {
		return nil
	}

	path := filepath.Join(d.folder, "kubeconfig")
	if err := os.WriteFile(path, d.cluster.Kubeconfig(), 0o600); err != nil {
		return fmt.Errorf("write kubeconfig: %w", err)
	}

	d.screen.printf("\nThe cluster runs until you press Ctrl-C:\n\n  export KUBECONFIG=%s\n  kubectl get nodes", path)

	if err := d.await(ctx, func() bool { return false }); ctx.Err() == nil {
		return err
	}

	return nil
}

// watch begins to observe the cluster, and has the kubelets look after their certificates.
func (d *demo) watch(ctx context.Context) error {
	watching, cancel := context.WithCancel(ctx)

	d.kubelets = &kubelets{cluster: d.cluster, observer: d.observer, failed: d.fail, queue: workqueue.NewTyped[string]()}
	d.observer.seen = d.kubelets.queue.Add
	d.observer.authority.AppendCertsFromPEM(d.cluster.ClientCA())

	kubelets := d.kubelets.start(watching)
	observer, err := d.observer.start(watching, d.client)

	d.unwatch = func() {
		cancel()
		kubelets()
		observer()
	}

	return err
}

// fail makes all waits return err, unless there already is an error.
func (d *demo) fail(err error) {
	select {
	case d.failures <- err:
	default:
	}
}

// initialize registers all Nodes and returns when all are right.
func (d *demo) initialize(ctx context.Context) error {
	began := time.Now()
	defer func() { d.duration = time.Since(began) }()

	return d.screen.during(d.progress, func() error {
		ctx, cancel := context.WithCancelCause(ctx)

		var late sync.WaitGroup
		defer late.Wait()
		defer cancel(nil)

		workqueue.ParallelizeUntil(ctx, parallel, len(d.fleet.members), func(index int) {
			m := d.fleet.members[index]
			if m.pending {
				late.Go(func() { d.resolveLater(ctx, m) })
			}

			if err := d.register(ctx, m); err != nil {
				cancel(err) // what fails for one is likely to fail for the others
			}
		})

		return d.await(ctx, func() bool { return d.counts().done == len(d.fleet.members) })
	})
}

// register registers a machine's Node and, as Talos does, labels the control plane's: kubelets may not set that label.
func (d *demo) register(ctx context.Context, m *member) error {
	if err := m.register(ctx, d.cluster); err != nil {
		return err
	}

	d.observer.noteRegistered(m.name)

	if m != d.fleet.controlPlane() {
		return nil
	}

	label := []byte(`{"metadata":{"labels":{"node-role.kubernetes.io/control-plane":""}}}`)

	if _, err := d.client.CoreV1().Nodes().Patch(ctx, m.name, types.MergePatchType, label, metav1.PatchOptions{}); err != nil {
		return fmt.Errorf("label node %s: %w", m.name, err)
	}

	return nil
}

// resolveLater lets the late machine's metadata come: a while after an Event has said that its Node waits for that, however late the Event is.
func (d *demo) resolveLater(ctx context.Context, m *member) {
	warned := func(context.Context) (bool, error) { return d.observer.get(m.name).waits, nil }

	if wait.PollUntilContextCancel(ctx, poll, true, warned) != nil {
		return // the cause of ctx is reported elsewhere
	}

	select {
	case <-time.After(lateness):
		if err := m.resolve(ctx); err != nil {
			d.fail(err)
		}
	case <-ctx.Done():
	}
}

// await returns when the condition holds. It fails when ctx ends, when talos-ccm does, and when something else has failed.
func (d *demo) await(ctx context.Context, condition func() bool) error {
	for !condition() {
		select {
		case <-d.observer.changed:
		case err := <-d.failures:
			return err
		case <-d.product.process.done:
			return d.product.ended()
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}

	return nil
}

// awaitDone waits until a Node is right, with its certificate.
func (d *demo) awaitDone(ctx context.Context, name string) error {
	if err := d.await(ctx, func() bool { return d.observer.get(name).done() }); err != nil {
		return fmt.Errorf("%w: %s", err, strings.Join(d.observer.get(name).problems(), "; "))
	}

	return nil
}

// errMissing is what a demo ends with that did not show what it should.
var errMissing = errors.New("some Nodes do not match their machines")

// missing lists what is wrong with the Nodes, or was when they were released.
func missing(records []record) error {
	var lines []string

	holders := map[string]string{} // of pod CIDRs, which have one length

	for _, r := range records {
		if !r.done() {
			lines = append(lines, "node "+described(r)+": "+strings.Join(r.problems(), "; "))

			continue
		}

		if other, taken := holders[r.node.Spec.PodCIDR]; taken {
			lines = append(lines, fmt.Sprintf("nodes %s and %s have the same pod CIDR %s", other, r.member.name, r.node.Spec.PodCIDR))
		}

		holders[r.node.Spec.PodCIDR] = r.member.name

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

// errApprovals is of a talos-ccm that has approved more or less than the kubelets have asked for what is theirs.
var errApprovals = errors.New("the number of approvals differs from the number of legitimate requests")

// countedMetrics are those that count all approvals: the API server, and so the observer, knows of an approval before talos-ccm counts it.
func (d *demo) countedMetrics(ctx context.Context) (after samples, err error) {
	requests := 0
	for _, r := range d.observer.list(d.fleet) {
		requests += r.requests
	}

	err = wait.PollUntilContextCancel(ctx, poll, true, func(ctx context.Context) (bool, error) {
		after, err = d.product.metrics(ctx)

		return after.approvals() >= float64(requests), err
	})
	if err == nil && after.approvals() != float64(requests) {
		err = errApprovals
	}

	if err != nil {
		return "", fmt.Errorf("count the approvals, %.0f of %d: %w", after.approvals(), requests, err)
	}

	return after, nil
}

// printCosts shows what initialization took talos-ccm: memory and requests.
func (d *demo) printCosts(ctx context.Context) error {
	after, err := d.countedMetrics(ctx)
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
		approvals           = after.approvals()
		talos               = after.sum("talosccm_api_requests_total") - d.before.sum("talosccm_api_requests_total")
	)

	const mebibyte = 1 << 20

	d.screen.printf("\nResources used by talos-ccm:")
	d.screen.printf("  memory    %.0f MiB resident", after.sum("process_resident_memory_bytes")/mebibyte)
	d.screen.printf("  requests  %.2f per Node to the API server (%.2f Node writes, %.2f Events, %.2f CSR approvals, %.2f other), %.2f per Node to Talos",
		all/nodes, patches/nodes, posts/nodes, approvals/nodes, (all-patches-posts-approvals)/nodes, talos/nodes)

	return nil
}
