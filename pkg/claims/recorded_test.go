package claims_test

import (
	"maps"
	"net/netip"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	corev1 "k8s.io/api/core/v1"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/noderecord"
)

// recorded returns the Node with a record of the machine with a volume, which the kubelet has not changed: it lists nothing.
func recorded(n *corev1.Node, volume string, addrs ...string) *corev1.Node {
	record := noderecord.Record{Volume: noderecord.ID([]byte(volume)), NodeID: noderecord.Fingerprint("id of " + n.Name)}

	for i, field := range []*netip.Addr{&record.Address, &record.OtherAddress} {
		if i < len(addrs) {
			*field = netip.MustParseAddr(addrs[i])
		}
	}

	return labels(n, record)
}

func labels(n *corev1.Node, record noderecord.Record) *corev1.Node {
	for key, value := range record.ByLeader() {
		if text, ok := value.(string); ok {
			n.Labels[key] = text
		}
	}

	return n
}

// formatted sets the volume of a machine.
func formatted(m machine.Machine, volume string) machine.Machine {
	m.EphemeralID = volume

	return m
}

func becomes(n *corev1.Node) func(*fixture) { return func(f *fixture) { f.SetNode(n) } }

// A kubelet removes what its Node lists, and may have another machine respond for it.
func TestClaims_OfRecordedAddresses(t *testing.T) {
	other := func() *corev1.Node { return recorded(node("other"), "volume", address, second) }
	debian := other()
	debian.Status.NodeInfo.OSImage = "Debian GNU/Linux"

	self, moved := formatted(view("other", address, address, second), "volume"), formatted(view("other", "10.0.0.9"), "volume")

	for what, test := range map[string]struct {
		node  *corev1.Node
		steps steps
		want  bool
	}{
		"machine has not been dialed":                     {other(), nil, true},
		"machine does not respond":                        {other(), steps{down}, true},
		"machine with another nodename responds":          {other(), steps{replaced}, true},
		"another operating system":                        {debian, nil, true},
		"machine with another volume responds":            {other(), steps{reports(formatted(view("other", "10.0.0.9"), "attacker's"))}, true},
		"the same, at the recorded address":               {other(), steps{reports(formatted(view("other", address), "attacker's"))}, true},
		"machine with the node ID and no volume responds": {other(), steps{reports(view("other", "10.0.0.9"))}, true},
		"machine reported them, and is down":              {other(), steps{reports(self), down, passes(retention)}, true},
		"the same, and another machine responded":         {other(), steps{reports(self), passes(retention), reports(view("other", "10.0.0.9")), passes(retention)}, true},
		"machine is elsewhere":                            {other(), steps{reports(moved)}, false},
		"machine moved":                                   {other(), steps{reports(self), reports(moved)}, true},
		"machine moved long ago":                          {other(), steps{reports(self), reports(moved), passes(retention)}, false},
		"control-plane machine is elsewhere":              {labeled(other()), steps{reports(moved)}, true},
		"only a fingerprint of the volume is recorded": {
			labels(node("other"), noderecord.Record{Volume: noderecord.Fingerprint("volume"), Address: self.Endpoint, OtherAddress: netip.MustParseAddr(second)}), steps{reports(moved)}, true,
		},
		"record moved":              {other(), steps{becomes(recorded(node("other"), "volume", "10.0.0.9", "fd00::9"))}, false},
		"record was removed":        {other(), steps{becomes(node("other"))}, false},
		"Node was deleted":          {other(), steps{func(f *fixture) { f.remove(other()) }}, true},
		"Node was deleted long ago": {other(), steps{func(f *fixture) { f.remove(other()) }, passes(retention)}, false},
		"record of a worker's Node that became a control plane's": {
			labels(labeled(node("other")), noderecord.Record{IsWorker: true, Address: self.Endpoint, OtherAddress: netip.MustParseAddr(second)}), nil, false,
		},
	} {
		t.Run(what, func(t *testing.T) {
			for _, subject := range []string{address, second} {
				f := newFixture(t)
				f.add(test.node)
				f.do(test.steps)
				f.assertOwnedByOther(test.want, subject)
			}
		})
	}
}

func TestClaims_OfRecordedAddressesDoNotCountAsReported(t *testing.T) {
	f := newFixture(t)
	f.add(recorded(node("other"), "volume", address))
	assert.Empty(t, f.ReportedBy(address, "requesting"), "the Node of a machine that has the address now must not lose it")
}

// Two workers exchange their addresses while no instance leads. The leader moves the records one after the other.
func TestClaims_ReleaseRecordedAddressesOfMachinesThatSwapThem(t *testing.T) {
	f := newFixture(t)
	one, two := f.add(recorded(node("one"), "volume 1", address)), f.add(recorded(node("two"), "volume 2", unlisted))
	atTwo, atOne := formatted(view("one", unlisted, unlisted), "volume 1"), formatted(view("two", address, address), "volume 2")
	blocked := func(subject string, n *corev1.Node) []string {
		return slices.Collect(maps.Keys(f.owners(subject, f.requester(n.Name, n))))
	}

	assert.Equal(t, []string{"two"}, blocked(unlisted, one))
	f.do(steps{reports(atTwo)})
	assert.Equal(t, []string{"two"}, blocked(unlisted, one), "the machine of the other Node has not responded")
	f.do(steps{reports(atOne)})

	for range 2 {
		assert.Empty(t, blocked(unlisted, one))
		assert.Empty(t, blocked(address, two))
		f.add(recorded(node("one"), "volume 1", unlisted))
		f.add(recorded(node("two"), "volume 2", address))
	}
}

// The record of a reinstalled worker does not follow it to another address. An operator removes the labels.
func TestClaims_ReleaseAddressOfReinstalledMachineWithItsRecord(t *testing.T) {
	f := newFixture(t)
	f.add(recorded(node("other"), "volume", address))
	f.do(steps{reports(formatted(view("other", "10.0.0.9", "10.0.0.9"), "reinstalled")), reports(view("requesting", address, address))})
	f.assertOwnedByOther(true, address)

	f.add(node("other"))
	f.assertOwnedByOther(false, address)
}
