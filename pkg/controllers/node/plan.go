package node

import (
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/pkg/rules"
)

// plan is the difference between what a Node carries and what it should. The zero value: nothing to write.
type plan struct {
	// managedFields replace those of the Node unless nil, before anything is applied: they end what the upstream Talos CCM holds.
	managedFields []metav1.ManagedFieldsEntry
	// apply is true if labels and annotations must be applied; they are then all of ours, which may be none.
	apply               bool
	labels, annotations map[string]string
	// records is true if labels say of a taint that we enforce it, and the Node did not say so before. Of a Node that has changed meanwhile that may not
	// be true: somebody else may have set the taint.
	records bool
	// addresses replace status.addresses unless nil.
	addresses []corev1.NodeAddress
	// providerID is set once, while the Node has none; empty: leave it.
	providerID string
	// initialize is true if the uninitialized taint is to go: spec.taints then change in the same write that sets providerID.
	initialize bool
	// retaint is true if spec.taints must change. To what is decided when they are written: the Node may have got others meanwhile.
	retaint bool
	taints  []rules.Taint
	// foreign are findings of what somebody else holds with another value.
	foreign []finding
}

func (p plan) empty() bool {
	return p.managedFields == nil && !p.apply && p.addresses == nil && !p.patchesSpec()
}

func (p plan) patchesSpec() bool { return p.providerID != "" || p.retaint }

// makePlan compares node with spec. It changes neither.
func makePlan(node *corev1.Node, spec nodespec.Spec) (plan, error) {
	holders, err := managersOf(node)
	if err != nil {
		return plan{}, err
	}

	taints := planTaints(node, spec.Taints)

	p := plan{
		initialize: nodespec.IsUninitialized(node),
		retaint:    !slices.Equal(taints.list, node.Spec.Taints),
		taints:     spec.Taints,
		records:    slices.ContainsFunc(slices.Collect(maps.Keys(taints.record)), func(key string) bool { return !hasLabel(node, key) }),
		foreign:    taints.foreign,
	}

	p.compareKeys(node, spec, holders, taints.record)

	if p.managedFields, err = holders.inherit(p.labels, p.annotations); err != nil {
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

// compareKeys plans labels and annotations, the record of enforced taints among the labels.
func (p *plan) compareKeys(node *corev1.Node, spec nodespec.Spec, holders managers, record map[string]string) {
	labels := maps.Clone(record)
	maps.Copy(labels, spec.Labels)

	for _, keys := range []struct {
		family family
		wanted map[string]string
		ours   *map[string]string
	}{
		{labelFamily, labels, &p.labels},
		{annotationFamily, spec.Annotations, &p.annotations},
	} {
		held := holders.holding(node, keys.family)
		ours, foreign := held.divide(keys.family.of(node), keys.wanted)

		*keys.ours = ours
		p.apply = p.apply || !maps.Equal(ours, held.ours)

		for key, value := range foreign {
			p.foreign = append(p.foreign, finding{
				reason:  ReasonOwnershipConflict,
				subject: keys.family.field + "/" + key,
				message: fmt.Sprintf("%s %s=%q was set by somebody else and is left alone", keys.family.name, key, nodespec.Abridged(value)),
			})
		}
	}
}
