package ccm

import (
	"runtime"
	"sync"

	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"

	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/version"
)

var machines = metrics.NewGaugeVec(&metrics.GaugeOpts{
	Name:           "talosccm_machines",
	Help:           "Number of machines by condition; those that are being watched are Current.",
	StabilityLevel: metrics.ALPHA,
}, []string{"condition"})

var buildInfo = metrics.NewGaugeVec(&metrics.GaugeOpts{
	Name:           "talosccm_build_info",
	Help:           "Always 1; which talos-ccm this is, and what it was built with.",
	StabilityLevel: metrics.ALPHA,
}, []string{"version", "go_version"})

func init() {
	legacyregistry.MustRegister(machines, buildInfo)
	buildInfo.WithLabelValues(version.Version(), runtime.Version()).Set(1)
}

// countMachines keeps the gauge in step with inv until it is told to stop; the gauge then has no values, for they are the next leader's to
// count. What is still heard of machines after that, from informers that end a moment later, does not count.
func countMachines(inv *inventory.Inventory) (stop func()) {
	var (
		mu      sync.Mutex // or an older count could overwrite a newer one
		stopped bool
	)

	inv.Subscribe(func(string) {
		mu.Lock()
		defer mu.Unlock()

		if stopped {
			return
		}

		for _, c := range []inventory.Condition{inventory.Unknown, inventory.Current, inventory.Unreachable, inventory.Mismatch} {
			machines.WithLabelValues(c.String()).Set(float64(inv.Count(c)))
		}
	})

	return func() {
		mu.Lock()
		defer mu.Unlock()

		stopped = true

		machines.Reset()
	}
}
