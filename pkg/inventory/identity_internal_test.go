package inventory

import (
	"fmt"
	"testing"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/resources/hardware"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

const someUUID = "0c34ad2d-f29e-136f-e25b-fdc0ce3b6b3c"

// A renamed machine has the UUID of its own former name.
func TestInventory_RenamedMachineDoesNotShareItsUUIDWithItself(t *testing.T) {
	m := machine.Machine{NodeID: "n1", System: hardware.SystemInformationSpec{UUID: someUUID}}
	i := New(time.Now)
	i.Replace("old", m)
	i.MarkUnreachable("old", "reboots")
	i.Replace("new", m)

	if got := i.RenamedTo("old"); got != "new" {
		t.Fatalf("RenamedTo %q", got)
	}

	if i.SharedUUID(someUUID, "new") {
		t.Error("UUID counts as shared: the new Node gets a providerID made from its node IP")
	}
}

// Without node IDs, the address must be the same, too.
func TestInventory_UnknownNodeIDsAreNotEqual(t *testing.T) {
	i := New(time.Now)
	i.Replace("old", machine.Machine{System: hardware.SystemInformationSpec{UUID: someUUID}})
	i.MarkUnreachable("old", "off")
	i.Replace("new", machine.Machine{System: hardware.SystemInformationSpec{UUID: someUUID}})

	if got := i.RenamedTo("old"); got != "" {
		t.Errorf("RenamedTo(old) = %q by the UUID alone, at another address", got)
	}
}

// A machine may report another nodename at each connection.
func TestInventory_ForgetsInventedNodenames(t *testing.T) {
	i := New(time.Now)
	for n := range 100_000 {
		i.MarkMismatch("bad", fmt.Sprint("invented-", n), "")
	}

	i.Forget("bad")

	if n := i.displaced.Len(); n > 1000 {
		t.Errorf("%d names are kept", n)
	}
}

// Every machine knows the node IDs of all others from Talos discovery.
func TestInventory_NodeIDAloneIsNoProofForMachineWithUUID(t *testing.T) {
	i := New(time.Now)
	i.Replace("victim", machine.Machine{NodeID: "n1", System: hardware.SystemInformationSpec{UUID: someUUID}})
	i.MarkUnreachable("victim", "down")
	i.Replace("bad", machine.Machine{NodeID: "n1"}) // hides its own UUID

	if got := i.RenamedTo("victim"); got != "" {
		t.Errorf("RenamedTo(victim) = %q by the node ID alone", got)
	}
}
