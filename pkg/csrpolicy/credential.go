package csrpolicy

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

// CodeUnexpectedCredential is the code of a request that was not made with the recorded client certificate. It is a reason
// to keep the request pending if Policy.EnforceCredential is set.
const CodeUnexpectedCredential = "UnexpectedCredential"

const (
	// extraCredentialID is the key under which the API server records the credential of a requester, and
	// certificatePrefix the prefix of client certificates (k8s.io/apiserver/pkg/authentication, Kubernetes 1.32 and
	// later).
	extraCredentialID = "authentication.kubernetes.io/credential-id"
	certificatePrefix = "X509SHA256="

	// credentialBytes is the length of a certificate's ID: 128 bits of its SHA-256 hash, so that it fits into a label.
	credentialBytes = 16
	// fingerprintBytes is the length of hashes that are only compared with an earlier hash of the same value.
	fingerprintBytes = 6

	// registrationSlack is how much later than its Node a kubelet's first client certificate may have been requested: a
	// kubelet requests it first, but the clocks of several API servers differ.
	registrationSlack = 10 * time.Second
)

// CertificateID returns the ID of a client certificate in DER encoding.
func CertificateID(der []byte) string {
	sum := sha256.Sum256(der)

	return hex.EncodeToString(sum[:credentialBytes])
}

// CredentialID returns the ID of the client certificate with which a request was made; empty if the API server does not
// report it.
func CredentialID(csr *certificatesv1.CertificateSigningRequest) string {
	values := csr.Spec.Extra[extraCredentialID]
	if len(values) != 1 {
		return ""
	}

	hash, isCertificate := strings.CutPrefix(values[0], certificatePrefix)
	if sum, err := hex.DecodeString(hash); !isCertificate || err != nil || len(sum) != sha256.Size {
		return ""
	}

	return strings.ToLower(hash[:2*credentialBytes])
}

// Fingerprint returns a short hash of a value that is only compared with earlier ones; empty for an empty value.
func Fingerprint(value string) string {
	if value == "" {
		return ""
	}

	sum := sha256.Sum256([]byte(value))

	return hex.EncodeToString(sum[:fingerprintBytes])
}

// ClientCertificate is a client certificate that was issued for a Node.
type ClientCertificate struct {
	ID string
	// RequestedWith is the ID of the client certificate with which it was requested; empty if there was none.
	RequestedWith string
	// Bootstrapped is true if it was requested with a bootstrap token, which works for any Node.
	Bootstrapped bool
	RequestedAt  time.Time
	// Serial is the serial number, in hexadecimal digits as openssl prints it.
	Serial string
	// Issuer is the fingerprint of the CA's key ID; empty if unknown.
	Issuer  string
	Expires time.Time
}

// origin describes how and when the certificate was obtained. used is when a request was made with the certificate.
func (c ClientCertificate) origin(used time.Time) string {
	requester := cmp.Or(c.RequestedWith, "an unknown credential")
	if c.Bootstrapped {
		requester = "a bootstrap token"
	}

	if c.ID == "" {
		return "of unknown origin, first seen at " + used.UTC().Format(time.RFC3339)
	}

	return fmt.Sprintf("serial number %s, requested with %s at %s", c.Serial, requester, c.RequestedAt.UTC().Format(time.RFC3339))
}

// Record is what the labels of a Node record of its kubelet's client certificate. The zero value means that none is
// known.
type Record struct {
	// Credential is the certificate's ID. Previous is the ID of the certificate with which the kubelet requested it: a
	// request that it made before the rotation can be reviewed after it, and a kubelet that fails to store a
	// certificate continues with the previous one.
	Credential, Previous string
	// NodeID and Volume are fingerprints of the machine's Talos node ID and of the file system on which the kubelet
	// stores the certificate. Issuer is ClientCertificate's. Each may be empty if unknown.
	NodeID, Volume, Issuer string
	// Address is the address at which the machine responded; the zero value if unknown. No other certificate can be
	// recorded while the machine is not dialed there.
	Address netip.Addr
	// Expires is when the certificate expires; zero if unknown.
	Expires time.Time
}

// Credentials are the client certificates of a Node's kubelet. The zero value means that none is known.
type Credentials struct {
	Record Record
	// Issued are the certificates that were issued for the Node within the last hour or so. The API server forgets older
	// requests.
	Issued []ClientCertificate
	// NodeCreated is when the Node was created.
	NodeCreated time.Time
}

// Has reports whether the credential is recorded.
func (r Record) Has(credential string) bool {
	return credential != "" && (credential == r.Credential || credential == r.Previous)
}

// Follow returns the record after all rotations of the recorded certificate. Its result does not change if it is called
// with the same certificates again.
func (r Record) Follow(issued []ClientCertificate) Record {
	issued = slices.SortedFunc(slices.Values(issued), func(a, b ClientCertificate) int {
		return cmp.Or(a.RequestedAt.Compare(b.RequestedAt), cmp.Compare(a.ID, b.ID))
	})

	for _, certificate := range issued {
		if r.Has(certificate.RequestedWith) && !r.Has(certificate.ID) {
			r.Credential, r.Previous = certificate.ID, certificate.RequestedWith
			r.Issuer, r.Expires = certificate.Issuer, certificate.Expires
		}
	}

	return r
}

// lost reports whether the kubelet can no longer have the recorded certificate. Only the machine at the recorded address
// counts, because a kubelet can change the address that is dialed. renewed is the certificate with which the request was
// made; the zero value if it is not known.
func (r Record) lost(m machine.Machine, renewed ClientCertificate, now time.Time) bool {
	changed := func(before, after string) bool { return before != "" && after != "" && before != after }
	volume := Fingerprint(m.EphemeralID)
	reinstalled := (r.Volume == "" || volume == "") && changed(r.NodeID, Fingerprint(m.NodeID))
	expired := !r.Expires.IsZero() && r.Expires.Before(now)

	return r.isAt(m) && (reinstalled || expired || changed(r.Volume, volume) || changed(r.Issuer, renewed.Issuer))
}

func (r Record) isAt(m machine.Machine) bool { return r.Address.IsValid() && r.Address == m.Endpoint }

// locate returns the record with the identity and the address of a machine that has the recorded certificate. The record
// does not change if the machine responds at another address and does not report the recorded identity.
func (r Record) locate(m machine.Machine) Record {
	nodeID, volume := Fingerprint(m.NodeID), Fingerprint(m.EphemeralID)
	isSame := r.Volume != "" && r.Volume == volume || r.Volume == "" && (r.NodeID == "" || r.NodeID == nodeID)

	if isSame || r.isAt(m) {
		r.NodeID, r.Volume, r.Address = cmp.Or(nodeID, r.NodeID), cmp.Or(volume, r.Volume), cmp.Or(m.Endpoint, r.Address)
	}

	return r
}

// describe describes the record for people, and how the machine differs from it.
func (r Record) describe(m machine.Machine) string {
	switch {
	case r.Credential == "":
		return "none is recorded, and this one goes back to a bootstrap token that was used after the Node was created"
	case r.Address.IsValid() && !r.isAt(m):
		return fmt.Sprintf("%s, of the machine at %s; now a machine at %s responds", r.Credential, r.Address, m.Endpoint)
	default:
		return r.Credential
	}
}

// issuedAs returns the certificate with an ID; the zero value if nothing is known of it.
func (c Credentials) issuedAs(id string) ClientCertificate {
	for _, certificate := range c.Issued {
		if certificate.ID == id {
			return certificate
		}
	}

	return ClientCertificate{}
}

// isLate reports whether a certificate goes back to a bootstrap token that was used after the Node had registered.
func (c Credentials) isLate(certificate ClientCertificate) bool {
	for range c.Issued {
		if certificate.Bootstrapped {
			return certificate.RequestedAt.After(c.NodeCreated.Add(registrationSlack))
		}

		certificate = c.issuedAs(certificate.RequestedWith)
	}

	return false
}

// checkCredential compares the credential with which the request was made with the recorded one. The kubelet's names are
// not enough: a bootstrap token obtains a client certificate for any Node.
func (c *checker) checkCredential() {
	id := CredentialID(c.request.csr)
	if id == "" || !c.machineKnown() || !c.Node.managed() {
		return
	}

	certificate := c.Credentials.issuedAs(id)
	record := c.Credentials.Record.Follow(c.Credentials.Issued)
	isLate := c.Credentials.isLate(certificate)

	switch {
	case record.Has(id):
	case record.lost(c.Machine, certificate, c.Now), record.Credential == "" && !isLate:
		record = Record{Credential: id}
	default:
		c.unexpected = fmt.Sprintf("Client certificate %s, %s, is not the recorded one of Node %.80q: %s",
			id, certificate.origin(c.request.csr.CreationTimestamp.Time), c.nodename, record.describe(c.Machine))
		if c.Policy.EnforceCredential {
			c.pending(CodeUnexpectedCredential, "%s", c.unexpected)
		}

		return
	}

	record = record.locate(c.Machine)
	if record.Credential == certificate.ID {
		record.Issuer, record.Expires = certificate.Issuer, certificate.Expires
	}

	c.record = record
}
