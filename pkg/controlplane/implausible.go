package controlplane

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/klog/v2"

	"github.com/talos-ccm/talos-ccm/pkg/internal/events"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
)

// Reasons of Events.
const (
	// ReasonImplausibleCIDR is on control-plane Nodes whose machines report a pod or service CIDR that no cluster has. Such
	// a CIDR must not have requests denied.
	ReasonImplausibleCIDR = "ClusterCIDRImplausible"
)

// Larger CIDRs are implausible. Talos's own have 16 and 12 bits.
const (
	minBitsIPv4 = 8
	minBitsIPv6 = 16
)

// implausible returns why a CIDR cannot be one of pods or Services; empty if it can.
func implausible(cidr netip.Prefix, nodes []*corev1.Node) string {
	shortest := minBitsIPv6
	if cidr.Addr().Is4() {
		shortest = minBitsIPv4
	}

	if cidr.Bits() < shortest {
		return fmt.Sprintf("is shorter than /%d", shortest)
	}

	for _, node := range nodes {
		for _, addr := range nodespec.DialAddresses(node) {
			if cidr.Contains(addr) {
				return fmt.Sprintf("contains the address %s of Node %s", addr, node.Name)
			}
		}
	}

	return ""
}

// findImplausible returns the implausible CIDRs of all parts.
func (r *Reader) findImplausible(parts []*identity) []netip.Prefix {
	nodes, _ := r.cfg.Nodes.Lister().List(labels.Everything()) // a list from the cache cannot fail

	return slices.DeleteFunc(union(parts, netip.Prefix.Compare, cidrsOf), func(cidr netip.Prefix) bool { return implausible(cidr, nodes) == "" })
}

// reportImplausible reports the implausible CIDRs of each machine.
func (r *Reader) reportImplausible(ctx context.Context) {
	nodes, _ := r.cfg.Nodes.Lister().List(labels.Everything()) // a list from the cache cannot fail

	for _, node := range nodes {
		var conditions []events.Condition

		if reported := r.machines[node.Name].identity; reported != nil {
			for _, cidr := range cidrsOf(reported) {
				if why := implausible(cidr, nodes); why != "" {
					conditions = append(conditions, events.Condition{Reason: ReasonImplausibleCIDR, Subject: cidr.String(), Message: fmt.Sprintf(
						"The machine's pod or service CIDR %s %s; CSRs for addresses in it stay pending. Correct podSubnets and serviceSubnets of cluster.network", cidr, why)})
				}
			}
		}

		for _, added := range r.reporter.Report(node.Name, node, conditions...) {
			klog.FromContext(ctx).Info("Control-plane machine reports an implausible CIDR; CSRs for its addresses stay pending",
				"node", node.Name, "message", added.Message)
		}
	}
}
