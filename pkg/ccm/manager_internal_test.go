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

// A fact that was not read must not be treated as absent.
func TestSettings_ApplyOnceFactsAreRead(t *testing.T) {
	var documents source

	store := settings.New(&documents, "", func([]string) error { return nil })
	store.Run(t.Context())

	m := Manager{store: store}
	apply := func(selector string) *config.Compiled {
		documents.deliver(settings.Document{Config: []byte("csrApproval:\n  selector: [{matchExpressions: [" + selector + "]}]\n")}, nil)
		require.NoError(t, store.Problem())

		return store.Current()
	}
	kinds := machine.FactKindsOf

	first := apply("{key: pciDevices, operator: DoesNotExist}")
	assert.Equal(t, kinds("PCIDevices"), m.needFacts())
	assert.Same(t, first, m.settings())

	second := apply("{key: zone, operator: Exists}")
	assert.Same(t, second, m.settings(), "no facts")

	third := apply("{key: links, operator: Exists}, {key: pciDevices, operator: Exists}")
	assert.Same(t, second, m.settings())
	assert.Equal(t, kinds("PCIDevices")|kinds("Links"), m.needFacts())
	assert.Same(t, third, m.settings())

	apply("{key: cpus, operator: Gt, values: ['8']}")
	assert.Same(t, third, m.settings())

	fourth := apply("{key: pciDevices, operator: Exists}")
	assert.Same(t, fourth, m.settings(), "facts that were read before")
	assert.Equal(t, kinds("PCIDevices")|kinds("Links"), m.needFacts(), "facts that were read before")
}

// The node controller must know which addresses are the cluster's before it lists those of rules.
func TestSettings_ApplyRulesForAddressesOnceIdentityIsRead(t *testing.T) {
	var documents source

	store := settings.New(&documents, "", func([]string) error { return nil })
	store.Run(t.Context())

	m := Manager{store: store}
	apply := func(rule string) *config.Compiled {
		documents.deliver(settings.Document{Config: []byte("transformations: [" + rule + "]\n")}, nil)
		require.NoError(t, store.Problem())

		return store.Current()
	}

	const addresses = "{addresses: {ExternalIP: 203.0.113.7}, addressCIDRs: [203.0.113.0/24]}"

	first := apply("{labels: {a: b}}")
	m.needFacts()
	assert.False(t, m.readsIdentity, "nothing may need it")

	second := apply(addresses)
	assert.Same(t, first, m.settings())

	m.needFacts()
	assert.True(t, m.readsIdentity)
	assert.Same(t, second, m.settings())

	apply("{labels: {a: c}}")
	m.needFacts()
	assert.Same(t, apply(addresses), m.settings())
}
