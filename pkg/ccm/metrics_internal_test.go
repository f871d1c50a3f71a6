package ccm

import (
	"strings"
	"testing"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/test/ctest"
)

// Events of informers may be handled after the leader has stopped.
func TestCountMachines_IgnoresChangesAfterStop(t *testing.T) {
	inv := inventory.New(time.Now)
	stop := countMachines(inv)

	inv.Replace("one", machine.Machine{Nodename: "one"})

	require.NotEmpty(t, gather(t, "talosccm_machines"))

	stop()
	inv.MarkUnreachable("two", "timeout")

	for _, name := range []string{"talosccm_machines", "talosccm_machine_up", "talosccm_machine_stage", "talosccm_machine_unmet_conditions"} {
		assert.Empty(t, gather(t, name))
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

	got, want := gather(t, "talosccm_machine_up"), map[string]float64{"current": 1, "stopped": 0, "moved": 0}
	assert.Equal(t, want, got)
}

func TestCountMachines_ExportsStages(t *testing.T) {
	inv := inventory.New(time.Now)
	defer countMachines(inv)()

	inv.Replace("worker", machine.Machine{Nodename: "worker", Stage: runtime.MachineStageBooting, UnmetConditions: make([]runtime.UnmetCondition, 2)})
	inv.Replace("deleted", machine.Machine{Nodename: "deleted"})
	inv.Forget("deleted")
	inv.MarkUnreachable("unknown", "timeout")

	assert.Equal(t, map[string]float64{"worker booting": 1}, gather(t, "talosccm_machine_stage"))
	assert.Equal(t, map[string]float64{"worker": 2}, gather(t, "talosccm_machine_unmet_conditions"))

	inv.Replace("worker", machine.Machine{Nodename: "worker", Stage: runtime.MachineStageShuttingDown})
	inv.MarkUnreachable("worker", "timeout")

	assert.Equal(t, map[string]float64{"worker shutting down": 1}, gather(t, "talosccm_machine_stage"))
	assert.Equal(t, map[string]float64{"worker": 0}, gather(t, "talosccm_machine_unmet_conditions"))
}

// gather returns the values of a metric by the value of its label.
func gather(t *testing.T, name string) map[string]float64 {
	t.Helper()

	values := map[string]float64{}

	for key, value := range ctest.Metrics(t) {
		if label, ok := strings.CutPrefix(key, name+" "); ok {
			values[label] = value
		}
	}

	return values
}
