package node

import (
	"bytes"
	"encoding/json"
	"fmt"

	"github.com/siderolabs/talos/pkg/machinery/constants"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"
)

const (
	// FieldManager owns the labels and annotations we apply.
	FieldManager = "talos-ccm"

	// upstreamManager is the name under which the upstream Talos CCM has written: its binary's.
	upstreamManager = "talos-cloud-controller-manager"
)

// family is one of the two maps of keys that we apply.
type family struct {
	name  string // as Events show it
	field string // in metadata
	of    func(*corev1.Node) map[string]string
	// talosList is the annotation in which Talos's own controller lists the keys that it keeps (k8s/NodeApplyController).
	talosList string
}

var (
	labelFamily = family{
		name: "Label", field: "labels", talosList: constants.AnnotationOwnedLabels,
		of: func(node *corev1.Node) map[string]string { return node.Labels },
	}
	annotationFamily = family{
		name: "Annotation", field: "annotations", talosList: constants.AnnotationOwnedAnnotations,
		of: func(node *corev1.Node) map[string]string { return node.Annotations },
	}
)

// managers are all who hold fields of a Node, by the managed fields. The generated ExtractNode cannot be used: it refuses a Node with two
// addresses of one type (https://github.com/kubernetes/kubernetes/issues/79391), which every dual-stack Node has.
type managers []manager

type manager struct {
	entry  metav1.ManagedFieldsEntry
	fields *fieldpath.Set
}

func managersOf(node *corev1.Node) (managers, error) {
	var list managers

	for _, entry := range node.ManagedFields {
		m := manager{entry: entry, fields: fieldpath.NewSet()}

		if entry.FieldsV1 != nil {
			if err := m.fields.FromJSON(bytes.NewReader(entry.FieldsV1.GetRawBytes())); err != nil {
				return nil, fmt.Errorf("read the managed fields of %s: %w", entry.Manager, err)
			}
		}

		list = append(list, m)
	}

	return list, nil
}

func (m manager) ours() bool {
	return m.entry.Manager == FieldManager && m.entry.Operation == metav1.ManagedFieldsOperationApply && m.entry.Subresource == ""
}

// inherited is true for what the upstream Talos CCM has left behind: its keys become ours as soon as we set them.
func (m manager) inherited() bool {
	return m.entry.Manager == upstreamManager && m.entry.Operation == metav1.ManagedFieldsOperationUpdate && m.entry.Subresource == ""
}

func (m manager) holds(f family, key string) bool {
	return m.fields.Has(fieldpath.MakePathOrDie("metadata", f.field, key))
}

// holding is who holds which keys of a family.
type holding struct {
	ours   map[string]string // that we hold by having applied them, with their values
	others map[string]bool   // that somebody else holds, perhaps together with us; not what the upstream Talos CCM has left
	talos  map[string]bool   // of others, that Talos's own controller holds
}

func (list managers) holding(node *corev1.Node, f family) holding {
	held := holding{ours: map[string]string{}, others: map[string]bool{}, talos: map[string]bool{}}

	for _, key := range talosKeys(node, f.talosList) {
		held.talos[key], held.others[key] = true, true
	}

	for key, value := range f.of(node) {
		for _, m := range list {
			switch {
			case !m.holds(f, key), m.inherited():
			case m.ours():
				held.ours[key] = value
			default:
				held.others[key] = true
			}
		}
	}

	return held
}

// inherit returns the managed fields without the upstream Talos CCM's hold on the given keys; nil if it holds none of them. Without that a key we
// apply would be held by both, and stay when we no longer set it.
func (list managers) inherit(labels, annotations map[string]string) ([]metav1.ManagedFieldsEntry, error) {
	var (
		entries []metav1.ManagedFieldsEntry
		changed bool
	)

	for _, m := range list {
		kept := m.fields

		if m.inherited() {
			kept = m.fields.Difference(keySet(labelFamily, labels).Union(keySet(annotationFamily, annotations)))
		}

		if kept.Size() == m.fields.Size() {
			entries = append(entries, m.entry)

			continue
		}

		changed = true

		fields, err := kept.ToJSON()
		if err != nil {
			return nil, fmt.Errorf("write the managed fields of %s: %w", m.entry.Manager, err)
		}

		entry := m.entry
		entry.FieldsV1 = metav1.NewFieldsV1(string(fields))
		entries = append(entries, entry)
	}

	if !changed {
		return nil, nil
	}

	return entries, nil
}

func keySet(f family, keys map[string]string) *fieldpath.Set {
	set := fieldpath.NewSet()

	for key := range keys {
		set.Insert(fieldpath.MakePathOrDie("metadata", f.field, key))
	}

	return set
}

// divide tells the keys that are ours to apply from those that somebody else holds with another value. What nobody holds is ours: a take-over from
// the upstream Talos CCM leaves keys so if it is interrupted. What Talos's own controller holds is never changed: what we had applied before it
// took over is left to both as long as the values are the same.
func (held holding) divide(present, wanted map[string]string) (ours, foreign map[string]string) {
	ours, foreign = map[string]string{}, map[string]string{}

	for key, value := range wanted {
		now, exists := present[key]
		_, mine := held.ours[key]

		switch {
		case exists && now != value:
			if held.others[key] {
				foreign[key] = now
			} else {
				ours[key] = value
			}
		case held.talos[key] && !mine: // Talos keeps it, or brings it back
		default:
			ours[key] = value
		}
	}

	return ours, foreign
}

// talosKeys reads one of the lists in which Talos's own controller records what it keeps, reverting what others write there. They are JSON
// (k8s/NodeApplyController); without a list that can be read it changes nothing.
func talosKeys(node *corev1.Node, annotation string) []string {
	var keys []string
	if err := json.Unmarshal([]byte(node.Annotations[annotation]), &keys); err != nil {
		return nil
	}

	return keys
}
