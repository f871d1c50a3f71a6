package csrapproval

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
)

const (
	talos = "Talos (v1.13.5)"
	role  = "node-role.kubernetes.io/control-plane"
)

// node returns a Node of a Talos worker that lists addresses.
func node(name string, addresses ...string) *corev1.Node {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{}}}
	n.Status.NodeInfo.OSImage = talos

	for _, a := range addresses {
		n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a})
	}

	return n
}

func labeled(n *corev1.Node) *corev1.Node {
	n.Labels[role] = ""

	return n
}

func TestNodeState(t *testing.T) {
	debian, deleted := node("a"), node("a")
	debian.Status.NodeInfo.OSImage = "Debian GNU/Linux"
	deleted.DeletionTimestamp = &metav1.Time{}

	for _, test := range []struct {
		name    string
		node    *corev1.Node
		state   inventory.Condition
		managed bool
		want    csrpolicy.NodeState
	}{
		{"no Node", nil, inventory.Unknown, true, csrpolicy.NodeUnknown},
		{"being deleted", deleted, inventory.Current, true, csrpolicy.NodeDeleting},
		{"another operating system", debian, inventory.Unknown, true, csrpolicy.NodeUnmanaged},
		{"another operating system, by the kubelet only", debian, inventory.Current, true, csrpolicy.NodeWorker},
		{"another operating system, since the machine went silent", debian, inventory.Unreachable, true, csrpolicy.NodeUnmanaged},
		{"another operating system, not managed", debian, inventory.Current, false, csrpolicy.NodeUnmanaged},
		{"worker", node("a"), inventory.Unknown, true, csrpolicy.NodeWorker},
		{"control plane", labeled(node("a")), inventory.Current, true, csrpolicy.NodeControlPlane},
		{"not managed", labeled(node("a")), inventory.Current, false, csrpolicy.NodeUnmanaged},
	} {
		entry := inventory.Entry{Condition: test.state}
		assert.Equal(t, test.want, nodeState(test.node, entry, func() bool { return test.managed }), test.name)
	}
}

func TestMachineState(t *testing.T) {
	now := time.Now()

	for name, test := range map[string]struct {
		entry inventory.Entry
		want  csrpolicy.MachineState
	}{
		"unknown":                  {inventory.Entry{}, csrpolicy.MachineUnknown},
		"never responded":          {inventory.Entry{Condition: inventory.Unreachable}, csrpolicy.MachineUnknown},
		"no longer responds":       {inventory.Entry{Condition: inventory.Unreachable, ObservedAt: now}, csrpolicy.MachineUnreachable},
		"another machine responds": {inventory.Entry{Condition: inventory.Mismatch}, csrpolicy.MachineMismatch},
		"watched":                  {inventory.Entry{Condition: inventory.Current, ObservedAt: now}, csrpolicy.MachineCurrent},
	} {
		assert.Equal(t, test.want, machineState(test.entry), name)
	}
}
