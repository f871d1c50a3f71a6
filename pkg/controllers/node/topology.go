package node

import (
	"cmp"
	"fmt"

	corev1 "k8s.io/api/core/v1"

	"github.com/talos-ccm/talos-ccm/pkg/internal/events"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
)

// topology is a field of the platform metadata with its labels: the stable one and the deprecated one.
type topology struct{ field, stable, beta string }

var topologies = []topology{
	{"Region", corev1.LabelTopologyRegion, corev1.LabelFailureDomainBetaRegion},
	{"Zone", corev1.LabelTopologyZone, corev1.LabelFailureDomainBetaZone},
}

// keepTopology replaces the region and the zone in the desired labels by those of an initialized Node, and returns each
// difference as a condition. Volumes are bound to these labels, and Kubernetes documents that it is safe to assume that
// they do not change (https://kubernetes.io/docs/reference/labels-annotations-taints/#topologykubernetesiozone). The
// labels of the Node are the only state, so a restart changes nothing.
//
// Missing labels are not kept but set: no volume can be bound to them, and an operator accepts a new value by deleting
// the label. The beta label follows the stable one.
func keepTopology(node *corev1.Node, managers []fieldManager, spec nodespec.Spec, desired map[string]string) (changed []events.Condition) {
	keep := func(t topology, key string) (value string) {
		current, exists := node.Labels[key]
		wanted := spec.Labels[key]
		isForeign := labelsField.otherOwner(node, managers, key) != ""
		isWritten := wanted != "" || labelsField.isApplied(managers, key)

		switch {
		case !exists || current == wanted:
			return wanted
		case isForeign: // compare reports the conflict
			return current
		case nodespec.IsUninitialized(node) || !isWritten:
			return wanted
		}

		desired[key] = current
		changed = append(changed, topologyChanged(spec, t, key, current))

		return current
	}

	for _, t := range topologies {
		value := keep(t, t.stable)

		if value != "" && (spec.Labels[t.beta] != "" || labelsField.isApplied(managers, t.beta)) {
			desired[t.beta] = value
		}
	}

	return changed
}

func topologyChanged(spec nodespec.Spec, t topology, key, current string) events.Condition {
	source := "its machine"
	if rule := cmp.Or(spec.Transformed.Labels[key].Rule, spec.Transformed.Replaced[t.field]); rule != "" {
		source = fmt.Sprintf("rule %q", rule)
	}

	now := "no longer sets it"
	if wanted := spec.Labels[key]; wanted != "" {
		now = fmt.Sprintf("now sets %.80q", wanted)
	}

	return events.Condition{
		Reason:  ReasonTopologyChanged,
		Subject: key,
		Message: fmt.Sprintf("Node keeps label %s=%.80q, but %s %s; to accept the new value, delete the label or set nodes.topology: follow", key, current, source, now),
	}
}
