package node

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"slices"

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

	// ownerTalos is the owner of keys that Talos lists in annotations of the Node.
	ownerTalos = "Talos"
)

// metadata are the labels or the annotations of a Node, with their owners.
type metadata struct {
	field  string // labels or annotations
	noun   string // in Events
	values map[string]string
	// applied are the values that the controller owns.
	applied map[string]string
	// owners are Talos and the field managers that own keys, without this controller and the upstream Talos CCM. Labels
	// and annotations of the upstream Talos CCM change their owner when they are applied.
	owners map[string]string
}

func newMetadata(field, noun string, values map[string]string, managers []fieldManager, talosKeys []string) metadata {
	m := metadata{field, noun, values, map[string]string{}, map[string]string{}}

	for key, value := range values {
		path := metadataPath(field, key)

		for _, manager := range managers {
			switch {
			case !manager.fields.Has(path):
			case manager.isOurs:
				m.applied[key] = value
			case !manager.isUpstream && m.owners[key] == "":
				m.owners[key] = fmt.Sprintf("field manager %q", manager.entry.Manager)
			}
		}
	}

	for _, key := range talosKeys {
		if !isRecord(key) { // kubelets can write the annotation
			m.owners[key] = ownerTalos
		}
	}

	return m
}

// compare returns the desired values that the controller may apply, and the others as conflicts.
//
// It skips keys that another client owns with a different value. It applies keys with a different value that no client
// owns: an interrupted takeover from the upstream Talos CCM leaves them. It does not start to apply keys that Talos
// owns, since Talos would revert them. Keys that were applied before Talos took them over stay applied as long as the
// values are equal: otherwise they would be removed.
func (m metadata) compare(desired map[string]string) (apply map[string]string, conflicts []events.Problem) {
	apply = map[string]string{}

	for _, key := range slices.Sorted(maps.Keys(desired)) {
		current, exists := m.values[key]
		_, isApplied := m.applied[key]
		owner := m.owners[key]

		switch {
		case exists && current != desired[key] && owner != "":
			conflicts = append(conflicts, events.Problem{
				Reason:  ReasonOwnershipConflict,
				Subject: m.field + "/" + key,
				Message: fmt.Sprintf("%s %s=%.80q is owned by %s; skipped", m.noun, key, current, owner),
			})
		case owner == ownerTalos && !isApplied: // Talos sets it
		default:
			apply[key] = desired[key]
		}
	}

	return apply, conflicts
}

// topology is a field of the platform metadata with its labels: the stable one and the deprecated one.
type topology struct{ field, stable, beta string }

var topologies = []topology{
	{"Region", corev1.LabelTopologyRegion, corev1.LabelFailureDomainBetaRegion},
	{"Zone", corev1.LabelTopologyZone, corev1.LabelFailureDomainBetaZone},
}

// keepTopology replaces the region and the zone in the desired labels by those of an initialized Node, and returns each
// difference as a problem. Volumes are bound to these labels, and Kubernetes documents that it is safe to assume that
// they do not change (https://kubernetes.io/docs/reference/labels-annotations-taints/#topologykubernetesiozone). The
// labels of the Node are the only state, so a restart changes nothing.
//
// Missing labels are not kept but set: no volume can be bound to them, and an operator accepts a new value by deleting
// the label. The beta label follows the stable one.
func keepTopology(node *corev1.Node, labels metadata, spec nodespec.Spec, desired map[string]string) (changed []events.Problem) {
	for _, t := range topologies {
		current, exists := node.Labels[t.stable]
		_, isApplied := labels.applied[t.stable]
		_, isBetaApplied := labels.applied[t.beta]
		value := spec.Labels[t.stable]

		switch {
		case !exists || current == value:
		case labels.owners[t.stable] != "": // compare reports the conflict
			value = current
		case nodespec.IsUninitialized(node) || (value == "" && !isApplied):
		default:
			changed = append(changed, topologyChanged(spec, t, current))
			value, desired[t.stable] = current, current
		}

		if value != "" && (isBetaApplied || spec.Labels[t.beta] != "") {
			desired[t.beta] = value
		}
	}

	return changed
}

func topologyChanged(spec nodespec.Spec, t topology, current string) events.Problem {
	source := "its machine"
	if rule := cmp.Or(spec.Transformed.Labels[t.stable].Rule, spec.Transformed.Replaced[t.field]); rule != "" {
		source = fmt.Sprintf("rule %q", rule)
	}

	now := "no longer sets it"
	if value := spec.Labels[t.stable]; value != "" {
		now = fmt.Sprintf("now sets %.80q", value)
	}

	return events.Problem{Reason: ReasonTopologyChanged, Subject: t.stable, Message: fmt.Sprintf(
		"Node keeps label %s=%.80q, but %s %s; to accept the new value, delete the label or set nodes.topology: follow", t.stable, current, source, now)}
}

// fieldManager is an entry of managedFields. The generated ExtractNode cannot be used: it fails for Nodes with two
// addresses of one type (https://github.com/kubernetes/kubernetes/issues/79391), such as every dual-stack Node.
type fieldManager struct {
	entry  metav1.ManagedFieldsEntry
	fields *fieldpath.Set
	// isOurs is true for what this controller applies, and isUpstream for the metadata of the upstream Talos CCM.
	isOurs, isUpstream bool
}

func fieldManagers(managedFields []metav1.ManagedFieldsEntry) ([]fieldManager, error) {
	var managers []fieldManager

	for _, entry := range managedFields {
		m := fieldManager{
			entry:      entry,
			fields:     fieldpath.NewSet(),
			isOurs:     entry.Manager == FieldManager && entry.Operation == metav1.ManagedFieldsOperationApply && entry.Subresource == "",
			isUpstream: entry.Manager == upstreamManager && entry.Operation == metav1.ManagedFieldsOperationUpdate && entry.Subresource == "",
		}

		if entry.FieldsV1 != nil {
			if err := m.fields.FromJSON(bytes.NewReader(entry.FieldsV1.GetRawBytes())); err != nil {
				return nil, fmt.Errorf("decode managed fields of %q: %w", entry.Manager, err)
			}
		}

		managers = append(managers, m)
	}

	return managers, nil
}

func metadataPath(field, key string) fieldpath.Path {
	return fieldpath.MakePathOrDie("metadata", field, key)
}

func (p plan) appliedFields() *fieldpath.Set {
	fields := fieldpath.NewSet()

	for key := range p.labels {
		fields.Insert(metadataPath("labels", key))
	}

	for key := range p.annotations {
		fields.Insert(metadataPath("annotations", key))
	}

	return fields
}

// takeOver returns managedFields in which the upstream Talos CCM does not own the applied labels and annotations; nil
// if it owns none. If it stayed an owner, the API server would keep them when the controller no longer applies them.
func (p plan) takeOver(managers []fieldManager) (entries []metav1.ManagedFieldsEntry, err error) {
	applied, changed := p.appliedFields(), false

	for _, m := range managers {
		if m.isUpstream && !m.fields.Intersection(applied).Empty() {
			fields, err := m.fields.Difference(applied).ToJSON()
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

// ownedByTalos returns the keys in the value of an annotation that lists what Talos owns. They are JSON
// (k8s/NodeApplyController); Talos changes nothing if it cannot parse them.
func ownedByTalos(annotation string) []string {
	var keys []string
	if err := json.Unmarshal([]byte(annotation), &keys); err != nil {
		return nil
	}

	return keys
}
