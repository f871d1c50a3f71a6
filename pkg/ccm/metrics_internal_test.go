package ccm

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"k8s.io/component-base/metrics/legacyregistry"

	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

// Events of informers may be handled after the leader has stopped.
func TestCountMachines_IgnoresChangesAfterStop(t *testing.T) {
	inv := inventory.New(time.Now)
	stop := countMachines(inv)

	inv.MarkUnreachable("one", "timeout")

	require.NotEmpty(t, gather(t, "talosccm_machines", "condition"))

	stop()
	inv.MarkUnreachable("two", "timeout")

	for name, label := range map[string]string{"talosccm_machines": "condition", "talosccm_machine_up": "node"} {
		assert.Empty(t, gather(t, name, label))
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
	assert.Equal(t, want, got)
}

// gather returns the values of a gauge by label.
func gather(t *testing.T, name, label string) map[string]float64 {
	t.Helper()

	families, err := legacyregistry.DefaultGatherer.Gather()
	require.NoError(t, err)

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
