package csrpolicy_test

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
)

const credentialKey = "authentication.kubernetes.io/credential-id"

// created is when the Node was created.
var created = now.Add(-24 * time.Hour)

// id returns the ID of a client certificate with a name.
func id(name string) string { return csrpolicy.CertificateID([]byte(name)) }

// with makes the request with the client certificate of the given name.
func (s *scene) with(name string) *scene {
	sum := sha256.Sum256([]byte(name))
	s.csr.Spec.Extra = map[string]certificatesv1.ExtraValue{credentialKey: {"X509SHA256=" + hex.EncodeToString(sum[:])}}

	return s
}

// issued returns a client certificate that was requested some time after the Node was created.
func issued(name, requestedWith string, after time.Duration) csrpolicy.ClientCertificate {
	c := csrpolicy.ClientCertificate{ID: id(name), RequestedAt: created.Add(after), Issuer: "ca", Expires: now.Add(time.Hour)}
	if requestedWith == "" {
		c.Bootstrapped = true
	} else {
		c.RequestedWith = id(requestedWith)
	}

	return c
}

func TestReview_Credential(t *testing.T) {
	machineID, volume := csrpolicy.Fingerprint("node-id"), csrpolicy.Fingerprint("volume")
	pin := csrpolicy.Pin{Credential: id("a"), NodeID: machineID, Volume: volume, Issuer: "ca", Expires: now.Add(time.Hour)}
	edited := func(edit func(*csrpolicy.Pin)) csrpolicy.Pin { p := pin; edit(&p); return p } //nolint:nlreturn // one line

	for _, test := range []struct {
		name   string
		pin    csrpolicy.Pin
		issued []csrpolicy.ClientCertificate
		edit   func(*scene)
		want   csrpolicy.Pin // none: unexpected
	}{
		{name: "first use", want: csrpolicy.Pin{Credential: id("a"), NodeID: machineID, Volume: volume}},
		{name: "first registration", issued: []csrpolicy.ClientCertificate{issued("a", "", -time.Second)}, want: pin},
		{name: "first registration with another clock", issued: []csrpolicy.ClientCertificate{issued("a", "", 9*time.Second)}, want: pin},
		{name: "bootstrap token for existing Node", issued: []csrpolicy.ClientCertificate{issued("a", "", time.Minute)}},
		{
			name:   "bootstrap token for existing Node, two rotations later",
			issued: []csrpolicy.ClientCertificate{issued("a", "b", 3*time.Minute), issued("b", "c", 2*time.Minute), issued("c", "", time.Minute)},
		},
		{
			name:   "first registration, a rotation later",
			issued: []csrpolicy.ClientCertificate{issued("a", "b", time.Minute), issued("b", "", -time.Second)},
			want:   edited(func(p *csrpolicy.Pin) { p.Credential = id("a") }),
		},

		{name: "pinned", pin: pin, want: pin},
		{name: "previous", pin: edited(func(p *csrpolicy.Pin) { p.Credential, p.Previous = id("b"), id("a") }), want: edited(func(p *csrpolicy.Pin) { p.Credential, p.Previous = id("b"), id("a") })},
		{name: "pinned by operator", pin: csrpolicy.Pin{Credential: id("a")}, want: csrpolicy.Pin{Credential: id("a"), NodeID: machineID, Volume: volume}},
		{name: "unknown origin", pin: edited(func(p *csrpolicy.Pin) { p.Credential = id("b") })},
		{
			name: "rotation of the pinned one", pin: edited(func(p *csrpolicy.Pin) { p.Credential = id("b") }),
			issued: []csrpolicy.ClientCertificate{issued("a", "b", time.Hour)},
			want:   edited(func(p *csrpolicy.Pin) { p.Previous = id("b") }),
		},
		{
			name: "rotation of another one", pin: edited(func(p *csrpolicy.Pin) { p.Credential = id("b") }),
			issued: []csrpolicy.ClientCertificate{issued("a", "c", time.Hour)},
		},
		{
			name: "bootstrap token", pin: edited(func(p *csrpolicy.Pin) { p.Credential = id("b") }),
			issued: []csrpolicy.ClientCertificate{issued("a", "", time.Hour)},
		},

		{
			name: "wiped volume", pin: edited(func(p *csrpolicy.Pin) { p.Credential, p.Volume = id("b"), "other" }),
			issued: []csrpolicy.ClientCertificate{issued("a", "", time.Hour)}, want: pin,
		},
		{name: "other node ID on the same volume", pin: edited(func(p *csrpolicy.Pin) { p.Credential, p.NodeID = id("b"), "other" })},
		{
			name: "other node ID without known volume", pin: edited(func(p *csrpolicy.Pin) { p.Credential, p.NodeID, p.Volume = id("b"), "other", "" }),
			want: csrpolicy.Pin{Credential: id("a"), NodeID: machineID, Volume: volume},
		},
		{
			name: "machine reports no volume", pin: edited(func(p *csrpolicy.Pin) { p.Credential = id("b") }),
			edit: func(s *scene) { s.evidence.Machine.EphemeralID = "" },
		},
		{
			name: "machine reports no node ID", pin: edited(func(p *csrpolicy.Pin) { p.Credential, p.Volume = id("b"), "" }),
			edit: func(s *scene) { s.evidence.Machine.NodeID = "" },
		},
		{
			name: "replaced CA", pin: edited(func(p *csrpolicy.Pin) { p.Credential, p.Issuer = id("b"), "old" }),
			issued: []csrpolicy.ClientCertificate{issued("a", "", time.Hour)}, want: pin,
		},
		{name: "replaced CA, unknown origin", pin: edited(func(p *csrpolicy.Pin) { p.Credential, p.Issuer = id("b"), "old" })},
		{
			name: "expired", pin: edited(func(p *csrpolicy.Pin) { p.Credential, p.Expires = id("b"), now.Add(-time.Second) }),
			want: csrpolicy.Pin{Credential: id("a"), NodeID: machineID, Volume: volume},
		},
	} {
		for _, enforce := range []bool{false, true} {
			s := asks("worker-1").with("a")
			s.evidence.Machine.NodeID, s.evidence.Machine.EphemeralID = "node-id", "volume"
			s.evidence.Custody = csrpolicy.Custody{Pin: test.pin, Issued: test.issued, NodeCreated: created}
			s.evidence.Policy.EnforceCredential = enforce

			if test.edit != nil {
				test.edit(s)
			}

			verdict := s.review(t)
			checkVerdict(t, s.csr, s.evidence, verdict)

			unexpected := test.want == csrpolicy.Pin{}
			want := csrpolicy.Approve

			if unexpected && enforce {
				want = csrpolicy.Defer
			}

			if verdict.Decision != want || verdict.Pin != test.want || (verdict.Unexpected != "") != unexpected {
				t.Errorf("%s, enforce %t: got %s%s, unexpected %q,\npin  %+v\nwant %+v", test.name, enforce, verdict.Decision, messages(verdict), verdict.Unexpected, verdict.Pin, test.want)
			}

			if want == csrpolicy.Defer && codes(verdict) != csrpolicy.CodeUnexpectedCredential {
				t.Errorf("%s: got %s", test.name, codes(verdict))
			}
		}
	}
}

// What cannot be judged is neither pinned nor reported.
func TestReview_CredentialWithoutEvidence(t *testing.T) {
	for name, edit := range map[string]func(*scene){
		"no machine":        func(s *scene) { s.evidence.MachineState = csrpolicy.MachineUnreachable },
		"no Node":           func(s *scene) { s.evidence.Node = csrpolicy.NodeUnknown },
		"not the machine's": func(s *scene) { s.pkcs10.addDNS("worker-2") },
		"no credential":     func(s *scene) { s.csr.Spec.Extra = nil },
	} {
		s := asks("worker-1").with("a")
		s.evidence.Policy.EnforceCredential = true
		edit(s)

		if v := s.review(t); v.Pin != (csrpolicy.Pin{}) || v.Unexpected != "" || strings.Contains(codes(v), csrpolicy.CodeUnexpectedCredential) {
			t.Errorf("%s: got %+v", name, v)
		}
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

		if got := csrpolicy.CredentialID(csr); got != want {
			t.Errorf("%q: got %q, want %q", value, got, want)
		}

		csr.Spec.Extra[credentialKey] = append(csr.Spec.Extra[credentialKey], value)

		if got := csrpolicy.CredentialID(csr); got != "" {
			t.Errorf("%q twice: got %q", value, got)
		}
	}
}

func TestPin_FollowsRotations(t *testing.T) {
	chain := []csrpolicy.ClientCertificate{issued("d", "c", 3), issued("c", "b", 2), issued("b", "a", 1), issued("x", "", 4), issued("y", "x", 5)}

	for _, test := range []struct {
		name, credential, previous string
		issued                     []csrpolicy.ClientCertificate
		want, wantPrevious         string
	}{
		{name: "none", credential: "a", want: "a"},
		{name: "chain", credential: "a", issued: chain, want: "d", wantPrevious: "c"},
		{name: "chain again", credential: "d", previous: "c", issued: chain, want: "d", wantPrevious: "c"},
		{name: "middle of the chain", credential: "c", previous: "b", issued: chain, want: "d", wantPrevious: "c"},
		{name: "certificate that was not stored", credential: "a", issued: []csrpolicy.ClientCertificate{issued("b", "a", 1), issued("c", "a", 2)}, want: "c", wantPrevious: "a"},
		{name: "another chain", credential: "e", issued: chain, want: "e"},
	} {
		pin := csrpolicy.Pin{Credential: id(test.credential)}
		if test.previous != "" {
			pin.Previous = id(test.previous)
		}

		got := pin.Follow(test.issued)
		if again := got.Follow(test.issued); again != got {
			t.Errorf("%s: got %+v, then %+v", test.name, got, again)
		}

		if got.Credential != id(test.want) || (test.wantPrevious != "" && got.Previous != id(test.wantPrevious)) {
			t.Errorf("%s: got %+v", test.name, got)
		}
	}
}
