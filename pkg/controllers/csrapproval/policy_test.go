package csrapproval_test

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	talosmachine "github.com/siderolabs/talos/pkg/machinery/config/machine"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/talos-ccm/talos-ccm/pkg/config"
	"github.com/talos-ccm/talos-ccm/pkg/controllers/csrapproval"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
)

func TestPolicyFor_AllowsSelectedMachinesOnly(t *testing.T) {
	compiled, err := config.Parse("test", []byte(`
csrApproval:
  maxExpiration: 48h
  credentialPinning: enforce
  allowedSANs:
    - nodeSelector: [{matchExpressions: [{key: machineType, operator: In, values: [controlplane]}]}]
      dnsNames: [api.example.org]
    - nodeSelector: [{matchExpressions: [{key: machineType, operator: NotIn, values: [worker]}]}]
      dnsNames: [other.example.org]
    - nodeSelector: [{matchExpressions: [{key: nodename, operator: In, values: [w1]}]}]
      dnsNames: [storage.example.org]
      ipAddresses: [198.51.100.7]
`))
	if err != nil {
		t.Fatal(err)
	}

	worker := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1"}}
	controlPlaneNode := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "cp", Labels: map[string]string{controlPlaneLabel: ""}}}

	for _, test := range []struct {
		name      string
		node      *corev1.Node
		kind      talosmachine.Type
		names     []string
		addresses []netip.Addr
	}{
		{"worker", worker, talosmachine.TypeWorker, []string{"storage.example.org"}, []netip.Addr{netip.MustParseAddr("198.51.100.7")}},
		{"worker that reports the control-plane role", worker, talosmachine.TypeControlPlane, nil, nil},
		{"control-plane machine", controlPlaneNode, talosmachine.TypeControlPlane, []string{"api.example.org", "other.example.org"}, nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			policy := csrapproval.PolicyFor(compiled, test.node, nodespec.Input{Machine: machine.Machine{Nodename: test.node.Name, Type: test.kind}})
			if !slices.Equal(policy.ExtraNames, test.names) || !slices.Equal(policy.ExtraIPs, test.addresses) || policy.MaxExpiration != 48*time.Hour || !policy.EnforceCredential {
				t.Errorf("got %+v, want %v, %v", policy, test.names, test.addresses)
			}
		})
	}
}

// Rules read the providerID that the Node would have without them.
func TestPolicyFor_AllowsNamesThatTheNodeLists(t *testing.T) {
	compiled, err := config.Parse("test", []byte(`
transformations:
  - platformMetadata:
      ExternalDNS: '{{ last (splitList "/" .ProviderID) }}.example'
`))
	if err != nil {
		t.Fatal(err)
	}

	nodeIP := netip.MustParseAddr("10.0.0.1")
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1"}}
	in := nodespec.NewInput(node, machine.Machine{
		Nodename: "w1", NodeIPs: []netip.Addr{nodeIP}, Addresses: []machine.Address{{Prefix: netip.PrefixFrom(nodeIP, 24)}},
		Platform: runtime.PlatformMetadataSpec{Platform: "vmware", InstanceID: "vm-200"},
	}, nodespec.Options{Rules: compiled.Rules})

	spec, _, _ := nodespec.Desired(in)
	if listed := (corev1.NodeAddress{Type: corev1.NodeExternalDNS, Address: "vm-200.example"}); !slices.Contains(spec.Addresses, listed) {
		t.Errorf("the Node lists %v", spec.Addresses)
	}

	policy := csrapproval.PolicyFor(compiled, node, in)
	if !slices.Equal(policy.ExtraNames, []string{"vm-200.example"}) {
		t.Errorf("allowed: %q", policy.ExtraNames)
	}

	// The machine keeps its names against others while Talos has not confirmed the metadata.
	in.Machine.PlatformFromCache = true

	policy = csrapproval.PolicyFor(compiled, node, in)
	if len(policy.ExtraNames) > 0 || !slices.Equal(policy.PendingNames, []string{"vm-200.example"}) {
		t.Errorf("pending: allowed %q, kept %q", policy.ExtraNames, policy.PendingNames)
	}
}
