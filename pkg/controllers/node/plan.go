package node

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/siderolabs/talos/pkg/machinery/constants"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	corev1ac "k8s.io/client-go/applyconfigurations/core/v1"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/claims"
	"github.com/talos-ccm/talos-ccm/pkg/internal/events"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/noderecord"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
)

// planner plans what to write to Nodes. It only reads.
type planner struct {
	nodes     corelisters.NodeLister
	inventory *inventory.Inventory
	clock     clock.PassiveClock
	options   func() nodespec.Options
	recorded  func(node *corev1.Node) bool
}

type state struct {
	node  *corev1.Node
	entry inventory.Entry
	input nodespec.Input
	// managed is true if the controller manages the Node: it runs Talos, is not in deletion, and the configuration selects
	// its machine. A machine that has not responded yet counts as selected.
	managed bool
	// spec is nil if the desired state is not known yet, or if the Node is not managed.
	spec     *nodespec.Spec
	problems []events.Problem
}

// awaitsOthers reports whether another Node may give up the providerID or an address of this one.
func (s state) awaitsOthers() bool {
	return s.managed && (s.node.Spec.ProviderID == "" || s.spec != nil && s.spec.AwaitsAddress)
}

func (p planner) observe(node *corev1.Node) state {
	entry := p.inventory.Get(node.Name)
	in := nodespec.NewInput(node, entry.Machine, p.options()).WithPeers(p.inventory, node.Name, p.nodes.Get)
	in.AwaitsFacts = p.clock.Since(node.CreationTimestamp.Time) < factsTimeout

	s := state{node: node, entry: entry, input: in}

	s.managed = nodespec.IsTalos(node) && node.DeletionTimestamp == nil && (entry.ObservedAt.IsZero() || nodespec.Selected(in))
	if !s.managed {
		return s
	}

	by := claims.Requester{Nodename: node.Name, UID: node.UID, Endpoint: entry.Machine.Endpoint, ObservedAt: entry.ObservedAt}
	s.input.ReserveAddress = func(ip netip.Addr) (owner string) { return p.inventory.Claims.Reserve(ip, by) }
	s.spec, s.problems = p.desired(s)

	for kind, why := range entry.Machine.Ignored {
		s.problems = append(s.problems, events.Problem{Reason: ReasonInvalidValue, Subject: "machine//" + kind, Message: "Resources of the machine are ignored: " + why})
	}

	return s
}

// desired returns the desired state of a managed Node, or nil if it is not known yet, and the problems to report.
func (p planner) desired(s state) (desired *nodespec.Spec, problems []events.Problem) {
	switch s.entry.Condition {
	case inventory.Unreachable:
		problems = append(problems, events.Problem{Reason: ReasonUnreachable, Message: "Talos API is unreachable: " + s.entry.Reason})
	case inventory.Mismatch:
		message := "Machine does not belong to this node: " + s.entry.Reason

		// The machine is probably the Node's own, and its kubelet has registered it under a different name.
		if _, err := p.nodes.Get(s.entry.Responding); apierrors.IsNotFound(err) {
			message += ", and no node has that name. If its kubelet has another name by hostname-override in the extraArgs of the kubelet, " +
				"set the hostname of the machine or registerWithFQDN instead. If it was renamed, its new node appears when its kubelet starts"
		}

		problems = append(problems, events.Problem{Reason: ReasonIdentityMismatch, Message: message})
	case inventory.Unknown, inventory.Current:
	}

	// The last view of an unreachable machine is good enough to update a Node, but not to initialize or identify it.
	isUninitialized := nodespec.IsUninitialized(s.node)
	if s.entry.ObservedAt.IsZero() || (s.entry.Condition != inventory.Current && (isUninitialized || s.node.Spec.ProviderID == "")) {
		return nil, problems
	}

	started := p.clock.Now()
	spec, invalid, pending := nodespec.Desired(s.input)

	transformation.Observe(p.clock.Since(started).Seconds())

	for _, p := range invalid {
		problems = append(problems, events.Problem{Reason: ReasonInvalidValue, Subject: p.Kind() + "/" + p.Rule + "/" + p.Key, Message: p.String()})
	}

	if pending == "" {
		keepRuleAddresses(s, spec)

		return &spec, problems
	}

	// No Event for initialized Nodes: every machine lacks metadata for a while after a reboot. Their updates wait, too.
	if isUninitialized {
		problems = append(problems, events.Problem{Reason: ReasonMetadataPending, Message: "Node cannot be initialized yet: " + pending})
	}

	return nil, problems
}

// keepRuleAddresses keeps the labels of addresses that rules set while a machine responds that is not the recorded one: it
// could free them for other Nodes.
func keepRuleAddresses(s state, spec nodespec.Spec) {
	m, r := s.entry.Machine, noderecord.Of(s.node)
	if r.Matches(m) || !r.Address.IsValid() && !r.Contradicts(m) {
		return
	}

	for key, value := range s.node.Labels {
		if _, isDesired := spec.Labels[key]; !isDesired && strings.HasPrefix(key, noderecord.LabelRuleAddress) {
			spec.Labels[key] = value
		}
	}
}

// plan compares a Node with its desired state. owner is the other Node that has the providerID; empty if none.
func (p planner) plan(s state, owner string) (plan, error) {
	pending := plan{isPending: s.managed, problems: s.problems}
	if actual := s.node.Spec.ProviderID; s.managed && actual != "" && owner != "" {
		pending.problems = append(pending.problems, events.Problem{Reason: ReasonProviderIDInUse, Message: fmt.Sprintf(
			"Node %s has providerID %s, too; delete the node that no machine belongs to", owner, actual)})
	}

	if s.spec == nil || nodespec.IsUninitialized(s.node) && !p.recorded(s.node) {
		return pending, nil
	}

	spec := *s.spec

	id, problem := p.providerID(s, owner)
	if problem != nil {
		if pending.problems = append(pending.problems, *problem); problem.Reason == ReasonProviderIDInUse {
			return pending, nil
		}
	}

	spec.ProviderID = id

	result, err := makePlan(s.node, spec)
	if err != nil {
		return plan{}, fmt.Errorf("compare node %s: %w", s.node.Name, err)
	}

	result.problems = append(pending.problems, result.problems...)

	return result, nil
}

// plan is the difference between a Node and its desired state. The zero value means that there is none.
type plan struct {
	// isPending is true if the desired state is not known yet or cannot be written.
	isPending bool
	// managedFields replace the managed fields of the Node unless nil. They are written first, and remove the upstream
	// Talos CCM as owner of the labels and annotations that are applied next.
	managedFields []metav1.ManagedFieldsEntry
	// apply is true if labels or annotations must be applied. They are complete, and may be empty.
	apply               bool
	labels, annotations map[string]string
	// released are labels that record what a rule no longer sets, with nil as value.
	released map[string]any
	// recordsTaint is true if the labels record a taint as enforced that was not recorded before. The request then carries
	// the resourceVersion, so that it fails if another client has added the taint since. A taint that another client adds
	// between this request and the next one is still mistaken for an enforced one.
	recordsTaint bool
	// addresses replace status.addresses unless nil.
	addresses []corev1.NodeAddress
	// conditions are set, or removed if they have no status.
	conditions []corev1.NodeCondition
	// providerID is set unless empty: the Node has one, or another Node still has it.
	providerID string
	// taints replace spec.taints if updateTaints is true.
	taints       []corev1.Taint
	updateTaints bool
	// problems are why values are not written, such as a conflict with another client.
	problems []events.Problem
}

// makePlan compares the Node with its desired state. It changes neither.
func makePlan(node *corev1.Node, spec nodespec.Spec) (plan, error) {
	managers, err := fieldManagers(node.ManagedFields)
	if err != nil {
		return plan{}, err
	}

	labels := newMetadata("labels", "Label", node.Labels, managers, ownedByTalos(node.Annotations[constants.AnnotationOwnedLabels]))
	annotations := newMetadata("annotations", "Annotation", node.Annotations, managers, ownedByTalos(node.Annotations[constants.AnnotationOwnedAnnotations]))
	taints := mergeTaints(node, spec.Taints)
	desired := maps.Clone(taints.record)
	maps.Copy(desired, spec.Labels)

	var topologyChanges []events.Problem
	if !spec.FollowTopology {
		topologyChanges = keepTopology(node, labels, spec, desired)
	}

	p := plan{released: released(node, desired), taints: taints.list, updateTaints: !slices.Equal(taints.list, node.Spec.Taints)}

	var labelConflicts, annotationConflicts []events.Problem

	p.labels, labelConflicts = labels.compare(desired)
	p.annotations, annotationConflicts = annotations.compare(spec.Annotations)
	p.apply = !maps.Equal(p.labels, labels.applied) || !maps.Equal(p.annotations, annotations.applied)
	p.problems = slices.Concat(topologyChanges, taints.conflicts, labelConflicts, annotationConflicts)

	for key := range taints.record {
		p.recordsTaint = p.recordsTaint || !hasLabel(node, key)
	}

	if p.managedFields, err = p.takeOver(managers); err != nil {
		return plan{}, err
	}

	if !slices.Equal(node.Status.Addresses, spec.Addresses) {
		p.addresses = spec.Addresses
	}

	if node.Spec.ProviderID == "" {
		p.providerID = spec.ProviderID
	}

	return p, nil
}

func isRecord(key string) bool {
	return strings.HasPrefix(key, noderecord.LabelRuleAddress) || strings.HasPrefix(key, labelEnforcedTaint)
}

// released returns the labels of the Node that record what rules no longer set. A kubelet that applies such a label with its
// value becomes an owner of it, too, because NodeRestriction compares only values. Omitting the label does not remove it then.
func released(node *corev1.Node, desired map[string]string) map[string]any {
	keys := map[string]any{}

	for key := range node.Labels {
		if _, isDesired := desired[key]; isRecord(key) && !isDesired {
			keys[key] = nil
		}
	}

	return keys
}

// changeAddresses is the change of a request that replaces the addresses.
const changeAddresses = "addresses"

type request struct {
	kind        types.PatchType
	body        any
	subresource []string
	// changes are what it changes, for logs and errors.
	changes []string
	// initializes is true if it removes the uninitialized taint.
	initializes bool
}

// requests returns the patches that the Node needs, in the order that makes initialization atomic for the scheduler:
// labels and annotations, addresses and conditions, and in the last request the providerID and the taints. Every request
// contains the UID of the Node, so that it can neither change a later Node of the same name nor create one. A request
// that depends on other values of the Node contains the resourceVersion, too.
func (p plan) requests(node *corev1.Node) (list []request) {
	if p.managedFields != nil {
		list = append(list, request{kind: types.MergePatchType, changes: []string{"field managers"}, body: map[string]any{
			"metadata": map[string]any{"uid": node.UID, "resourceVersion": node.ResourceVersion, "managedFields": p.managedFields},
		}})
	}

	if p.apply {
		// Without force: if a client has taken a key since the plan was made, the request fails, and the next sync skips
		// the key.
		config := corev1ac.Node(node.Name).WithUID(node.UID).WithLabels(p.labels).WithAnnotations(p.annotations)
		if p.recordsTaint {
			config.WithResourceVersion(node.ResourceVersion)
		}

		list = append(list, request{kind: types.ApplyYAMLPatchType, changes: []string{"labels and annotations"}, body: config})
	}

	if len(p.released) > 0 {
		list = append(list, request{kind: types.MergePatchType, changes: []string{"records of rules"}, body: map[string]any{
			"metadata": map[string]any{"uid": node.UID, "labels": p.released},
		}})
	}

	if p.addresses != nil || p.conditions != nil {
		list = append(list, p.statusRequest(node))
	}

	// A providerID cannot be changed once it is set, and the list of taints is replaced.
	spec, changes := map[string]any{}, []string(nil)

	if p.providerID != "" {
		spec["providerID"], changes = p.providerID, append(changes, "providerID")
	}

	if p.updateTaints {
		spec["taints"], changes = p.taints, append(changes, "taints")
	}

	if len(changes) > 0 {
		list = append(list, request{kind: types.MergePatchType, changes: changes, initializes: nodespec.IsUninitialized(node), body: map[string]any{
			"metadata": map[string]any{"uid": node.UID, "resourceVersion": node.ResourceVersion}, "spec": spec,
		}})
	}

	return list
}

// statusRequest sets the addresses and the conditions. The strategic merge patch leaves other conditions alone. It
// replaces the addresses, because merging would drop all but one of each type
// (https://github.com/kubernetes/kubernetes/issues/79391). Their order is kept, because they are grouped by type.
func (p plan) statusRequest(node *corev1.Node) request {
	metadata, status := map[string]any{"uid": node.UID}, map[string]any{}
	r := request{kind: types.StrategicMergePatchType, body: map[string]any{"metadata": metadata, "status": status}, subresource: []string{"status"}}

	if p.addresses != nil {
		list := []any{map[string]any{"$patch": "replace"}}
		for _, address := range p.addresses {
			list = append(list, address)
		}

		status["addresses"], r.changes = list, append(r.changes, changeAddresses)
	}

	var list []any

	for _, condition := range p.conditions {
		if condition.Status == "" {
			list = append(list, map[string]any{"$patch": "delete", "type": condition.Type})
		} else {
			list = append(list, condition)
		}

		r.changes = append(r.changes, fmt.Sprintf("%s=%s", condition.Type, condition.Status))
	}

	if list != nil { // other writers may set conditions, too
		metadata["resourceVersion"], status["conditions"] = node.ResourceVersion, list
	}

	return r
}
