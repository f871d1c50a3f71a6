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
	// ReasonOwnershipConflict: another client, such as Talos, set a label, annotation or taint to a different value, which
	// stays, or replaced the addresses twice within an hour, which talos-ccm restores.
	// Fix: choose one owner (docs/guides/coexistence.md#ownership-rules); to let the rule own the key, delete the key.
	ReasonOwnershipConflict = "OwnershipConflict"
	// ReasonInvalidValue: a value of a rule or machine is skipped, the rule for a providerID fails, or the machine exceeds a
	// limit.
	// Fix: docs/troubleshooting/nodes.md#skipped-values.
	ReasonInvalidValue = "InvalidValue"
	// ReasonTopologyChanged: the machine or a rule sets another region or zone; the Node keeps its own.
	// Fix: correct the metadata or the rule, or accept the new value:
	// docs/guides/labels-and-taints.md#change-a-region-or-zone.
	ReasonTopologyChanged = "TopologyChanged"
	// ReasonProviderIDInUse: another Node has this providerID: clones, a machine with a new name, or a kubelet registered it.
	// Fix: docs/troubleshooting/nodes.md#providerid-in-use.
	ReasonProviderIDInUse = "ProviderIDInUse"
	// ReasonProviderIDMismatch: the providerID names another instance than the machine, or two machines have the hostname.
	// Fix: docs/troubleshooting/nodes.md#providerid-of-another-instance.
	ReasonProviderIDMismatch = "ProviderIDMismatch"
	// ReasonRenamed: no providerID yet: the Node of the machine's earlier name has it.
	// Fix: wait for the deletion of that Node, or delete it.
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
	maxRequests = 5
)

// Config configures a Controller. Every field is required.
type Config struct {
	Client    kubernetes.Interface
	Nodes     coreinformers.NodeInformer
	Inventory *inventory.Inventory
	Recorder  record.EventRecorder
	Clock     clock.Clock
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

	addressWriters addressWriters
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

		addressWriters: addressWriters{byNode: map[string]addressWriter{}},
	}
	c.providerIDs = newProviderIDs(c.indexer, c.planner.counts, func(providerID string) {
		names, _ := c.indexer.IndexKeys(indexProviderID, providerID) // fails for an unknown index only
		c.queueWaiting(names...)
	})

	_, err := nodes.Watch(cfg.Nodes, func(before, after *corev1.Node) {
		if after == nil {
			c.queueWaiting(before.Name)
		} else {
			c.queue.Add(after.Name)
		}
	})
	if err != nil {
		return nil, err
	}

	cfg.Inventory.Subscribe(c.queue.Add)

	return c, nil
}

// Resync queues every Node.
func (c *Controller) Resync() {
	for _, nodename := range c.indexer.ListKeys() {
		c.queue.Add(nodename)
	}
}

// queueWaiting queues the given Nodes and those without a providerID, each once and in the order of their names: they may
// be waiting for a providerID that has become free.
func (c *Controller) queueWaiting(nodenames ...string) {
	waiting := nodenames

	for _, obj := range c.indexer.List() {
		if node, isNode := obj.(*corev1.Node); isNode && node.Spec.ProviderID == "" {
			waiting = append(waiting, node.Name)
		}
	}

	slices.Sort(waiting)

	for _, nodename := range slices.Compact(waiting) {
		c.queue.Add(nodename)
	}
}

// Run processes the queue. It returns after ctx has ended and all workers have finished.
func (c *Controller) Run(ctx context.Context) {
	defer c.queue.ShutDown()
	// An instance that does not lead reports none.
	defer c.pending.update(func(names sets.Set[string]) { names.Clear() })

	if !cache.WaitForNamedCacheSyncWithContext(ctx, c.config.Nodes.Informer().HasSynced) {
		return
	}

	queue.Reconciler{Queue: c.queue, Subject: "node", Failure: "Failed to update node; retrying", Sync: c.sync}.Run(ctx, c.config.Workers)
}

// Results of a sync, as label values of the metric.
const (
	resultUnchanged = "unchanged"
	resultChanged   = "changed"
	resultPending   = "pending"
	resultConflict  = "conflict"
	resultError     = "error"
)

func (c *Controller) sync(ctx context.Context, nodename string) (again time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, syncTimeout)
	defer cancel()

	result := resultUnchanged

	node, err := c.planner.nodes.Get(nodename)
	if err == nil {
		if node.Spec.ProviderID != "" {
			c.providerIDs.release(nodename, node.Spec.ProviderID)
		}

		if c.expectations.Satisfied(node) {
			result, again, err = c.syncNode(ctx, node)
		}
	}

	switch {
	case apierrors.IsNotFound(err):
		err = nil

		c.reporter.Forget(nodename)
		c.expectations.Forget(nodename)
		c.addressWriters.forget(nodename)
		c.pending.update(func(names sets.Set[string]) { names.Delete(nodename) })
		c.providerIDs.release(nodename, "")
	case apierrors.IsConflict(err):
		result = resultConflict
	case err != nil:
		result = resultError
	}

	syncs.WithLabelValues(result).Inc()

	return again, err
}

// syncNode sends the first request that the Node needs, and plans again with the Node that the API server returned. The
// request that removes the uninitialized taint is thus sent only for a version that needs nothing else. It fails after
// maxRequests: another client or an admission webhook reverts them.
func (c *Controller) syncNode(ctx context.Context, node *corev1.Node) (result string, again time.Duration, err error) {
	var (
		p       plan
		last    request
		changes []string
	)

	for sent := 0; ; sent++ {
		if p, again, err = c.prepare(node); err != nil {
			return "", 0, err
		}

		requests := p.requests(node)
		if len(requests) == 0 {
			break
		}

		if sent == maxRequests {
			return "", 0, fmt.Errorf("node %s needs further changes after %d requests: %s", node.Name, sent, strings.Join(changes, ", "))
		}

		last = requests[0]
		if node, err = c.send(ctx, node.Name, last); apierrors.IsNotFound(err) {
			return resultUnchanged, 0, nil // the cache will show the deletion
		} else if err != nil {
			return "", 0, err
		}

		if changes = append(changes, last.changes...); len(requests) == 1 {
			break
		}
	}

	switch {
	case last.initializes:
		c.reportInitialized(ctx, node)
	case len(changes) > 0:
		klog.FromContext(ctx).Info("Updated node", "changes", changes)
	case p.isPending:
		return resultPending, again, nil
	default:
		return resultUnchanged, again, nil
	}

	return resultChanged, again, nil
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

	problems := p.problems
	if s.managed && !p.isPending {
		problems = append(problems, c.addressWriters.observe(node, p.addresses, c.config.Clock.Now())...)
	}

	c.report(node, problems)

	// A Node gets its first conditions with its addresses or, if no addresses must be written, after its initialization.
	if !isUninitialized || p.addresses != nil || slices.ContainsFunc(node.Status.Conditions, isOwn) {
		p.conditions, again = syncConditions(s, c.planner.mostRespond, c.config.Clock.Now())
	}

	if again == 0 && p.isPending {
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

// send sends a request, and returns the new version of the Node.
func (c *Controller) send(ctx context.Context, nodename string, r request) (*corev1.Node, error) {
	changes := strings.Join(r.changes, ", ")

	data, err := json.Marshal(r.body)
	if err != nil {
		return nil, fmt.Errorf("encode %s of node %s: %w", changes, nodename, err)
	}

	options := metav1.PatchOptions{FieldManager: FieldManager}

	node, err := c.config.Client.CoreV1().Nodes().Patch(ctx, nodename, r.kind, data, options, r.subresource...)
	if err != nil {
		return nil, fmt.Errorf("patch %s of node %s: %w", changes, nodename, err)
	}

	c.expectations.Expect(node)

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
