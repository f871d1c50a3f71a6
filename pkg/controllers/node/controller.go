// Package node initializes the Nodes of Talos machines and keeps them up to date.
//
// Name: cloud-node-controller (alias cloud-node), as the controller of k8s.io/cloud-provider.
//
// Inputs: Nodes, from the informer; machines, from the inventory; the rules and settings in force.
//
// Outputs, for Nodes of managed Talos machines only:
//   - labels and annotations, by server-side apply;
//   - status.addresses;
//   - conditions with the state of the machine (conditions.go), unless another writer has set them;
//   - the taints of rules: at initialization and, if a rule enforces them, at any later time;
//   - once per Node: the removal of the uninitialized taint, and spec.providerID in the same write. If the providerID is
//     not available then, a later write sets it;
//   - managedFields, to take over labels and annotations from the upstream Talos CCM;
//   - Events on the Nodes, with the remedy.
//
// It never writes the Node of a machine without Talos. It never changes a providerID, or a label or an annotation that
// another field manager owns, except the upstream Talos CCM. It uses the data of a machine only if the machine reported
// the Node's name over a verified connection.
//
// A sync compares the Node with its desired state (plan.go), sends the first request that it needs, and compares
// again. The same code initializes a Node and updates it. If a request fails, the Node keeps the uninitialized
// taint, and the sync is retried. Labels and annotations are applied, so that the API server removes those that a later
// apply omits. The providerID is patched: omitting it from a later apply would remove it, which the API server forbids.
package node

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	coreinformers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/internal/events"
	"github.com/talos-ccm/talos-ccm/pkg/internal/expectations"
	"github.com/talos-ccm/talos-ccm/pkg/internal/nodes"
	"github.com/talos-ccm/talos-ccm/pkg/internal/queue"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
)

// Reasons of the Events on Nodes.
const (
	// ReasonInitialized (Normal): the uninitialized taint was removed; names the providerID.
	ReasonInitialized = "Initialized"
	// ReasonMetadataPending: the machine has not published required metadata, or a rule fails.
	// Fix: docs/troubleshooting/nodes.md#node-stays-uninitialized.
	ReasonMetadataPending = "MetadataPending"
	// ReasonUnreachable: the machine's Talos API does not respond; an initialized Node stays unchanged.
	// Fix: docs/troubleshooting/nodes.md#machine-unreachable.
	ReasonUnreachable = "MachineUnreachable"
	// ReasonIdentityMismatch: the machine at the Node's address has another nodename.
	// Fix: docs/troubleshooting/nodes.md#identity-mismatch.
	ReasonIdentityMismatch = "IdentityMismatch"
	// ReasonOwnershipConflict: another client, such as Talos, set a label, annotation or taint to another value, which stays.
	// Fix: choose one owner (docs/guides/coexistence.md#ownership-rules); to let the rule own it, delete the key.
	ReasonOwnershipConflict = "OwnershipConflict"
	// ReasonInvalidValue: a value is skipped, the rule for a providerID fails, or the machine exceeds a limit.
	// Fix: docs/troubleshooting/nodes.md#skipped-values.
	ReasonInvalidValue = "InvalidValue"
	// ReasonTopologyChanged: the machine or a rule sets another region or zone; the Node keeps its own.
	// Fix: correct it, or docs/guides/labels-and-taints.md#change-a-region-or-zone.
	ReasonTopologyChanged = "TopologyChanged"
	// ReasonProviderIDInUse: another Node has this providerID: clones, a machine with a new name, or a kubelet registered it.
	// Fix: docs/troubleshooting/nodes.md#providerid-in-use.
	ReasonProviderIDInUse = "ProviderIDInUse"
	// ReasonProviderIDMismatch: the providerID names another instance than the machine, or two machines have the hostname.
	// Fix: docs/troubleshooting/nodes.md#providerid-of-another-instance.
	ReasonProviderIDMismatch = "ProviderIDMismatch"
	// ReasonRenamed: the Node of the machine's earlier name has the providerID.
	// Fix: wait until that Node is deleted, or delete it.
	ReasonRenamed = "NodeRenamed"
)

// Names of the controller, as in k8s.io/cloud-provider.
const (
	Name  = "cloud-node-controller"
	Alias = "cloud-node"
)

const (
	// syncTimeout bounds all API requests of one sync.
	syncTimeout = 30 * time.Second

	// factsTimeout is how long a new Node waits until its machine has booted. The boot may itself wait for something that
	// needs the Node.
	factsTimeout = time.Minute

	// maxRequests is one more than a Node needs.
	maxRequests = 6
)

// Config configures a Controller. Every field is required.
type Config struct {
	Client    kubernetes.Interface
	Nodes     coreinformers.NodeInformer
	Inventory *inventory.Inventory
	Recorder  record.EventRecorder
	Clock     clock.Clock
	// HasNodes reports whether the inventory has the claims of all Nodes that existed at the start.
	HasNodes func() bool
	// Options returns the cluster-wide settings in force. Call Resync after they have changed.
	Options func() nodespec.Options
	// IsRecorded reports whether the machine of a Node responds and its record needs no write. No Node is initialized before.
	IsRecorded func(node *corev1.Node) bool
	// Workers is the number of Nodes that are updated concurrently.
	Workers int
}

// Controller is the node controller. Use New and Run.
type Controller struct {
	config       Config
	planner      planner
	indexer      cache.Indexer
	providerIDs  *providerIDs
	reporter     *events.Reporter
	expectations *expectations.Expectations
	pending      *pendingNodes
	queue        queue.Queue
}

// New returns a Controller that is subscribed to Nodes and machines. Call it before the informer is started.
func New(cfg Config) (*Controller, error) {
	informer := cfg.Nodes.Informer()
	if err := informer.AddIndexers(indexers); err != nil {
		return nil, fmt.Errorf("index nodes by providerID: %w", err)
	}

	c := &Controller{
		config:       cfg,
		planner:      planner{cfg.Nodes.Lister(), cfg.Inventory, cfg.Clock, cfg.Options, cfg.IsRecorded},
		indexer:      informer.GetIndexer(),
		reporter:     events.New(cfg.Recorder),
		expectations: expectations.New(),
		pending:      &pendingNodes{gauge: uninitialized, names: sets.New[string]()},
		queue:        queue.New(Alias),
	}
	c.providerIDs = newProviderIDs(c.indexer, c.planner.counts)

	_, err := nodes.Watch(cfg.Nodes, func(before, after *corev1.Node) {
		node := cmp.Or(after, before)
		names := []string{node.Name}

		// Nodes with the same providerID are synced when it changes. An attacker can register many of them, so other changes
		// do not count.
		if after == nil || before == nil || before.Spec.ProviderID != after.Spec.ProviderID {
			sharing, _ := c.indexer.IndexKeys(indexProviderID, node.Spec.ProviderID) // fails for an unknown index only
			names = append(names, sharing...)
		}

		if after == nil {
			names = append(names, c.waiting()...)
		}

		c.queueAll(names)
	})
	if err != nil {
		return nil, err
	}

	cfg.Inventory.Subscribe(c.queue.Add)

	return c, nil
}

// Resync queues every Node.
func (c *Controller) Resync() { c.queueAll(c.indexer.ListKeys()) }

// queueAll queues Nodes, each once and in a defined order, so that tests can repeat it.
func (c *Controller) queueAll(nodenames []string) {
	for _, nodename := range slices.Compact(slices.Sorted(slices.Values(nodenames))) {
		c.queue.Add(nodename)
	}
}

// waiting returns the Nodes without a providerID: they may be waiting for that of a deleted Node.
func (c *Controller) waiting() []string {
	return slices.DeleteFunc(c.indexer.ListKeys(), func(nodename string) bool {
		obj, _, _ := c.indexer.GetByKey(nodename) // cannot fail
		node, isNode := obj.(*corev1.Node)

		return !isNode || node.Spec.ProviderID != ""
	})
}

// Run processes the queue. It returns after ctx has ended and all workers have finished.
func (c *Controller) Run(ctx context.Context) {
	defer c.queue.ShutDown()
	// An instance that does not lead reports none.
	defer c.pending.update(func(names sets.Set[string]) { names.Clear() })

	if !cache.WaitForNamedCacheSyncWithContext(ctx, c.config.Nodes.Informer().HasSynced, c.config.HasNodes) {
		return
	}

	queue.Reconciler{Queue: c.queue, Subject: "node", Failure: "Failed to update node; retrying", Sync: c.sync}.Run(ctx, c.config.Workers)
}

func (c *Controller) sync(ctx context.Context, nodename string) (again time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, syncTimeout)
	defer cancel()

	node, _ := c.planner.nodes.Get(nodename) // fails only if there is none
	if node == nil {
		c.reporter.Forget(nodename)
		c.expectations.Forget(nodename)
		c.pending.update(func(names sets.Set[string]) { names.Delete(nodename) })
		c.providerIDs.release(nodename)

		return 0, nil
	}

	if node.Spec.ProviderID != "" {
		c.providerIDs.release(nodename)
	}

	if !c.expectations.Satisfied(node) {
		return 0, nil
	}

	return c.syncNode(ctx, node)
}

// syncNode sends the first request that the Node needs, and plans again with the Node that the API server returned. The
// request that removes the uninitialized taint is thus sent only for a version that needs nothing else. It fails after
// maxRequests: another client or an admission webhook reverts them.
func (c *Controller) syncNode(ctx context.Context, node *corev1.Node) (again time.Duration, err error) {
	for sent := 0; ; sent++ {
		p, again, err := c.prepare(node)
		if err != nil {
			return 0, err
		}

		requests := p.requests(node)
		if len(requests) == 0 {
			return again, nil
		}

		if sent == maxRequests {
			return 0, fmt.Errorf("node %s needs further changes after %d requests: %s", node.Name, sent, strings.Join(requests[0].changes, ", "))
		}

		if node, err = c.send(ctx, node, requests[0]); apierrors.IsNotFound(err) {
			return 0, nil // the cache will show the deletion
		} else if err != nil {
			return 0, err
		}
	}
}

// prepare returns the plan for a Node, and the time after which the plan may change. It reserves the providerID, and
// reports the problems.
func (c *Controller) prepare(node *corev1.Node) (p plan, again time.Duration, err error) {
	s := c.planner.observe(node)
	isUninitialized := nodespec.IsUninitialized(node)

	c.pending.update(func(names sets.Set[string]) {
		if names.Delete(node.Name); s.managed && isUninitialized {
			names.Insert(node.Name)
		}
	})

	if p, err = c.planner.plan(s, c.providerIDs.assign(s)); err != nil {
		return plan{}, 0, err
	}

	c.report(node, p.problems)

	// A Node gets its first conditions with its addresses or, if no addresses must be written, after its initialization.
	if !isUninitialized || p.addresses != nil || slices.ContainsFunc(node.Status.Conditions, isOwn) {
		p.conditions, again = syncConditions(s, c.planner.mostRespond, c.config.Clock.Now())
	}

	if again == 0 && (p.isPending || s.awaitsOthers()) {
		again = factsTimeout // nodespec may wait for facts until then
	}

	return p, again, nil
}

// report emits Events for new problems, and counts the invalid values and topology changes among them.
func (c *Controller) report(node *corev1.Node, problems []events.Problem) {
	for _, added := range c.reporter.Report(node.Name, node, problems...) {
		switch added.Reason {
		case ReasonInvalidValue:
			kind, _, _ := strings.Cut(added.Subject, "/")
			transformationErrors.WithLabelValues(kind).Inc()
		case ReasonTopologyChanged:
			topologyChanges.WithLabelValues(added.Subject).Inc()
		}
	}
}

// send sends a request, reports it, and returns the new version of the Node.
func (c *Controller) send(ctx context.Context, before *corev1.Node, r request) (*corev1.Node, error) {
	changes := strings.Join(r.changes, ", ")

	data, err := json.Marshal(r.body)
	if err != nil {
		return nil, fmt.Errorf("encode %s of node %s: %w", changes, before.Name, err)
	}

	options := metav1.PatchOptions{FieldManager: FieldManager}

	node, err := c.config.Client.CoreV1().Nodes().Patch(ctx, before.Name, r.kind, data, options, r.subresource...)
	if err != nil {
		return nil, fmt.Errorf("patch %s of node %s: %w", changes, before.Name, err)
	}

	if node.ResourceVersion == before.ResourceVersion {
		return nil, fmt.Errorf("patch %s of node %s: accepted without effect; an admission webhook may revert it", changes, before.Name)
	}

	c.expectations.Expect(node)

	switch {
	case r.initializes:
		c.reportInitialized(ctx, node)
	case !nodespec.IsUninitialized(node):
		klog.FromContext(ctx).Info("Updated node", "changes", r.changes)

		if slices.Contains(r.changes, changeAddresses) {
			addressUpdates.Inc()
		}
	}

	return node, nil
}

// reportInitialized logs and measures the initialization of a Node, and emits an Event.
func (c *Controller) reportInitialized(ctx context.Context, node *corev1.Node) {
	duration, message := c.config.Clock.Since(node.CreationTimestamp.Time), "Initialized without providerID"
	if node.Spec.ProviderID != "" {
		message = "Initialized with providerID " + node.Spec.ProviderID
	}

	initialization.Observe(duration.Seconds())
	klog.FromContext(ctx).Info("Initialized node", "providerID", node.Spec.ProviderID, "duration", duration)
	c.config.Recorder.Event(node, corev1.EventTypeNormal, ReasonInitialized, message)
}
