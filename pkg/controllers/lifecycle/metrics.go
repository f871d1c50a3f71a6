package lifecycle

import "github.com/talos-ccm/talos-ccm/pkg/internal/metric"

var (
	deletionsTotal = metric.Zero(metric.NewCounterVec("talosccm_lifecycle_deletions_total",
		"Number of deleted Nodes by proof: reset, scaled-down, renamed or discovery.", "proof"),
		ProofReset, ProofScaledDown, ProofRenamed, ProofDiscovery)

	affectedNodes = metric.NewGaugeVec("talosccm_lifecycle_nodes",
		"Number of Nodes that are shut down, unresponsive, missing, gone or not deleted, by the reason of their Event.", "reason")
)
