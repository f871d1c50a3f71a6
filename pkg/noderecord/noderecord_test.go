package noderecord_test

import (
	"crypto/x509"
	"encoding/json"
	"maps"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/strategicpatch"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/noderecord"
)

var (
	expiry = time.Date(2126, 1, 2, 3, 4, 5, 0, time.UTC)
	self   = machine.Machine{NodeID: "node-id", EphemeralID: "volume", Endpoint: netip.MustParseAddr("10.0.0.1")}
)

// id returns the ID of a client certificate with a name.
func id(name string) string { return noderecord.ID([]byte(name)) }

// certificate returns a client certificate with a name.
func certificate(name string) *x509.Certificate {
	return &x509.Certificate{Raw: []byte(name), AuthorityKeyId: []byte("ca"), NotAfter: expiry}
}

// nodeWith returns a Node with labels, of the control plane.
func nodeWith(labels map[string]string) *corev1.Node {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{
		Name: "n", UID: "uid", ResourceVersion: "7", Labels: map[string]string{"node-role.kubernetes.io/control-plane": ""},
	}}
	maps.Copy(node.Labels, labels)

	return node
}

// patch writes labels to a Node as the API server does. All values must be valid.
func patch(t *testing.T, node *corev1.Node, labels noderecord.Labels) {
	t.Helper()

	text, err := labels.PatchOf(node)
	require.NoError(t, err)

	before, err := json.Marshal(node)
	require.NoError(t, err)

	after, err := strategicpatch.StrategicMergePatch(before, text, node)
	require.NoError(t, err)

	*node = corev1.Node{}
	require.NoError(t, json.Unmarshal(after, node))

	for key, value := range node.Labels {
		assert.Empty(t, validation.IsValidLabelValue(value), key)
	}
}

func TestOf_ReadsWhatWasWritten(t *testing.T) {
	full := noderecord.Record{
		Credential: id("a"), Previous: id("b"), Stated: id("b"), NodeID: noderecord.Fingerprint("n"), Volume: id("v"), Issuer: noderecord.Fingerprint("i"),
		Expires: expiry, Address: netip.MustParseAddr("2001:db8::"), OtherAddress: netip.MustParseAddr("10.0.0.1"),
	}

	for name, record := range map[string]noderecord.Record{
		"full": full, "certificate only": {Credential: full.Credential}, "none": {},
		"IPv4":                              {Credential: full.Credential, Volume: full.Volume, Address: netip.MustParseAddr("10.0.0.1")},
		"volume of an earlier version":      {Credential: full.Credential, Volume: noderecord.Fingerprint("v")},
		"without a certificate":             {NodeID: full.NodeID, Volume: full.Volume, Address: full.Address, OtherAddress: full.OtherAddress, IsWorker: true},
		"of a machine without a volume":     {NodeID: full.NodeID, Address: full.OtherAddress, OtherAddress: full.Address},
		"of a worker that the machine made": {Credential: full.Credential, Stated: full.Credential, IsWorker: true},
	} {
		node := nodeWith(nil)
		delete(node.Labels, "node-role.kubernetes.io/control-plane")
		patch(t, node, record.ByLeader())
		patch(t, node, record.ByMachine())
		assert.Equal(t, record, noderecord.Of(node), name)

		// An operator accepts another certificate.
		node.Labels[noderecord.LabelCredential] = id("operator")
		assert.Equal(t, noderecord.Record{Credential: id("operator"), Address: record.Address, OtherAddress: record.OtherAddress}, noderecord.Of(node), name)
	}
}

func TestOf_IgnoresWhatDoesNotBelongTogether(t *testing.T) {
	const p = "talos-ccm.node-restriction.kubernetes.io/"

	credential, volume := id("a"), id("v")
	context := credential[:8] + ".0." + volume[:12] + ".0.0"
	record := noderecord.Record{Credential: credential, Volume: volume[:12]}
	only := noderecord.Record{Credential: credential}

	for name, test := range map[string]struct {
		labels map[string]string
		want   noderecord.Record
	}{
		"context":                         {map[string]string{}, record},
		"empty context":                   {map[string]string{"credential-context": ""}, only},
		"word as context":                 {map[string]string{"credential-context": "a"}, only},
		"context of another certificate":  {map[string]string{"credential-context": "a.b.c.d.e", "credential-previous": id("b"), "credential-stated": id("b")}, only},
		"context without a certificate":   {map[string]string{"credential-context": "none" + context[8:]}, only},
		"context of six parts":            {map[string]string{"credential-context": context + ".f"}, only},
		"stated":                          {map[string]string{"credential-stated": credential}, noderecord.Record{Credential: credential, Volume: volume[:12], Stated: credential}},
		"another certificate stated":      {map[string]string{"credential-stated": id("b")}, record},
		"volume":                          {map[string]string{"credential-volume": volume}, noderecord.Record{Credential: credential, Volume: volume}},
		"volume that the context has not": {map[string]string{"credential-volume": id("w")}, record},
		"volume without a context":        {map[string]string{"credential-volume": volume, "credential-context": credential[:8] + ".0.0.0.0"}, only},
		"no valid address":                {map[string]string{"credential-address": "worker-1"}, record},
		"made for a worker":               {map[string]string{"credential-role": "worker", "credential-address": "10.0.0.1"}, noderecord.Record{}},
		"stated, made for a worker": {
			map[string]string{"credential-role": "worker", "credential-stated": credential},
			noderecord.Record{Credential: credential, Volume: volume[:12], Stated: credential, IsWorker: true},
		},
	} {
		labels := map[string]string{p + "credential": credential, p + "credential-context": context}
		for key, value := range test.labels {
			labels[p+key] = value
		}

		node := nodeWith(labels)
		assert.Equal(t, test.want, noderecord.Of(node), name)

		// A record of an earlier version, or of a cluster without the extension, counts on a Node of the control plane.
		if delete(node.Labels, "node-role.kubernetes.io/control-plane"); test.labels["credential-role"] == "" {
			assert.Equal(t, test.want, noderecord.Of(node), "%s, worker", name)
		} else {
			assert.Equal(t, credential, noderecord.Of(node).Credential, "%s, worker", name)
		}
	}
}

func TestRecord_State(t *testing.T) {
	ca, volume, nodeID := noderecord.Fingerprint("ca"), id("volume"), noderecord.Fingerprint("node-id")
	stated := noderecord.Record{Credential: id("a"), Stated: id("a"), NodeID: nodeID, Volume: volume, Issuer: ca, Expires: expiry}
	with := func(edit func(*noderecord.Record)) noderecord.Record { r := stated; edit(&r); return r } //nolint:nlreturn // one line
	// The leader has followed a rotation from a to b, and the file has a.
	followed := with(func(r *noderecord.Record) { r.Credential, r.Previous = id("b"), id("a") })
	address := netip.MustParseAddr("10.0.0.9")

	for name, test := range map[string]struct {
		before noderecord.Record
		file   string
		self   machine.Machine
		want   noderecord.Record
	}{
		"no record": {file: "a", self: self, want: stated},
		"same":      {stated, "a", self, stated},
		"by the leader": {
			with(func(r *noderecord.Record) { r.Stated, r.Volume, r.Address = "", volume[:12], address }), "a", self,
			with(func(r *noderecord.Record) { r.Address = address }),
		},
		"by an operator":                 {noderecord.Record{Credential: id("a")}, "a", self, stated},
		"by an operator, not the file's": {noderecord.Record{Credential: id("operator")}, "a", self, stated},
		"for a worker":                   {noderecord.Record{}, "a", self, stated},

		"rotation, file has the previous one": {followed, "a", self, followed},
		"rotation, file has the new one":      {followed, "b", self, with(func(r *noderecord.Record) { r.Credential, r.Previous, r.Stated = id("b"), id("a"), id("b") })},
		"rotation, before the leader":         {stated, "b", self, with(func(r *noderecord.Record) { r.Credential, r.Previous, r.Stated = id("b"), id("a"), id("b") })},
		"second rotation, file has the previous one": {
			with(func(r *noderecord.Record) { r.Credential, r.Previous, r.Stated = id("c"), id("b"), "" }), "b", self,
			with(func(r *noderecord.Record) { r.Credential, r.Previous, r.Stated = id("c"), id("b"), id("b") }),
		},
		"second rotation, file has the first one": {with(func(r *noderecord.Record) { r.Credential, r.Previous, r.Stated = id("c"), id("b"), "" }), "a", self, stated},
		"another one than the leader followed":    {followed, "x", self, with(func(r *noderecord.Record) { r.Credential, r.Stated = id("x"), id("x") })},

		"another one than an attacker's": {with(func(r *noderecord.Record) { r.Credential, r.Previous, r.Stated = id("evil"), id("evil-2"), "" }), "a", self, stated},
		"reinstalled": {
			with(func(r *noderecord.Record) { r.NodeID, r.Volume = "other", "other" }), "b", self,
			with(func(r *noderecord.Record) { r.Credential, r.Previous, r.Stated = id("b"), id("a"), id("b") }),
		},
		"volume not known": {
			stated, "b",
			machine.Machine{NodeID: "node-id"},
			with(func(r *noderecord.Record) {
				r.Credential, r.Previous, r.Stated, r.Volume = id("b"), id("a"), id("b"), ""
			}),
		},
		"volume not known, same certificate": {stated, "a", machine.Machine{}, stated},
		"wiped STATE":                        {with(func(r *noderecord.Record) { r.NodeID = "other" }), "a", self, stated},
	} {
		got := test.before.State(certificate(test.file), test.self)
		assert.Equal(t, test.want, got, name)
		assert.Equal(t, got, got.State(certificate(test.file), test.self), "%s, again", name)
	}
}

// An earlier version that leads writes these labels only, and ignores a context that does not have five parts.
func TestOf_KeepsStatementBesideEarlierVersions(t *testing.T) {
	const p = "talos-ccm.node-restriction.kubernetes.io/"

	a, b := id("a"), id("b")
	node := nodeWith(map[string]string{p + "credential": a, p + "credential-context": a[:8] + ".0.0.0.0", p + "credential-address": "10.0.0.1"})
	stated := noderecord.Of(node).State(certificate("a"), self)
	patch(t, node, stated.ByMachine())
	assert.Equal(t, stated, noderecord.Of(node))
	assert.Len(t, strings.Split(node.Labels[p+"credential-context"], "."), 5)

	// It follows a rotation, and reads only 48 bits of the volume.
	context := strings.Replace(node.Labels[p+"credential-context"], a[:8], b[:8], 1)
	patch(t, node, noderecord.Labels{
		p + "credential": b, p + "credential-previous": a, p + "credential-context": context, p + "credential-address": "10.0.0.1",
	})

	want := stated
	want.Credential, want.Previous = b, a
	assert.Equal(t, want, noderecord.Of(node))

	// It replaces the record, for another volume.
	patch(t, node, noderecord.Labels{
		p + "credential": id("x"), p + "credential-previous": nil, p + "credential-context": id("x")[:8] + ".0." + noderecord.Fingerprint("other") + ".0.0",
		p + "credential-address": "10.0.0.1",
	})
	assert.Equal(t, noderecord.Record{Credential: id("x"), Volume: noderecord.Fingerprint("other"), Address: self.Endpoint}, noderecord.Of(node))

	// The machine states its own within a minute.
	patch(t, node, noderecord.Of(node).State(certificate("b"), self).ByMachine())
	assert.Equal(t, b, noderecord.Of(node).Stated)
	assert.False(t, noderecord.Of(node).Has(id("x")))
}

func TestRecord_Contradicts(t *testing.T) {
	nodeID, volume := noderecord.Fingerprint("node-id"), id("volume")

	for name, test := range map[string]struct {
		record noderecord.Record
		self   machine.Machine
		want   bool
	}{
		"nothing known":                    {noderecord.Record{}, self, false},
		"same":                             {noderecord.Record{NodeID: nodeID, Volume: volume}, self, false},
		"same, of an earlier version":      {noderecord.Record{NodeID: nodeID, Volume: volume[:12]}, self, false},
		"other volume":                     {noderecord.Record{NodeID: nodeID, Volume: id("other")}, self, true},
		"other volume, same fingerprint":   {noderecord.Record{Volume: volume[:31] + "x"}, self, true},
		"other node ID":                    {noderecord.Record{NodeID: "other"}, self, true},
		"other node ID on the same volume": {noderecord.Record{NodeID: "other", Volume: volume}, self, false},
		"machine reports no volume":        {noderecord.Record{NodeID: nodeID, Volume: volume}, machine.Machine{NodeID: "node-id"}, false},
		"other node ID, reports no volume": {noderecord.Record{NodeID: nodeID, Volume: volume}, machine.Machine{NodeID: "x"}, true},
		"machine reports nothing":          {noderecord.Record{NodeID: nodeID, Volume: volume}, machine.Machine{}, false},
	} {
		assert.Equal(t, test.want, test.record.Contradicts(test.self), name)
	}
}

// Everyone who may list Nodes can read the node ID, and find a volume with the same fingerprint.
func TestRecord_IdentifiesOnlyByVolume(t *testing.T) {
	nodeID, volume := noderecord.Fingerprint("node-id"), id("volume")

	assert.True(t, noderecord.Record{NodeID: "other", Volume: volume}.Identifies(self))

	for name, record := range map[string]noderecord.Record{
		"other volume": {NodeID: nodeID, Volume: id("other"), Address: self.Endpoint}, "no volume": {NodeID: nodeID, Address: self.Endpoint}, "no record": {},
		"volume of an earlier version": {NodeID: nodeID, Volume: volume[:12], Address: self.Endpoint},
	} {
		assert.False(t, record.Identifies(self), name)
		assert.False(t, record.Identifies(machine.Machine{NodeID: "node-id", Endpoint: self.Endpoint}), "%s, machine without a volume", name)
	}
}

// Versions that do not know records without a certificate read no certificate, and a context of no certificate.
func TestRecord_WithoutCertificateWritesNone(t *testing.T) {
	const p = "talos-ccm.node-restriction.kubernetes.io/"

	node := nodeWith(map[string]string{p + "credential": id("a"), p + "credential-previous": id("b")})
	patch(t, node, noderecord.Record{NodeID: noderecord.Fingerprint("node-id"), Volume: id("volume"), Address: self.Endpoint}.ByLeader())

	assert.NotContains(t, node.Labels, p+"credential")
	assert.NotContains(t, node.Labels, p+"credential-previous")
	assert.Equal(t, "none."+noderecord.Fingerprint("node-id")+"."+id("volume")[:12]+".0.0", node.Labels[p+"credential-context"])
}

// Requests move the address of a stated record, and nothing else.
func TestRecord_LocateKeepsStatedIdentity(t *testing.T) {
	stated := noderecord.Record{Credential: id("a"), Stated: id("a"), Volume: id("volume")}
	located := stated
	located.Address = self.Endpoint

	assert.Equal(t, located, stated.Locate(self))
	assert.Equal(t, stated, stated.Locate(machine.Machine{EphemeralID: "other", NodeID: "other", Endpoint: self.Endpoint}))
	assert.Equal(t, located, located.Locate(machine.Machine{EphemeralID: "other", NodeID: "other", Endpoint: self.Endpoint}))
}

// A virtual IP is the first address that the local machine's kubelet wrote into its Node.
func TestAddressOf_LocalMachineHasNodeIP(t *testing.T) {
	nodeIP, virtual := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.100")
	local := machine.Machine{ControlPlane: &machine.ControlPlane{Local: true}, Endpoint: virtual, NodeIPs: []netip.Addr{nodeIP, netip.MustParseAddr("2001:db8::1")}}
	remote := local
	remote.ControlPlane = &machine.ControlPlane{}

	assert.Equal(t, virtual, noderecord.AddressOf(remote))
	assert.Equal(t, nodeIP, noderecord.AddressOf(local))
	assert.Equal(t, nodeIP, noderecord.Record{}.Locate(local).Address)

	local.Endpoint = local.NodeIPs[1]
	assert.Equal(t, local.NodeIPs[1], noderecord.AddressOf(local))

	local.NodeIPs = nil
	assert.Equal(t, netip.Addr{}, noderecord.AddressOf(local))
}

// A machine that moves does not keep an address that it no longer has. The leader records the other one again.
func TestRecord_LocateDropsOtherAddress(t *testing.T) {
	before := noderecord.Record{Volume: id("volume"), NodeID: noderecord.Fingerprint("node-id"), Address: netip.MustParseAddr("10.0.0.9"), OtherAddress: netip.MustParseAddr("2001:db8::9")}
	after := before
	after.Address, after.OtherAddress = self.Endpoint, netip.Addr{}

	assert.Equal(t, after, before.Locate(self))
	assert.Equal(t, before, before.Locate(machine.Machine{NodeID: "node-id", EphemeralID: "volume"}))
	assert.Equal(t, before, before.Locate(machine.Machine{NodeID: "node-id", EphemeralID: "volume", Endpoint: before.Address}))
}

// A machine without a certificate must not hide the certificate of an earlier Node.
func TestKept_PrefersCertificate(t *testing.T) {
	deleted := func(r noderecord.Record) *corev1.Node {
		node := nodeWith(nil)
		patch(t, node, r.ByLeader())

		return node
	}

	a, b := noderecord.Record{Credential: id("a"), Volume: id("v")}, noderecord.Record{Credential: id("b")}
	first, second := noderecord.Record{Volume: id("v")}, noderecord.Record{Volume: id("w")}
	worker := noderecord.Record{Credential: id("c"), IsWorker: true}

	for name, test := range map[string]struct {
		deleted []noderecord.Record
		want    noderecord.Record
	}{
		"none":                          {},
		"no record":                     {[]noderecord.Record{{}}, noderecord.Record{}},
		"last one":                      {[]noderecord.Record{a, b}, b},
		"machines":                      {[]noderecord.Record{first, second}, second},
		"machine after a certificate":   {[]noderecord.Record{a, first, {}}, a},
		"certificate after a machine":   {[]noderecord.Record{first, b}, b},
		"made for a worker":             {[]noderecord.Record{worker}, noderecord.Record{}},
		"machine, then made for worker": {[]noderecord.Record{first, worker}, first},
	} {
		var nodes []*corev1.Node
		for _, r := range test.deleted {
			nodes = append(nodes, deleted(r))
		}

		assert.Equal(t, test.want, noderecord.Kept(nodes, nodeWith(nil)), name)
	}
}
