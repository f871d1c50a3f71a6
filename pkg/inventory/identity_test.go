package inventory_test

import (
	"net/netip"
	"testing"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/resources/hardware"
	"github.com/stretchr/testify/assert"

	"github.com/talos-ccm/talos-ccm/pkg/claims"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

const otherUUID = "11111111-2222-3333-4444-555555555555"

func identified(nodeID, uuid string) machine.Machine {
	return machine.Machine{NodeID: nodeID, System: hardware.SystemInformationSpec{UUID: uuid}}
}

// reached returns a machine that responds at an address.
func reached(m machine.Machine, addr string) machine.Machine {
	m.Endpoint = netip.MustParseAddr(addr)

	return m
}

// The machines of these tests: one, the same after a reinstallation, a clone of its disk, and one that is different.
var (
	original    = identified("n1", uuid)
	reinstalled = identified("n2", uuid)
	clone       = identified("n1", otherUUID)
	another     = identified("n2", otherUUID)
)

func TestInventory_SharedNameIgnoresFormerNames(t *testing.T) {
	const name = "worker.example.org"

	named := func(nodeID string) machine.Machine {
		m := identified(nodeID, "")
		m.Platform.InternalDNS = name

		return m
	}

	f := newFixture(view("old", named("n1")), mismatch("old", "new"), view("new", named("n1")))
	assert.Empty(t, f.SharedName(name, "new"))
	f.do(view("other", named("n2")))
	assert.Equal(t, []string{"other"}, f.SharedName(name, "new"))

	// Another machine has the address of one whose connection is still open.
	f = newFixture(view("one", reached(named("n1"), "10.0.0.1")), view("other", reached(named("n2"), "10.0.0.1")))
	assert.Equal(t, []string{"one"}, f.SharedName(name, "other"))
}

// Two machines respond under one name, and each in turn moves the Node to its address.
func TestInventory_RivalsRespondInTurns(t *testing.T) {
	one, two := reached(original, "10.0.0.1"), reached(another, "10.0.0.2")

	for _, test := range []struct {
		name    string
		changes steps
		want    []netip.Addr
	}{
		{"one machine", steps{view("a", one), view("a", one)}, nil},
		{"replaced", steps{view("a", one), view("a", two)}, nil},
		{"in turns", steps{view("a", one), view("a", two), view("a", one)}, []netip.Addr{one.Endpoint, two.Endpoint}},
		{"again", steps{view("a", one), view("a", two), view("a", one), view("a", two), view("a", two)}, []netip.Addr{two.Endpoint, one.Endpoint}},
		{"after a failed attempt", steps{view("a", one), view("a", two), unreachable("a"), view("a", one)}, []netip.Addr{one.Endpoint, two.Endpoint}},
		{"at one address", steps{view("a", one), view("a", reached(another, "10.0.0.1")), view("a", one)}, nil},
		{"moved twice", steps{view("a", one), view("a", reached(original, "10.0.0.2")), view("a", one)}, nil},
		{"long ago", steps{view("a", one), view("a", two), view("a", one), after(claims.Retention)}, nil},
		{"under another name", steps{view("a", one), view("b", two), view("a", one)}, nil},
	} {
		f := newFixture(test.changes...)
		assert.Equal(t, test.want, f.Rivals("a"), test.name)
	}
}

func TestInventory_RenamedToNeedsProof(t *testing.T) {
	anonymous, onlyUUID := identified("n1", ""), identified("", uuid)

	for _, test := range []struct {
		name    string
		changes steps
		want    string
	}{
		{"never known", steps{view("new", original)}, ""},
		{"still responds", steps{view("old", original)}, ""},
		{"responds under another name", steps{view("old", original), mismatch("old", "new"), view("new", original)}, "new"},
		{"responds under another name at another address", steps{view("old", original), unreachable("old"), view("new", original)}, "new"},
		{"mismatch, then unreachable", steps{view("old", original), mismatch("old", "new"), unreachable("old"), view("new", original)}, "new"},
		{"reinstalled under another name", steps{view("old", original), mismatch("old", "new"), view("new", reinstalled)}, "new"},
		{"UUID of a machine at another address", steps{view("old", original), mismatch("old", "third"), view("new", reinstalled)}, ""},
		{"UUID that a vendor uses several times", steps{view("old", original), unreachable("old"), view("new", reinstalled)}, ""},
		{"without UUID", steps{view("old", anonymous), unreachable("old"), view("new", anonymous)}, "new"},
		// Without node IDs, the address must be the same, too.
		{"without node ID, at another address", steps{view("old", onlyUUID), unreachable("old"), view("new", onlyUUID)}, ""},
		// Every machine knows the node IDs of all others from Talos discovery, and can hide its own UUID.
		{"node ID alone of a machine with UUID", steps{view("old", original), unreachable("old"), view("new", anonymous)}, ""},
		{"clone of the disk", steps{view("old", original), unreachable("old"), view("new", clone)}, ""},
		{"clone of the disk of a machine whose UUID is not unique", steps{
			view("a", identified("n8", uuid)), view("old", original), unreachable("old"), view("new", clone),
		}, ""},
		{"another machine has taken the address", steps{view("old", original), mismatch("old", "new"), view("new", another)}, ""},
		{"new name does not respond any more", steps{view("old", original), mismatch("old", "new"), view("new", original), unreachable("new")}, ""},
		{"new name does not respond yet", steps{view("old", original), mismatch("old", "new")}, ""},
		{"renamed back", steps{
			view("old", original), mismatch("old", "new"), view("new", original), mismatch("new", "old"), view("old", original),
		}, ""},
		{"UUID of two machines", steps{view("old", original), view("new", reinstalled), unreachable("old")}, ""},
		{"UUID of two machines, and the same node ID", steps{
			view("a", identified("n8", uuid)), view("b", identified("n9", uuid)), unreachable("a"), unreachable("b"),
			view("old", original), unreachable("old"), view("new", original),
		}, "new"},
		{"node ID of two machines", steps{view("old", anonymous), view("new", anonymous), unreachable("old")}, ""},
		{"node re-created", steps{view("old", original), forgotten("old"), mismatch("old", "new"), view("new", original)}, ""},
		{"renamed while the connection under the old name is open", steps{
			view("old", reached(original, "10.0.0.1")), view("new", reached(original, "10.0.0.1")), mismatch("old", "new"),
		}, "new"},
		{"another machine with both identifiers, at another address", steps{
			view("old", reached(original, "10.0.0.1")), view("new", reached(original, "10.0.0.2")), unreachable("old"),
		}, ""},
		{"responds under two other names", steps{view("old", original), unreachable("old"), view("new", original), view("newer", original)}, ""},
		// These two connections are to one machine, so its identity remains unambiguous.
		{"responds under two other names at one address", steps{
			view("old", original), unreachable("old"), view("new", reached(original, "10.0.0.1")), view("newer", reached(original, "10.0.0.1")),
		}, ""},
	} {
		assert.Equal(t, test.want, newFixture(test.changes...).RenamedTo("old"), test.name)
	}
}

func TestInventory_NotifiesFormerNameOfRenamedMachine(t *testing.T) {
	f := newFixture(view("old", original), unreachable("old"))

	for _, change := range (steps{view("new", original), unreachable("new"), view("new", original), forgotten("new")}) {
		f.takeNotified()
		f.do(change)
		assert.Contains(t, f.takeNotified(), "old")
	}
}

// Two clones that stay up must not be taken for one renamed machine, however long they do.
func TestInventory_ForgetsIdentifierOfSeveralMachines(t *testing.T) {
	anonymous, changed, purge := identified("n1", ""), identified("n3", ""), steps{after(time.Minute), view("purge", identified("n4", "")), forgotten("purge")}
	both := steps{view("old", anonymous), view("new", anonymous)}
	later := steps{unreachable("old"), view("new", anonymous)}

	for _, test := range []struct {
		name    string
		between steps
		want    string
	}{
		{"both up for an hour", steps{after(time.Hour)}, ""},
		{"one of them for an hour", steps{view("old", changed), after(time.Hour)}, ""},
		{"one of them down for an hour", steps{unreachable("old"), unreachable("new"), after(time.Hour)}, ""},
		{"none for 14 minutes", steps{view("old", changed), view("new", changed), after(13 * time.Minute)}, ""},
		{"none for 15 minutes", steps{view("old", changed), view("new", changed), after(15 * time.Minute)}, "new"},
		{"none for a while, and one again", steps{
			view("old", changed), view("new", changed), after(10 * time.Minute), view("old", anonymous), after(10 * time.Minute),
		}, ""},
	} {
		f := newFixture(both...)
		f.do(test.between...)
		f.do(purge...)
		f.do(view("new", changed), view("old", anonymous))
		f.do(later...)
		assert.Equal(t, test.want, f.RenamedTo("old"), test.name)
	}
}
