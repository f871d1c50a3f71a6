package machine_test

import (
	"testing"

	"github.com/siderolabs/talos/pkg/machinery/resources/hardware"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

func TestIdentity_Compare(t *testing.T) {
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
		t.Run(test.name, func(t *testing.T) {
			if got := test.a.Compare(test.b); got != test.want {
				t.Errorf("got %v, want %v", got, test.want)
			}

			if got := test.b.Compare(test.a); got != test.want {
				t.Errorf("reversed: got %v, want %v", got, test.want)
			}
		})
	}
}

func TestIdentity_String(t *testing.T) {
	const uuid = "0c34ad2d-f29e-136f-e25b-fdc0ce3b6b3c"

	for want, m := range map[string]machine.Machine{
		"unknown identity":                       {},
		`node ID "n1"`:                           {NodeID: "n1"},
		"SMBIOS UUID " + uuid:                    {System: hardware.SystemInformationSpec{UUID: uuid}},
		"SMBIOS UUID " + uuid + `, node ID "n1"`: {NodeID: "n1", System: hardware.SystemInformationSpec{UUID: uuid}},
	} {
		if got := m.Identity().String(); got != want {
			t.Errorf("got %q, want %q", got, want)
		}

		if got := m.Identity().IsZero(); got != (want == "unknown identity") {
			t.Errorf("%s: IsZero returns %v", want, got)
		}
	}
}
