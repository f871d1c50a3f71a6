package ccm

import (
	"context"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

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

type factsReader int

func (r *factsReader) ReadFacts() { *r++ }

// A fact that was not read must not be treated as absent.
func TestSettings_ApplyToMachineOnceItsFactsAreRead(t *testing.T) {
	var (
		documents source
		reader    factsReader
	)

	store := settings.New(&documents, "", func([]string) error { return nil })
	store.Run(t.Context())

	m := Manager{store: store}
	unread, read := machine.Machine{Nodename: "a"}, machine.Machine{Nodename: "a", Facts: &machine.Facts{}}

	for i, step := range []struct {
		selector string
		applies  int // the step with the configuration that applies to a machine before its facts are read
		reads    factsReader
	}{
		{"{key: pciDevices, operator: DoesNotExist}", 0, 1}, // no configuration was in force before
		{"{key: zone, operator: Exists}", 1, 1},
		{"{key: region, operator: Exists}", 2, 1},
		{"{key: links, operator: DoesNotExist}", 2, 2},
		{"{key: cpus, operator: Gt, values: ['8']}", 2, 3},
		{"{key: zone, operator: Exists}", 5, 3},
	} {
		documents.deliver(settings.Document{Config: []byte("csrApproval:\n  selector: [{matchExpressions: [" + step.selector + "]}]\n")}, nil)
		require.NoError(t, store.Problem())
		m.readFacts(&reader)

		current := store.Current()
		assert.Equal(t, step.reads, reader, "step %d", i)
		assert.Same(t, current, m.settings(), "step %d", i)
		assert.Same(t, current, m.settingsFor(read), "step %d", i)
		assert.Same(t, current, m.settingsFor(machine.Machine{}), "step %d: no machine has responded", i)

		if step.applies == i {
			assert.Same(t, current, m.settingsFor(unread), "step %d", i)
		} else {
			assert.Same(t, m.withoutFacts.Load(), m.settingsFor(unread), "step %d", i)
			assert.NotSame(t, current, m.settingsFor(unread), "step %d", i)
		}
	}
}
