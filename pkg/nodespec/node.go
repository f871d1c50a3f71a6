package nodespec

import (
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	cloudproviderapi "k8s.io/cloud-provider/api"

	"github.com/talos-ccm/talos-ccm/pkg/noderecord"
)

// osImagePrefix is the prefix of status.nodeInfo.osImage on Talos: "Talos (v1.13.5)", PRETTY_NAME of its os-release.
const osImagePrefix = "Talos"

// TaintToBeDeleted is the taint that Cluster Autoscaler sets before it deletes a machine. No kubelet can add it to a
// registered Node. k8s.io/cloud-provider/controllers/service excludes such Nodes, too.
const TaintToBeDeleted = "ToBeDeletedByClusterAutoscaler"

// maxDialAddresses limits the addresses that a kubelet can make talos-ccm dial. Machines have fewer node IPs.
const maxDialAddresses = 4

// IsTalos reports whether the Node's kubelet reports Talos. It is no proof: it only prevents dialing machines
// and writing Nodes of other operating systems.
func IsTalos(node *corev1.Node) bool {
	return strings.HasPrefix(node.Status.NodeInfo.OSImage, osImagePrefix)
}

// labelControlPlane marks the Nodes of control-plane machines. Talos sets it with an administrator's certificate; the
// NodeRestriction admission plugin keeps kubelets from setting it.
const labelControlPlane = "node-role.kubernetes.io/control-plane"

// IsControlPlane reports whether the Node has the label of the control plane. Unlike the machine type, which a machine
// reports about itself, a compromised worker cannot set it.
func IsControlPlane(node *corev1.Node) bool {
	_, labeled := node.Labels[labelControlPlane]

	return labeled
}

// IsKnown reports whether the Node has the label of the control plane, or talos-ccm has labeled it, at its initialization
// or with the record of its machine. The NodeRestriction admission plugin keeps kubelets from setting these labels. The
// upstream Talos CCM sets LabelPlatform, too.
func IsKnown(node *corev1.Node) bool {
	return IsControlPlane(node) || node.Labels[LabelPlatform] != "" || noderecord.Of(node).Address.IsValid()
}

// IsUninitialized reports whether the Node has the taint with which kubelets wait for a cloud controller manager.
func IsUninitialized(node *corev1.Node) bool {
	return slices.ContainsFunc(node.Spec.Taints, IsUninitializedTaint)
}

// IsUninitializedTaint reports whether taint has the key of the uninitialized taint, with any value and effect.
func IsUninitializedTaint(taint corev1.Taint) bool {
	return taint.Key == cloudproviderapi.TaintExternalCloudProvider
}

// ReadyCondition returns the Ready condition of the Node, or nil if it has none.
func ReadyCondition(node *corev1.Node) *corev1.NodeCondition {
	return Condition(node, corev1.NodeReady)
}

// Condition returns a condition of the Node, or nil if it does not have it.
func Condition(node *corev1.Node, conditionType corev1.NodeConditionType) *corev1.NodeCondition {
	for i := range node.Status.Conditions {
		if node.Status.Conditions[i].Type == conditionType {
			return &node.Status.Conditions[i]
		}
	}

	return nil
}

// IsReady reports whether the Ready condition is true. A Node without one is not ready.
func IsReady(node *corev1.Node) bool {
	ready := ReadyCondition(node)

	return ready != nil && ready.Status == corev1.ConditionTrue
}

// ProvidedNodeIPs returns the addresses of the kubelet's --node-ip, as the kubelet reports them, in its order. It
// omits invalid values.
func ProvidedNodeIPs(node *corev1.Node) []netip.Addr {
	return parseAddrs(strings.Split(node.Annotations[cloudproviderapi.AnnotationAlphaProvidedIPAddr], ","))
}

// IsScaledDown reports whether Cluster Autoscaler is about to delete the machine of the Node.
func IsScaledDown(node *corev1.Node) bool {
	return slices.ContainsFunc(node.Spec.Taints, func(t corev1.Taint) bool { return t.Key == TaintToBeDeleted })
}

// DialAddresses returns the addresses at which to dial the Node's machine, best first. The recorded address is the first,
// so that a kubelet cannot move a machine that responds there. The kubelet reports the others, and the machine that
// responds has to prove its identity. Those that rules set may not lead to the machine.
func DialAddresses(node *corev1.Node) []netip.Addr {
	var addrs []netip.Addr

	set := noderecord.RuleAddresses(node)
	listed := slices.DeleteFunc(listedIPs(node, corev1.NodeInternalIP), func(addr netip.Addr) bool { return slices.Contains(set, addr) })

	for _, addr := range slices.Concat([]netip.Addr{noderecord.Of(node).Address}, ProvidedNodeIPs(node), listed) {
		if addr.IsValid() && !slices.Contains(addrs, addr) && len(addrs) < maxDialAddresses {
			addrs = append(addrs, addr)
		}
	}

	return addrs
}

func listedIPs(node *corev1.Node, typ corev1.NodeAddressType) []netip.Addr {
	var listed []string

	for _, a := range node.Status.Addresses {
		if a.Type == typ {
			listed = append(listed, a.Address)
		}
	}

	return parseAddrs(listed)
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
