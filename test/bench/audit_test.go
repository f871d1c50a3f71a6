package main

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/assert"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	cloudproviderapi "k8s.io/cloud-provider/api"
)

func initialized() *corev1.Node {
	node := &corev1.Node{}
	node.Name, node.UID = "a", "1"
	node.Labels = map[string]string{
		corev1.LabelTopologyRegion: region, corev1.LabelTopologyZone: zone, corev1.LabelInstanceTypeStable: instanceType,
	}
	node.Spec.ProviderID = providerID("a")
	node.Spec.PodCIDRs = []string{"10.64.0.0/24"}
	node.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "10.0.0.1"}, {Type: corev1.NodeHostName, Address: "a"}}

	return node
}

func TestAuditor_ReportsWrongNodes(t *testing.T) {
	for name, test := range map[string]struct {
		change func(node *corev1.Node)
		want   string // part of the violation; empty if there is none
	}{
		"right":              {func(*corev1.Node) {}, ""},
		"another providerID": {func(node *corev1.Node) { node.Spec.ProviderID = "aws:///zone-1/b" }, "has the providerID aws:///zone-1/b"},
		"lost providerID":    {func(node *corev1.Node) { node.Spec.ProviderID = "" }, "has changed its providerID"},
		"untainted without a label": {
			func(node *corev1.Node) { delete(node.Labels, corev1.LabelTopologyZone) }, "was initialized without label topology.kubernetes.io/zone",
		},
		"untainted without addresses": {func(node *corev1.Node) { node.Status.Addresses = nil }, "was initialized without addresses"},
		"tainted without a label": {func(node *corev1.Node) {
			delete(node.Labels, corev1.LabelTopologyZone)
			node.Spec.Taints = []corev1.Taint{{Key: cloudproviderapi.TaintExternalCloudProvider}}
		}, ""},
		"address of another machine": {
			func(node *corev1.Node) { node.Status.Addresses[0].Address = "10.0.0.2" }, "lists 10.0.0.2, which its machine never had",
		},
		"former address": {func(node *corev1.Node) { node.Status.Addresses[0].Address = "198.18.0.1" }, ""},
		"other pod CIDR": {func(node *corev1.Node) { node.Spec.PodCIDRs[0] = "10.65.0.0/24" }, "has changed its pod CIDRs from [10.64.0.0/24]"},
		"new Node with another pod CIDR": {func(node *corev1.Node) {
			node.UID = "2"
			node.Spec.PodCIDRs[0] = "10.65.0.0/24"
		}, ""},
		"new Node with the pod CIDR of another": {func(node *corev1.Node) {
			node.UID = "2"
			node.Spec.PodCIDRs[0] = "10.70.0.0/16"
		}, "shares pod CIDR 10.70.1.0/24 with Node b"},
		"unmanaged, written": {func(node *corev1.Node) {
			node.Name = unmanaged
			node.ManagedFields = []metav1.ManagedFieldsEntry{{Manager: "talos-ccm-node-ipam"}}
		}, "is not managed, but was written by talos-ccm-node-ipam"},
	} {
		t.Run(name, func(t *testing.T) {
			other := initialized()
			other.Name, other.Spec.ProviderID, other.Spec.PodCIDRs = "b", "aws:///zone-1/b", []string{"10.70.1.0/24"}

			a := newAuditor()
			a.expected["a"] = &expectation{addresses: []netip.Addr{netip.MustParseAddr("10.0.0.1")}}
			a.expected["b"] = a.expected["a"]
			a.replacePublic("a")
			a.replacePublic("a")
			a.observe(other)
			a.observe(initialized())

			node := initialized()
			test.change(node)
			a.observe(node)

			_, _, err := a.verdict()

			if test.want == "" {
				assert.NoError(t, err)
			} else {
				assert.ErrorContains(t, err, test.want)
			}
		})
	}
}
