package lifecycle

import (
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/talos-ccm/talos-ccm/pkg/config"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
)

// A machine that moved to another address is still discovered, even if another machine responds at its old address.
func TestDecide_AbsenceIsProofIfMachineDoesNotRespond(t *testing.T) {
	for condition, want := range map[inventory.Condition]Proof{
		inventory.Unreachable: ProofDiscovery, inventory.Mismatch: ProofDiscovery, inventory.Unknown: "", inventory.Current: "",
	} {
		got := decide(evidence{entry: inventory.Entry{Condition: condition}, absent: "not seen"}, config.CompiledLifecycle{Discovery: true})
		assert.Equal(t, want, got.proof, condition)
	}
}
