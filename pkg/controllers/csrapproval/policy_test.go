package csrapproval_test

import (
	"net/netip"
	"testing"
	"time"

	talosmachine "github.com/siderolabs/talos/pkg/machinery/config/machine"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/talos-ccm/talos-ccm/pkg/config"
	"github.com/talos-ccm/talos-ccm/pkg/controllers/csrapproval"
	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/noderecord"
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
	require.NoError(t, err)

	worker := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1"}}
	controlPlaneNode := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "cp", Labels: map[string]string{"node-role.kubernetes.io/control-plane": ""}}}

	for name, test := range map[string]struct {
		node      *corev1.Node
		kind      talosmachine.Type
		names     []string
		addresses []netip.Addr
	}{
		"worker": {worker, talosmachine.TypeWorker, []string{"storage.example.org"}, []netip.Addr{netip.MustParseAddr("198.51.100.7")}},
		"worker that reports the control-plane role": {worker, talosmachine.TypeControlPlane, nil, nil},
		"control-plane machine":                      {controlPlaneNode, talosmachine.TypeControlPlane, []string{"api.example.org", "other.example.org"}, nil},
	} {
		policy := csrapproval.PolicyFor(compiled, test.node, nodespec.Input{Machine: machine.Machine{Nodename: test.node.Name, Type: test.kind}})
		want := csrpolicy.Policy{ExtraNames: test.names, ExtraIPs: test.addresses, MaxExpiration: 48 * time.Hour, EnforceCredential: true}
		assert.Equal(t, want, policy, name)
	}
}

func TestPolicyFor_EnforcesCredentialsOfControlPlaneByDefault(t *testing.T) {
	for pinning, want := range map[string]struct{ worker, controlPlane bool }{
		"{}": {false, true}, "{credentialPinning: warn}": {false, false}, "{credentialPinning: enforce}": {true, true},
	} {
		compiled, err := config.Parse("test", []byte("csrApproval: "+pinning))
		require.NoError(t, err)

		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1"}}
		assert.Equal(t, want.worker, csrapproval.PolicyFor(compiled, node, nodespec.Input{}).EnforceCredential, pinning)

		node.Labels = map[string]string{"node-role.kubernetes.io/control-plane": ""}
		assert.Equal(t, want.controlPlane, csrapproval.PolicyFor(compiled, node, nodespec.Input{}).EnforceCredential, pinning)
	}
}

// Rules read the providerID that the Node would have without them.
func TestPolicyFor_AllowsNamesAndAddressesThatTheNodeHas(t *testing.T) {
	compiled, err := config.Parse("test", []byte(`
transformations:
  - platformMetadata:
      ExternalDNS: '{{ last (splitList "/" .ProviderID) }}.example'
    addresses: {ExternalIP: '198.51.100.5', InternalIP: '10.8.0.{{ trimPrefix "vm-" .InstanceID }}'}
    addressCIDRs: [198.51.100.0/24, 10.8.0.0/24]
`))
	require.NoError(t, err)

	nodeIP := netip.MustParseAddr("10.0.0.1")
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1"}}
	in := nodespec.NewInput(node, machine.Machine{
		Nodename: "w1", NodeIPs: []netip.Addr{nodeIP}, Addresses: []machine.Address{{Prefix: netip.PrefixFrom(nodeIP, 24)}},
		Platform: runtime.PlatformMetadataSpec{Platform: "vmware", InstanceID: "vm-200"},
	}, nodespec.Options{Rules: compiled.Rules})

	spec, _, _ := nodespec.Desired(in)
	assert.Contains(t, spec.Addresses, corev1.NodeAddress{Type: corev1.NodeExternalDNS, Address: "vm-200.example"})

	// Another Node may have the other address, and that of an earlier rule.
	external, internal := netip.MustParseAddr("198.51.100.5"), netip.MustParseAddr("10.8.0.200")
	node.Labels = map[string]string{noderecord.RuleAddressLabel(external): "ExternalIP", noderecord.RuleAddressLabel(nodeIP.Next()): "InternalIP"}

	policy := csrapproval.PolicyFor(compiled, node, in)
	assert.Equal(t, []string{"vm-200.example"}, policy.ExtraNames)
	assert.Equal(t, []netip.Addr{external}, policy.ExtraIPs)
	assert.Equal(t, []netip.Addr{internal}, policy.PendingIPs)

	// Other machines cannot take the names of the machine while Talos has not confirmed its metadata.
	in.Machine.PlatformFromCache = true
	policy = csrapproval.PolicyFor(compiled, node, in)
	assert.Empty(t, policy.ExtraNames)
	assert.Empty(t, policy.ExtraIPs)
	assert.Equal(t, []string{"vm-200.example"}, policy.PendingNames)
	assert.ElementsMatch(t, []netip.Addr{external, internal}, policy.PendingIPs)
}
