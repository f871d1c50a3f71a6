package node

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/siderolabs/talos/pkg/machinery/constants"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	cloudproviderapi "k8s.io/cloud-provider/api"

	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
)

// FieldManager owns the labels we apply.
const FieldManager = "talos-ccm"

// plan is the difference between what a Node carries and what it should. The zero value: nothing to write.
type plan struct {
	// applyLabels is true if labels must be applied; labels are then all of ours, which may be none.
	applyLabels bool
	labels      map[string]string
	// addresses replace status.addresses unless nil.
	addresses []corev1.NodeAddress
	// providerID is set once, while the Node has none; empty: leave it.
	providerID string
	// initialize is true if the uninitialized taint is to go, in the same write that sets providerID.
	initialize bool
	// foreign are the keys that somebody else holds with another value, with that value.
	foreign map[string]string
}

func (p plan) empty() bool {
	return !p.applyLabels && p.addresses == nil && p.providerID == "" && !p.initialize
}

// makePlan compares node with spec. It changes neither.
func makePlan(node *corev1.Node, spec nodespec.Spec) (plan, error) {
	held, err := labelsHeld(node)
	if err != nil {
		return plan{}, err
	}

	p := plan{initialize: uninitialized(node)}
	p.labels, p.foreign = divide(node, spec.Labels, held)
	p.applyLabels = !maps.Equal(p.labels, held.ours)

	if !slices.Equal(node.Status.Addresses, spec.Addresses) {
		p.addresses = spec.Addresses
	}

	if node.Spec.ProviderID == "" {
		p.providerID = spec.ProviderID
	}

	return p, nil
}

// holding is who holds which labels, by the managed fields. The generated ExtractNode cannot be used: it refuses a Node with two
// addresses of one type (https://github.com/kubernetes/kubernetes/issues/79391), which every dual-stack Node has.
type holding struct {
	ours   map[string]string // that we hold by having applied them, with their values
	others map[string]bool   // that somebody else holds, perhaps together with us
	talos  map[string]bool   // of others, that Talos's own controller holds
}

func labelsHeld(node *corev1.Node) (holding, error) {
	held := holding{ours: map[string]string{}, others: map[string]bool{}, talos: map[string]bool{}}

	for _, key := range talosLabels(node) {
		held.talos[key], held.others[key] = true, true
	}

	for _, entry := range node.ManagedFields {
		keys, err := labelKeys(entry)
		if err != nil {
			return holding{}, err
		}

		applied := entry.Manager == FieldManager && entry.Operation == metav1.ManagedFieldsOperationApply && entry.Subresource == ""

		for _, key := range keys {
			if value, exists := node.Labels[key]; applied && exists {
				held.ours[key] = value
			} else if !applied {
				held.others[key] = true
			}
		}
	}

	return held, nil
}

func labelKeys(entry metav1.ManagedFieldsEntry) ([]string, error) {
	if entry.FieldsV1 == nil {
		return nil, nil
	}

	var fields struct {
		Metadata struct {
			Labels map[string]json.RawMessage `json:"f:labels"`
		} `json:"f:metadata"`
	}

	if err := json.Unmarshal(entry.FieldsV1.GetRawBytes(), &fields); err != nil {
		return nil, fmt.Errorf("read the managed fields of %s: %w", entry.Manager, err)
	}

	var keys []string

	for field := range fields.Metadata.Labels {
		if key, isKey := strings.CutPrefix(field, "f:"); isKey {
			keys = append(keys, key)
		}
	}

	return keys, nil
}

// divide tells the labels that are ours to apply from those that somebody else holds with another value. What Talos's own controller holds
// is never changed: what we had applied before it took over is left to both as long as the values are the same.
func divide(node *corev1.Node, wanted map[string]string, held holding) (ours, foreign map[string]string) {
	ours, foreign = map[string]string{}, map[string]string{}

	for key, value := range wanted {
		present, exists := node.Labels[key]
		_, mine := held.ours[key]

		switch {
		case exists && present != value:
			if mine && !held.others[key] {
				ours[key] = value
			} else {
				foreign[key] = present
			}
		case held.talos[key] && !mine: // Talos keeps it, or brings it back
		default:
			ours[key] = value
		}
	}

	return ours, foreign
}

// talosLabels are the keys that Talos's own controller keeps, and reverts what others write to them. It lists them as JSON
// (k8s/NodeApplyController); without a list that can be read it changes nothing.
func talosLabels(node *corev1.Node) []string {
	var keys []string
	if err := json.Unmarshal([]byte(node.Annotations[constants.AnnotationOwnedLabels]), &keys); err != nil {
		return nil
	}

	return keys
}

func uninitialized(node *corev1.Node) bool {
	return slices.ContainsFunc(node.Spec.Taints, isUninitialized)
}

func isUninitialized(taint corev1.Taint) bool {
	return taint.Key == cloudproviderapi.TaintExternalCloudProvider
}
