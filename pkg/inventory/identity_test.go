package inventory_test

import (
	"slices"
	"testing"

	"github.com/siderolabs/talos/pkg/machinery/resources/hardware"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

const otherUUID = "11111111-2222-3333-4444-555555555555"

func identified(nodeID, uuid string) machine.Machine {
	return machine.Machine{NodeID: nodeID, System: hardware.SystemInformationSpec{UUID: uuid}}
}

func TestInventory_SharedName(t *testing.T) {
	const name = "worker.example.org"

	named := func(nodeID string) machine.Machine {
		m := identified(nodeID, "")
		m.Platform.InternalDNS = name

		return m
	}

	f := newFixture()
	f.Replace("old", named("n1"))
	f.MarkMismatch("old", "new", "renamed")
	f.Replace("new", named("n1"))

	if got := f.SharedName(name, "new"); len(got) > 0 {
		t.Errorf("name of a renamed machine is shared with %v", got)
	}

	f.Replace("other", named("n2"))

	if got := f.SharedName(name, "new"); !slices.Equal(got, []string{"other"}) {
		t.Errorf("name is shared with %v, want other", got)
	}
}

func TestInventory_RenamedTo(t *testing.T) {
	for _, test := range []struct {
		name   string
		change func(*fixture)
		want   string
	}{
		{"never known", func(f *fixture) { f.Replace("new", identified("n1", uuid)) }, ""},
		{"still responds", func(f *fixture) { f.Replace("old", identified("n1", uuid)) }, ""},
		{"responds under another name", func(f *fixture) {
			f.Replace("old", identified("n1", uuid))
			f.MarkMismatch("old", "new", "renamed")
			f.Replace("new", identified("n1", uuid))
		}, "new"},
		{"responds under another name at another address", func(f *fixture) {
			f.Replace("old", identified("n1", uuid))
			f.MarkUnreachable("old", "gone")
			f.Replace("new", identified("n1", uuid))
		}, "new"},
		{"mismatch, then unreachable", func(f *fixture) {
			f.Replace("old", identified("n1", uuid))
			f.MarkMismatch("old", "new", "renamed")
			f.MarkUnreachable("old", "gone")
			f.Replace("new", identified("n1", uuid))
		}, "new"},
		{"reinstalled under another name", func(f *fixture) {
			f.Replace("old", identified("n1", uuid))
			f.MarkMismatch("old", "new", "reinstalled")
			f.Replace("new", identified("n2", uuid))
		}, "new"},
		{"UUID that a vendor uses several times", func(f *fixture) {
			f.Replace("old", identified("n1", uuid))
			f.MarkUnreachable("old", "gone")
			f.Replace("new", identified("n2", uuid))
		}, ""},
		{"without UUID", func(f *fixture) {
			f.Replace("old", identified("n1", ""))
			f.MarkUnreachable("old", "gone")
			f.Replace("new", identified("n1", ""))
		}, "new"},
		{"clone of the disk", func(f *fixture) {
			f.Replace("old", identified("n1", uuid))
			f.MarkUnreachable("old", "gone")
			f.Replace("new", identified("n1", otherUUID))
		}, ""},
		{"clone of the disk of a machine whose UUID is not unique", func(f *fixture) {
			f.Replace("a", identified("n8", uuid))
			f.Replace("old", identified("n1", uuid))
			f.MarkUnreachable("old", "gone")
			f.Replace("new", identified("n1", otherUUID))
		}, ""},
		{"another machine has taken the address", func(f *fixture) {
			f.Replace("old", identified("n1", uuid))
			f.MarkMismatch("old", "new", "replaced")
			f.Replace("new", identified("n2", otherUUID))
		}, ""},
		{"new name does not respond any more", func(f *fixture) {
			f.Replace("old", identified("n1", uuid))
			f.MarkMismatch("old", "new", "renamed")
			f.Replace("new", identified("n1", uuid))
			f.MarkUnreachable("new", "gone")
		}, ""},
		{"new name does not respond yet", func(f *fixture) {
			f.Replace("old", identified("n1", uuid))
			f.MarkMismatch("old", "new", "renamed")
		}, ""},
		{"renamed back", func(f *fixture) {
			f.Replace("old", identified("n1", uuid))
			f.MarkMismatch("old", "new", "renamed")
			f.Replace("new", identified("n1", uuid))
			f.MarkMismatch("new", "old", "renamed")
			f.Replace("old", identified("n1", uuid))
		}, ""},
		{"UUID of two machines", func(f *fixture) {
			f.Replace("old", identified("n1", uuid))
			f.Replace("new", identified("n2", uuid))
			f.MarkUnreachable("old", "gone")
		}, ""},
		{"UUID of two machines, and the same node ID", func(f *fixture) {
			f.Replace("a", identified("n8", uuid))
			f.Replace("b", identified("n9", uuid))
			f.MarkUnreachable("a", "gone")
			f.MarkUnreachable("b", "gone")
			f.Replace("old", identified("n1", uuid))
			f.MarkUnreachable("old", "gone")
			f.Replace("new", identified("n1", uuid))
		}, "new"},
		{"node ID of two machines", func(f *fixture) {
			f.Replace("old", identified("n1", ""))
			f.Replace("new", identified("n1", ""))
			f.MarkUnreachable("old", "gone")
		}, ""},
		{"node re-created", func(f *fixture) {
			f.Replace("old", identified("n1", uuid))
			f.Forget("old")
			f.MarkMismatch("old", "new", "renamed")
			f.Replace("new", identified("n1", uuid))
		}, ""},
		{"responds under two other names", func(f *fixture) {
			f.Replace("old", identified("n1", uuid))
			f.MarkUnreachable("old", "gone")
			f.Replace("new", identified("n1", uuid))
			f.Replace("newer", identified("n1", uuid))
		}, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			f := newFixture()
			test.change(f)

			if got := f.RenamedTo("old"); got != test.want {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}

func TestInventory_ReplacedBy(t *testing.T) {
	for _, test := range []struct {
		name   string
		change func(*fixture)
		want   string
	}{
		{"another machine has taken the address", func(f *fixture) {
			f.Replace("old", identified("n1", uuid))
			f.MarkMismatch("old", "new", "replaced")
			f.Replace("new", identified("n2", otherUUID))
		}, "new"},
		{"unknown identity", func(f *fixture) {
			f.MarkMismatch("old", "new", "replaced")
			f.Replace("new", identified("n2", otherUUID))
		}, ""},
		{"unknown identity of the other", func(f *fixture) {
			f.Replace("old", identified("n1", uuid))
			f.MarkMismatch("old", "new", "replaced")
			f.Replace("new", identified("", ""))
		}, ""},
		{"the other does not respond under its own name", func(f *fixture) {
			f.Replace("old", identified("n1", uuid))
			f.Replace("new", identified("n2", otherUUID))
			f.MarkMismatch("old", "new", "swapped")
			f.MarkMismatch("new", "old", "swapped")
		}, ""},
		{"renamed", func(f *fixture) {
			f.Replace("old", identified("n1", uuid))
			f.MarkMismatch("old", "new", "renamed")
			f.Replace("new", identified("n1", uuid))
		}, ""},
		{"seen elsewhere", func(f *fixture) {
			f.Replace("old", identified("n1", uuid))
			f.MarkMismatch("old", "new", "replaced")
			f.Replace("new", identified("n2", otherUUID))
			f.Replace("third", identified("n1", uuid))
		}, ""},
		{"seen at the address of the other, which has moved", func(f *fixture) {
			f.Replace("old", identified("n1", uuid))
			f.Replace("new", identified("n2", otherUUID))
			f.MarkMismatch("old", "new", "swapped")
			f.MarkMismatch("new", "old", "swapped")
			f.Replace("new", identified("n2", otherUUID))
		}, ""},
		{"seen at another address, and then at its own again", func(f *fixture) {
			f.Replace("old", identified("n1", uuid))
			f.Replace("new", identified("n2", otherUUID))
			f.MarkMismatch("new", "old", "swapped")
			f.Replace("new", identified("n2", otherUUID))
			f.Replace("old", identified("n1", uuid))
			f.MarkMismatch("old", "new", "replaced")
		}, "new"},
		{"no longer responds at the address", func(f *fixture) {
			f.Replace("old", identified("n1", uuid))
			f.MarkMismatch("old", "new", "replaced")
			f.Replace("new", identified("n2", otherUUID))
			f.MarkUnreachable("old", "gone")
		}, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			f := newFixture()
			test.change(f)

			if got := f.ReplacedBy("old"); got != test.want {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}

func TestInventory_NotifiesFormerNameOfRenamedMachine(t *testing.T) {
	f := newFixture()
	f.Replace("old", identified("n1", uuid))
	f.MarkUnreachable("old", "gone")

	for _, change := range []func(){
		func() { f.Replace("new", identified("n1", uuid)) },
		func() { f.MarkUnreachable("new", "gone") },
		func() { f.Replace("new", identified("n1", uuid)) },
		func() { f.Forget("new") },
	} {
		f.takeNotified()
		change()

		if got := f.takeNotified(); !slices.Contains(got, "old") {
			t.Errorf("notified %v", got)
		}
	}
}
