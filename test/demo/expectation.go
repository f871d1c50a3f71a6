package main

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	cloudproviderapi "k8s.io/cloud-provider/api"
)

const (
	labelPlatform  = "node.cloudprovider.kubernetes.io/platform"
	labelLifecycle = "node.cloudprovider.kubernetes.io/lifecycle"

	// podCIDRBits is the default length of a Node's pod CIDR.
	podCIDRBits = 24
)

// podCIDR is the cluster's: large enough for the largest demo, which Talos's default is not.
var podCIDR = netip.MustParsePrefix("10.192.0.0/11")

// expectation is what a Node should carry, worked out from the machine and not by the code that is shown.
type expectation struct {
	providerID string
	// labels by key; an empty value means that the label must be absent.
	labels    map[string]string
	addresses map[corev1.NodeAddressType][]string
	// taints that the document's rules set, by key.
	taints map[string]string
}

// expectation is that of a machine that is up and whose metadata is known.
func (m *member) expectation() expectation {
	platform := m.origin.platform

	e := expectation{
		providerID: m.origin.providerID,
		labels: map[string]string{
			labelPlatform:                     platform.Platform,
			corev1.LabelTopologyRegion:        platform.Region,
			corev1.LabelTopologyZone:          platform.Zone,
			corev1.LabelInstanceTypeStable:    platform.InstanceType,
			corev1.LabelFailureDomainBetaZone: platform.Zone,
			labelCapacity:                     "on-demand",
		},
		addresses: map[corev1.NodeAddressType][]string{
			corev1.NodeInternalIP: texts(m.nodeIPs()),
			corev1.NodeExternalIP: texts(m.origin.external),
			corev1.NodeHostName:   {m.name},
		},
	}

	if platform.Spot {
		e.labels[labelLifecycle], e.labels[labelCapacity] = "spot", "spot"
		e.taints = map[string]string{taintSpot: platform.InstanceType + ":" + string(corev1.TaintEffectPreferNoSchedule)}
	}

	// The metadata's host name is the internal name if it has a domain.
	if strings.Contains(platform.Hostname, ".") {
		e.addresses[corev1.NodeInternalDNS] = []string{platform.Hostname}
	}

	return e
}

func texts(addrs []netip.Addr) []string {
	list := make([]string, len(addrs))
	for i, addr := range addrs {
		list[i] = addr.String()
	}

	return list
}

// differences are what is wrong with the Node, as sentences; none if it is right.
func (e expectation) differences(node *corev1.Node) []string {
	wrong := slices.Concat(e.wrongIdentity(node), e.wrongTaints(node), e.wrongAddresses(node), wrongPodCIDRs(node))

	if tainted(node) {
		wrong = append(wrong, "it still has the uninitialized taint")
	}

	return wrong
}

func (e expectation) wrongIdentity(node *corev1.Node) []string {
	var wrong []string

	if node.Spec.ProviderID != e.providerID {
		wrong = append(wrong, differ("providerID", node.Spec.ProviderID, e.providerID))
	}

	for _, key := range slices.Sorted(maps.Keys(e.labels)) {
		if node.Labels[key] != e.labels[key] {
			wrong = append(wrong, differ("label "+key, node.Labels[key], e.labels[key]))
		}
	}

	return wrong
}

func (e expectation) wrongAddresses(node *corev1.Node) []string {
	var wrong []string

	for _, kind := range []corev1.NodeAddressType{
		corev1.NodeInternalIP, corev1.NodeExternalIP, corev1.NodeHostName, corev1.NodeInternalDNS, corev1.NodeExternalDNS,
	} {
		if is := addressesOf(node, kind); !sameElements(is, e.addresses[kind]) {
			wrong = append(wrong, differ(string(kind), is, e.addresses[kind]))
		}
	}

	return wrong
}

// wrongTaints checks only the taints that the document's rules set.
func (e expectation) wrongTaints(node *corev1.Node) []string {
	is := map[string]string{}

	for _, taint := range node.Spec.Taints {
		if taint.Key == taintSpot {
			is[taint.Key] = taint.Value + ":" + string(taint.Effect)
		}
	}

	if maps.Equal(is, e.taints) {
		return nil
	}

	return []string{differ("taints", is, e.taints)}
}

func wrongPodCIDRs(node *corev1.Node) []string {
	if len(node.Spec.PodCIDRs) == 0 {
		return []string{"it has no pod CIDR"}
	}

	block, err := netip.ParsePrefix(node.Spec.PodCIDR)
	if err != nil || len(node.Spec.PodCIDRs) > 1 || block.Bits() != podCIDRBits || !podCIDR.Contains(block.Addr()) {
		return []string{fmt.Sprintf("podCIDRs are %q, want one /%d block of %s", node.Spec.PodCIDRs, podCIDRBits, podCIDR)}
	}

	return nil
}

func differ(what string, is, should any) string {
	return fmt.Sprintf("%s is %q, want %q", what, is, should)
}

func tainted(node *corev1.Node) bool {
	return slices.ContainsFunc(node.Spec.Taints, func(taint corev1.Taint) bool {
		return taint.Key == cloudproviderapi.TaintExternalCloudProvider
	})
}

func addressesOf(node *corev1.Node, kind corev1.NodeAddressType) []string {
	var list []string

	for _, address := range node.Status.Addresses {
		if address.Type == kind {
			list = append(list, address.Address)
		}
	}

	return list
}

func sameElements(a, b []string) bool {
	return slices.Equal(slices.Sorted(slices.Values(a)), slices.Sorted(slices.Values(b)))
}
