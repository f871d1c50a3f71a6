package ccm

import (
	"testing"
	"time"

	"k8s.io/component-base/metrics/legacyregistry"

	"github.com/talos-ccm/talos-ccm/pkg/inventory"
)

// Events of informers may be handled after the leader has stopped.
func TestCountMachines_IgnoresChangesAfterStop(t *testing.T) {
	inv := inventory.New(time.Now)
	stop := countMachines(inv)

	inv.MarkUnreachable("one", "timeout")

	if n := seriesOfMachines(t); n == 0 {
		t.Fatal("no series before stop")
	}

	stop()
	inv.MarkUnreachable("two", "timeout")

	if n := seriesOfMachines(t); n != 0 {
		t.Errorf("got %d series after stop, want 0", n)
	}
}

func seriesOfMachines(t *testing.T) int {
	t.Helper()

	families, err := legacyregistry.DefaultGatherer.Gather()
	if err != nil {
		t.Fatal(err)
	}

	for _, family := range families {
		if family.GetName() == "talosccm_machines" {
			return len(family.GetMetric())
		}
	}

	return 0
}
