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
)

const credentialKey = "authentication.kubernetes.io/credential-id"

// created is when the Node was created.
var created = now.Add(-24 * time.Hour)

// id returns the ID of a client certificate with a name; empty for none.
func id(name string) string {
	if name == "" {
		return ""
	}

	return csrpolicy.CertificateID([]byte(name))
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

	machineID, volume := csrpolicy.Fingerprint("node-id"), csrpolicy.Fingerprint("volume")
	address, elsewhere := netip.MustParseAddr("10.0.0.10"), netip.MustParseAddr("10.0.0.99")
	seen := csrpolicy.Record{Credential: id("a"), NodeID: machineID, Volume: volume, Address: address} // for an unknown certificate
	record := csrpolicy.Record{Credential: id("a"), NodeID: machineID, Volume: volume, Issuer: "ca", Expires: now.Add(time.Hour), Address: address}
	with := func(edit func(*csrpolicy.Record)) csrpolicy.Record { r := record; edit(&r); return r } //nolint:nlreturn // one line
	other := with(func(r *csrpolicy.Record) { r.Credential = id("b") })
	rotated := with(func(r *csrpolicy.Record) { r.Credential, r.Previous = id("b"), id("a") })
	moved := with(func(r *csrpolicy.Record) { r.Volume, r.Address = "other", elsewhere })
	noVolume := func(e *csrpolicy.Evidence) { e.Machine.EphemeralID = "" }
	token := certificates{issued("a", "", time.Hour)} // long after the Node was created

	for name, test := range map[string]struct {
		record csrpolicy.Record
		issued certificates
		edit   func(*csrpolicy.Evidence)
		want   csrpolicy.Record // none: unexpected
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
		"recorded by operator": {record: csrpolicy.Record{Credential: id("a")}, want: seen},
		"recorded by operator for a machine that has moved": {record: csrpolicy.Record{Credential: id("a"), Address: elsewhere}, want: seen},
		"unknown origin":               {record: other},
		"rotation of the recorded one": {record: other, issued: certificates{issued("a", "b", time.Hour)}, want: with(func(r *csrpolicy.Record) { r.Previous = id("b") })},
		"rotation of another one":      {record: other, issued: certificates{issued("a", "c", time.Hour)}},
		"bootstrap token":              {record: other, issued: token},

		"wiped volume":                       {record: with(func(r *csrpolicy.Record) { r.Credential, r.Volume = id("b"), "other" }), issued: token, want: record},
		"other node ID on the same volume":   {record: with(func(r *csrpolicy.Record) { r.Credential, r.NodeID = id("b"), "other" })},
		"other node ID without known volume": {record: with(func(r *csrpolicy.Record) { r.Credential, r.NodeID, r.Volume = id("b"), "other", "" }), want: seen},
		"machine reports no volume":          {record: other, edit: noVolume},
		"machine reports no node ID": {
			record: with(func(r *csrpolicy.Record) { r.Credential, r.Volume = id("b"), "" }), edit: func(e *csrpolicy.Evidence) { e.Machine.NodeID = "" },
		},
		"replaced CA":                 {record: with(func(r *csrpolicy.Record) { r.Credential, r.Issuer = id("b"), "old" }), issued: token, want: record},
		"replaced CA, unknown origin": {record: with(func(r *csrpolicy.Record) { r.Credential, r.Issuer = id("b"), "old" })},
		"expired":                     {record: with(func(r *csrpolicy.Record) { r.Credential, r.Expires = id("b"), now.Add(-time.Second) }), want: seen},

		"recorded, moved":                        {record: with(func(r *csrpolicy.Record) { r.Address = elsewhere }), want: record},
		"recorded, moved, without known volume":  {record: with(func(r *csrpolicy.Record) { r.Address, r.Volume = elsewhere, "" }), want: record},
		"recorded without an address":            {record: with(func(r *csrpolicy.Record) { r.Address = netip.Addr{} }), want: record},
		"recorded, other volume":                 {record: with(func(r *csrpolicy.Record) { r.Volume = "other" }), want: record},
		"recorded, moved to another volume":      {record: moved, want: moved},
		"recorded, moved, machine has no volume": {record: with(func(r *csrpolicy.Record) { r.Address = elsewhere }), edit: noVolume, want: with(func(r *csrpolicy.Record) { r.Address = elsewhere })},
		"wiped volume of a machine elsewhere":    {record: with(func(r *csrpolicy.Record) { *r = moved; r.Credential = id("b") }), issued: token},
		"wiped volume, recorded without an address": {
			record: with(func(r *csrpolicy.Record) { *r = moved; r.Credential, r.Address = id("b"), netip.Addr{} }), issued: token,
		},
		"replaced CA, elsewhere": {record: with(func(r *csrpolicy.Record) { r.Credential, r.Issuer, r.Address = id("b"), "old", elsewhere }), issued: token},
		"expired, elsewhere": {record: with(func(r *csrpolicy.Record) {
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

			unexpected, decision, want := test.want == csrpolicy.Record{}, csrpolicy.Approved, csrpolicy.CodeVerified
			if unexpected && enforce {
				decision, want = csrpolicy.Pending, csrpolicy.CodeUnexpectedCredential
			}

			verdict := s.review(t)
			assert.Equal(t, decision, verdict.Decision, "%s, enforce %t", name, enforce)
			assert.Equal(t, want, codes(verdict), "%s, enforce %t", name, enforce)
			assert.Equal(t, test.want, verdict.Record, name)
			assert.Equal(t, unexpected, verdict.Unexpected != "", name)
		}
	}
}

// The description tells the kubelet's request from an attacker's.
func TestReview_DescribesUnexpectedCredential(t *testing.T) {
	address := netip.MustParseAddr("10.0.0.10")
	record := csrpolicy.Record{Credential: "c0ffee", Expires: now.Add(time.Hour), Address: address}
	token := issued("a", "", time.Hour)
	token.Serial = "5F"

	for name, test := range map[string]struct {
		record   csrpolicy.Record
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
			csrpolicy.Record{Credential: "c0ffee"},
			[]csrpolicy.ClientCertificate{issued("a", "x", time.Hour)},
			address,
			"serial number , requested with " + id("x") + " at " + created.Add(time.Hour).Format(time.RFC3339) + `, is not the recorded one of Node "worker-1": c0ffee`,
		},
		"machine elsewhere": {
			csrpolicy.Record{Credential: "c0ffee", Address: address},
			nil, netip.MustParseAddr("10.0.0.99"),
			"of unknown origin, first seen at " + now.Format(time.RFC3339) + `, is not the recorded one of Node "worker-1": c0ffee, of the machine at 10.0.0.10; now a machine at 10.0.0.99 responds`,
		},
		"no record": {
			csrpolicy.Record{},
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
		credential, previous string
		issued               []csrpolicy.ClientCertificate
		want, wantPrevious   string
	}{
		"none":                            {credential: "a", want: "a"},
		"chain":                           {credential: "a", issued: chain, want: "d", wantPrevious: "c"},
		"chain again":                     {credential: "d", previous: "c", issued: chain, want: "d", wantPrevious: "c"},
		"middle of the chain":             {credential: "c", previous: "b", issued: chain, want: "d", wantPrevious: "c"},
		"certificate that was not stored": {credential: "a", issued: unstored, want: "c", wantPrevious: "a"},
		"another chain":                   {credential: "e", issued: chain, want: "e"},
	} {
		got := csrpolicy.Record{Credential: id(test.credential), Previous: id(test.previous)}.Follow(test.issued)
		assert.Equal(t, id(test.want), got.Credential, name)
		assert.Equal(t, id(test.wantPrevious), got.Previous, name)
		assert.Equal(t, got, got.Follow(test.issued), "%s, again", name)
	}
}
