// Package nodeipam gives Nodes their pod CIDRs.
//
// Name: node-ipam-controller (alias nodeipam).
//
// Inputs: the Node informer, a list of the Nodes from the API server at the start, the inventory, the pools of the configuration, the ServiceCIDRs, and
// what kube-controller-manager does, as the control-plane machines have it.
//
// Outputs: spec.podCIDR and spec.podCIDRs of Nodes of Talos machines that have none, both families in one write.
//
// It never changes podCIDRs, which the API server forbids; never writes one family without the other; never puts another prefix in the place of one that it
// cannot learn; and writes nothing while somebody else allocates too.
//
// # What is in use
//
// The truth are the Nodes. A leader lists them after it has won the lease, and then follows the cache and remembers what it has written itself and the
// cache does not show yet. A block is free when its Node is gone from the API, and there is no other way to give one back. So a killed process leaves
// nothing behind: what it had written is on the list, what it had not is free. One worker decides and writes, one Node after the other.
//
// # Two leaders
//
// No two Nodes get one block as long as no two leaders write: the API server checks a write against one Node, not against all of them. A leader
// stops before its lease expires and releases it only when it has stopped, a write is never abandoned half-way, and it is bounded, here and
// at the API server, by less than what is left of the lease: so it is done or refused before the next leader lists. A process that is halted for longer than that
// between its last look at the lease and its write can still do harm; the next leader then sees blocks overlap, and says so on both Nodes.
package nodeipam

import (
	"context"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/wait"
	coreinformers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/internal/queue"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/pkg/rules"
	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
)

// What the controller is called.
const (
	Name  = nodeIPAM
	Alias = nodeIPAMAlias
)

const (

	// listTimeout bounds a list of all Nodes, and listPage is how many of them come at a time.
	listTimeout = time.Minute

	// These are no Nodes' names. wakeKey has the worker look at all Nodes without podCIDRs, refreshKey at everything else that has no event of its own, too.
	wakeKey    = "/wake"
	refreshKey = "/refresh"
)

// Inventory is what the controller reads of the machines.
type Inventory interface {
	Get(nodename string) inventory.Entry
	Subscribe(handler func(nodename string))
}

// Config is all a Controller needs. Every field must be set, but for those that say otherwise.
type Config struct {
	Client    kubernetes.Interface
	Nodes     coreinformers.NodeInformer
	Inventory Inventory
	Recorder  record.EventRecorder
	Clock     clock.Clock
	// Own is this machine's state, to ask it what kube-controller-manager does while no control-plane machine is in the inventory; nil outside Talos.
	LocalState talosapi.State
	// Dial is for the control-plane machines in the inventory.
	Dial talosapi.DialFunc
	// Claim selects the machines whose Nodes are ours to write, by the configuration in force; nil, or a nil answer: all.
	Selector func() *rules.Selector
	// Pools are those of the configuration in force; nil: there are none. The first that selects a Node counts.
	Pools func() []Pool
	// Options are the cluster-wide choices; the zero value is the default.
	Options Options
}

// Controller is the node IPAM controller. Use New and Run.
type Controller struct {
	client      kubernetes.Interface
	lister      corelisters.NodeLister
	synced      cache.InformerSynced
	inventory   Inventory
	clock       clock.Clock
	own         talosapi.State
	dial        talosapi.DialFunc
	claim       func() *rules.Selector
	pools       func() []Pool
	options     Options
	book        *book
	reporter    *reporter
	queue       queue.Queue
	environment atomic.Pointer[environment]
	intruder    atomic.Pointer[intruder]
	// hearing is held while what a machine says is read and taken down, so that it is not replaced by something older.
	hearing sync.Mutex
	// managers are what the control-plane machines have said last, by nodename; follow's alone.
	managers map[string]manager
}

// New makes a Controller and subscribes it. The informer must not have been started yet. The error says what is wrong with the Options.
func New(cfg Config) (*Controller, error) {
	if err := cfg.Options.Validate(); err != nil {
		return nil, err
	}

	options := cfg.Options.withDefaults()

	c := &Controller{
		client:    cfg.Client,
		lister:    cfg.Nodes.Lister(),
		inventory: cfg.Inventory,
		clock:     cfg.Clock,
		own:       cfg.LocalState,
		dial:      cfg.Dial,
		claim:     cfg.Selector,
		pools:     cfg.Pools,
		options:   options,
		reporter:  newReporter(cfg.Recorder),
		queue:     queue.New(nodeIPAMAlias),
	}
	c.book = newBook(c.Resync)

	if c.claim == nil {
		c.claim = func() *rules.Selector { return nil }
	}

	if c.pools == nil {
		c.pools = func() []Pool { return nil }
	}

	registration, err := cfg.Nodes.Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{AddFunc: c.added, UpdateFunc: c.updated, DeleteFunc: c.deleted})
	if err != nil {
		return nil, fmt.Errorf("watch nodes: %w", err)
	}

	// Of the handler, not of the informer alone: the book has to know all that the cache knows.
	c.synced = registration.HasSynced

	cfg.Inventory.Subscribe(c.heard)

	return c, nil
}

func (c *Controller) added(obj any) {
	if node, ok := obj.(*corev1.Node); ok {
		c.book.show(node)
		c.book.reserve("node "+node.Name, hosts(nodespec.DialAddresses(node)))
		c.heard(node.Name)
	}
}

// heard takes down what a machine keeps from all Nodes, before any of them is given blocks.
func (c *Controller) heard(nodename string) {
	c.hearing.Lock()
	defer c.hearing.Unlock()

	c.book.reserve("machine "+nodename, kept(c.inventory.Get(nodename).Machine))
	c.queue.Add(nodename)
}

func (c *Controller) updated(old, obj any) {
	before, wasNode := old.(*corev1.Node)
	node, isNode := obj.(*corev1.Node)

	if wasNode && isNode {
		c.watchOthers(before, node)
	}

	c.added(obj)
}

func (c *Controller) deleted(obj any) {
	if tombstone, ok := obj.(cache.DeletedFinalStateUnknown); ok {
		obj = tombstone.Obj
	}

	if node, ok := obj.(*corev1.Node); ok {
		c.book.gone(node.Name, node.UID)
		c.book.reserve("node "+node.Name, nil)
		c.queue.Add(node.Name)
	}
}

// Resync has the Nodes looked at again that wait: something was given back, or the configuration has changed.
func (c *Controller) Resync() { c.queue.Add(wakeKey) }

// Run works until ctx ends and what has been begun is done. It must not be called before the lease is held: what it starts from must be newer than
// what any leader before has written.
func (c *Controller) Run(ctx context.Context) {
	defer c.queue.ShutDown()
	defer resetGauges()

	if !cache.WaitForNamedCacheSyncWithContext(ctx, c.synced) {
		return
	}

	if !c.start(ctx) {
		return
	}

	var group wait.Group

	group.StartWithContext(ctx, c.follow)
	group.StartWithContext(ctx, c.worker().Run)

	<-ctx.Done()
	c.queue.ShutDown()
	group.Wait()
}

// start takes down what is in use, as the API server has it now. It tells whether that was done before ctx ended.
func (c *Controller) start(ctx context.Context) bool {
	backoff := wait.Backoff{Duration: queue.RetryFirst, Factor: 2, Jitter: 0.1, Steps: 10, Cap: queue.RetryMax}

	for {
		err := c.list(ctx)
		if err == nil {
			return true
		}

		klog.FromContext(ctx).Error(err, "Could not learn which pod CIDRs are in use, trying again")

		select {
		case <-ctx.Done():
			return false
		case <-c.clock.After(backoff.Step()):
		}
	}
}

// list reads all Nodes from the API server, and not from a cache of its or ours: without a resourceVersion it answers with what is true now.
func (c *Controller) list(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, listTimeout)
	defer cancel()

	nodes, err := c.client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return fmt.Errorf("list nodes: %w", err)
	}

	c.book.list(nodes)

	return nil
}

func (c *Controller) worker() queue.Worker {
	return queue.Worker{Queue: c.queue, Subject: "node", Failure: "Could not give the Node its pod CIDRs, trying again", Sync: c.sync}
}

func (c *Controller) sync(ctx context.Context, key string) error {
	switch key {
	case wakeKey:
		return c.enqueueWaiting()
	case refreshKey:
		return c.refresh(ctx)
	default:
		return c.syncNode(ctx, key)
	}
}

// syncNode looks at one Node. What cannot be done yet is reported and is no error: whatever changes it brings the Node back here.
func (c *Controller) syncNode(ctx context.Context, key string) error {
	node, err := c.lister.Get(key)
	if err != nil && !apierrors.IsNotFound(err) {
		return err
	} else if err != nil {
		node = nil
	}

	blocks, waiting := c.book.settle(key, node)

	switch {
	case node == nil:
		c.reporter.clear(key)
	case !waiting:
		c.review(node)
	case nodespec.IsTalos(node) && node.DeletionTimestamp == nil:
		return c.allocate(ctx, node, blocks)
	}

	return nil
}

// review reports what is wrong with podCIDRs that cannot be changed any more.
func (c *Controller) review(node *corev1.Node) {
	if _, invalid := podCIDRs(node); len(invalid) > 0 {
		c.reporter.report(node, finding{reason: ReasonInvalid, message: fmt.Sprintf("podCIDRs %q are not CIDRs", invalid)})

		return
	}

	if other, found := c.book.overlap(node.Name); found {
		c.reporter.report(node, finding{reason: ReasonOverlap, message: fmt.Sprintf(
			"podCIDRs %v overlap those of Node %s; to be given others, a Node has to be deleted and registered again", node.Spec.PodCIDRs, other)})

		return
	}

	c.reporter.clear(node.Name)
}

// allocate gives a Node its blocks: those that were decided on before, if a write of them may have been lost.
func (c *Controller) allocate(ctx context.Context, node *corev1.Node, blocks []netip.Prefix) error {
	env := c.environment.Load()
	if env == nil {
		return nil // comes back when it is known
	}

	d := demand{
		node: node, entry: c.inventory.Get(node.Name), clusterCIDRs: env.clusterCIDRs, claim: c.claim(), pools: c.pools(), options: c.options,
	}

	requests, problem := c.decide(d)
	if problem == nil && blocks == nil && len(requests) > 0 {
		blocks, problem = c.book.take(node, requests)
	}

	if problem != nil {
		c.reporter.report(node, *problem)

		return nil
	}

	if len(requests) == 0 || len(blocks) == 0 {
		c.reporter.clear(node.Name)

		return nil
	}

	return c.give(ctx, node, blocks, requests)
}

// decide says what the Node needs, nothing if it is none of ours, or why it has to wait.
func (c *Controller) decide(d demand) ([]request, *finding) {
	if claimed, problem := d.claimed(); problem != nil || !claimed {
		return nil, problem
	}

	if problem := c.obstacle(); problem != nil {
		return nil, problem
	}

	return d.requests()
}

// give writes what was decided on.
func (c *Controller) give(ctx context.Context, node *corev1.Node, blocks []netip.Prefix, requests []request) error {
	after, err := write(ctx, c.client, node, blocks)

	switch {
	case apierrors.IsNotFound(err): // deleted meanwhile
		return nil
	case apierrors.IsInvalid(err), apierrors.IsForbidden(err):
		c.reporter.report(node, finding{reason: ReasonWriteFailed, message: err.Error()})
	}

	if err != nil {
		// It may have been done all the same. The blocks stay this Node's until the cache shows a version of it that tells.
		return fmt.Errorf("update node %s: %w", node.Name, err)
	}

	c.book.wrote(after)
	c.reporter.clear(node.Name)
	klog.FromContext(ctx).Info("Gave the Node its pod CIDRs", "cidr", blocks)

	for _, r := range requests {
		allocations.WithLabelValues(r.pool, string(r.family)).Inc()
	}

	return nil
}

// refresh does what no event asks for.
func (c *Controller) refresh(ctx context.Context) error {
	if c.book.unseen() {
		if err := c.list(ctx); err != nil {
			return err
		}
	}

	c.measure()

	return c.enqueueWaiting()
}

func (c *Controller) enqueueWaiting() error {
	nodes, err := c.lister.List(labels.Everything())
	if err != nil {
		return err
	}

	for _, node := range nodes {
		if len(node.Spec.PodCIDRs) == 0 {
			c.queue.Add(node.Name)
		}
	}

	return nil
}
