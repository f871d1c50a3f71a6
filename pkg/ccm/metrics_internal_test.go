package ccm

import (
	"maps"
	"testing"
	"time"

	"k8s.io/component-base/metrics/legacyregistry"

	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

// Events of informers may be handled after the leader has stopped.
func TestCountMachines_IgnoresChangesAfterStop(t *testing.T) {
	inv := inventory.New(time.Now)
	stop := countMachines(inv)

	inv.MarkUnreachable("one", "timeout")

	if n := len(gather(t, "talosccm_machines", "condition")); n == 0 {
		t.Fatal("no series before stop")
	}

	stop()
	inv.MarkUnreachable("two", "timeout")

	for name, label := range map[string]string{"talosccm_machines": "condition", "talosccm_machine_up": "node"} {
		if series := gather(t, name, label); len(series) != 0 {
			t.Errorf("%s has %v after stop", name, series)
		}
	}
}

func TestCountMachines_ExportsMachinesOfNodes(t *testing.T) {
	inv := inventory.New(time.Now)
	defer countMachines(inv)()

	inv.Replace("current", machine.Machine{Nodename: "current"})
	inv.Replace("stopped", machine.Machine{Nodename: "stopped"})
	inv.MarkUnreachable("stopped", "timeout")
	inv.MarkMismatch("moved", "current", "another machine")
	inv.MarkUnreachable("deleted", "timeout")
	inv.Forget("deleted")

	got, want := gather(t, "talosccm_machine_up", "node"), map[string]float64{"current": 1, "stopped": 0, "moved": 0}
	if !maps.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

// gather returns the values of a gauge by label.
func gather(t *testing.T, name, label string) map[string]float64 {
	t.Helper()

	families, err := legacyregistry.DefaultGatherer.Gather()
	if err != nil {
		t.Fatal(err)
	}

	values := map[string]float64{}

	for _, family := range families {
		for _, metric := range family.GetMetric() {
			if pair := metric.GetLabel(); family.GetName() == name && len(pair) == 1 && pair[0].GetName() == label {
				values[pair[0].GetValue()] = metric.GetGauge().GetValue()
			}
		}
	}

	return values
}
