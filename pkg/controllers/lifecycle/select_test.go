package lifecycle_test

import (
	"testing"

	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/talos-ccm/talos-ccm/pkg/controllers/lifecycle"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/rules"
)

// After a leader change, a stopped instance of another provider is unknown.
func TestSelects_UnknownMachineOnlyWithoutSelector(t *testing.T) {
	notAWS, errs := rules.CompileSelector([]rules.SelectorTerm{{MatchExpressions: []rules.Expression{
		{Key: "platform", Operator: rules.NotIn, Values: []string{"aws"}},
	}}}, field.NewPath("lifecycle", "selector"))
	require.Empty(t, errs)

	metal := machine.Machine{Nodename: "w-1", Platform: runtime.PlatformMetadataSpec{Platform: "metal"}}

	for _, test := range []struct {
		name     string
		selector *rules.Selector
		machine  machine.Machine
		want     bool
	}{
		{"unknown machine, selector", notAWS, machine.Machine{}, false},
		{"unknown machine, no selector", nil, machine.Machine{}, true},
		{"known machine, selector", notAWS, metal, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			assert.Equal(t, test.want, lifecycle.Selects(test.selector, &corev1.Node{}, test.machine))
		})
	}
}
