package nodeipam

import (
	"k8s.io/component-base/metrics"

	"github.com/talos-ccm/talos-ccm/pkg/internal/events"
	"github.com/talos-ccm/talos-ccm/pkg/internal/metric"
)

// Reasons of the Events on Nodes, and values of the label "reason" in metrics.
const (
	// ReasonAllocatorConflict: another controller allocates pod CIDRs.
	ReasonAllocatorConflict = "PodCIDRAllocatorConflict"
	// ReasonAllocatorUnknown: the ServiceCIDRs or the configuration of kube-controller-manager could not be read, or
	// are contradictory.
	ReasonAllocatorUnknown = "PodCIDRAllocatorUnknown"
	// ReasonClusterCIDRMissing: neither the options nor Talos configure cluster CIDRs.
	ReasonClusterCIDRMissing = "PodCIDRClusterCIDRMissing"
	// ReasonMachineUnknown: the state of the machine is needed, and is not known.
	ReasonMachineUnknown = "PodCIDRMachineUnavailable"
	// ReasonNotInitialized: pools select Nodes by label, and the Node is not initialized.
	ReasonNotInitialized = "PodCIDRNodeNotInitialized"
	// ReasonPrefixMissing: the machine has no global IPv6 prefix.
	ReasonPrefixMissing = "PodCIDRIPv6PrefixMissing"
	// ReasonPrefixTooSmall: a prefix cannot be divided into blocks of the configured size.
	ReasonPrefixTooSmall = "PodCIDRPrefixTooSmall"
	// ReasonMaxPodsUnknown: the block size depends on the kubelet's pod capacity, and the kubelet has not reported it.
	ReasonMaxPodsUnknown = "PodCIDRMaxPodsUnknown"
	// ReasonExhausted: no block is free.
	ReasonExhausted = "PodCIDRPoolExhausted"
	// ReasonWriteFailed: the API server rejected the podCIDRs.
	ReasonWriteFailed = "PodCIDRWriteFailed"
	// ReasonOverlap: the Node's podCIDRs overlap those of another Node.
	ReasonOverlap = "PodCIDROverlap"
	// ReasonTooLarge: the Node's podCIDRs are too large for a pool, and do not count.
	ReasonTooLarge = "PodCIDRTooLarge"
	// ReasonInvalid: the Node's podCIDRs are not CIDRs.
	ReasonInvalid = "PodCIDRInvalid"
	// ReasonFamilyMissing: the Node has no podCIDR of an IP family that new Nodes get.
	ReasonFamilyMissing = "PodCIDRFamilyMissing"
	// ReasonPrefixChanged: the Node's IPv6 podCIDR is not in the machine's prefix.
	ReasonPrefixChanged = "PodCIDRPrefixChanged"
)

var (
	allocationsTotal = metric.NewCounterVec("talosccm_ipam_allocations_total",
		"Blocks written to Nodes, by pool and IP family.", "pool", "family")

	failuresTotal = metric.NewCounterVec("talosccm_ipam_failures_total",
		"Problems with the podCIDRs of Nodes, counted when they appear, by reason.", "reason")

	affectedNodes = metric.NewGaugeVec("talosccm_ipam_affected_nodes",
		"Nodes whose podCIDRs are pending or invalid, by reason.", "reason")

	blocked = metric.NewGauge("talosccm_ipam_blocked",
		"1 while allocation is blocked because another controller allocates pod CIDRs, or because that is not known.")

	poolBlocks = metric.NewGaugeVec("talosccm_ipam_pool_blocks",
		"Blocks in a CIDR of a pool.", "pool", "family", "cidr")
	poolBlocksUsed = metric.NewGaugeVec("talosccm_ipam_pool_blocks_used",
		"Blocks in a CIDR of a pool that are allocated or reserved, in whole or in part.", "pool", "family", "cidr")
	poolBlocksFree = metric.NewGaugeVec("talosccm_ipam_pool_blocks_free",
		"Blocks in a CIDR of a pool that are free.", "pool", "family", "cidr")
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
