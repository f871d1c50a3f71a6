package ccm

import (
	"context"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/talos-ccm/talos-ccm/pkg/settings"
)

// source delivers the documents that a test writes.
type source struct {
	deliver func(settings.Document, error)
}

func (s *source) Follow(_ context.Context, deliver func(settings.Document, error)) {
	s.deliver = deliver
}

// A fact that was not read must not be treated as absent.
func TestSettings_WaitForFacts(t *testing.T) {
	var documents source

	store := settings.New(&documents, settings.LastKnownGood{}, func([]string) error { return nil })
	store.Run(t.Context())

	reconnects := 0
	m := Manager{store: store, facts: []string{"CPUs"}, reconnect: func() { reconnects++ }}

	for i, step := range []struct {
		selector   string
		inForce    bool
		reconnects int
	}{
		{"{key: cpus, operator: Gt, values: ['8']}", true, 0},
		{"{key: pciDevices, operator: DoesNotExist}", false, 1},
		{"{key: zone, operator: Exists}", true, 1},
		{"{key: links, operator: DoesNotExist}", false, 2},
	} {
		served := m.served.Load()

		documents.deliver(settings.Document{Config: []byte("csrApproval:\n  selector: [{matchExpressions: [" + step.selector + "]}]\n")}, nil)
		require.NoError(t, store.Problem())

		got, want := m.settings(), store.Current()
		if !step.inForce {
			want = served
		}

		assert.Same(t, want, got, "step %d", i)
		assert.Equal(t, step.reconnects, reconnects)
	}
}
