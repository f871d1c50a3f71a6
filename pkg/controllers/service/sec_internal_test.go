package service

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
)

// A machine that was shut down weeks ago must not get addresses because the other Node is not ready for a moment.
func TestSec_ShutDownMachineGetsNoAddress(t *testing.T) {
	nodes := candidates(2)
	nodes[0].node.Status.Conditions[0].Status = corev1.ConditionUnknown
	nodes[0].node.Spec.Taints = []corev1.Taint{{Key: "node.cloudprovider.kubernetes.io/shutdown", Effect: corev1.TaintEffectNoSchedule}}
	nodes[1].node.Status.Conditions[0].Status = corev1.ConditionUnknown

	s := snapshot{services: []*corev1.Service{newService("s", published("192.0.2.2"))}, nodes: nodes}
	if got, _ := s.addressesOf("s"); len(got) != 1 {
		t.Errorf("got %v", got)
	}
}
