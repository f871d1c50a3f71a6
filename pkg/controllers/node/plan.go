package node

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"slices"

	"github.com/siderolabs/talos/pkg/machinery/constants"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"

	"github.com/talos-ccm/talos-ccm/pkg/internal/events"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
)

const (
	// FieldManager owns the labels and annotations that the controller applies.
	FieldManager = "talos-ccm"

	// upstreamManager is the field manager of the upstream Talos CCM: the name of its binary.
	upstreamManager = "talos-cloud-controller-manager"

	// ownerTalos is the owner of keys that Talos lists in an annotation of the Node.
	ownerTalos = "Talos"
)

// plan is the difference between a Node and its desired state. The zero value means that there is none.
type plan struct {
	// spec is the desired state.
	spec nodespec.Spec
	// managedFields replace the managed fields of the Node unless nil. They are written first, and remove the upstream
	// Talos CCM as owner of labels and annotations that are applied next.
	managedFields []metav1.ManagedFieldsEntry
	// apply is true if labels or annotations must be applied. They are complete, and may be empty.
	apply               bool
	labels, annotations map[string]string
	// recordsTaint is true if the labels record a taint as enforced that was not recorded before. The record must be
	// written to this version of the Node only: in a later version, the taint may belong to another client.
	recordsTaint bool
	// addresses replace status.addresses unless nil.
	addresses []corev1.NodeAddress
	// providerID is set unless empty, which means that the Node has one.
	providerID string
	// wantedID is the providerID of a new Node of the machine.
	wantedID string
	// initialize is true if the uninitialized taint must be removed, in the same write that sets providerID.
	initialize bool
	// updateTaints is true if spec.taints must change. The new list is computed from the version of the Node that is
	// written.
	updateTaints bool
	// conflicts are values that were skipped: another client has set a different one, or the topology is kept.
	conflicts []events.Condition
}

func (p plan) empty() bool {
	return p.managedFields == nil && !p.apply && p.addresses == nil && !p.patchesSpec()
}

func (p plan) patchesSpec() bool { return p.providerID != "" || p.updateTaints }

// makePlan compares the Node with its desired state. It changes neither.
func makePlan(node *corev1.Node, spec nodespec.Spec) (plan, error) {
	managers, err := fieldManagers(node)
	if err != nil {
		return plan{}, err
	}

	taints := planTaints(node, spec.Taints)
	desiredLabels := maps.Clone(taints.record)
	maps.Copy(desiredLabels, spec.Labels)

	var topologyChanges []events.Condition
	if !spec.FollowTopology {
		topologyChanges = keepTopology(node, managers, spec, desiredLabels)
	}

	labels := labelsField.compare(node, managers, desiredLabels)
	annotations := annotationsField.compare(node, managers, spec.Annotations)

	p := plan{
		spec:         spec,
		apply:        labels.changed || annotations.changed,
		labels:       labels.apply,
		annotations:  annotations.apply,
		recordsTaint: slices.ContainsFunc(slices.Collect(maps.Keys(taints.record)), func(key string) bool { return !hasLabel(node, key) }),
		initialize:   nodespec.IsUninitialized(node),
		updateTaints: !slices.Equal(taints.list, node.Spec.Taints),
		conflicts:    slices.Concat(topologyChanges, taints.conflicts, labels.conflicts, annotations.conflicts),
	}

	if p.managedFields, err = takeOver(managers, p.labels, p.annotations); err != nil {
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

// applyTo returns the Node after the plan is written. It does not change the given one.
func (p plan) applyTo(node *corev1.Node) (*corev1.Node, error) {
	managers, err := fieldManagers(node)
	if err != nil {
		return nil, err
	}

	after := node.DeepCopy()
	after.Spec.ProviderID = cmp.Or(p.providerID, node.Spec.ProviderID)

	if p.apply {
		after.Labels = labelsField.applied(node, managers, p.labels)
		after.Annotations = annotationsField.applied(node, managers, p.annotations)
	}

	if p.addresses != nil {
		after.Status.Addresses = p.addresses
	}

	if p.updateTaints {
		after.Spec.Taints = planTaints(node, p.spec.Taints).list
	}

	return after, nil
}

// metadataField is one of the two maps that the controller applies.
type metadataField struct {
	name string // in metadata
	noun string // in Events
	of   func(*corev1.Node) map[string]string
	// talosKeys is the annotation in which Talos lists the keys that it owns (k8s/NodeApplyController).
	talosKeys string
}

var (
	labelsField = metadataField{
		name: "labels", noun: "Label", talosKeys: constants.AnnotationOwnedLabels,
		of: func(node *corev1.Node) map[string]string { return node.Labels },
	}
	annotationsField = metadataField{
		name: "annotations", noun: "Annotation", talosKeys: constants.AnnotationOwnedAnnotations,
		of: func(node *corev1.Node) map[string]string { return node.Annotations },
	}
)

func (f metadataField) path(key string) fieldpath.Path {
	return fieldpath.MakePathOrDie("metadata", f.name, key)
}

// comparison is what to apply to a metadataField.
type comparison struct {
	apply     map[string]string
	changed   bool // apply differs from what is applied
	conflicts []events.Condition
}

// compare returns the desired keys that the controller may own.
//
// It skips keys that another client owns with a different value. It applies keys with a different value that no client
// owns: an interrupted takeover from the upstream Talos CCM leaves them. It does not start to apply keys that Talos
// owns, since Talos would revert them. Keys that were applied before Talos took them over stay applied as long as the
// values are equal: otherwise they would be removed.
func (f metadataField) compare(node *corev1.Node, managers []fieldManager, desired map[string]string) comparison {
	present, applied := f.of(node), map[string]string{}

	for key, value := range present {
		if f.isApplied(managers, key) {
			applied[key] = value
		}
	}

	result := comparison{apply: map[string]string{}}

	for _, key := range slices.Sorted(maps.Keys(desired)) {
		current, exists := present[key]
		_, isApplied := applied[key]
		owner := f.otherOwner(node, managers, key)

		switch {
		case exists && current != desired[key] && owner != "":
			result.conflicts = append(result.conflicts, events.Condition{
				Reason:  ReasonOwnershipConflict,
				Subject: f.name + "/" + key,
				Message: fmt.Sprintf("%s %s=%.80q is owned by %s; skipped", f.noun, key, current, owner),
			})
		case owner == ownerTalos && !isApplied: // Talos sets it
		default:
			result.apply[key] = desired[key]
		}
	}

	result.changed = !maps.Equal(result.apply, applied)

	return result
}

// applied returns the keys of the Node after apply is applied: server-side apply removes what the controller no longer
// applies and no other manager owns.
func (f metadataField) applied(node *corev1.Node, managers []fieldManager, apply map[string]string) map[string]string {
	after := maps.Clone(f.of(node))

	maps.DeleteFunc(after, func(key, _ string) bool {
		return f.isApplied(managers, key) && !slices.ContainsFunc(managers, func(m fieldManager) bool { return !m.isOurs() && m.fields.Has(f.path(key)) })
	})

	if after == nil {
		return apply
	}

	maps.Copy(after, apply)

	return after
}

// fieldManager is an entry of managedFields. The generated ExtractNode cannot be used: it fails for Nodes with two
// addresses of one type (https://github.com/kubernetes/kubernetes/issues/79391), such as every dual-stack Node.
type fieldManager struct {
	entry  metav1.ManagedFieldsEntry
	fields *fieldpath.Set
}

func fieldManagers(node *corev1.Node) ([]fieldManager, error) {
	var managers []fieldManager

	for _, entry := range node.ManagedFields {
		m := fieldManager{entry: entry, fields: fieldpath.NewSet()}

		if entry.FieldsV1 != nil {
			if err := m.fields.FromJSON(bytes.NewReader(entry.FieldsV1.GetRawBytes())); err != nil {
				return nil, fmt.Errorf("decode managed fields of %q: %w", entry.Manager, err)
			}
		}

		managers = append(managers, m)
	}

	return managers, nil
}

func (m fieldManager) isOurs() bool {
	return m.entry.Manager == FieldManager && m.entry.Operation == metav1.ManagedFieldsOperationApply && m.entry.Subresource == ""
}

// isUpstream reports whether the manager is the upstream Talos CCM. Its labels and annotations change their owner as
// soon as they are applied.
func (m fieldManager) isUpstream() bool {
	return m.entry.Manager == upstreamManager && m.entry.Operation == metav1.ManagedFieldsOperationUpdate && m.entry.Subresource == ""
}

// isApplied reports whether this controller owns the key.
func (f metadataField) isApplied(managers []fieldManager, key string) bool {
	return slices.ContainsFunc(managers, func(m fieldManager) bool { return m.isOurs() && m.fields.Has(f.path(key)) })
}

// otherOwner names Talos or a field manager, other than this controller and the upstream Talos CCM, that owns the key;
// empty if there is none.
func (f metadataField) otherOwner(node *corev1.Node, managers []fieldManager, key string) string {
	if slices.Contains(ownedByTalos(node, f.talosKeys), key) {
		return ownerTalos
	}

	for _, m := range managers {
		if m.fields.Has(f.path(key)) && !m.isOurs() && !m.isUpstream() {
			return fmt.Sprintf("field manager %q", m.entry.Manager)
		}
	}

	return ""
}

// takeOver returns managedFields in which the upstream Talos CCM does not own the given labels and annotations; nil if
// it owns none. As long as it is an owner, they would not be removed when the controller no longer applies them.
func takeOver(managers []fieldManager, labels, annotations map[string]string) ([]metav1.ManagedFieldsEntry, error) {
	taken := fieldpath.NewSet()

	for key := range labels {
		taken.Insert(labelsField.path(key))
	}

	for key := range annotations {
		taken.Insert(annotationsField.path(key))
	}

	var entries []metav1.ManagedFieldsEntry

	changed := false

	for _, m := range managers {
		if m.isUpstream() && !m.fields.Intersection(taken).Empty() {
			fields, err := m.fields.Difference(taken).ToJSON()
			if err != nil {
				return nil, fmt.Errorf("encode managed fields of %q: %w", m.entry.Manager, err)
			}

			m.entry.FieldsV1, changed = metav1.NewFieldsV1(string(fields)), true
		}

		entries = append(entries, m.entry)
	}

	if !changed {
		return nil, nil
	}

	return entries, nil
}

// ownedByTalos returns the keys in one of the annotations that list what Talos owns. They are JSON
// (k8s/NodeApplyController); Talos changes nothing if it cannot parse them.
func ownedByTalos(node *corev1.Node, annotation string) []string {
	var keys []string
	if err := json.Unmarshal([]byte(node.Annotations[annotation]), &keys); err != nil {
		return nil
	}

	return keys
}
