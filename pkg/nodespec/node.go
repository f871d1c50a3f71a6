package nodespec

import (
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	cloudproviderapi "k8s.io/cloud-provider/api"
)

// osImagePrefix begins status.nodeInfo.osImage of every Talos machine, such as "Talos (v1.13.5)" (PRETTY_NAME of its os-release).
const osImagePrefix = "Talos"

// maxDialAddresses is more than a machine has node IPs, and bounds where a kubelet can make us dial.
const maxDialAddresses = 4

// IsTalos tells whether the Node's kubelet says that it runs on Talos. It proves nothing: it only keeps us from dialing
// and writing Nodes of other systems.
func IsTalos(node *corev1.Node) bool {
	return strings.HasPrefix(node.Status.NodeInfo.OSImage, osImagePrefix)
}

// IsUninitialized tells whether the Node still has the taint with which kubelets wait for a cloud controller manager.
func IsUninitialized(node *corev1.Node) bool {
	return slices.ContainsFunc(node.Spec.Taints, IsUninitializedTaint)
}

// IsUninitializedTaint tells whether it is that taint, whatever its value and effect.
func IsUninitializedTaint(taint corev1.Taint) bool {
	return taint.Key == cloudproviderapi.TaintExternalCloudProvider
}

// ProvidedNodeIPs are the addresses the kubelet was started with (--node-ip), as it says; none if it does not.
// What is not an address is left out.
func ProvidedNodeIPs(node *corev1.Node) []netip.Addr {
	return parseAddrs(strings.Split(node.Annotations[cloudproviderapi.AnnotationAlphaProvidedIPAddr], ","))
}

// DialAddresses are the addresses at which the Node's machine may be found, best first. They come from the kubelet, so what
// answers there has yet to prove that it is this Node's machine.
func DialAddresses(node *corev1.Node) []netip.Addr {
	var listed []string

	for _, a := range node.Status.Addresses {
		if a.Type == corev1.NodeInternalIP {
			listed = append(listed, a.Address)
		}
	}

	var addrs []netip.Addr

	seen := map[netip.Addr]bool{}

	for _, addr := range append(ProvidedNodeIPs(node), parseAddrs(listed)...) {
		if !seen[addr] && len(addrs) < maxDialAddresses {
			seen[addr] = true

			addrs = append(addrs, addr)
		}
	}

	return addrs
}

func parseAddrs(list []string) []netip.Addr {
	var addrs []netip.Addr

	for _, s := range list {
		if addr, err := netip.ParseAddr(strings.TrimSpace(s)); err == nil && addr.Zone() == "" {
			addrs = append(addrs, addr.Unmap())
		}
	}

	return addrs
}
