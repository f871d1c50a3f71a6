package node

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"

	"github.com/talos-ccm/talos-ccm/pkg/noderecord"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/pkg/rules"
)

var (
	ruleAddress = netip.MustParseAddr("2001:db8::5")
	dedicated   = corev1.Taint{Key: "example.org/dedicated", Effect: corev1.TaintEffectNoSchedule}
)

// A minute after another Node has lost the address, at the latest, the Node gets it.
func TestController_SyncsNodeAgainWhileAnotherHasItsAddress(t *testing.T) {
	f := newSyncFixture(t)
	set, errs := rules.Compile([]rules.Rule{{Addresses: map[string]string{"ExternalIP": ruleAddress.String()}, AddressCIDRs: []string{"2001:db8::/32"}}}, nil, nil)
	require.Empty(t, errs)

	f.controller.planner.options = func() nodespec.Options { return nodespec.Options{Rules: set, OmitConditions: true} }

	other := identified("other", "aws:///a/i-2")
	other.Labels[noderecord.RuleAddressLabel(ruleAddress)] = "ExternalIP"
	f.controller.config.Inventory.Claims.SetNode(other)

	node := f.node()
	node.Spec.ProviderID = "aws:///a/i-1"

	p, again, err := f.controller.prepare(node)
	require.NoError(t, err)
	assert.Equal(t, factsTimeout, again)
	assert.NotContains(t, p.labels, noderecord.RuleAddressLabel(ruleAddress))
	assert.NotContains(t, p.addresses, corev1.NodeAddress{Type: corev1.NodeExternalIP, Address: ruleAddress.String()})
}

// NodeRestriction compares only values, so that a kubelet can become an owner of each label.
func TestMakePlan_RemovesRecordsThatKubeletOwnsToo(t *testing.T) {
	record := map[string]string{
		noderecord.RuleAddressLabel(ruleAddress): "ExternalIP",
		recordKey(dedicated):                     "NoSchedule",
	}
	desired := nodespec.Spec{
		Labels: map[string]string{noderecord.RuleAddressLabel(ruleAddress): "ExternalIP"}, Taints: []rules.Taint{{Taint: dedicated, Enforce: true}},
	}

	h := registered(t, dedicated).apply(FieldManager, record).apply("kubelet", record)
	assert.Empty(t, mustPlan(t, h.node(), desired).released)

	h.update("another client", func(n *corev1.Node) { n.Spec.Taints = nil })

	// Omitting a label does not remove it.
	h.apply(FieldManager, nil)
	require.Subset(t, h.node().Labels, record)

	p := mustPlan(t, h.node(), nodespec.Spec{})
	assert.Equal(t, map[string]any{noderecord.RuleAddressLabel(ruleAddress): nil, recordKey(dedicated): nil}, p.released)
	assert.NotSubset(t, p.applyTo(h.node(), nil).Labels, record)

	requests := p.requests(h.node())
	require.Len(t, requests, 1)
	assert.Equal(t, map[string]any{"metadata": map[string]any{"uid": h.node().UID, "labels": p.released}}, requests[0].body)
}
