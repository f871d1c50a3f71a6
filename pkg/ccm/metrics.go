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
	Help:           "Number of machines by condition. Machines with a working watch are Current.",
	StabilityLevel: metrics.ALPHA,
}, []string{"condition"})

var machineUp = metrics.NewGaugeVec(&metrics.GaugeOpts{
	Name:           "talosccm_machine_up",
	Help:           "Whether the machine of a Node has a working watch. The series ends when the Node is deleted.",
	StabilityLevel: metrics.ALPHA,
}, []string{"node"})

var buildInfo = metrics.NewGaugeVec(&metrics.GaugeOpts{
	Name:           "talosccm_build_info",
	Help:           "Always 1. The labels are the version of talos-ccm and of Go.",
	StabilityLevel: metrics.ALPHA,
}, []string{"version", "go_version"})

func init() {
	legacyregistry.MustRegister(machines, machineUp, buildInfo)
	buildInfo.WithLabelValues(version.Version(), runtime.Version()).Set(1)
}

// countMachines updates the metrics of machines from inv until stop is called. stop deletes all series, since the next
// leader exports them. Later changes of inv, from informers that stop late, have no effect.
func countMachines(inv *inventory.Inventory) (stop func()) {
	var (
		mu      sync.Mutex // keeps an older count from overwriting a newer one
		stopped bool
	)

	inv.Subscribe(func(nodename string) {
		mu.Lock()
		defer mu.Unlock()

		if stopped {
			return
		}

		for _, c := range []inventory.Condition{inventory.Unknown, inventory.Current, inventory.Unreachable, inventory.Mismatch} {
			machines.WithLabelValues(c.String()).Set(float64(inv.Count(c)))
		}

		switch inv.Get(nodename).Condition {
		case inventory.Unknown: // not in the inventory
			machineUp.Delete(map[string]string{"node": nodename})
		case inventory.Current:
			machineUp.WithLabelValues(nodename).Set(1)
		default:
			machineUp.WithLabelValues(nodename).Set(0)
		}
	})

	return func() {
		mu.Lock()
		defer mu.Unlock()

		stopped = true

		machines.Reset()
		machineUp.Reset()
	}
}
