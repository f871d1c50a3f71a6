package csrpolicy_test

import (
	"crypto/sha256"
	"encoding/hex"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/noderecord"
)

const credentialKey = "authentication.kubernetes.io/credential-id"

// created is when the Node was created.
var created = now.Add(-24 * time.Hour)

// id returns the ID of a client certificate with a name; empty for none.
func id(name string) string {
	if name == "" {
		return ""
	}

	return noderecord.ID([]byte(name))
}

// with makes the request with the client certificate of the given name.
func (s *scene) with(name string) *scene {
	sum := sha256.Sum256([]byte(name))
	s.csr.Spec.Extra = map[string]certificatesv1.ExtraValue{credentialKey: {"X509SHA256=" + hex.EncodeToString(sum[:])}}

	return s
}

// issued returns a client certificate that was requested some time after the Node was created.
func issued(name, requestedWith string, after time.Duration) csrpolicy.ClientCertificate {
	return csrpolicy.ClientCertificate{
		ID: id(name), RequestedWith: id(requestedWith), Bootstrapped: requestedWith == "", RequestedAt: created.Add(after), Issuer: "ca", Expires: now.Add(time.Hour),
	}
}

func TestReview_ComparesCredentialWithRecord(t *testing.T) {
	type certificates = []csrpolicy.ClientCertificate

	machineID, volume := noderecord.Fingerprint("node-id"), id("volume")
	address, elsewhere := netip.MustParseAddr("10.0.0.10"), netip.MustParseAddr("10.0.0.99")
	seen := noderecord.Record{Credential: id("a"), NodeID: machineID, Volume: volume, Address: address} // for an unknown certificate
	record := noderecord.Record{Credential: id("a"), NodeID: machineID, Volume: volume, Issuer: "ca", Expires: now.Add(time.Hour), Address: address}
	with := func(edit func(*noderecord.Record)) noderecord.Record { r := record; edit(&r); return r } //nolint:nlreturn // one line
	other := with(func(r *noderecord.Record) { r.Credential = id("b") })
	rotated := with(func(r *noderecord.Record) { r.Credential, r.Previous = id("b"), id("a") })
	machineOnly := noderecord.Record{NodeID: machineID, Volume: volume, Address: address, OtherAddress: netip.MustParseAddr("2001:db8::1"), IsWorker: true}
	edited := func(r noderecord.Record, edit func(*noderecord.Record)) noderecord.Record { edit(&r); return r } //nolint:nlreturn // one line
	withOther := with(func(r *noderecord.Record) { r.OtherAddress = machineOnly.OtherAddress })
	unknown := func(r *noderecord.Record) { *r = seen; r.OtherAddress = machineOnly.OtherAddress }
	moved := with(func(r *noderecord.Record) { r.Volume, r.Address = "other", elsewhere })
	noVolume := func(e *csrpolicy.Evidence) { e.Machine.EphemeralID = "" }
	token := certificates{issued("a", "", time.Hour)} // long after the Node was created

	for name, test := range map[string]struct {
		record noderecord.Record
		issued certificates
		edit   func(*csrpolicy.Evidence)
		want   noderecord.Record // none: unexpected
	}{
		"first use":                             {want: seen},
		"first registration":                    {issued: certificates{issued("a", "", -time.Second)}, want: record},
		"first registration with another clock": {issued: certificates{issued("a", "", 9*time.Second)}, want: record},
		"first registration, a rotation later":  {issued: certificates{issued("a", "b", time.Minute), issued("b", "", -time.Second)}, want: record},
		"bootstrap token for existing Node":     {issued: certificates{issued("a", "", time.Minute)}},
		"bootstrap token for existing Node, two rotations later": {
			issued: certificates{issued("a", "b", 3*time.Minute), issued("b", "c", 2*time.Minute), issued("c", "", time.Minute)},
		},

		"recorded":             {record: record, want: record},
		"previous":             {record: rotated, want: rotated},
		"recorded by operator": {record: noderecord.Record{Credential: id("a")}, want: seen},
		"recorded by operator for a machine that has moved": {record: noderecord.Record{Credential: id("a"), Address: elsewhere}, want: seen},
		"unknown origin":               {record: other},
		"rotation of the recorded one": {record: other, issued: certificates{issued("a", "b", time.Hour)}, want: with(func(r *noderecord.Record) { r.Previous = id("b") })},
		"rotation of another one":      {record: other, issued: certificates{issued("a", "c", time.Hour)}},
		"bootstrap token":              {record: other, issued: token},

		"wiped volume":                       {record: with(func(r *noderecord.Record) { r.Credential, r.Volume = id("b"), "other" }), issued: token, want: record},
		"other node ID on the same volume":   {record: with(func(r *noderecord.Record) { r.Credential, r.NodeID = id("b"), "other" })},
		"other node ID without known volume": {record: with(func(r *noderecord.Record) { r.Credential, r.NodeID, r.Volume = id("b"), "other", "" }), want: seen},
		"machine reports no volume":          {record: other, edit: noVolume},
		"machine reports no node ID": {
			record: with(func(r *noderecord.Record) { r.Credential, r.Volume = id("b"), "" }), edit: func(e *csrpolicy.Evidence) { e.Machine.NodeID = "" },
		},
		"replaced CA":                 {record: with(func(r *noderecord.Record) { r.Credential, r.Issuer = id("b"), "old" }), issued: token, want: record},
		"replaced CA, unknown origin": {record: with(func(r *noderecord.Record) { r.Credential, r.Issuer = id("b"), "old" })},
		"expired":                     {record: with(func(r *noderecord.Record) { r.Credential, r.Expires = id("b"), now.Add(-time.Second) }), want: seen},

		"recorded, moved":                       {record: with(func(r *noderecord.Record) { r.Address = elsewhere }), want: record},
		"recorded, moved, without known volume": {record: with(func(r *noderecord.Record) { r.Address, r.Volume = elsewhere, "" }), want: record},
		"recorded without an address":           {record: with(func(r *noderecord.Record) { r.Address = netip.Addr{} }), want: record},
		"recorded, other volume": {
			record: with(func(r *noderecord.Record) { r.Volume = "other" }), want: with(func(r *noderecord.Record) { r.Volume = "other" }),
		},
		"recorded, other node ID without known volume": {
			record: with(func(r *noderecord.Record) { r.NodeID, r.Volume = "other", "" }), want: with(func(r *noderecord.Record) { r.NodeID, r.Volume = "other", "" }),
		},
		"recorded, other node ID on the same volume": {record: with(func(r *noderecord.Record) { r.NodeID = "other" }), want: record},
		"recorded, volume of an earlier version":     {record: with(func(r *noderecord.Record) { r.Volume, r.Address = volume[:12], elsewhere }), want: record},

		"machine recorded":                       {record: machineOnly, want: with(unknown)},
		"machine recorded, first registration":   {record: machineOnly, issued: certificates{issued("a", "", -time.Second)}, want: withOther},
		"machine recorded, bootstrap token":      {record: machineOnly, issued: token},
		"machine recorded by volume":             {record: edited(machineOnly, func(r *noderecord.Record) { r.Address = elsewhere }), want: seen},
		"machine recorded, without an address":   {record: edited(machineOnly, func(r *noderecord.Record) { r.Address = netip.Addr{} }), want: seen},
		"machine recorded by address":            {record: edited(machineOnly, func(r *noderecord.Record) { r.Volume = "" }), want: with(unknown)},
		"machine recorded, wiped volume":         {record: edited(machineOnly, func(r *noderecord.Record) { r.Volume = id("other") }), issued: token, want: record},
		"other machine recorded":                 {record: edited(machineOnly, func(r *noderecord.Record) { r.Volume, r.Address = id("other"), elsewhere })},
		"other machine recorded by node ID":      {record: edited(machineOnly, func(r *noderecord.Record) { r.Volume, r.Address = "", elsewhere })},
		"other machine recorded by 48 bits":      {record: edited(machineOnly, func(r *noderecord.Record) { r.Volume, r.Address = volume[:12], elsewhere })},
		"nothing of the machine known, recorded": {record: noderecord.Record{IsWorker: true}},
		"recorded, moved to another volume":      {record: moved, want: moved},
		"recorded, moved, machine has no volume": {record: with(func(r *noderecord.Record) { r.Address = elsewhere }), edit: noVolume, want: with(func(r *noderecord.Record) { r.Address = elsewhere })},
		"wiped volume of a machine elsewhere":    {record: with(func(r *noderecord.Record) { *r = moved; r.Credential = id("b") }), issued: token},
		"wiped volume, recorded without an address": {
			record: with(func(r *noderecord.Record) { *r = moved; r.Credential, r.Address = id("b"), netip.Addr{} }), issued: token,
		},
		"replaced CA, elsewhere": {record: with(func(r *noderecord.Record) { r.Credential, r.Issuer, r.Address = id("b"), "old", elsewhere }), issued: token},
		"expired, elsewhere": {record: with(func(r *noderecord.Record) {
			r.Credential, r.Expires, r.Address = id("b"), now.Add(-time.Second), elsewhere
		})},
		"machine without an address of its Node": {
			record: record, edit: func(e *csrpolicy.Evidence) { e.Machine.Endpoint = netip.Addr{} }, want: record,
		},
	} {
		for _, enforce := range []bool{false, true} {
			s := asks("worker-1").with("a")
			s.evidence.Machine.NodeID, s.evidence.Machine.EphemeralID, s.evidence.Machine.Endpoint = "node-id", "volume", address
			s.evidence.Credentials = csrpolicy.Credentials{Record: test.record, Issued: test.issued, NodeCreated: created}
			s.evidence.Policy.EnforceCredential = enforce

			if test.edit != nil {
				test.edit(&s.evidence)
			}

			unexpected, decision, want := test.want == noderecord.Record{}, csrpolicy.Approved, csrpolicy.CodeVerified
			if unexpected && enforce {
				decision, want = csrpolicy.Pending, csrpolicy.CodeUnexpectedCredential
			}

			verdict := s.review(t)
			assert.Equal(t, decision, verdict.Decision, "%s, enforce %t", name, enforce)
			assert.Equal(t, want, codes(verdict), "%s, enforce %t", name, enforce)
			assert.Equal(t, test.want.Credential != "" && !s.evidence.Credentials.Follow().Has(id("a")), verdict.Record.IsWorker, "%s: made for a worker", name)

			verdict.Record.IsWorker = false
			assert.Equal(t, test.want, verdict.Record, name)
			assert.Equal(t, unexpected, verdict.Unexpected != "", name)
		}
	}
}

// A control-plane machine with the extension states its certificate itself: what responds at its address, and a bootstrap
// token, do not replace it.
func TestReview_RecordsForControlPlaneWhatItsMachineStated(t *testing.T) {
	type certificates = []csrpolicy.ClientCertificate

	address := netip.MustParseAddr("10.0.0.10")
	byLeader := noderecord.Record{Credential: id("b"), Volume: id("other"), Address: address} // at whose address another volume is
	stated := byLeader
	stated.Stated = id("b")
	expired := stated
	expired.Expires = now.Add(-time.Second)
	rotated := stated
	rotated.Credential, rotated.Previous = id("c"), id("b")

	const (
		unstated = "; a machine that runs the talos-ccm extension states its own"
		itself   = ", which the machine itself stated"
	)

	for name, test := range map[string]struct {
		record noderecord.Record
		issued certificates
		pod    string // why it is unexpected if a pod leads; empty if it is recorded
		want   string // the same, if an extension leads
	}{
		"first registration":                   {issued: certificates{issued("a", "", -time.Second)}},
		"first registration, a rotation later": {issued: certificates{issued("a", "b", time.Minute), issued("b", "", -time.Second)}},
		"unknown origin":                       {want: "none is recorded" + unstated},
		"rotation of unknown origin":           {issued: certificates{issued("a", "b", time.Minute)}, want: "none is recorded" + unstated},
		"bootstrap token for existing Node": {
			issued: certificates{issued("a", "", time.Minute)},
			pod:    "none is recorded, and this one goes back to a bootstrap token that was used after the Node was created",
			want:   "none is recorded, and this one goes back to a bootstrap token that was used after the Node was created" + unstated,
		},
		"another volume":                        {record: byLeader, want: id("b") + unstated},
		"rotation of the recorded one":          {record: byLeader, issued: certificates{issued("a", "b", time.Hour)}},
		"another volume, stated":                {record: stated, pod: id("b") + itself, want: id("b") + itself},
		"expired, stated":                       {record: expired, pod: id("b") + itself, want: id("b") + itself},
		"another volume, previous one stated":   {record: rotated, pod: id("c") + itself, want: id("c") + itself},
		"rotation of the stated one":            {record: stated, issued: certificates{issued("a", "b", time.Hour)}},
		"late certificate, stated":              {record: stated, issued: certificates{issued("a", "", time.Hour)}, pod: id("b") + itself, want: id("b") + itself},
		"rotation of another than a stated one": {record: stated, issued: certificates{issued("a", "x", time.Hour)}, pod: id("b") + itself, want: id("b") + itself},
	} {
		for _, require := range []bool{false, true} {
			s := asks("cp-1").with("a")
			s.evidence.Machine.NodeID, s.evidence.Machine.EphemeralID, s.evidence.Machine.Endpoint = "node-id", "volume", address
			s.evidence.Credentials = csrpolicy.Credentials{Record: test.record, Issued: test.issued, NodeCreated: created}
			s.evidence.Policy.EnforceCredential, s.evidence.Policy.RequireStatement = true, require

			want := test.pod
			if require {
				want = test.want
			}

			verdict := s.review(t)
			assert.True(t, strings.HasSuffix(verdict.Unexpected, want), "%s, require %t: %s", name, require, verdict.Unexpected)
			assert.Equal(t, want != "", verdict.Unexpected != "", "%s, require %t", name, require)
			assert.Equal(t, want == "", verdict.Record.Has(id("a")), "%s, require %t", name, require)
			assert.False(t, verdict.Record.IsWorker, name)
		}
	}
}

// The description tells the kubelet's request from an attacker's.
func TestReview_DescribesUnexpectedCredential(t *testing.T) {
	address := netip.MustParseAddr("10.0.0.10")
	record := noderecord.Record{Credential: "c0ffee", Expires: now.Add(time.Hour), Address: address}
	token := issued("a", "", time.Hour)
	token.Serial = "5F"

	for name, test := range map[string]struct {
		record   noderecord.Record
		issued   []csrpolicy.ClientCertificate
		endpoint netip.Addr
		want     string
	}{
		"bootstrap token": {
			record,
			[]csrpolicy.ClientCertificate{token},
			address,
			"serial number 5F, requested with a bootstrap token at " + created.Add(time.Hour).Format(time.RFC3339) +
				`, is not the recorded one of Node "worker-1": c0ffee`,
		},
		"rotation of another one": {
			noderecord.Record{Credential: "c0ffee"},
			[]csrpolicy.ClientCertificate{issued("a", "x", time.Hour)},
			address,
			"serial number , requested with " + id("x") + " at " + created.Add(time.Hour).Format(time.RFC3339) + `, is not the recorded one of Node "worker-1": c0ffee`,
		},
		"machine elsewhere": {
			noderecord.Record{Credential: "c0ffee", Address: address},
			nil, netip.MustParseAddr("10.0.0.99"),
			"of unknown origin, first seen at " + now.Format(time.RFC3339) + `, is not the recorded one of Node "worker-1": c0ffee, of the machine at 10.0.0.10; now a machine at 10.0.0.99 responds`,
		},
		"no record": {
			noderecord.Record{},
			[]csrpolicy.ClientCertificate{token},
			address,
			"serial number 5F, requested with a bootstrap token at " + created.Add(time.Hour).Format(time.RFC3339) +
				`, is not the recorded one of Node "worker-1": none is recorded, and this one goes back to a bootstrap token that was used after the Node was created`,
		},
	} {
		s := asks("worker-1").with("a")
		s.csr.CreationTimestamp = metav1.NewTime(now)
		s.evidence.Machine.Endpoint = test.endpoint
		s.evidence.Credentials = csrpolicy.Credentials{Record: test.record, Issued: test.issued, NodeCreated: created}
		assert.Equal(t, "Client certificate "+id("a")+", "+test.want, s.review(t).Unexpected, name)
	}
}

// A credential is neither recorded nor reported without evidence.
func TestReview_RecordsNoCredentialWithoutEvidence(t *testing.T) {
	for name, edit := range map[string]func(*scene){
		"no machine":        func(s *scene) { s.evidence.MachineState = csrpolicy.MachineUnreachable },
		"no Node":           func(s *scene) { s.evidence.Node = csrpolicy.NodeUnknown },
		"not the machine's": func(s *scene) { s.pkcs10.addDNS("worker-2") },
		"no credential":     func(s *scene) { s.csr.Spec.Extra = nil },
	} {
		s := asks("worker-1").with("a")
		s.evidence.Policy.EnforceCredential = true
		edit(s)

		verdict := s.review(t)
		assert.Empty(t, verdict.Record, name)
		assert.Empty(t, verdict.Unexpected, name)
		assert.NotContains(t, codes(verdict), csrpolicy.CodeUnexpectedCredential, name)
	}
}

func TestCredentialID_AcceptsOneCertificateHash(t *testing.T) {
	hash := strings.Repeat("aB", 32)

	for value, want := range map[string]string{
		"X509SHA256=" + hash: strings.ToLower(hash[:32]), "X509SHA256=" + hash[:62]: "", "X509SHA256=" + hash + "00": "",
		"X509SHA256=" + strings.Repeat("x", 64): "", "JTI=" + hash: "", hash: "", "": "",
	} {
		csr := &certificatesv1.CertificateSigningRequest{}
		csr.Spec.Extra = map[string]certificatesv1.ExtraValue{credentialKey: {value}}
		assert.Equal(t, want, csrpolicy.CredentialID(csr), value)

		csr.Spec.Extra[credentialKey] = append(csr.Spec.Extra[credentialKey], value)
		assert.Empty(t, csrpolicy.CredentialID(csr), "%q twice", value)
	}
}

func TestRecord_FollowsRotations(t *testing.T) {
	chain := []csrpolicy.ClientCertificate{issued("d", "c", 3), issued("c", "b", 2), issued("b", "a", 1), issued("x", "", 4), issued("y", "x", 5)}
	unstored := []csrpolicy.ClientCertificate{issued("b", "a", 1), issued("c", "a", 2)}

	for name, test := range map[string]struct {
		credential, previous, stated string
		issued                       []csrpolicy.ClientCertificate
		want, wantPrevious           string
	}{
		"none":                            {credential: "a", want: "a"},
		"chain":                           {credential: "a", issued: chain, want: "d", wantPrevious: "c"},
		"chain again":                     {credential: "d", previous: "c", issued: chain, want: "d", wantPrevious: "c"},
		"middle of the chain":             {credential: "c", previous: "b", issued: chain, want: "d", wantPrevious: "c"},
		"certificate that was not stored": {credential: "a", issued: unstored, want: "c", wantPrevious: "a"},
		"another chain":                   {credential: "e", issued: chain, want: "e"},
		"previous, not stored":            {credential: "b", previous: "a", issued: unstored, want: "c", wantPrevious: "a"},
		"previous of a stated one":        {credential: "b", previous: "a", stated: "b", issued: unstored, want: "b", wantPrevious: "a"},
		"stated one":                      {credential: "b", previous: "a", stated: "b", issued: chain, want: "d", wantPrevious: "c"},
	} {
		credentials := csrpolicy.Credentials{Record: noderecord.Record{Credential: id(test.credential), Previous: id(test.previous), Stated: id(test.stated)}, Issued: test.issued}
		got := credentials.Follow()
		assert.Equal(t, id(test.want), got.Credential, name)
		assert.Equal(t, id(test.wantPrevious), got.Previous, name)

		credentials.Record = got
		assert.Equal(t, got, credentials.Follow(), "%s, again", name)
	}
}

// API servers before 1.32 do not report the client certificate.
func TestReview_RecordsReinstalledWorkerWithoutCredential(t *testing.T) {
	record := noderecord.Record{NodeID: noderecord.Fingerprint("id"), Volume: noderecord.ID([]byte("volume")), Address: netip.MustParseAddr("10.0.0.11"), IsWorker: true}

	for volume, changes := range map[string]bool{"volume": false, "new": true} {
		s := asks("worker-1")
		s.evidence.Machine.NodeID, s.evidence.Machine.EphemeralID, s.evidence.Machine.Endpoint = "id", volume, record.Address
		s.evidence.Credentials = csrpolicy.Credentials{Record: record, NodeCreated: now}
		s.csr.Spec.Extra = nil

		verdict := s.review(t)
		assert.Equal(t, csrpolicy.Approved, verdict.Decision)

		want := noderecord.Record{}
		if changes {
			want = record
			want.Volume = noderecord.ID([]byte(volume))
		}

		assert.Equal(t, want, verdict.Record, volume)
	}
}
