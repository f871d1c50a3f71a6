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
// A sync compares the Node with its desired state (plan.go), and writes the differences (write). The same code
// initializes a Node and updates it. If a request fails, the Node keeps the uninitialized taint, and the sync is
// retried. Labels and annotations are applied, so that the API server removes those that a later apply omits.
// The providerID is patched: omitting it from a later apply would remove it, which the API server forbids.
package node

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	corev1ac "k8s.io/client-go/applyconfigurations/core/v1"
	coreinformers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/internal/events"
	"github.com/talos-ccm/talos-ccm/pkg/internal/expectations"
	"github.com/talos-ccm/talos-ccm/pkg/internal/nodes"
	"github.com/talos-ccm/talos-ccm/pkg/internal/queue"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
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
	// ReasonOwnershipConflict: another field manager set a label, annotation or taint to a different value; talos-ccm
	// skips that key.
	// Fix: choose one owner, see docs/troubleshooting/nodes.md#skipped-values.
	ReasonOwnershipConflict = "OwnershipConflict"
	// ReasonInvalidValue: a value of a rule or machine is skipped: Kubernetes does not accept it, no certificate could
	// contain it, or another machine reports it; or the rule for a providerID fails; or the machine exceeds a limit
	// (docs/explanation/security.md#limits).
	// Fix: docs/troubleshooting/nodes.md#skipped-values.
	ReasonInvalidValue = "InvalidValue"
	// ReasonTopologyChanged: the machine or a rule sets another region or zone; the Node keeps its own.
	// Fix: docs/troubleshooting/nodes.md#topology-changed.
	ReasonTopologyChanged = "TopologyChanged"
	// ReasonProviderIDInUse: another Node already has this providerID.
	// Fix: delete the Node that no longer exists; give clones identities of their own.
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

	// factsTimeout is how long a new Node waits until its machine has booted. Something that waits for the Node may delay that.
	factsTimeout = time.Minute

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
	expectations *expectations.Expectations
	pending      *pendingNodes
	queue        queue.Queue

	mu sync.Mutex
	// reservations are the providerIDs that Nodes will get, by nodename. The cache shows a providerID only after it is
	// written, and several Nodes are synced at the same time.
	reservations map[string]string
}

// New returns a Controller that is subscribed to Nodes and machines. Call it before the informer is started.
func New(cfg Config) (*Controller, error) {
	informer := cfg.Nodes.Informer()

	c := &Controller{
		config:       cfg,
		lister:       cfg.Nodes.Lister(),
		indexer:      informer.GetIndexer(),
		reporter:     events.New(cfg.Recorder),
		expectations: expectations.New(),
		pending:      &pendingNodes{gauge: uninitialized, names: sets.New[string]()},
		queue:        queue.New(Alias),
		reservations: map[string]string{},
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

	_, err = nodes.Watch(cfg.Nodes, func(before, after *corev1.Node) {
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

// Run processes the queue. It returns after ctx has ended and all workers have finished.
func (c *Controller) Run(ctx context.Context) {
	defer c.queue.ShutDown()
	// The next leader counts the Nodes.
	defer c.pending.update(func(names sets.Set[string]) { names.Clear() })

	if !cache.WaitForNamedCacheSyncWithContext(ctx, c.config.Nodes.Informer().HasSynced) {
		return
	}

	queue.Reconciler{Queue: c.queue, Subject: "node", Failure: "Failed to update node; retrying", Sync: c.sync}.Run(ctx, c.config.Workers)
}

// sync updates one Node and counts the result.
func (c *Controller) sync(ctx context.Context, nodename string) (again time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, syncTimeout)
	defer cancel()

	result := resultUnchanged

	node, err := c.lister.Get(nodename)
	switch {
	case err == nil:
		result, again, err = c.syncNode(ctx, node)
	case apierrors.IsNotFound(err):
		err = nil

		c.reporter.Forget(nodename)
		c.expectations.Forget(nodename)
		c.pending.update(func(names sets.Set[string]) { names.Delete(nodename) })
		c.release(nodename, "")
	}

	switch {
	case apierrors.IsConflict(err):
		result = resultConflict
	case err != nil:
		result = resultError
	}

	syncs.WithLabelValues(result).Inc()

	return again, err
}

// Results of a sync, as label values of the metric.
const (
	resultUnchanged = "unchanged"
	resultChanged   = "changed"
	resultPending   = "pending"
	resultConflict  = "conflict"
	resultError     = "error"
)

// syncNode updates a Node. If the desired state is not known yet, it reports why and returns no error: the change that
// resolves it queues the Node.
func (c *Controller) syncNode(ctx context.Context, node *corev1.Node) (result string, again time.Duration, err error) {
	entry, in := c.machineOf(node)
	managed := isManaged(node, entry, in)

	c.pending.update(func(names sets.Set[string]) {
		if managed && nodespec.IsUninitialized(node) {
			names.Insert(node.Name)
		} else {
			names.Delete(node.Name)
		}
	})

	if !c.expectations.Satisfied(node) {
		return resultUnchanged, 0, nil
	}

	p, isPending := &plan{}, false

	if managed {
		planned, problems, err := c.plan(node, entry, in)
		if err != nil {
			return "", 0, fmt.Errorf("compare node %s: %w", node.Name, err)
		}

		c.report(node, problems)

		if isPending = planned == nil; isPending {
			again = factsTimeout // nodespec may wait for facts until then
		} else {
			p = planned
		}
	} else {
		c.release(node.Name, node.Spec.ProviderID)
		c.report(node, nil)
	}

	if c.addConditions(p, node, entry, managed && !in.Options.OmitConditions) {
		again = recheckInterval
	}

	switch {
	case !p.empty():
		result, err = c.update(ctx, node, *p) // the new version of the Node is queued
	case isPending:
		result = resultPending
	default:
		result = resultUnchanged
	}

	return result, again, err
}

// machineOf returns the machine of a Node and the input for its desired state.
func (c *Controller) machineOf(node *corev1.Node) (inventory.Entry, nodespec.Input) {
	entry := c.config.Inventory.Get(node.Name)
	in := nodespec.NewInput(node, entry.Machine, c.config.Options(entry.Machine)).WithPeers(c.config.Inventory, node.Name, c.lister.Get)
	in.AwaitsFacts = c.config.Clock.Since(node.CreationTimestamp.Time) < factsTimeout

	return entry, in
}

// isManaged reports whether the controller manages a Node. The Node must run Talos and not be in deletion, and the
// configuration must select its machine. A machine that has not responded yet counts as selected.
func isManaged(node *corev1.Node, entry inventory.Entry, in nodespec.Input) bool {
	return nodespec.IsTalos(node) && node.DeletionTimestamp == nil && (entry.ObservedAt.IsZero() || nodespec.Selected(in))
}

// plan returns the plan for a managed Node and the problems to report. The plan is nil if the desired state is not
// known yet or cannot be written.
func (c *Controller) plan(node *corev1.Node, entry inventory.Entry, in nodespec.Input) (*plan, []events.Problem, error) {
	spec, problems := c.desired(node, entry, in)
	for kind, why := range entry.Machine.Ignored {
		problems = append(problems, events.Problem{Reason: ReasonInvalidValue, Subject: "machine//" + kind, Message: "Resources of the machine are ignored: " + why})
	}

	if spec == nil {
		return nil, problems, nil
	}

	wanted := spec.ProviderID

	id, problem := c.providerID(node, entry, wanted)
	if problem != nil {
		problems = append(problems, *problem)

		if problem.Reason == ReasonProviderIDInUse {
			return nil, problems, nil
		}
	}

	spec.ProviderID = id

	p, err := makePlan(node, *spec)
	if err != nil {
		return nil, nil, err
	}

	p.wantedID = wanted

	return &p, append(problems, p.conflicts...), nil
}

// desired returns the desired state of the Node, or nil if it is not known yet, and the problems to report.
func (c *Controller) desired(node *corev1.Node, entry inventory.Entry, in nodespec.Input) (desired *nodespec.Spec, problems []events.Problem) {
	switch entry.Condition {
	case inventory.Unreachable:
		problems = append(problems, events.Problem{Reason: ReasonUnreachable, Message: "Talos API is unreachable: " + entry.Reason})
	case inventory.Mismatch:
		c.release(node.Name, node.Spec.ProviderID)

		message := "Machine does not belong to this node: " + entry.Reason

		// The machine is probably the Node's own, and its kubelet has registered it under a different name.
		if _, err := c.lister.Get(entry.Responding); apierrors.IsNotFound(err) {
			message += ", and no node has that name. If its kubelet has another name by hostname-override in the extraArgs of the kubelet, " +
				"set the hostname of the machine or registerWithFQDN instead. If it was renamed, its new node appears when its kubelet starts"
		}

		problems = append(problems, events.Problem{Reason: ReasonIdentityMismatch, Message: message})
	case inventory.Unknown, inventory.Current:
	}

	// The last view of an unreachable machine is good enough to update a Node, but not to initialize or identify it.
	isUninitialized := nodespec.IsUninitialized(node)
	if entry.ObservedAt.IsZero() || (entry.Condition != inventory.Current && (isUninitialized || node.Spec.ProviderID == "")) {
		return nil, problems
	}

	started := c.config.Clock.Now()
	spec, invalid, pending := nodespec.Desired(in)

	transformation.Observe(c.config.Clock.Since(started).Seconds())

	for _, p := range invalid {
		problems = append(problems, events.Problem{Reason: ReasonInvalidValue, Subject: p.Kind() + "/" + p.Rule + "/" + p.Key, Message: p.String()})
	}

	if pending == "" {
		return &spec, problems
	}

	// No Event for initialized Nodes: every machine lacks metadata for a while after a reboot. Their updates wait, too.
	if isUninitialized {
		problems = append(problems, events.Problem{Reason: ReasonMetadataPending, Message: "Node cannot be initialized yet: " + pending})
	}

	return nil, problems
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

// update writes the plan, logs it and emits an Event for an initialization.
func (c *Controller) update(ctx context.Context, node *corev1.Node, p plan) (result string, err error) {
	written, err := c.write(ctx, node, p)
	c.expectations.Expect(written)

	switch {
	case apierrors.IsNotFound(err): // deleted in the meantime
		return resultUnchanged, nil
	case err != nil:
		return "", fmt.Errorf("update node %s: %w", node.Name, err)
	}

	logger := klog.FromContext(ctx)

	if !p.initialize {
		conditions := []string{} // not nil, which is logged as null
		for _, condition := range p.conditions {
			conditions = append(conditions, fmt.Sprintf("%s=%s", condition.Type, condition.Status))
		}

		logger.Info("Updated node", "metadata", p.apply, "addresses", p.addresses != nil, "taints", p.updateTaints, "conditions", conditions)

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

// write writes the plan in the order that makes initialization atomic for the scheduler: labels and annotations,
// addresses and conditions, and in the last request the providerID and the taints. It returns the Node after the last
// successful request, or the given Node. Every request contains the UID of the Node that the plan was made for, so that
// it can neither change a later Node of the same name nor create one.
func (c *Controller) write(ctx context.Context, node *corev1.Node, p plan) (*corev1.Node, error) {
	for _, step := range []struct {
		action  string
		needed  bool
		request func(*corev1.Node) (*corev1.Node, error)
	}{
		{"take over from the upstream Talos CCM", p.managedFields != nil, func(node *corev1.Node) (*corev1.Node, error) {
			// The request contains the resourceVersion, because it replaces a list.
			return c.patch(ctx, node.Name, types.MergePatchType, map[string]any{
				"metadata": map[string]any{"uid": node.UID, "resourceVersion": node.ResourceVersion, "managedFields": p.managedFields},
			})
		}},
		{"apply labels and annotations", p.apply, func(node *corev1.Node) (*corev1.Node, error) {
			// Without force: if a client has taken a key since the plan was made, the request fails, and the next sync
			// skips the key.
			config := corev1ac.Node(node.Name).WithUID(node.UID).WithLabels(p.labels).WithAnnotations(p.annotations)
			if p.recordsTaint {
				config.WithResourceVersion(node.ResourceVersion)
			}

			return c.config.Client.CoreV1().Nodes().Apply(ctx, config, metav1.ApplyOptions{FieldManager: FieldManager})
		}},
		{"patch status", p.patchesStatus(), func(node *corev1.Node) (*corev1.Node, error) { return c.patchStatus(ctx, node, p) }},
		{"patch spec", p.patchesSpec(), func(node *corev1.Node) (*corev1.Node, error) { return c.patchSpec(ctx, node, p) }},
	} {
		if !step.needed {
			continue
		}

		written, err := step.request(node)
		if err != nil {
			return node, fmt.Errorf("%s: %w", step.action, err)
		}

		node = written
	}

	return node, nil
}

// patchStatus sets the addresses and the conditions. The strategic merge patch leaves other conditions alone. It replaces
// the addresses, because merging would drop all but one of each type (https://github.com/kubernetes/kubernetes/issues/79391).
// Their order is kept, because they are grouped by type. Another writer may set a condition after the plan was made:
// patchStatus compares the conditions again, and the request contains the resourceVersion.
func (c *Controller) patchStatus(ctx context.Context, node *corev1.Node, p plan) (*corev1.Node, error) {
	metadata, status := map[string]any{"uid": node.UID}, map[string]any{}

	if p.addresses != nil {
		list := []any{map[string]any{"$patch": "replace"}}
		for _, address := range p.addresses {
			list = append(list, address)
		}

		status["addresses"] = list
	}

	if p.conditions != nil {
		conditions, _ := compareConditions(node, p.observation)
		list := make([]any, len(conditions))

		for i, condition := range conditions {
			if list[i] = condition; condition.Status == "" {
				list[i] = map[string]any{"$patch": "delete", "type": condition.Type}
			}
		}

		metadata["resourceVersion"], status["conditions"] = node.ResourceVersion, list
	}

	return c.patch(ctx, node.Name, types.StrategicMergePatchType, map[string]any{"metadata": metadata, "status": status}, "status")
}

// patchSpec sets the providerID and the taints. The request contains the resourceVersion, because it replaces the list
// of taints, and because a providerID cannot be changed once it is set. Most other requests do not contain the
// resourceVersion, so another client may have changed the Node before them. patchSpec therefore compares the Node again,
// and fails if another client has reverted labels, annotations or addresses. They must be in place before the
// uninitialized taint is removed.
func (c *Controller) patchSpec(ctx context.Context, node *corev1.Node, p plan) (*corev1.Node, error) {
	left, err := makePlan(node, p.spec)
	if err != nil {
		return nil, err
	} else if left.apply || left.addresses != nil || left.providerID != p.providerID {
		return nil, apierrors.NewConflict(corev1.Resource("nodes"), node.Name, errors.New("another client changed it after the plan was made"))
	}

	spec := map[string]any{}
	if p.providerID != "" {
		spec["providerID"] = p.providerID
	}

	if p.updateTaints {
		spec["taints"] = mergeTaints(node, p.spec.Taints).list
	}

	return c.patch(ctx, node.Name, types.MergePatchType, map[string]any{
		"metadata": map[string]any{"uid": node.UID, "resourceVersion": node.ResourceVersion},
		"spec":     spec,
	})
}

// patch sends a patch. A JSON merge patch replaces lists, a strategic merge patch merges them.
func (c *Controller) patch(
	ctx context.Context, nodename string, kind types.PatchType, patch map[string]any, subresources ...string,
) (*corev1.Node, error) {
	data, err := json.Marshal(patch)
	if err != nil {
		return nil, err
	}

	return c.config.Client.CoreV1().Nodes().Patch(ctx, nodename, kind, data, metav1.PatchOptions{FieldManager: FieldManager}, subresources...)
}
