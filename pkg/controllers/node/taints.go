package node

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"

	"github.com/siderolabs/talos/pkg/machinery/constants"
	corev1 "k8s.io/api/core/v1"

	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/pkg/rules"
)

// labelEnforcedTaint begins the labels that record which of a Node's taints are there because a rule enforces them. The managed fields cannot tell:
// to them the list of taints is one field. Whoever can write the record can have taints removed, so it is kept where
// admission (NodeRestriction) lets no kubelet write, just as it guards the taints themselves.
const labelEnforcedTaint = "talos-ccm.node-restriction.kubernetes.io/enforced-"

// taintPlan is what should become of a Node's taints.
type taintPlan struct {
	list []corev1.Taint
	// record are the labels that remember what we enforce. A taint that is about to go stays recorded until it has gone: the record
	// is written first.
	record  map[string]string
	foreign []finding
}

// planTaints adds what rules want: all of it when the Node is initialized, later what is to be enforced. It takes away what we
// have recorded as enforced and no rule sets any longer. It leaves what others have set.
func planTaints(node *corev1.Node, wanted []rules.Taint) taintPlan {
	var (
		first = nodespec.IsUninitialized(node)
		named = map[string]bool{}
		p     = taintPlan{list: slices.DeleteFunc(slices.Clone(node.Spec.Taints), nodespec.IsUninitializedTaint), record: map[string]string{}}
	)

	for _, taint := range wanted {
		named[taintID(taint.Taint)] = true

		if first || taint.Enforce {
			p.want(node, taint)
		}
	}

	keptByTalos := talosKeys(node, constants.AnnotationOwnedTaints)

	p.list = slices.DeleteFunc(p.list, func(taint corev1.Taint) bool {
		if !isRecorded(node, taint) || named[taintID(taint)] || slices.Contains(keptByTalos, taint.Key) {
			return false
		}

		p.record[recordKey(taint)] = string(taint.Effect)

		return true
	})

	return p
}

// want puts a taint on the list. One that is there with another value and is not ours is left alone.
func (p *taintPlan) want(node *corev1.Node, taint rules.Taint) {
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
		p.foreign = append(p.foreign, finding{
			reason:  ReasonOwnershipConflict,
			subject: "taints/" + id,
			message: fmt.Sprintf("Taint %s was set by somebody else with the value %q and is left alone", id, p.list[i].Value),
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

// recordKey is a hash, because a taint's key is longer than the name of a label may be.
func recordKey(taint corev1.Taint) string {
	sum := sha256.Sum256([]byte(taintID(taint)))

	return labelEnforcedTaint + hex.EncodeToString(sum[:8])
}

func taintID(taint corev1.Taint) string { return taint.Key + ":" + string(taint.Effect) }
