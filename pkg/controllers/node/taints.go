package node

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"

	"github.com/siderolabs/talos/pkg/machinery/constants"
	corev1 "k8s.io/api/core/v1"

	"github.com/talos-ccm/talos-ccm/pkg/internal/events"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/pkg/rules"
)

// labelEnforcedTaint is the prefix of labels that record which taints a rule enforces.
//
// managedFields cannot: they treat the list of taints as one field. Clients that can write the record can have taints
// removed. Therefore it has a prefix that the NodeRestriction admission plugin protects from kubelets, just as it
// protects taints.
const labelEnforcedTaint = "talos-ccm.node-restriction.kubernetes.io/enforced-"

type mergedTaints struct {
	list []corev1.Taint
	// record are the labels that record enforced taints. They are written before the taints, and include a taint that is
	// about to be removed.
	record    map[string]string
	conflicts []events.Problem
}

// mergeTaints adds the desired taints: all at initialization, later the enforced ones. It removes the uninitialized
// taint, and taints that are recorded as enforced but no longer desired. It keeps the taints of other clients.
func mergeTaints(node *corev1.Node, desired []rules.Taint) mergedTaints {
	var (
		isUninitialized = nodespec.IsUninitialized(node)
		ids             = map[string]bool{}
		p               = mergedTaints{list: slices.DeleteFunc(slices.Clone(node.Spec.Taints), nodespec.IsUninitializedTaint), record: map[string]string{}}
	)

	for _, taint := range desired {
		ids[taintID(taint.Taint)] = true

		if isUninitialized || taint.Enforce {
			p.add(node, taint)
		}
	}

	talosKeys := ownedByTalos(node.Annotations[constants.AnnotationOwnedTaints])

	p.list = slices.DeleteFunc(p.list, func(taint corev1.Taint) bool {
		if !isRecorded(node, taint) || ids[taintID(taint)] || slices.Contains(talosKeys, taint.Key) {
			return false
		}

		p.record[recordKey(taint)] = string(taint.Effect)

		return true
	})

	return p
}

// add adds a taint. It does not change the value of a taint that is not recorded as enforced.
func (p *mergedTaints) add(node *corev1.Node, taint rules.Taint) {
	id := taintID(taint.Taint)
	ours := isRecorded(node, taint.Taint)
	i := slices.IndexFunc(p.list, func(t corev1.Taint) bool { return taintID(t) == id })

	switch {
	case i < 0:
		p.list = append(p.list, taint.Taint)
		ours = true
	case p.list[i].Value != taint.Value && ours:
		p.list[i] = taint.Taint
	case p.list[i].Value != taint.Value:
		p.conflicts = append(p.conflicts, events.Problem{
			Reason:  ReasonOwnershipConflict,
			Subject: "taints/" + id,
			Message: fmt.Sprintf("Taint %s with value %q is owned by another client; skipped", id, p.list[i].Value),
		})
	}

	if ours && taint.Enforce {
		p.record[recordKey(taint.Taint)] = string(taint.Effect)
	}
}

func isRecorded(node *corev1.Node, taint corev1.Taint) bool { return hasLabel(node, recordKey(taint)) }

func hasLabel(node *corev1.Node, key string) bool {
	_, exists := node.Labels[key]

	return exists
}

// recordKey contains a hash, because the key of a taint can be longer than the name of a label.
func recordKey(taint corev1.Taint) string {
	sum := sha256.Sum256([]byte(taintID(taint)))

	return labelEnforcedTaint + hex.EncodeToString(sum[:8])
}

func taintID(taint corev1.Taint) string { return taint.Key + ":" + string(taint.Effect) }
