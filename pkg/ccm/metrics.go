package ccm

import (
	"runtime"
	"sync"

	"github.com/talos-ccm/talos-ccm/pkg/internal/metric"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/version"
)

var machines = metric.NewGaugeVec("talosccm_machines",
	"Number of machines by condition: Current (watched), Unreachable, Mismatch or Unknown (not reached yet).", "condition")

var machineUp = metric.NewGaugeVec("talosccm_machine_up",
	"1 if the machine of a Node is watched, else 0.", "node")

var (
	machineStage = metric.NewGaugeVec("talosccm_machine_stage",
		"Always 1 for the last known stage of a Node's machine.", "node", "stage")

	unmetConditions = metric.NewGaugeVec("talosccm_machine_unmet_conditions",
		"Number of unmet conditions of a Node's machine that is not ready.", "node")
)

var buildInfo = metric.NewGaugeVec("talosccm_build_info",
	"Always 1. The labels are the version of talos-ccm and of Go.", "version", "go_version")

func init() {
	buildInfo.WithLabelValues(version.Version(), runtime.Version()).Set(1)
}

// countMachines updates the metrics of machines from inv until stop is called. stop deletes all series, since the next
// leader exports them. Later changes of inv, from informers that stop late, have no effect.
func countMachines(inv *inventory.Inventory) (stop func()) {
	var (
		mu      sync.Mutex // keeps an older count from overwriting a newer one
		stopped bool
		stages  = map[string]string{} // by nodename
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

		entry := inv.Get(nodename)

		stage := ""
		if entry.Last.Nodename != "" {
			stage = entry.Last.Stage.String()
		}

		if before := stages[nodename]; before != stage {
			machineStage.Delete(map[string]string{"node": nodename, "stage": before})
		}

		if stages[nodename] = stage; stage == "" {
			delete(stages, nodename)
			unmetConditions.Delete(map[string]string{"node": nodename})
		} else {
			machineStage.WithLabelValues(nodename, stage).Set(1)
			unmetConditions.WithLabelValues(nodename).Set(float64(len(entry.Last.UnmetConditions)))
		}

		switch entry.Condition {
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
		machineStage.Reset()
		unmetConditions.Reset()
	}
}
