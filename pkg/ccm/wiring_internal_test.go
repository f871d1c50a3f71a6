package ccm

import (
	"slices"
	"testing"

	talosmachine "github.com/siderolabs/talos/pkg/machinery/config/machine"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/talos-ccm/talos-ccm/pkg/config"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

func TestCSRPolicy_AllowedSANsFollowSelector(t *testing.T) {
	compiled, err := config.Parse("test", []byte(`
csrApproval:
  allowedSANs:
    - nodeSelector: [{matchExpressions: [{key: machineType, operator: In, values: [controlplane]}]}]
      dnsNames: [api.example.org]
    - nodeSelector: [{matchExpressions: [{key: machineType, operator: NotIn, values: [worker]}]}]
      dnsNames: [other.example.org]
    - nodeSelector: [{matchExpressions: [{key: nodename, operator: In, values: [w1]}]}]
      dnsNames: [storage.example.org]
`))
	if err != nil {
		t.Fatal(err)
	}

	worker := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1"}}
	controlPlane := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "cp", Labels: map[string]string{"node-role.kubernetes.io/control-plane": ""}}}

	for _, test := range []struct {
		rule string
		node *corev1.Node
		kind talosmachine.Type
		want []string
	}{
		{"worker", worker, talosmachine.TypeWorker, []string{"storage.example.org"}},
		{"worker that reports the type controlplane", worker, talosmachine.TypeControlPlane, nil},
		{"control-plane machine", controlPlane, talosmachine.TypeControlPlane, []string{"api.example.org", "other.example.org"}},
	} {
		policy := csrPolicy(compiled, test.node, machine.Machine{Nodename: test.node.Name, Type: test.kind})
		if !slices.Equal(policy.ExtraNames, test.want) {
			t.Errorf("%s: got %v, want %v", test.rule, policy.ExtraNames, test.want)
		}
	}
}
