// Package node initializes the Nodes of Talos machines and keeps them up to date.
//
// Name: cloud-node-controller (alias cloud-node), as the controller of k8s.io/cloud-provider.
//
// Inputs: Nodes, from the informer; machines, from the inventory; the rules and settings in force.
//
// Outputs, for Nodes of managed Talos machines only:
//   - labels and annotations, by server-side apply;
//   - status.addresses;
//   - the taints of rules: at initialization and, if a rule enforces them, at any later time;
//   - once per Node, in the same write: spec.providerID and the removal of the uninitialized taint;
//   - managedFields, to take over labels and annotations from the upstream Talos CCM;
//   - Events for what an operator should know.
//
// It never writes a Node of another operating system, changes a providerID, a label, an annotation or a taint that
// another client has set, or uses the data of a machine that has not proven to be the Node's.
package node

import (
	"cmp"
	"context"
	"fmt"
	"strings"
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

	"github.com/talos-ccm/talos-ccm/pkg/internal/events"
	"github.com/talos-ccm/talos-ccm/pkg/internal/expectations"
	"github.com/talos-ccm/talos-ccm/pkg/internal/queue"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
)

// Reasons of the Events on Nodes.
const (
	ReasonInitialized        = "Initialized"
	ReasonMetadataPending    = "MetadataPending"
	ReasonUnreachable        = "MachineUnreachable"
	ReasonIdentityMismatch   = "IdentityMismatch"
	ReasonOwnershipConflict  = "OwnershipConflict"
	ReasonInvalidValue       = "InvalidValue"
	ReasonProviderIDInUse    = "ProviderIDInUse"
	ReasonProviderIDMismatch = "ProviderIDMismatch"
	ReasonRenamed            = "NodeRenamed"
	ReasonTopologyChanged    = "TopologyChanged"
)

// Names of the controller, as in k8s.io/cloud-provider.
const (
	Name  = "cloud-node-controller"
	Alias = "cloud-node"
)

const (
	// syncTimeout bounds all API requests of one sync.
	syncTimeout = 30 * time.Second

	indexProviderID = "providerID"
)

// Config configures a Controller. Every field is required.
type Config struct {
	Client    kubernetes.Interface
	Nodes     coreinformers.NodeInformer
	Inventory *inventory.Inventory
	Recorder  record.EventRecorder
	Clock     clock.Clock
	// Options returns the cluster-wide settings in force. Call Resync after they have changed.
	Options func(machine.Machine) nodespec.Options
	// Workers is the number of Nodes that are updated concurrently.
	Workers int
}

// Controller is the node controller. Use New and Run.
type Controller struct {
	config       Config
	lister       corelisters.NodeLister
	indexer      cache.Indexer
	reporter     *events.Reporter
	reservations *reservations
	expectations *expectations.Expectations
	pending      *pendingNodes
	queue        queue.Queue
}

// New returns a Controller that is subscribed to Nodes and machines. Call it before the informer is started.
func New(cfg Config) (*Controller, error) {
	informer := cfg.Nodes.Informer()

	c := &Controller{
		config:       cfg,
		lister:       cfg.Nodes.Lister(),
		indexer:      informer.GetIndexer(),
		reporter:     events.New(cfg.Recorder),
		reservations: newReservations(),
		expectations: expectations.New(),
		pending:      newPendingNodes(uninitialized),
		queue:        queue.New(Alias),
	}

	err := informer.AddIndexers(cache.Indexers{indexProviderID: func(obj any) ([]string, error) {
		if node, ok := obj.(*corev1.Node); ok && node.Spec.ProviderID != "" {
			return []string{node.Spec.ProviderID}, nil
		}

		return nil, nil
	}})
	if err != nil {
		return nil, fmt.Errorf("index nodes by providerID: %w", err)
	}

	_, err = informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
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

func (c *Controller) enqueue(obj any) {
	if key, err := cache.DeletionHandlingMetaNamespaceKeyFunc(obj); err == nil {
		c.queue.Add(key)
	}
}

// Resync queues every Node.
func (c *Controller) Resync() { c.enqueueAll(c.indexer.ListKeys()) }

// Run processes the queue. It returns after ctx has ended and all workers have finished.
func (c *Controller) Run(ctx context.Context) {
	defer c.queue.ShutDown()
	defer c.pending.clear()

	if !cache.WaitForNamedCacheSyncWithContext(ctx, c.config.Nodes.Informer().HasSynced) {
		return
	}

	worker := queue.Worker{Queue: c.queue, Subject: "node", Failure: "Failed to update node; retrying", Sync: c.reconcile}

	var group wait.Group

	for range c.config.Workers {
		group.StartWithContext(ctx, worker.Run)
	}

	<-ctx.Done()
	c.queue.ShutDown()
	group.Wait()
}

// reconcile is sync with a timeout and metrics.
func (c *Controller) reconcile(ctx context.Context, nodename string) error {
	ctx, cancel := context.WithTimeout(ctx, syncTimeout)
	defer cancel()

	result, err := c.sync(ctx, nodename)
	syncs.WithLabelValues(result).Inc()
	c.countPending(nodename)

	return err
}

// countPending updates the number of managed Nodes that are not initialized.
func (c *Controller) countPending(nodename string) {
	node, err := c.lister.Get(nodename)
	if err == nil && nodespec.IsTalos(node) && node.DeletionTimestamp == nil && nodespec.IsUninitialized(node) {
		entry := c.config.Inventory.Get(nodename)
		if mayManage(entry, nodespec.NewInput(node, entry.Machine, c.config.Options(entry.Machine))) {
			c.pending.add(nodename)

			return
		}
	}

	c.pending.remove(nodename)
}

// mayManage reports whether the machine is managed or not known yet.
func mayManage(entry inventory.Entry, in nodespec.Input) bool {
	return entry.ObservedAt.IsZero() || nodespec.Managed(in)
}

// Results of a sync, as label values of the metric.
const (
	resultUnchanged = "unchanged"
	resultChanged   = "changed"
	resultPending   = "pending"
	resultConflict  = "conflict"
	resultError     = "error"
)

// sync updates one Node. If the desired state is not known yet, it reports why and returns no error: the change that
// resolves it queues the Node.
func (c *Controller) sync(ctx context.Context, nodename string) (result string, err error) {
	node, err := c.lister.Get(nodename)
	if apierrors.IsNotFound(err) {
		c.reporter.Forget(nodename)
		c.expectations.Forget(nodename)
		c.release(nodename)

		return resultUnchanged, nil
	} else if err != nil {
		return resultError, err
	}

	if !nodespec.IsTalos(node) || node.DeletionTimestamp != nil || !c.expectations.Satisfied(node) {
		return resultUnchanged, nil
	}

	p, conditions, err := c.plan(node)

	switch {
	case err != nil:
		return resultError, fmt.Errorf("compare node %s: %w", nodename, err)
	case p == nil:
		c.report(node, conditions)

		return resultPending, nil
	}

	return c.update(ctx, node, *p, conditions)
}

// plan returns what to write to the Node of a Talos machine, and what to report. The plan is nil if the desired state is
// not known yet or the Node is not managed.
func (c *Controller) plan(node *corev1.Node) (p *plan, conditions []events.Condition, err error) {
	entry := c.config.Inventory.Get(node.Name)
	in := nodespec.NewInput(node, entry.Machine, c.config.Options(entry.Machine)).WithPeers(c.config.Inventory, node.Name)

	if entry.Condition == inventory.Mismatch || !mayManage(entry, in) {
		c.release(node.Name)
	}

	spec, conditions, ok := c.desired(node, entry, in)
	if !ok {
		return nil, conditions, nil
	}

	wanted := spec.ProviderID

	id, condition, ok := c.providerID(node, entry, wanted)
	if condition != nil {
		conditions = append(conditions, *condition)
	}

	if !ok {
		return nil, conditions, nil
	}

	spec.ProviderID = id

	made, err := makePlan(node, spec)
	if err != nil {
		return nil, conditions, err
	}

	made.wantedID = wanted

	return &made, append(conditions, made.conflicts...), nil
}

// desired returns the desired state of the Node, whether it is known and can be written, and what to report.
func (c *Controller) desired(node *corev1.Node, entry inventory.Entry, in nodespec.Input) (spec nodespec.Spec, conditions []events.Condition, ok bool) {
	if !mayManage(entry, in) {
		return nodespec.Spec{}, nil, false
	}

	switch entry.Condition {
	case inventory.Unreachable:
		conditions = append(conditions, events.Condition{Reason: ReasonUnreachable, Message: "Talos API is unreachable: " + entry.Reason})
	case inventory.Mismatch:
		conditions = append(conditions, c.identityMismatch(entry))
	case inventory.Unknown, inventory.Current:
	}

	// The last view of an unreachable machine is good enough to update a Node, but not to initialize or identify it.
	isUninitialized := nodespec.IsUninitialized(node)
	if entry.ObservedAt.IsZero() || (entry.Condition != inventory.Current && (isUninitialized || node.Spec.ProviderID == "")) {
		return nodespec.Spec{}, conditions, false
	}

	started := c.config.Clock.Now()
	spec, problems, pending := nodespec.Desired(in)

	transformation.Observe(c.config.Clock.Since(started).Seconds())

	for _, p := range problems {
		conditions = append(conditions, events.Condition{Reason: ReasonInvalidValue, Subject: p.Kind() + "/" + p.Rule + "/" + p.Key, Message: p.String()})
	}

	// Initialized Nodes are not affected: every machine lacks metadata for a while after a reboot.
	if pending != "" && isUninitialized {
		conditions = append(conditions, events.Condition{Reason: ReasonMetadataPending, Message: "Node cannot be initialized yet: " + pending})
	}

	return spec, conditions, pending == ""
}

// identityMismatch describes that the machine at the Node's address reports another nodename. If there is no Node with
// that name, the machine is probably the Node's own, and its kubelet has registered it under another name.
func (c *Controller) identityMismatch(entry inventory.Entry) events.Condition {
	message := "Machine does not belong to this node: " + entry.Reason
	if _, err := c.lister.Get(entry.Responding); apierrors.IsNotFound(err) {
		message += ", and no node has that name. If its kubelet has another name by hostname-override in machine.kubelet.extraArgs, " +
			"set the hostname of the machine or machine.kubelet.registerWithFQDN instead. If it was renamed, its new node appears when its kubelet starts"
	}

	return events.Condition{Reason: ReasonIdentityMismatch, Message: message}
}

// providerID returns the providerID to set if the Node has none, what to report about it, and whether the Node can be
// written. A machine that was renamed leaves behind a Node with its providerID. The new Node is written without one, and
// gets it when the former Node is deleted.
func (c *Controller) providerID(node *corev1.Node, entry inventory.Entry, desired string) (id string, condition *events.Condition, ok bool) {
	if actual := node.Spec.ProviderID; actual != "" {
		if entry.Condition == inventory.Current && differentInstances(actual, desired) {
			condition = &events.Condition{Reason: ReasonProviderIDMismatch, Message: fmt.Sprintf("Node has providerID %s, but its machine is %s now; "+
				"drain and delete the node, and then reboot the machine, so that it registers again", actual, desired)}
		}

		return actual, condition, true
	}

	owner := c.reserve(desired, node.Name)

	switch {
	case owner == "":
		return desired, nil, true
	case c.config.Inventory.RenamedTo(owner) == node.Name, c.config.Inventory.Get(owner).Condition == inventory.Mismatch:
		return "", &events.Condition{Reason: ReasonRenamed, Message: fmt.Sprintf("ProviderID %s is not set yet: it is used by node %s, "+
			"probably the former name of this machine; the lifecycle controller deletes that node after its grace period if it has seen the "+
			"renaming, or delete it yourself", desired, owner)}, true
	default:
		return "", &events.Condition{Reason: ReasonProviderIDInUse, Message: fmt.Sprintf(
			"ProviderID %s is already used by node %s; delete that node if its machine no longer exists", desired, owner)}, false
	}
}

// reserve reserves the providerID for the Node. If another Node has it or has reserved it, reserve returns the name of
// that Node, and queues this Node when a reservation is released.
func (c *Controller) reserve(providerID, nodename string) (owner string) {
	// Request before reading the index, or a release in between would not queue the Node.
	c.reservations.request(nodename)

	objs, _ := c.indexer.ByIndex(indexProviderID, providerID) // fails for an unknown index only

	for _, obj := range objs {
		if other, isNode := obj.(*corev1.Node); isNode && other.Name != nodename {
			return other.Name
		}
	}

	owner, waiting := c.reservations.reserve(providerID, nodename)
	c.enqueueAll(waiting)

	return owner
}

// release releases the Node's reservation and queues the Nodes that may have waited for it.
func (c *Controller) release(nodename string) { c.enqueueAll(c.reservations.release(nodename)) }

func (c *Controller) enqueueAll(nodenames []string) {
	for _, nodename := range nodenames {
		c.queue.Add(nodename)
	}
}

// report emits Events for new conditions, and counts the invalid values and topology changes among them.
func (c *Controller) report(node *corev1.Node, conditions []events.Condition) {
	for _, added := range c.reporter.Report(node.Name, node, conditions...) {
		switch added.Reason {
		case ReasonInvalidValue:
			kind, _, _ := strings.Cut(added.Subject, "/")
			transformationErrors.WithLabelValues(kind).Inc()
		case ReasonTopologyChanged:
			topologyChanges.WithLabelValues(added.Subject).Inc()
		}
	}
}

// update writes the plan, logs it and emits an Event for an initialization.
func (c *Controller) update(ctx context.Context, node *corev1.Node, p plan, conditions []events.Condition) (result string, err error) {
	c.report(node, conditions)

	if p.empty() {
		return resultUnchanged, nil
	}

	written, err := c.write(ctx, node, p)
	c.expectations.Expect(written)

	switch {
	case apierrors.IsNotFound(err): // deleted in the meantime
		return resultUnchanged, nil
	case apierrors.IsConflict(err):
		return resultConflict, fmt.Errorf("update node %s: %w", node.Name, err)
	case err != nil:
		return resultError, fmt.Errorf("update node %s: %w", node.Name, err)
	}

	logger := klog.FromContext(ctx)

	if !p.initialize {
		logger.Info("Updated node", "metadata", p.apply, "addresses", p.addresses != nil, "taints", p.updateTaints)

		return resultChanged, nil
	}

	providerID := cmp.Or(node.Spec.ProviderID, p.providerID)
	duration := c.config.Clock.Since(node.CreationTimestamp.Time)
	initialization.Observe(duration.Seconds())
	logger.Info("Initialized node", "providerID", providerID, "duration", duration)

	if providerID == "" {
		c.config.Recorder.Event(node, corev1.EventTypeNormal, ReasonInitialized, "Initialized without providerID")
	} else {
		c.config.Recorder.Eventf(node, corev1.EventTypeNormal, ReasonInitialized, "Initialized with providerID %s", providerID)
	}

	return resultChanged, nil
}
