package machine_test

import (
	"testing"

	"github.com/siderolabs/talos/pkg/machinery/resources/hardware"
	"github.com/stretchr/testify/assert"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

func TestIdentity_CompareNeedsAgreementOfWhatIsKnown(t *testing.T) {
	for _, test := range []struct {
		name string
		a, b machine.Identity
		want machine.Match
	}{
		{"nothing known", machine.Identity{}, machine.Identity{}, machine.Undecided},
		{"one node ID", machine.Identity{NodeID: "n1"}, machine.Identity{}, machine.Undecided},
		{"same node ID", machine.Identity{NodeID: "n1"}, machine.Identity{NodeID: "n1"}, machine.Same},
		{"other node ID", machine.Identity{NodeID: "n1"}, machine.Identity{NodeID: "n2"}, machine.Different},
		{"same node ID, one UUID", machine.Identity{NodeID: "n1", UUID: "u1"}, machine.Identity{NodeID: "n1"}, machine.Undecided},
		{"cloned disk", machine.Identity{NodeID: "n1", UUID: "u1"}, machine.Identity{NodeID: "n1", UUID: "u2"}, machine.Different},
		{"reinstalled", machine.Identity{NodeID: "n1", UUID: "u1"}, machine.Identity{NodeID: "n2", UUID: "u1"}, machine.Same},
	} {
		assert.Equal(t, test.want, test.a.Compare(test.b), test.name)
		assert.Equal(t, test.want, test.b.Compare(test.a), "%s, reversed", test.name)
	}
}

func TestIdentity_StringNamesWhatIsKnown(t *testing.T) {
	const uuid = "0c34ad2d-f29e-136f-e25b-fdc0ce3b6b3c"

	for want, m := range map[string]machine.Machine{
		"unknown identity":                       {},
		`node ID "n1"`:                           {NodeID: "n1"},
		"SMBIOS UUID " + uuid:                    {System: hardware.SystemInformationSpec{UUID: uuid}},
		"SMBIOS UUID " + uuid + `, node ID "n1"`: {NodeID: "n1", System: hardware.SystemInformationSpec{UUID: uuid}},
	} {
		assert.Equal(t, want, m.Identity().String())
		assert.Equal(t, want == "unknown identity", m.Identity().IsZero(), want)
	}
}
