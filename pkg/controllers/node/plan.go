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
	owned, err := appliedLabels(node)
	if err != nil {
		return plan{}, err
	}

	p := plan{initialize: uninitialized(node)}
	p.labels, p.foreign = divide(node, spec.Labels, owned)
	p.applyLabels = !maps.Equal(p.labels, owned)

	if !slices.Equal(node.Status.Addresses, spec.Addresses) {
		p.addresses = spec.Addresses
	}

	if node.Spec.ProviderID == "" {
		p.providerID = spec.ProviderID
	}

	return p, nil
}

// appliedLabels are the labels that we hold by having applied them. The generated ExtractNode cannot be used: it refuses a Node with two
// addresses of one type (https://github.com/kubernetes/kubernetes/issues/79391), which every dual-stack Node has.
func appliedLabels(node *corev1.Node) (map[string]string, error) {
	labels := map[string]string{}

	for _, entry := range node.ManagedFields {
		if entry.Manager != FieldManager || entry.Operation != metav1.ManagedFieldsOperationApply || entry.Subresource != "" || entry.FieldsV1 == nil {
			continue
		}

		var fields struct {
			Metadata struct {
				Labels map[string]struct{} `json:"f:labels"`
			} `json:"f:metadata"`
		}

		if err := json.Unmarshal(entry.FieldsV1.GetRawBytes(), &fields); err != nil {
			return nil, fmt.Errorf("read the managed fields of %s: %w", FieldManager, err)
		}

		for field := range fields.Metadata.Labels {
			key, isKey := strings.CutPrefix(field, "f:")
			if value, exists := node.Labels[key]; isKey && exists {
				labels[key] = value
			}
		}
	}

	return labels, nil
}

// divide tells the labels that are ours to apply from those that somebody else holds with another value.
func divide(node *corev1.Node, wanted, owned map[string]string) (ours, foreign map[string]string) {
	ours, foreign = map[string]string{}, map[string]string{}

	talos := talosLabels(node)

	for key, value := range wanted {
		present, exists := node.Labels[key]
		_, mine := owned[key]

		switch {
		case slices.Contains(talos, key):
			if present != value {
				foreign[key] = present
			}
		case exists && !mine && present != value:
			foreign[key] = present
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
