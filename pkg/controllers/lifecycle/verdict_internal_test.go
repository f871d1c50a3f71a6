package lifecycle

import (
	"net/netip"
	"testing"

	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/assert"

	"github.com/talos-ccm/talos-ccm/pkg/config"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/noderecord"
)

// A machine that moved to another address is still discovered, even if another machine responds at its old address.
func TestDecide_AbsenceIsProofIfMachineDoesNotRespond(t *testing.T) {
	for condition, want := range map[inventory.Condition]Proof{
		inventory.Unreachable: ProofDiscovery, inventory.Mismatch: ProofDiscovery, inventory.Unknown: "", inventory.Current: "",
	} {
		got := decide(evidence{entry: inventory.Entry{Condition: condition}, absent: "not seen"}, config.CompiledLifecycle{Discovery: true})
		assert.Equal(t, want, got.proof, condition)
	}
}

func TestDoubt_AnnouncementCountsOnlyFromRecordedMachineAtItsAddress(t *testing.T) {
	here, elsewhere := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2")
	self := machine.Machine{Nodename: "w-1", NodeID: "id", EphemeralID: "volume", Endpoint: here}
	record := noderecord.Record{Address: here, NodeID: noderecord.Fingerprint("id"), Volume: noderecord.ID([]byte("volume"))}

	change := func(m machine.Machine, change func(*machine.Machine)) machine.Machine {
		change(&m)

		return m
	}
	moved := change(self, func(m *machine.Machine) { m.Endpoint = elsewhere })
	wiped := change(self, func(m *machine.Machine) { m.NodeID, m.EphemeralID = "new", "new" })
	controlPlane := change(moved, func(m *machine.Machine) { m.ControlPlane = &machine.ControlPlane{} })
	renamed := change(self, func(m *machine.Machine) { m.Nodename = "new" })

	for what, test := range map[string]struct {
		record          noderecord.Record
		last, announcer machine.Machine
		want            string
	}{
		"recorded machine":                           {record, self, self, ""},
		"no machine has responded":                   {record, machine.Machine{}, machine.Machine{}, ""},
		"other address":                              {record, moved, moved, "responded at 10.0.0.2, and 10.0.0.1 is recorded"},
		"other address of a control plane":           {record, controlPlane, controlPlane, "responded at 10.0.0.2"},
		"no recorded address":                        {noderecord.Record{Volume: record.Volume}, self, self, "no address"},
		"no recorded address of a control plane":     {noderecord.Record{}, controlPlane, controlPlane, ""},
		"other volume":                               {record, wiped, wiped, "does not have the recorded EPHEMERAL volume"},
		"no volume, known node ID":                   {record, change(self, func(m *machine.Machine) { m.EphemeralID = "" }), self, "EPHEMERAL volume"},
		"volume recorded by an earlier version":      {noderecord.Record{Address: here, Volume: noderecord.Fingerprint("volume")}, self, self, ""},
		"no volume recorded":                         {noderecord.Record{Address: here, NodeID: record.NodeID}, self, self, ""},
		"no volume recorded, other node ID":          {noderecord.Record{Address: here, NodeID: record.NodeID}, wiped, wiped, "EPHEMERAL volume"},
		"renamed":                                    {record, self, renamed, ""},
		"renamed and reinstalled":                    {record, self, change(wiped, func(m *machine.Machine) { m.Nodename = "new" }), ""},
		"renamed at another address":                 {record, self, change(moved, func(m *machine.Machine) { m.Nodename = "new" }), "responded at 10.0.0.2"},
		"renamed, and another machine had responded": {record, wiped, renamed, "EPHEMERAL volume"},
	} {
		got := doubt(test.record, test.last, test.announcer)
		assert.Contains(t, got, test.want, what)
		assert.Equal(t, test.want == "", got == "", what)
	}
}

// The leader on a machine recorded its reset, and the next leader has seen the machine once more.
func TestDecide_BelievesRecordedReset(t *testing.T) {
	entry := inventory.Entry{Condition: inventory.Unreachable, Last: machine.Machine{Nodename: "cp-1", Stage: runtime.MachineStageResetting}}
	e := evidence{doubt: "the machine responded at 10.0.0.2, and 10.0.0.1 is recorded", entry: entry}
	assert.NotEmpty(t, decide(e, config.CompiledLifecycle{}).weakness)

	e.recorded = true
	v := decide(e, config.CompiledLifecycle{})
	assert.Equal(t, ProofReset, v.proof)
	assert.Empty(t, v.weakness)
}
