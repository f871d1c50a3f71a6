package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"net/rpc"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"github.com/talos-ccm/talos-ccm/test/kube"
)

// bed is a control plane and a fleet for one subject.
type bed struct {
	folder   string
	cluster  *kube.Cluster
	client   kubernetes.Interface
	machines []Machine

	fleet      *rpc.Client
	fleetChild *exec.Cmd
	watching   context.CancelFunc
	factory    informers.SharedInformerFactory
	observer   *observer
}

// newBed starts everything but the subject.
func newBed(ctx context.Context, machines int, options kube.Options) (b *bed, err error) {
	b = &bed{observer: &observer{changed: make(chan struct{}, 1), listed: map[netip.Addr]time.Time{}}}

	defer func() {
		if err != nil {
			err = errors.Join(err, b.close())
		}
	}()

	if b.folder, err = os.MkdirTemp("", "talos-ccm-bench-"); err != nil {
		return b, err
	}

	if b.cluster, err = kube.Start(ctx, options); err != nil {
		return b, err
	}

	if err := os.WriteFile(b.kubeconfig(), b.cluster.Kubeconfig(), 0o600); err != nil {
		return b, err
	}

	config := b.cluster.Config()
	config.Insecure, config.CAData = true, nil // faults replace the CA

	if b.client, err = kubernetes.NewForConfig(config); err != nil {
		return b, err
	}

	if err := b.startFleet(machines); err != nil {
		return b, err
	}

	ctx, b.watching = context.WithCancel(ctx)
	b.factory = informers.NewSharedInformerFactory(b.client, 0)
	informer := b.factory.Core().V1().Nodes().Informer()

	b.observer.store = informer.GetStore()

	_, err = informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    b.observer.observe,
		UpdateFunc: func(_, obj any) { b.observer.observe(obj) },
	})
	if err != nil {
		return b, err
	}

	b.factory.Start(ctx.Done())

	if !cache.WaitForCacheSync(ctx.Done(), informer.HasSynced) {
		return b, ctx.Err()
	}

	return b, nil
}

func (b *bed) kubeconfig() string  { return filepath.Join(b.folder, "kubeconfig") }
func (b *bed) talosconfig() string { return filepath.Join(b.folder, "talosconfig") }

func (b *bed) startFleet(machines int) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}

	b.fleetChild = exec.Command(self, "fleet")
	b.fleetChild.Stderr = os.Stderr
	// Main's thread started it, and never ends before the program does.
	b.fleetChild.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}

	in, err := b.fleetChild.StdinPipe()
	if err != nil {
		return err
	}

	out, err := b.fleetChild.StdoutPipe()
	if err != nil {
		return err
	}

	if err := b.fleetChild.Start(); err != nil {
		return err
	}

	b.fleet = rpc.NewClient(stdio{out, in})

	var started Started
	if err := b.fleet.Call("Fleet.Start", Plan{machines, b.cluster.Kubeconfig()}, &started); err != nil {
		return fmt.Errorf("start %d simulated machines: %w", machines, err)
	}

	b.machines = started.Machines

	return os.WriteFile(b.talosconfig(), started.Talosconfig, 0o600)
}

// close ends everything in order.
func (b *bed) close() error {
	var errs []error

	if b.watching != nil {
		b.watching()
		b.factory.Shutdown()
	}

	if b.fleet != nil {
		_ = b.fleet.Close()
		errs = append(errs, b.fleetChild.Wait())
	}

	if b.cluster != nil {
		errs = append(errs, b.cluster.Stop())
	}

	return errors.Join(append(errs, os.RemoveAll(b.folder))...)
}

// register registers the Nodes of machines at once, as their kubelets do.
func (b *bed) register(ctx context.Context, machines []Machine) error {
	return inParallel(machines, func(m Machine) error {
		_, err := b.cluster.RegisterNode(ctx, kube.NodeSpec{Name: m.Nodename, NodeIPs: m.nodeIPs(), ControlPlane: m.Socket != ""})

		return err
	})
}

// inParallel calls do for each item, for up to 64 at a time, and returns the first error.
func inParallel[T any](items []T, do func(T) error) error {
	var group errgroup.Group

	group.SetLimit(64)

	for _, item := range items {
		group.Go(func() error { return do(item) })
	}

	return group.Wait()
}

// do executes an order on machines, and returns when each of them began to change, by nodename.
func (b *bed) do(order Order, machines []Machine) (began map[string]time.Time, err error) {
	for _, m := range machines {
		order.Nodenames = append(order.Nodenames, m.Nodename)
	}

	if err := b.fleet.Call("Fleet.Do", order, &began); err != nil {
		return nil, fmt.Errorf("%s: %w", order.Action, err)
	}

	return began, nil
}

// configure replaces the configuration of the instance of talos-ccm on the first machine.
func (b *bed) configure(content string) error { return b.fleet.Call("Fleet.Configure", content, nil) }

// calls returns how many requests the machines have received.
func (b *bed) calls() (n uint64, err error) {
	err = b.fleet.Call("Fleet.Calls", struct{}{}, &n)

	return n, err
}

// observer follows all Nodes.
type observer struct {
	store   cache.Store
	changed chan struct{}

	mu           sync.Mutex
	listed       map[netip.Addr]time.Time // when a Node listed an address first
	firstPodCIDR time.Time
}

func (o *observer) observe(obj any) {
	node, _ := obj.(*corev1.Node)

	o.mu.Lock()
	defer o.mu.Unlock()

	if o.firstPodCIDR.IsZero() && len(node.Spec.PodCIDRs) > 0 {
		o.firstPodCIDR = time.Now()
	}

	for _, addr := range nodeAddresses(node) {
		if _, known := o.listed[addr]; !known {
			o.listed[addr] = time.Now()
		}
	}

	select {
	case o.changed <- struct{}{}:
	default:
	}
}

// awaitNodes waits until all Nodes are ready. Like await, it must be called by one goroutine only.
func (o *observer) awaitNodes(ctx context.Context, what string, nodes int, ready func(*corev1.Node) bool) error {
	return o.await(ctx, what, func() bool {
		list := o.store.List()

		return len(list) == nodes && !slices.ContainsFunc(list, func(obj any) bool {
			node, _ := obj.(*corev1.Node)

			return !ready(node)
		})
	})
}

// await waits until the condition holds.
func (o *observer) await(ctx context.Context, what string, condition func() bool) error {
	for {
		o.mu.Lock()
		met := condition()
		o.mu.Unlock()

		if met {
			return nil
		}

		select {
		case <-o.changed:
		case <-ctx.Done():
			return fmt.Errorf("wait until %s: %w", what, ctx.Err())
		}
	}
}
