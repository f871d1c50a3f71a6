// Package node initialises the Nodes of Talos machines and keeps them true.
//
// Name: cloud-node-controller (alias cloud-node), in place of the framework's.
//
// Inputs: the Node informer, the inventory.
//
// Outputs, of Nodes of Talos machines alone: the labels of nodespec, by server-side apply; status.addresses; once in a
// Node's life spec.providerID and the removal of the uninitialized taint.
//
// It never writes a Node of another system, a providerID that is set, a key that somebody else holds, or anything of a machine
// that has not proved to be the Node's.
package node

import (
	"cmp"
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/wait"
	coreinformers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
)

const (
	// syncTimeout bounds all remote calls of one sync.
	syncTimeout = 30 * time.Second

	retryFirst = 100 * time.Millisecond
	retryMax   = time.Minute

	indexProviderID = "providerID"
)

// Inventory is what the controller reads of the machines.
type Inventory interface {
	Get(nodename string) inventory.Entry
	SharedUUID(uuid, nodename string) bool
	Subscribe(handler func(nodename string))
}

// Config is all a Controller needs. Every field but Options must be set.
type Config struct {
	Client    kubernetes.Interface
	Nodes     coreinformers.NodeInformer
	Inventory Inventory
	Recorder  record.EventRecorder
	Clock     clock.Clock
	// Options are the cluster-wide choices; the zero value is the default.
	Options nodespec.Options
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
	recorder  record.EventRecorder
	clock     clock.Clock
	options   nodespec.Options
	queue     workqueue.TypedRateLimitingInterface[string]
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
		recorder:  cfg.Recorder,
		clock:     cfg.Clock,
		options:   cfg.Options,
		queue: workqueue.NewTypedRateLimitingQueueWithConfig(
			workqueue.NewTypedItemExponentialFailureRateLimiter[string](retryFirst, retryMax),
			workqueue.TypedRateLimitingQueueConfig[string]{Name: "cloud-node"},
		),
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

// Run works with the given number of workers until ctx ends and the last of them has finished.
func (c *Controller) Run(ctx context.Context, workers int) {
	defer c.queue.ShutDown()

	if !cache.WaitForNamedCacheSyncWithContext(ctx, c.synced) {
		return
	}

	var group wait.Group

	for range workers {
		group.StartWithContext(ctx, c.work)
	}

	<-ctx.Done()
	c.queue.ShutDown()
	group.Wait()
}

func (c *Controller) work(ctx context.Context) {
	for c.next(ctx) {
	}
}

func (c *Controller) next(ctx context.Context) bool {
	key, shutdown := c.queue.Get()
	if shutdown || ctx.Err() != nil {
		return false
	}

	defer c.queue.Done(key)

	logger := klog.LoggerWithValues(klog.FromContext(ctx), "node", key)
	ctx, cancel := context.WithTimeout(klog.NewContext(ctx, logger), syncTimeout)

	defer cancel()

	result, err := c.sync(ctx, key)
	syncs.WithLabelValues(result).Inc()

	switch {
	case err == nil:
		c.queue.Forget(key)

		return true
	case apierrors.IsConflict(err):
		logger.V(4).Info("Node changed meanwhile, trying again", "err", err)
	default:
		logger.Error(err, "Could not bring the Node up to date, trying again")
	}

	c.queue.AddRateLimited(key)

	return true
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

	c.reporter.report(node, append(findings, foreignKeys(p)...))

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

	// The last view of a machine that is unreachable still holds for a Node that was initialised from it, but none is initialised
	// or identified from hearsay.
	inNeed := uninitialized(node) || node.Spec.ProviderID == ""
	if entry.ObservedAt.IsZero() || (entry.Condition != inventory.Current && inNeed) {
		return nodespec.Spec{}, findings, false
	}

	spec, problems, pending := nodespec.Desired(nodespec.Input{
		Machine:         entry.Machine,
		ProvidedNodeIPs: nodespec.ProvidedNodeIPs(node),
		SharedUUID:      c.inventory.SharedUUID(entry.Machine.UUID(), node.Name),
		Options:         c.options,
	})
	if pending != "" {
		// Every machine is short of metadata for a while after a reboot: no news of a Node that was initialised before.
		if uninitialized(node) {
			findings = append(findings, finding{reason: ReasonMetadataPending, message: "Waiting for the machine: " + pending})
		}

		return nodespec.Spec{}, findings, false
	}

	for _, p := range problems {
		findings = append(findings, finding{reason: ReasonInvalidValue, subject: p.Key, message: p.String()})
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

func foreignKeys(p plan) []finding {
	var findings []finding

	for key, value := range p.foreign {
		findings = append(findings, finding{
			reason:  ReasonKeyOwnedByOther,
			subject: key,
			message: fmt.Sprintf("Label %s=%q was set by somebody else and is left alone", key, value),
		})
	}

	return findings
}

func (c *Controller) noteWritten(ctx context.Context, node *corev1.Node, p plan, spec nodespec.Spec) {
	logger := klog.FromContext(ctx)

	if !p.initialize {
		logger.Info("Brought the Node up to date", "labels", p.applyLabels, "addresses", p.addresses != nil)

		return
	}

	providerID := cmp.Or(node.Spec.ProviderID, spec.ProviderID)
	took := c.clock.Since(node.CreationTimestamp.Time)
	initialization.Observe(took.Seconds())
	logger.Info("Initialised the Node", "providerID", providerID, "after", took)
	c.recorder.Eventf(node, corev1.EventTypeNormal, ReasonInitialized, "Initialised from its Talos machine as %s", providerID)
}
