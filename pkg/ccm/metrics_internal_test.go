package ccm

import (
	"testing"
	"time"

	"k8s.io/component-base/metrics/legacyregistry"

	"github.com/talos-ccm/talos-ccm/pkg/inventory"
)

// Informers that end with a leader's term may have told of a Node that is handled a moment later.
func TestWhatIsHeardOfMachinesAfterALeadersTermIsNotCounted(t *testing.T) {
	inv := inventory.New(time.Now)
	stop := countMachines(inv)

	inv.MarkUnreachable("one", "silence")

	if n := seriesOfMachines(t); n == 0 {
		t.Fatal("nothing is counted: the test does not test")
	}

	stop()
	inv.MarkUnreachable("two", "silence")

	if n := seriesOfMachines(t); n != 0 {
		t.Errorf("there are %d values of a leader's that does not lead any more", n)
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
