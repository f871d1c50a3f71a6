package ccm

import (
	"sync"

	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"

	"github.com/talos-ccm/talos-ccm/pkg/inventory"
)

var machines = metrics.NewGaugeVec(&metrics.GaugeOpts{
	Name:           "talosccm_machines",
	Help:           "Number of machines by condition; those that are being watched are Current.",
	StabilityLevel: metrics.ALPHA,
}, []string{"condition"})

func init() { legacyregistry.MustRegister(machines) }

// countMachines keeps the gauge in step with inv.
func countMachines(inv *inventory.Inventory) {
	var mu sync.Mutex // or an older count could overwrite a newer one

	inv.Subscribe(func(string) {
		mu.Lock()
		defer mu.Unlock()

		for _, c := range []inventory.Condition{inventory.Unknown, inventory.Current, inventory.Unreachable, inventory.Mismatch} {
			machines.WithLabelValues(c.String()).Set(float64(inv.Count(c)))
		}
	})
}
