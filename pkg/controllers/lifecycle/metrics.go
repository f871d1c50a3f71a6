package lifecycle

import "github.com/talos-ccm/talos-ccm/pkg/internal/metric"

var (
	deletionsTotal = metric.NewCounterVec("talosccm_lifecycle_deletions_total",
		"Number of Nodes that were deleted by proof: reset, scaled-down, renamed or discovery.", "proof")

	affectedNodes = metric.NewGaugeVec("talosccm_lifecycle_nodes",
		"Number of Nodes, or for NodeMissing of machines, by Event reason: NodeShutdown, NodeGone, NodeMissing, MachineSilent, DeletionLimited, DeletionPaused or DeletionDryRun.", "reason")
)
