package machine_test

import (
	"regexp"
	"strings"
	"testing"

	"github.com/siderolabs/talos/pkg/machinery/resources/hardware"
	"github.com/stretchr/testify/assert"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

func withUUID(uuid string) machine.Machine {
	return machine.Machine{System: hardware.SystemInformationSpec{UUID: uuid}}
}

func TestMachine_UUIDIsCanonicalOrEmpty(t *testing.T) {
	for _, test := range []struct{ name, smbios, want string }{
		{"valid", "30a0bdf7-4b1a-4f0e-9f86-2a3d64a3c5ee", "30a0bdf7-4b1a-4f0e-9f86-2a3d64a3c5ee"},
		{"upper case", "30A0BDF7-4B1A-4F0E-9F86-2A3D64A3C5EE", "30a0bdf7-4b1a-4f0e-9f86-2a3d64a3c5ee"},
		{"surrounded by white space", " 30a0bdf7-4b1a-4f0e-9f86-2a3d64a3c5ee\n", "30a0bdf7-4b1a-4f0e-9f86-2a3d64a3c5ee"},
		{"Dell with a service tag", "4c4c4544-0042-3510-8052-b4c04f564831", "4c4c4544-0042-3510-8052-b4c04f564831"},

		{"empty", "", ""},
		{"text", "Not Settable", ""},
		{"too short", "30a0bdf7-4b1a-4f0e-9f86-2a3d64a3c5e", ""},
		{"too long", "30a0bdf7-4b1a-4f0e-9f86-2a3d64a3c5eee", ""},
		{"without dashes", "30a0bdf74b1a4f0e9f862a3d64a3c5ee0000", ""},
		{"misplaced dashes", "30a0bdf74-b1a-4f0e-9f86-2a3d64a3c5ee", ""},
		{"not hexadecimal", "30a0bdf7-4b1a-4f0e-9f86-2a3d64a3c5eg", ""},
		{"36 bytes but fewer characters", "30a0bdf7-4b1a-4f0e-9f86-2a3d64a3c5é", ""},

		{"all zeros", "00000000-0000-0000-0000-000000000000", ""},
		{"all ones", "ffffffff-ffff-ffff-ffff-ffffffffffff", ""},
		{"all ones in upper case", "FFFFFFFF-FFFF-FFFF-FFFF-FFFFFFFFFFFF", ""},
		{"one byte repeated", "fefefefe-fefe-fefe-fefe-fefefefefefe", ""},
		{"AMI sample", "03000200-0400-0500-0006-000700080009", ""},
		{"AMI sample in the other byte order", "00020003-0004-0005-0006-000700080009", ""},
		{"counting sample", "12345678-1234-5678-90AB-CDDEEFAABBCC", ""},
		{"counting sample in the other byte order", "78563412-3412-7856-90ab-cddeefaabbcc", ""},
		{"Dell without a service tag", "4c4c4544-0000-2010-8020-80c04f202020", ""},
		{"Dell without a service tag in the other byte order", "44454C4C-0000-1020-8020-80C04F202020", ""},
	} {
		assert.Equal(t, test.want, withUUID(test.smbios).UUID(), test.name)
	}
}

func FuzzMachine_UUID(f *testing.F) {
	for _, seed := range []string{"", "30A0BDF7-4B1A-4F0E-9F86-2A3D64A3C5EE", "00000000-0000-0000-0000-000000000000", "\xff", "İ0a0bdf7-4b1a-4f0e-9f86-2a3d64a3c5e"} {
		f.Add(seed)
	}

	canonical := regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)

	f.Fuzz(func(t *testing.T, smbios string) {
		uuid := withUUID(smbios).UUID()
		if uuid == "" {
			return
		}

		assert.Regexp(t, canonical, uuid)
		assert.Equal(t, uuid, withUUID(strings.ToUpper(uuid)).UUID(), "from upper case")
	})
}
