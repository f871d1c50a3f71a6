package nodeipam

import (
	"k8s.io/component-base/metrics"

	"github.com/talos-ccm/talos-ccm/pkg/internal/events"
	"github.com/talos-ccm/talos-ccm/pkg/internal/metric"
)

// Reasons of the Events on Nodes, and values of the label "reason" in metrics.
const (
	// ReasonAllocatorConflict: allocation is paused: another allocator is active.
	// Fix: as the message says, see docs/explanation/pod-cidrs.md#other-allocators.
	ReasonAllocatorConflict = "PodCIDRAllocatorConflict"
	// ReasonAllocatorUnknown: allocation is paused: a control-plane machine was not read yet, or pod subnets or mask sizes
	// differ.
	// Fix: as the message says, often docs/troubleshooting/nodes.md#machine-unreachable.
	ReasonAllocatorUnknown = "PodCIDRAllocatorUnknown"
	// ReasonClusterCIDRMissing: no cluster CIDR is set with `--cluster-cidr` or in Talos.
	// Fix: set `podSubnets` in Talos.
	ReasonClusterCIDRMissing = "PodCIDRClusterCIDRMissing"
	// ReasonOutsidePodSubnets: on a control-plane Node: pools outside `podSubnets` break Flannel or kube-proxy.
	// Fix: docs/guides/coexistence.md#pod-cidrs-and-cnis.
	ReasonOutsidePodSubnets = "PodCIDROutsidePodSubnets"
	// ReasonMachineUnknown: the pool or prefix depends on the machine, which does not respond.
	// Fix: docs/troubleshooting/nodes.md#machine-unreachable.
	ReasonMachineUnknown = "PodCIDRMachineUnavailable"
	// ReasonNotInitialized: a pool selects Nodes by label, and the Node is not initialized yet.
	// Fix: docs/troubleshooting/nodes.md#node-stays-uninitialized.
	ReasonNotInitialized = "PodCIDRNodeNotInitialized"
	// ReasonPrefixMissing: the machine has no global IPv6 address, or only single ones (/128).
	// Fix: add one, use a pool, or fall back: docs/explanation/pod-cidrs.md#machines-without-a-prefix.
	ReasonPrefixMissing = "PodCIDRIPv6PrefixMissing"
	// ReasonPrefixTooSmall: a prefix cannot be divided into blocks of the configured size.
	// Fix: change the mask size or the prefix, as the message says.
	ReasonPrefixTooSmall = "PodCIDRPrefixTooSmall"
	// ReasonMaxPodsUnknown: `blockSize` is `auto`, and the kubelet reports no pod capacity, or more than 4096.
	// Fix: wait, or set a mask size.
	ReasonMaxPodsUnknown = "PodCIDRMaxPodsUnknown"
	// ReasonExhausted: the pool has no free block.
	// Fix: add a CIDR, or delete Nodes that no longer exist.
	ReasonExhausted = "PodCIDRPoolExhausted"
	// ReasonWriteFailed: the API server rejected the write.
	// Fix: docs/troubleshooting/installation.md#kubernetes-api-errors.
	ReasonWriteFailed = "PodCIDRWriteFailed"
	// ReasonOverlap: podCIDRs overlap with other Nodes'.
	// Fix: delete the wrong Node, and let it register without podCIDRs.
	ReasonOverlap = "PodCIDROverlap"
	// ReasonTooLarge: docs/explanation/pod-cidrs.md#podcidrs-that-are-too-large do not count.
	// Fix: delete the Node, and let it register without podCIDRs.
	ReasonTooLarge = "PodCIDRTooLarge"
	// ReasonPrefixChanged: the IPv6 podCIDR is no longer in the machine's own prefix.
	// Fix: docs/guides/pod-cidrs.md#change-the-podcidrs-of-a-node.
	ReasonPrefixChanged = "PodCIDRPrefixChanged"
)

var (
	allocationsTotal = metric.NewCounterVec("talosccm_ipam_allocations_total",
		"Number of pod CIDR blocks written to Nodes, by pool and IP family.", "pool", "family")

	failuresTotal = metric.Zero(metric.NewCounterVec("talosccm_ipam_failures_total",
		"Number of pod CIDR problems that began, by the reason of their Event.", "reason"),
		ReasonAllocatorConflict, ReasonAllocatorUnknown, ReasonClusterCIDRMissing, ReasonMachineUnknown, ReasonNotInitialized,
		ReasonPrefixMissing, ReasonPrefixTooSmall, ReasonMaxPodsUnknown, ReasonExhausted, ReasonWriteFailed, ReasonOverlap,
		ReasonTooLarge, ReasonPrefixChanged, ReasonOutsidePodSubnets)

	affectedNodes = metric.NewGaugeVec("talosccm_ipam_affected_nodes",
		"Number of Nodes with a pod CIDR problem, by the reason of its Event.", "reason")

	blocked = metric.NewGauge("talosccm_ipam_blocked",
		"1 while allocation is paused because another allocator is active or could be, else 0.")

	poolBlocks = metric.NewGaugeVec("talosccm_ipam_pool_blocks",
		"Number of pod CIDR blocks in a CIDR of a pool.", "pool", "family", "cidr")
	poolBlocksUsed = metric.NewGaugeVec("talosccm_ipam_pool_blocks_used",
		"Number of pod CIDR blocks that are allocated or reserved, fully or partly.", "pool", "family", "cidr")
	poolBlocksFree = metric.NewGaugeVec("talosccm_ipam_pool_blocks_free",
		"Number of pod CIDR blocks that can be allocated.", "pool", "family", "cidr")
)

// resetGauges also runs when leadership ends: only the leader knows the values.
func resetGauges() {
	blocked.Set(0)

	for _, gauge := range []*metrics.GaugeVec{affectedNodes, poolBlocks, poolBlocksUsed, poolBlocksFree} {
		gauge.Reset()
	}
}

// updateGauges sets all gauges, and removes those of pools and reasons that no longer exist.
func (c *Controller) updateGauges(options Options, blockedReason *events.Problem) {
	resetGauges()

	if blockedReason != nil {
		blocked.Set(1)
	}

	for reason, count := range c.reporter.CountByReason() {
		affectedNodes.WithLabelValues(reason).Set(float64(count))
	}

	// The size of the blocks is the pool's usual one, even if BlockSizeAuto is set.
	for _, s := range (assignment{pools: c.cfg.Pools(), options: options}).sources() {
		stats, labels := c.allocations.stats(s), []string{s.name, string(familyOf(s.CIDR().Addr())), s.CIDR().String()}

		poolBlocks.WithLabelValues(labels...).Set(float64(stats.Size))
		poolBlocksUsed.WithLabelValues(labels...).Set(float64(stats.Used))
		poolBlocksFree.WithLabelValues(labels...).Set(float64(stats.Free))
	}
}
