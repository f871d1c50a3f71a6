// Package node initializes the Nodes of Talos machines and keeps them true.
//
// Name: cloud-node-controller (alias cloud-node), in place of the framework's.
//
// Inputs: the Node informer, the inventory.
//
// Outputs, of Nodes of claimed Talos machines alone: labels and annotations of nodespec, by server-side apply; status.addresses; taints of rules, at
// initialization and, where a rule enforces them, later; once in a Node's life spec.providerID and the removal of the uninitialized taint. Of
// managedFields, the end of what the upstream Talos CCM held of the same keys.
//
// It never writes a Node of another system, a providerID that is set, a key or taint that somebody else holds, or anything of a machine
// that has not proved to be the Node's.
package node

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
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
)

const (
	// syncTimeout bounds all remote calls of one sync.
	syncTimeout = 30 * time.Second

	indexProviderID = "providerID"

	queueName = "cloud-node"
)

// Inventory is what the controller reads of the machines.
type Inventory interface {
	Get(nodename string) inventory.Entry
	SharedUUID(uuid, nodename string) bool
	SharedAddresses(nodename string) []netip.Addr
	Subscribe(handler func(nodename string))
}

// Config is all a Controller needs. Every field must be set.
type Config struct {
	Client    kubernetes.Interface
	Nodes     coreinformers.NodeInformer
	Inventory Inventory
	Recorder  record.EventRecorder
	Clock     clock.Clock
	// Options returns the cluster-wide choices now in force. Call Resync when they have changed.
	Options func() nodespec.Options
}

// Controller is the node controller. Use New and Run.
type Controller struct {
	writer    writer
	lister    corelisters.NodeLister
	indexer   cache.Indexer
	synced    cache.InformerSynced
	inventory Inventory
	reporter  *reporter
	claims    *claims
	written   *written
	waiting   *waiting
	recorder  record.EventRecorder
	clock     clock.Clock
	options   func() nodespec.Options
	queue     queue.Queue
}

// New makes a Controller and subscribes it. The informer must not have been started yet.
func New(cfg Config) (*Controller, error) {
	informer := cfg.Nodes.Informer()

	c := &Controller{
		writer:    writer{client: cfg.Client},
		lister:    cfg.Nodes.Lister(),
		indexer:   informer.GetIndexer(),
		synced:    informer.HasSynced,
		inventory: cfg.Inventory,
		reporter:  newReporter(cfg.Recorder),
		claims:    newClaims(),
		written:   newWritten(),
		waiting:   newWaiting(uninitialized),
		recorder:  cfg.Recorder,
		clock:     cfg.Clock,
		options:   cfg.Options,
		queue:     queue.New(queueName),
	}

	if err := informer.AddIndexers(cache.Indexers{indexProviderID: providerIDOf}); err != nil {
		return nil, fmt.Errorf("index nodes by providerID: %w", err)
	}

	_, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    c.enqueue,
		UpdateFunc: func(_, node any) { c.enqueue(node) },
		DeleteFunc: c.enqueue,
	})
	if err != nil {
		return nil, fmt.Errorf("watch nodes: %w", err)
	}

	cfg.Inventory.Subscribe(c.queue.Add)

	return c, nil
}

func providerIDOf(obj any) ([]string, error) {
	node, ok := obj.(*corev1.Node)
	if !ok || node.Spec.ProviderID == "" {
		return nil, nil
	}

	return []string{node.Spec.ProviderID}, nil
}

func (c *Controller) enqueue(obj any) {
	if key, err := cache.DeletionHandlingMetaNamespaceKeyFunc(obj); err == nil {
		c.queue.Add(key)
	}
}

// Resync has every Node looked at again.
func (c *Controller) Resync() {
	for _, nodename := range c.indexer.ListKeys() {
		c.queue.Add(nodename)
	}
}

// Run works with the given number of workers until ctx ends and the last of them has finished.
func (c *Controller) Run(ctx context.Context, workers int) {
	defer c.queue.ShutDown()
	defer c.waiting.clear()

	if !cache.WaitForNamedCacheSyncWithContext(ctx, c.synced) {
		return
	}

	var group wait.Group

	for range workers {
		group.StartWithContext(ctx, c.worker().Run)
	}

	<-ctx.Done()
	c.queue.ShutDown()
	group.Wait()
}

// worker syncs Nodes, and counts how that ends.
func (c *Controller) worker() queue.Worker {
	return queue.Worker{
		Queue:   c.queue,
		Subject: "node",
		Failure: "Could not bring the Node up to date, trying again",
		Sync: func(ctx context.Context, nodename string) error {
			ctx, cancel := context.WithTimeout(ctx, syncTimeout)
			defer cancel()

			result, err := c.sync(ctx, nodename)
			syncs.WithLabelValues(result).Inc()
			c.countWaiting(nodename)

			return err
		},
	}
}

// countWaiting keeps the number of Nodes that wait.
func (c *Controller) countWaiting(nodename string) {
	if c.waits(nodename) {
		c.waiting.add(nodename)
	} else {
		c.waiting.remove(nodename)
	}
}

// waits tells whether a Node of ours is there and not initialized.
func (c *Controller) waits(nodename string) bool {
	node, err := c.lister.Get(nodename)
	if err != nil || !nodespec.IsTalos(node) || node.DeletionTimestamp != nil || !nodespec.IsUninitialized(node) {
		return false
	}

	entry := c.inventory.Get(nodename)

	return entry.ObservedAt.IsZero() || nodespec.Managed(nodespec.NewInput(node, entry.Machine, c.options()))
}

// Results of a sync, as the metric names them.
const (
	resultUnchanged = "unchanged"
	resultChanged   = "changed"
	resultPending   = "pending"
	resultConflict  = "conflict"
	resultError     = "error"
)

// sync brings one Node up to date. What cannot be done yet is reported and is no error: a change of Node or Machine brings it
// back here.
func (c *Controller) sync(ctx context.Context, nodename string) (result string, err error) {
	node, err := c.lister.Get(nodename)
	if apierrors.IsNotFound(err) {
		c.reporter.forget(nodename)
		c.release(nodename)
		c.written.forget(nodename)

		return resultUnchanged, nil
	} else if err != nil {
		return resultError, err
	}

	if !nodespec.IsTalos(node) || node.DeletionTimestamp != nil || c.written.outdates(node) {
		return resultUnchanged, nil
	}

	if c.inventory.Get(nodename).Condition == inventory.Mismatch {
		c.release(nodename)
	}

	spec, findings, ready := c.desired(node)
	if !ready {
		c.reporter.report(node, findings)

		return resultPending, nil
	}

	p, err := makePlan(node, spec)
	if err != nil {
		return resultError, fmt.Errorf("compare node %s: %w", nodename, err)
	}

	c.reporter.report(node, append(findings, p.foreign...))

	if p.empty() {
		return resultUnchanged, nil
	}

	result, err = c.write(ctx, node, p, spec)
	if err != nil {
		return result, fmt.Errorf("update node %s: %w", nodename, err)
	}

	return result, nil
}

func (c *Controller) write(ctx context.Context, node *corev1.Node, p plan, spec nodespec.Spec) (result string, err error) {
	after, err := c.writer.write(ctx, node, p)
	c.written.note(after)

	switch {
	case err == nil:
		c.noteWritten(ctx, node, p, spec)

		return resultChanged, nil
	case apierrors.IsNotFound(err): // deleted meanwhile
		return resultUnchanged, nil
	case apierrors.IsConflict(err):
		return resultConflict, err
	default:
		return resultError, err
	}
}

// desired returns what node should carry; not ready if that cannot be said, or not be relied on.
func (c *Controller) desired(node *corev1.Node) (spec nodespec.Spec, findings []finding, ready bool) {
	entry := c.inventory.Get(node.Name)
	findings = condition(entry)

	// The last view of a machine that is unreachable still holds for a Node that was initialized from it, but none is initialized
	// or identified from hearsay.
	inNeed := nodespec.IsUninitialized(node) || node.Spec.ProviderID == ""
	if entry.ObservedAt.IsZero() || (entry.Condition != inventory.Current && inNeed) {
		return nodespec.Spec{}, findings, false
	}

	in := nodespec.NewInput(node, entry.Machine, c.options())
	in.SharedUUID = c.inventory.SharedUUID(entry.Machine.UUID(), node.Name)
	in.SharedAddresses = c.inventory.SharedAddresses(node.Name)

	if !nodespec.Managed(in) {
		c.release(node.Name)

		return nodespec.Spec{}, nil, false
	}

	spec, problems, pending := c.transform(in)

	for _, p := range problems {
		findings = append(findings, finding{reason: ReasonInvalidValue, subject: p.Rule + "/" + p.Key, message: p.String(), kind: p.Kind()})
	}

	if pending != "" {
		// Every machine is short of metadata for a while after a reboot: no news of a Node that was initialized before.
		if nodespec.IsUninitialized(node) {
			findings = append(findings, finding{reason: ReasonMetadataPending, message: "Cannot be initialized yet: " + pending})
		}

		return nodespec.Spec{}, findings, false
	}

	if node.Spec.ProviderID == "" {
		c.claims.wait(node.Name)

		if holder := c.holder(spec.ProviderID, node.Name); holder != "" {
			message := fmt.Sprintf("Node %s already has providerID %s; no two Nodes can be the same machine", holder, spec.ProviderID)

			return nodespec.Spec{}, append(findings, finding{reason: ReasonProviderIDInUse, message: message}), false
		}
	}

	return spec, findings, true
}

// transform is nodespec.Desired, timed.
func (c *Controller) transform(in nodespec.Input) (nodespec.Spec, []nodespec.Problem, string) {
	began := c.clock.Now()
	defer func() { transformation.Observe(c.clock.Since(began).Seconds()) }()

	return nodespec.Desired(in)
}

// holder is the name of another Node that has providerID or is about to get it, or empty. A Node whose address is known to
// belong to another machine holds nothing: it is what a renamed machine leaves behind.
func (c *Controller) holder(providerID, nodename string) string {
	objs, err := c.indexer.ByIndex(indexProviderID, providerID)
	if err != nil {
		return ""
	}

	for _, obj := range objs {
		other, ok := obj.(*corev1.Node)
		if ok && other.Name != nodename && c.inventory.Get(other.Name).Condition != inventory.Mismatch {
			return other.Name
		}
	}

	return c.claims.take(providerID, nodename)
}

// release gives up nodename's claim and has the Nodes looked at again that it may have been in the way of.
func (c *Controller) release(nodename string) {
	for _, waiting := range c.claims.release(nodename) {
		c.queue.Add(waiting)
	}
}

func condition(entry inventory.Entry) []finding {
	switch entry.Condition {
	case inventory.Unreachable:
		return []finding{{reason: ReasonUnreachable, message: "The Talos API of the machine does not answer: " + entry.Reason}}
	case inventory.Mismatch:
		return []finding{{reason: ReasonIdentityMismatch, message: "Not this Node's machine: " + entry.Reason}}
	case inventory.Unknown, inventory.Current:
	}

	return nil
}

func (c *Controller) noteWritten(ctx context.Context, node *corev1.Node, p plan, spec nodespec.Spec) {
	logger := klog.FromContext(ctx)

	if !p.initialize {
		logger.Info("Brought the Node up to date", "labels", p.apply, "addresses", p.addresses != nil, "taints", p.retaint)

		return
	}

	providerID := cmp.Or(node.Spec.ProviderID, spec.ProviderID)
	took := c.clock.Since(node.CreationTimestamp.Time)
	initialization.Observe(took.Seconds())
	logger.Info("Initialized the Node", "providerID", providerID, "after", took)
	c.recorder.Eventf(node, corev1.EventTypeNormal, ReasonInitialized, "Initialized from its Talos machine as %s", providerID)
}
