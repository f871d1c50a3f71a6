package machine_test

import (
	"regexp"
	"strings"
	"testing"

	"github.com/siderolabs/talos/pkg/machinery/resources/hardware"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

func withUUID(uuid string) machine.Machine {
	return machine.Machine{System: hardware.SystemInformationSpec{UUID: uuid}}
}

func TestUUIDIsWhatCanIdentifyAMachine(t *testing.T) {
	for _, test := range []struct{ rule, smbios, want string }{
		{"a proper one is taken", "30a0bdf7-4b1a-4f0e-9f86-2a3d64a3c5ee", "30a0bdf7-4b1a-4f0e-9f86-2a3d64a3c5ee"},
		{"upper case is folded", "30A0BDF7-4B1A-4F0E-9F86-2A3D64A3C5EE", "30a0bdf7-4b1a-4f0e-9f86-2a3d64a3c5ee"},
		{"blanks around it are cut", " 30a0bdf7-4b1a-4f0e-9f86-2a3d64a3c5ee\n", "30a0bdf7-4b1a-4f0e-9f86-2a3d64a3c5ee"},
		{"a Dell with a service tag counts", "4c4c4544-0042-3510-8052-b4c04f564831", "4c4c4544-0042-3510-8052-b4c04f564831"},

		{"none is none", "", ""},
		{"text is none", "Not Settable", ""},
		{"too short is none", "30a0bdf7-4b1a-4f0e-9f86-2a3d64a3c5e", ""},
		{"too long is none", "30a0bdf7-4b1a-4f0e-9f86-2a3d64a3c5eee", ""},
		{"without dashes it is none", "30a0bdf74b1a4f0e9f862a3d64a3c5ee0000", ""},
		{"with dashes elsewhere it is none", "30a0bdf74-b1a-4f0e-9f86-2a3d64a3c5ee", ""},
		{"with other letters it is none", "30a0bdf7-4b1a-4f0e-9f86-2a3d64a3c5eg", ""},
		{"36 bytes that are fewer letters are none", "30a0bdf7-4b1a-4f0e-9f86-2a3d64a3c5é", ""},

		{"zero identifies nothing", "00000000-0000-0000-0000-000000000000", ""},
		{"all ones identify nothing", "ffffffff-ffff-ffff-ffff-ffffffffffff", ""},
		{"all ones in upper case neither", "FFFFFFFF-FFFF-FFFF-FFFF-FFFFFFFFFFFF", ""},
		{"one byte repeated identifies nothing", "fefefefe-fefe-fefe-fefe-fefefefefefe", ""},
		{"AMI's sample identifies nothing", "03000200-0400-0500-0006-000700080009", ""},
		{"AMI's sample in the other byte order neither", "00020003-0004-0005-0006-000700080009", ""},
		{"the counting sample identifies nothing", "12345678-1234-5678-90AB-CDDEEFAABBCC", ""},
		{"the counting sample in the other byte order neither", "78563412-3412-7856-90ab-cddeefaabbcc", ""},
		{"a Dell without a service tag identifies nothing", "4c4c4544-0000-2010-8020-80c04f202020", ""},
		{"a Dell without a service tag in the other byte order neither", "44454C4C-0000-1020-8020-80C04F202020", ""},
	} {
		t.Run(test.rule, func(t *testing.T) {
			if got := withUUID(test.smbios).UUID(); got != test.want {
				t.Errorf("UUID of %q: got %q, want %q", test.smbios, got, test.want)
			}
		})
	}
}

func FuzzUUIDIsEmptyOrCanonical(f *testing.F) {
	for _, seed := range []string{"", "30A0BDF7-4B1A-4F0E-9F86-2A3D64A3C5EE", "00000000-0000-0000-0000-000000000000", "\xff", "İ0a0bdf7-4b1a-4f0e-9f86-2a3d64a3c5e"} {
		f.Add(seed)
	}

	canonical := regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)

	f.Fuzz(func(t *testing.T, smbios string) {
		uuid := withUUID(smbios).UUID()
		if uuid == "" {
			return
		}

		if !canonical.MatchString(uuid) {
			t.Errorf("UUID of %q is %q", smbios, uuid)
		}

		if again := withUUID(strings.ToUpper(uuid)).UUID(); again != uuid {
			t.Errorf("UUID of the upper-case form of %q is %q", uuid, again)
		}
	})
}
