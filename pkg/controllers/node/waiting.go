package node

import (
	"sync"

	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
)

var uninitialized = metrics.NewGauge(&metrics.GaugeOpts{
	Name:           "talosccm_nodes_uninitialized",
	Help:           "Number of Nodes of ours that have the uninitialized taint.",
	StabilityLevel: metrics.ALPHA,
})

func init() { legacyregistry.MustRegister(uninitialized) }

// waiting counts the Nodes that are not initialized yet.
type waiting struct {
	mu    sync.Mutex
	names map[string]bool
	gauge metrics.GaugeMetric
}

// newWaiting counts none yet; gauge is always how many there are.
func newWaiting(gauge metrics.GaugeMetric) *waiting {
	return &waiting{names: map[string]bool{}, gauge: gauge}
}

// add is for a Node that waits.
func (w *waiting) add(nodename string) {
	w.mu.Lock()
	defer w.mu.Unlock()

	w.names[nodename] = true
	w.gauge.Set(float64(len(w.names)))
}

// remove is for one that does not.
func (w *waiting) remove(nodename string) {
	w.mu.Lock()
	defer w.mu.Unlock()

	delete(w.names, nodename)
	w.gauge.Set(float64(len(w.names)))
}

// clear is for one that no longer leads, and no longer knows.
func (w *waiting) clear() {
	w.mu.Lock()
	defer w.mu.Unlock()

	clear(w.names)
	w.gauge.Set(0)
}
