package ccm

import (
	"context"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/talos-ccm/talos-ccm/pkg/config"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/settings"
)

// source delivers the documents that a test writes.
type source struct {
	deliver func(settings.Document, error)
}

func (s *source) Follow(_ context.Context, deliver func(settings.Document, error)) {
	s.deliver = deliver
}

type factsReader machine.FactKinds

func (r *factsReader) ReadFacts(kinds machine.FactKinds) { *r |= factsReader(kinds) }

// A fact that was not read must not be treated as absent.
func TestSettings_ApplyToMachineOnceItsFactsAreRead(t *testing.T) {
	var (
		documents source
		reader    factsReader
	)

	store := settings.New(&documents, "", func([]string) error { return nil })
	store.Run(t.Context())

	m := Manager{store: store}
	kinds := machine.FactKindsOf
	reads := func(facts machine.FactKinds) machine.Machine {
		return machine.Machine{Nodename: "a", FactKinds: facts, Facts: &machine.Facts{}}
	}

	var steps []*config.Compiled

	for i, step := range []struct {
		selector string
		// The steps with the configurations that apply to machines without facts, and with links only.
		unread, links int
		reads         machine.FactKinds
	}{
		{"{key: pciDevices, operator: DoesNotExist}", 0, 0, kinds("PCIDevices")}, // no configuration was in force before
		{"{key: zone, operator: Exists}", 1, 1, kinds("PCIDevices")},
		{"{key: region, operator: Exists}", 2, 2, kinds("PCIDevices")},
		{"{key: links, operator: DoesNotExist}", 2, 3, kinds("PCIDevices") | kinds("Links")},
		{"{key: links, operator: Exists}, {key: cpus, operator: Gt, values: ['8']}", 2, 3, kinds("PCIDevices") | kinds("Links") | kinds("CPUs")},
		{"{key: cpus, operator: Gt, values: ['8']}", 2, 3, kinds("PCIDevices") | kinds("Links") | kinds("CPUs")},
		{"{key: zone, operator: Exists}", 6, 6, kinds("PCIDevices") | kinds("Links") | kinds("CPUs")},
		{"{key: cpus, operator: Gt, values: ['8']}", 6, 6, kinds("PCIDevices") | kinds("Links") | kinds("CPUs")},
	} {
		documents.deliver(settings.Document{Config: []byte("csrApproval:\n  selector: [{matchExpressions: [" + step.selector + "]}]\n")}, nil)
		require.NoError(t, store.Problem())
		m.readFacts(&reader)

		current := store.Current()
		steps = append(steps, current)
		assert.Equal(t, factsReader(step.reads), reader, "step %d", i)
		assert.Same(t, current, m.settings(), "step %d", i)
		assert.Same(t, current, m.settingsFor(reads(machine.AllFacts)), "step %d", i)
		assert.Same(t, current, m.settingsFor(machine.Machine{}), "step %d: no machine has responded", i)
		assert.Same(t, steps[step.unread], m.settingsFor(reads(0)), "step %d", i)
		assert.Same(t, steps[step.links], m.settingsFor(reads(kinds("Links"))), "step %d", i)
	}
}
