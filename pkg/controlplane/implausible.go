package controlplane

import (
	"context"
	"fmt"
	"maps"
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
	// ReasonImplausibleCIDR is on control-plane Nodes whose machines report a pod or service CIDR that no cluster has, and on
	// one control-plane Node if talos-ccm allocates from one. Such a CIDR must not have requests denied.
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

// reportImplausible reports the implausible CIDRs of each machine, and those of PodCIDRs on one control-plane Node.
func (r *Reader) reportImplausible(ctx context.Context) {
	nodes, _ := r.cfg.Nodes.Lister().List(labels.Everything()) // a list from the cache cannot fail

	own := r.local
	if own == "" && len(r.machines) > 0 {
		own = slices.Min(slices.Collect(maps.Keys(r.machines)))
	}

	for _, node := range nodes {
		var conditions []events.Condition

		if reported := r.machines[node.Name].identity; reported != nil {
			conditions = conditionsFor(cidrsOf(reported), nodes,
				"The machine's pod or service CIDR %s %s; CSRs for addresses in it stay pending. Correct podSubnets and serviceSubnets of cluster.network")
		}

		if node.Name == own {
			conditions = append(conditions, conditionsFor(r.allocating().PodCIDRs, nodes,
				"The CIDR %s, from which pod CIDRs are allocated, %s; CSRs for addresses in it stay pending. Correct --cluster-cidr, or set containsMachines of the pool")...)
		}

		for _, added := range r.reporter.Report(node.Name, node, conditions...) {
			klog.FromContext(ctx).Info("Implausible pod or service CIDR; CSRs for its addresses stay pending", "node", node.Name, "message", added.Message)
		}
	}
}

// conditionsFor returns a condition for each implausible CIDR. The format is for the CIDR and the problem.
func conditionsFor(cidrs []netip.Prefix, nodes []*corev1.Node, format string) (conditions []events.Condition) {
	for _, cidr := range cidrs {
		if why := implausible(cidr, nodes); why != "" {
			conditions = append(conditions, events.Condition{Reason: ReasonImplausibleCIDR, Subject: cidr.String(), Message: fmt.Sprintf(format, cidr, why)})
		}
	}

	return conditions
}
