package lifecycle

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	corev1 "k8s.io/api/core/v1"

	"github.com/talos-ccm/talos-ccm/pkg/config"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
)

// A machine that moved to another address is still discovered, even if another machine responds at its old address.
func TestJudge_AbsenceIsProofIfMachineDoesNotRespond(t *testing.T) {
	for condition, want := range map[inventory.Condition]Proof{
		inventory.Unreachable: ProofDiscovery, inventory.Mismatch: ProofDiscovery, inventory.Unknown: "", inventory.Current: "",
	} {
		got := judge(evidence{entry: inventory.Entry{Condition: condition}, absent: "not seen"}, config.CompiledLifecycle{Discovery: true})
		assert.Equal(t, want, got.proof, condition)
	}
}

// A kubelet that is marked late has worked after its machine stopped responding.
func TestHistory_KubeletMarkedLateHasWorked(t *testing.T) {
	reporting := &corev1.Node{Status: corev1.NodeStatus{Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}}}

	for markedAfter, want := range map[time.Duration]bool{heartbeatLimit: false, heartbeatLimit + time.Second: true} {
		h := history{}.after(reporting, inventory.Unreachable, time.Minute)
		h = h.after(&corev1.Node{}, inventory.Unreachable, time.Minute+markedAfter)
		assert.Equal(t, want, h.kubeletWorked, markedAfter)
	}
}
