package lifecycle

import (
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/talos-ccm/talos-ccm/pkg/config"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
)

// Another machine that responds at the address may be a temporary replacement.
func TestJudge_AbsenceIsProofOnlyForUnreachableMachine(t *testing.T) {
	for condition, want := range map[inventory.Condition]Proof{
		inventory.Unreachable: ProofDiscovery, inventory.Mismatch: "", inventory.Unknown: "", inventory.Current: "",
	} {
		got := judge(evidence{entry: inventory.Entry{Condition: condition}, absent: "not seen"}, config.CompiledLifecycle{Discovery: true})
		assert.Equal(t, want, got.proof, condition)
	}
}
