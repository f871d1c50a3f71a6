package claims_test

import (
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	corev1 "k8s.io/api/core/v1"
	cloudproviderapi "k8s.io/cloud-provider/api"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/noderecord"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
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
		"machine is elsewhere":                            {other(), steps{reports(moved)}, true},
		"machine moved":                                   {other(), steps{reports(self), reports(moved)}, true},
		"machine moved long ago":                          {other(), steps{reports(self), reports(moved), passes(retention)}, true},
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
	f.do(steps{reports(atTwo), reports(atOne)})
	assert.Equal(t, []string{"two"}, blocked(unlisted, one), "the records have not followed yet")

	f.add(recorded(node("one"), "volume 1", unlisted))
	assert.Equal(t, []string{"two"}, blocked(unlisted, one))

	f.add(recorded(node("two"), "volume 2", address))
	assert.Empty(t, blocked(unlisted, one))
	assert.Empty(t, blocked(address, two))
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

// ruled returns the Node with labels of addresses that rules set.
func ruled(n *corev1.Node, addrs ...string) *corev1.Node {
	for _, a := range addrs {
		n.Labels[noderecord.RuleAddressLabel(netip.MustParseAddr(a))] = "ExternalIP"
	}

	return n
}

// A template reads what root on a machine can change, also of a machine that only answers for the Node.
func TestClaims_OfRuleAddresses(t *testing.T) {
	other := func() *corev1.Node { return ruled(node("other"), address, second) }
	elsewhere := reports(view("other", "10.0.0.9"))

	for what, test := range map[string]struct {
		steps steps
		want  bool
	}{
		"machine has not been dialed":               {nil, true},
		"machine does not report them":              {steps{elsewhere, passes(retention)}, true},
		"machine does not respond":                  {steps{elsewhere, down, passes(retention)}, true},
		"kubelet empties its Node":                  {steps{elsewhere, becomes(ruled(node("other", "10.0.0.9"), address, second)), passes(retention)}, true},
		"rule no longer sets them":                  {steps{elsewhere, becomes(node("other"))}, true},
		"the same, while the Node still lists them": {steps{elsewhere, becomes(node("other", address, second)), becomes(node("other"))}, true},
		"the same, long ago":                        {steps{elsewhere, becomes(node("other")), passes(retention)}, false},
		"the same, but the kubelet lists them":      {steps{elsewhere, becomes(node("other", address, second)), passes(retention)}, false},
		"rule sets them again":                      {steps{elsewhere, becomes(node("other")), passes(time.Minute), becomes(other()), passes(retention)}, true},
		"Node was deleted":                          {steps{elsewhere, func(f *fixture) { f.remove(other()) }}, true},
		"Node was deleted long ago":                 {steps{elsewhere, func(f *fixture) { f.remove(other()) }, passes(retention)}, false},
		"the same, and claims were purged":          {steps{elsewhere, func(f *fixture) { f.remove(other()) }, passes(retention), reports(view("purging", "10.0.0.8"))}, false},
	} {
		t.Run(what, func(t *testing.T) {
			for _, subject := range []string{address, second} {
				f := newFixture(t)
				f.add(other())
				f.do(test.steps)
				f.assertOwnedByOther(test.want, subject)
				assert.Empty(t, f.ReportedBy(subject, "requesting"))
			}
		})
	}
}

// A new Node of the name gets the addresses only with the machine of the deleted one.
func TestClaims_OfRuleAddressesOfDeletedNode(t *testing.T) {
	for endpoint, isOwned := range map[string]bool{"10.0.0.9": false, "10.0.0.8": true} {
		f := newFixture(t)
		f.add(ruled(node("other", "10.0.0.9"), address))
		f.remove(ruled(node("other", "10.0.0.9"), address))

		next := node("other", "10.0.0.9")
		next.UID = "next"
		f.add(next)
		f.do(steps{reports(view("other", endpoint))})
		f.assertOwned(isOwned, address, "other", next)
	}
}

// Only one of the Nodes that rules give an address gets it, and none of them if another machine reports it.
func TestClaims_ReserveRuleAddresses(t *testing.T) {
	reserve := func(nodename string) func(*fixture) {
		return func(f *fixture) { f.Reserve(netip.MustParseAddr(address), f.requester(nodename, node(nodename))) }
	}
	known := func(addresses ...string) *corev1.Node {
		n := node("other", addresses...)
		n.Labels[nodespec.LabelPlatform] = "metal"

		return n
	}
	of, provided := ruled(node("other"), address), node("other")
	provided.Annotations = map[string]string{cloudproviderapi.AnnotationAlphaProvidedIPAddr: address}

	for what, test := range map[string]struct {
		steps steps
		owner string // according to Node "requesting"
	}{
		"free":                                   {nil, ""},
		"reserved for itself":                    {steps{reserve("requesting")}, ""},
		"reserved":                               {steps{reserve("other")}, "other"},
		"reserved, and the Node changed":         {steps{reserve("other"), becomes(node("other"))}, "other"},
		"reserved again and again":               {steps{reserve("other"), passes(retention / 2), reserve("other"), passes(retention / 2)}, "other"},
		"reserved, and never written":            {steps{reserve("other"), passes(retention)}, ""},
		"reserved and written":                   {steps{reserve("other"), becomes(of), passes(retention)}, "other"},
		"written":                                {steps{becomes(of)}, "other"},
		"written, and its machine responded":     {steps{becomes(of), reports(view("other", "10.0.0.9"))}, "other"},
		"written for itself":                     {steps{becomes(ruled(node("requesting"), address))}, ""},
		"written before, and its rule changed":   {steps{becomes(of), becomes(node("other"))}, "other"},
		"the same, long ago":                     {steps{becomes(of), becomes(node("other")), passes(retention)}, ""},
		"written, and deleted":                   {steps{becomes(ruled(known(), address)), func(f *fixture) { f.remove(ruled(known(), address)) }}, "other"},
		"of the record":                          {steps{becomes(recorded(node("other"), "volume", address))}, "other"},
		"reported by another machine":            {steps{reports(view("other", "10.0.0.9", address))}, "other"},
		"reported by the machine itself":         {steps{reports(view("requesting", "10.0.0.9", address))}, ""},
		"listed by a known Node":                 {steps{becomes(known(address))}, "other"},
		"listed by a known Node that responds":   {steps{becomes(known(address)), reports(view("other", "10.0.0.9"))}, ""},
		"listed by a known Node, and deleted":    {steps{becomes(known(address)), func(f *fixture) { f.remove(known(address)) }}, "other"},
		"listed by a registered Node":            {steps{becomes(node("other", address))}, ""},
		"listed by a registered Node, deleted":   {steps{becomes(node("other", address)), func(f *fixture) { f.remove(node("other", address)) }}, ""},
		"provided to a registered Node":          {steps{becomes(provided)}, ""},
		"name of a registered Node":              {steps{becomes(node(address))}, ""},
		"listed by a Node, reported by another":  {steps{becomes(node("other", address)), reports(view("third", address, address))}, "third"},
		"written, and listed by registered Node": {steps{becomes(ruled(node("requesting"), address)), becomes(node("other", address))}, ""},
	} {
		t.Run(what, func(t *testing.T) {
			f := newFixture(t)
			f.do(test.steps)
			assert.Equal(t, test.owner, f.Reserve(netip.MustParseAddr(address), f.requester("requesting", node("requesting"))))

			if test.owner == "" {
				assert.Equal(t, "requesting", f.Reserve(netip.MustParseAddr(address), f.requester("fourth", node("fourth"))))
				f.assertReserved(address, "requesting")
			}
		})
	}
}

// assertReserved fails unless a certificate for the subject waits for the Node.
func (f *fixture) assertReserved(subject, nodename string) {
	f.t.Helper()
	assert.Contains(f.t, f.owners(subject, f.requester("fourth", node("fourth"))), nodename)
}

// Workers of the controller sync Nodes at the same time.
func TestClaims_ReserveRuleAddressForOneNodeAtOnce(t *testing.T) {
	var (
		f       = newFixture(t)
		group   sync.WaitGroup
		granted atomic.Int32
	)

	for _, name := range []string{"one", "two"} {
		by := f.requester(name, node(name))

		group.Go(func() {
			if f.Reserve(netip.MustParseAddr(address), by) == "" {
				granted.Add(1)
			}
		})
	}

	group.Wait()
	assert.EqualValues(t, 1, granted.Load())
}

// TestClaims_ReserveLimitedNumber: the machine of a Node that is not written can report other tags again and again.
func TestClaims_ReserveLimitedNumber(t *testing.T) {
	f := newFixture(t)
	addr := netip.MustParseAddr("198.51.100.1")
	reserved := 0

	for range 5_000 {
		if addr = addr.Next(); f.Reserve(addr, f.requester("evil", node("evil"))) == "" {
			reserved++
		}
	}

	assert.Equal(t, 2_000, reserved)
	assert.Empty(t, f.Reserve(addr, f.requester("victim", node("victim"))))
}
