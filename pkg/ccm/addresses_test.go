package ccm_test

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/siderolabs/talos/pkg/machinery/constants"
	"github.com/siderolabs/talos/pkg/machinery/resources/k8s"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	corev1ac "k8s.io/client-go/applyconfigurations/core/v1"
	"k8s.io/client-go/kubernetes"
	cloudproviderapi "k8s.io/cloud-provider/api"

	"github.com/talos-ccm/talos-ccm/pkg/ccm"
	"github.com/talos-ccm/talos-ccm/pkg/controllers/csrapproval"
	nodecontroller "github.com/talos-ccm/talos-ccm/pkg/controllers/node"
	"github.com/talos-ccm/talos-ccm/pkg/controllers/service"
	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/noderecord"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/ctest"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

// translated is the NAT address of a worker, and endpoint the address of the cluster endpoint, which is in the same CIDR.
const translated, endpoint = "198.51.100.5", "198.51.100.100"

// byTag configures a rule for the addresses of workers, whose tags root on a worker can choose.
func byTag(externalCIDRs string) string {
	return fmt.Sprintf(`
transformations:
  - name: nat
    nodeSelector: [{matchExpressions: [{key: machineType, operator: In, values: [worker]}, {key: tags.nat, operator: Exists}]}]
    addresses: {ExternalIP: "{{ .Tags.nat }}"}
    addressCIDRs: [198.51.100.0/24]
service: {externalCIDRs: [%s]}
`, externalCIDRs)
}

// ruleCluster is a cluster with a rule for the addresses of two workers.
type ruleCluster struct {
	*suite

	self, first, second *talostest.Machine
	options             *ccm.Options
}

func newRuleCluster(t *testing.T) ruleCluster {
	t.Helper()

	s, self, first := newCluster(t)
	second := s.worker("second")
	s.register(second)
	s.labelControlPlane(self)
	s.configure(self, byTag("203.0.113.0/24"))

	endpoints := k8s.NewEndpoint(k8s.ControlPlaneNamespaceName, k8s.ControlPlaneKubernetesEndpointsID)
	endpoints.TypedSpec().Addresses = []netip.Addr{netip.MustParseAddr(endpoint)}
	require.NoError(t, self.State().Create(t.Context(), endpoints))

	options := s.options(self)
	options.Framework.Generic.Controllers = []string{"*", service.Alias}

	return ruleCluster{s, self, first, second, options}
}

// tag changes the address that a machine makes the rule set.
func (s ruleCluster) tag(m *talostest.Machine, address string) {
	s.Helper()
	require.NoError(s, m.UpdatePlatform(s.Context(), func(spec *runtime.PlatformMetadataSpec) { spec.Tags = map[string]string{"nat": address} }))
}

// applyLabel makes the kubelet of a machine an owner of a label that its Node has. NodeRestriction allows that.
func (s ruleCluster) applyLabel(m *talostest.Machine, key, value string) {
	s.Helper()

	kubelet, err := kubernetes.NewForConfig(s.Kube.KubeletConfig(m.Nodename()))
	require.NoError(s, err)

	_, err = kubelet.CoreV1().Nodes().Apply(s.Context(), corev1ac.Node(m.Nodename()).WithLabels(map[string]string{key: value}),
		metav1.ApplyOptions{FieldManager: "kubelet", Force: true})
	require.NoError(s, err)
}

// translatedIsListed asserts that a Node lists the address of the rule.
func translatedIsListed(n *corev1.Node, asrt *assert.Assertions) {
	asrt.Contains(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeExternalIP, Address: translated})
}

func translatedIsNotListed(n *corev1.Node, asrt *assert.Assertions) {
	asrt.NotEmpty(n.Status.Addresses)
	asrt.NotContains(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeExternalIP, Address: translated})
}

func TestRuleAddresses_BelongToOneNode(t *testing.T) {
	s := newRuleCluster(t)
	r := s.start(s.options)
	s.awaitInitialized(s.first, s.second)

	s.tag(s.first, translated)
	s.AwaitNode(s.first.Nodename(), translatedIsListed)
	s.awaitApproved(s.requestCertificate(s.first, translated))

	s.tag(s.second, translated)
	s.AwaitEvent(s.second.Nodename(), nodecontroller.ReasonInvalidValue, fmt.Sprintf("node %q has the address", s.first.Nodename()))

	// The kubelet lists the address nevertheless.
	s.PatchNode(s.second.Nodename(), "kubelet", fmt.Sprintf(`{"status":{"addresses":[{"type":"ExternalIP","address":%q}]}}`, translated), "status")
	s.AwaitNode(s.second.Nodename(), translatedIsNotListed)
	s.AwaitEvent(s.requestCertificate(s.second, translated), csrapproval.ReasonDeferred, csrpolicy.CodeOwnedByOthers)

	// The next leader does not reach the machine, and the kubelet has emptied its Node.
	r.stop()
	require.NoError(t, s.first.BlackHole())
	s.PatchNode(s.first.Nodename(), "kubelet", `{"status":{"addresses":null}}`, "status")
	s.start(s.options)
	s.move(s.second, "moved") // in the request that would record the address
	assert.NotContains(t, s.Node(s.second.Nodename()).Labels, noderecord.RuleAddressLabel(netip.MustParseAddr(translated)))
	s.AwaitEvent(s.requestCertificate(s.second, translated), csrapproval.ReasonDeferred, csrpolicy.CodeOwnedByOthers)
}

// The node controller is the only one that runs, and so must know the Nodes and the addresses of the cluster itself.
func TestRuleAddresses_OfNodeControllerAlone(t *testing.T) {
	s := newRuleCluster(t)
	s.options.Framework.Generic.Controllers = []string{nodecontroller.Name}
	require.NoError(t, s.first.AddAddress(t.Context(), machine.LinkExternal, netip.MustParsePrefix(translated+"/32")))

	// The client has only the bootstrap token.
	const unclaimed = "198.51.100.6"

	forged := s.Register(kube.NodeSpec{Name: s.prefix + "forged", NodeIPs: []netip.Addr{netip.MustParseAddr(unclaimed)}})
	r := s.start(s.options)
	s.awaitInitialized(s.first, s.second)
	s.tag(s.second, unclaimed)
	s.AwaitNode(s.second.Nodename(), func(n *corev1.Node, asrt *assert.Assertions) {
		asrt.Contains(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeExternalIP, Address: unclaimed})
	})
	s.AwaitNode(s.first.Nodename(), translatedIsListed) // which the machine reports
	assert.NotEmpty(t, s.Node(forged.Name).Spec.Taints)

	label := noderecord.RuleAddressLabel(netip.MustParseAddr(unclaimed))
	s.applyLabel(s.second, label, "ExternalIP")

	s.tag(s.second, endpoint)
	s.AwaitEvent(s.second.Nodename(), nodecontroller.ReasonInvalidValue, endpoint, "is an address of the cluster")
	s.AwaitNode(s.second.Nodename(), func(n *corev1.Node, asrt *assert.Assertions) { asrt.NotContains(n.Labels, label) })

	// The next leader does not reach the machine.
	r.stop()
	require.NoError(t, s.first.BlackHole())
	s.tag(s.second, translated)
	s.start(s.options)
	s.AwaitEvent(s.second.Nodename(), nodecontroller.ReasonInvalidValue, fmt.Sprintf("node %q has the address", s.first.Nodename()))
	translatedIsNotListed(s.Node(s.second.Nodename()), assert.New(t))
}

func TestRuleAddresses_AreInTheCIDRsOfTheRule(t *testing.T) {
	s := newRuleCluster(t)
	s.start(s.options)
	s.awaitInitialized(s.first, s.second)

	const outside = "192.0.2.1"

	s.tag(s.first, outside)
	s.AwaitEvent(s.first.Nodename(), nodecontroller.ReasonInvalidValue, `rule "nat": addresses[ExternalIP]`, "is in none of the rule's addressCIDRs")
	s.AwaitEvent(s.requestCertificate(s.first, outside), csrapproval.ReasonDenied, csrpolicy.CodeNotOwned)

	s.tag(s.second, endpoint)
	s.AwaitEvent(s.second.Nodename(), nodecontroller.ReasonInvalidValue, endpoint, "is an address of the cluster")
	s.AwaitEvent(s.requestCertificate(s.second, endpoint), csrapproval.ReasonDeferred, csrpolicy.CodeClusterAddress)

	for _, m := range []*talostest.Machine{s.first, s.second} {
		for _, a := range s.Node(m.Nodename()).Status.Addresses {
			assert.NotEqual(t, corev1.NodeExternalIP, a.Type, a)
		}
	}
}

func TestRuleAddresses_ArePublishedWithinExternalCIDRs(t *testing.T) {
	s := newRuleCluster(t)
	require.NoError(t, s.first.AddAddress(t.Context(), "wg0", netip.MustParsePrefix(translated+"/32")))
	s.tag(s.first, translated)
	s.start(s.options)
	s.awaitInitialized(s.first)
	s.AwaitNode(s.first.Nodename(), translatedIsListed)
	s.SetReady(s.first.Nodename(), corev1.ConditionTrue)

	name := s.prefix + "web"
	services := s.createService("default", name, corev1.ServiceSpec{LoadBalancerClass: new(service.Class)})

	external := fmt.Appendf(nil, `{"metadata":{"annotations":{%q:"external"}}}`, service.AnnotationAddresses)
	_, err := services.Patch(t.Context(), name, types.MergePatchType, external, metav1.PatchOptions{})
	require.NoError(t, err)

	s.AwaitEvent(name, service.ReasonNoEligibleNodes, "none of these has on a link an address")
	s.configure(s.self, byTag("198.51.100.0/24"))
	ctest.Await(s, services, ctest.Named(name), ctest.Published(translated))
}

// TestRuleAddresses_AreNotFreedByAnotherMachine: root on a worker has its machine respond for the Node of a machine that is
// down, with other tags.
func TestRuleAddresses_AreNotFreedByAnotherMachine(t *testing.T) {
	s := newRuleCluster(t)
	impostor := s.worker("impostor")
	label := noderecord.RuleAddressLabel(netip.MustParseAddr(translated))

	require.NoError(t, s.first.FormatVolume(t.Context(), constants.EphemeralPartitionLabel, "first"))
	require.NoError(t, impostor.FormatVolume(t.Context(), constants.EphemeralPartitionLabel, "attacker's"))

	r := s.start(s.options)
	s.awaitInitialized(s.first, s.second)
	s.tag(s.first, translated)
	s.AwaitNode(s.first.Nodename(), func(n *corev1.Node, asrt *assert.Assertions) {
		asrt.Contains(n.Labels, label)
		asrt.NotEmpty(noderecord.Of(n).Volume)
		translatedIsListed(n, asrt)
	})

	require.NoError(t, s.first.BlackHole())
	require.NoError(t, impostor.SetNodename(t.Context(), s.first.Nodename()))
	s.PatchNode(s.first.Nodename(), "kubelet", fmt.Sprintf(`{"metadata":{"annotations":{%q:%q}}}`, cloudproviderapi.AnnotationAlphaProvidedIPAddr, impostor.Address()))
	s.AwaitNode(s.first.Nodename(), translatedIsNotListed)

	r.stop()
	s.tag(s.second, translated)
	s.start(s.options)
	s.AwaitEvent(s.second.Nodename(), nodecontroller.ReasonInvalidValue, fmt.Sprintf("node %q has the address", s.first.Nodename()))
	s.AwaitEvent(s.requestCertificate(s.second, translated), csrapproval.ReasonDeferred, csrpolicy.CodeOwnedByOthers)
}

// TestRuleAddresses_AreRecordedDespiteAnnotationOfKubelet: a kubelet lists the label as one of Talos.
func TestRuleAddresses_AreRecordedDespiteAnnotationOfKubelet(t *testing.T) {
	s := newRuleCluster(t)
	s.start(s.options)
	s.awaitInitialized(s.first)

	label := noderecord.RuleAddressLabel(netip.MustParseAddr(translated))

	kubelet, err := kubernetes.NewForConfig(s.Kube.KubeletConfig(s.first.Nodename()))
	require.NoError(t, err)

	_, err = kubelet.CoreV1().Nodes().Patch(t.Context(), s.first.Nodename(), types.MergePatchType,
		fmt.Appendf(nil, `{"metadata":{"annotations":{%q:%q}}}`, constants.AnnotationOwnedLabels, fmt.Sprintf("[%q]", label)), metav1.PatchOptions{})
	require.NoError(t, err)

	s.tag(s.first, translated)
	s.AwaitNode(s.first.Nodename(), translatedIsListed)
	assert.Contains(t, s.Node(s.first.Nodename()).Labels, label)
}
