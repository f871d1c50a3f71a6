package node

import (
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/component-base/metrics"

	"github.com/talos-ccm/talos-ccm/pkg/internal/metric"
)

var (
	initialization = metric.NewHistogram("talosccm_node_initialization_duration_seconds",
		"Time from the creation of a Node to the removal of its uninitialized taint.", []float64{.25, .5, 1, 2.5, 5, 10, 30, 60, 300, 1800})

	uninitialized = metric.NewGauge("talosccm_nodes_uninitialized",
		"Number of managed Nodes with the uninitialized taint.")

	topologyChanges = metric.Zero(metric.NewCounterVec("talosccm_topology_changes_total",
		"Number of changes of a region or zone that were not written to the Node, by label.", "label"),
		corev1.LabelTopologyRegion, corev1.LabelTopologyZone)

	addressUpdates = metric.NewCounter("talosccm_node_address_updates_total",
		"Number of times that the addresses of an initialized Node were corrected, after its machine or another client changed them.")

	// The upstream Talos CCM uses these two names.
	transformation = metric.NewHistogram("talosccm_transformer_duration_seconds",
		"Time to compute the desired state of a Node, including rules.", []float64{.0001, .00025, .0005, .001, .0025, .005, .01, .05, .1, 1})

	transformationErrors = metric.Zero(metric.NewCounterVec("talosccm_transformer_errors_total",
		"Number of values that became invalid, by type: labels, labelsFromTags, annotations, taints, platformMetadata, addresses or machine.", "type"),
		"labels", "labelsFromTags", "annotations", "taints", "platformMetadata", "addresses", "machine")
)

// pendingNodes are the managed Nodes that are not initialized. The gauge has their number.
type pendingNodes struct {
	gauge metrics.GaugeMetric

	mu    sync.Mutex
	names sets.Set[string]
}

func (p *pendingNodes) update(change func(names sets.Set[string])) {
	p.mu.Lock()
	defer p.mu.Unlock()

	change(p.names)
	p.gauge.Set(float64(p.names.Len()))
}
