package csrpolicy

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/talos-ccm/talos-ccm/pkg/noderecord"
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

	// registrationSlack is how much later than its Node a kubelet's first client certificate may have been requested: a
	// kubelet requests it first, but the clocks of several API servers differ.
	registrationSlack = 10 * time.Second
)

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

	return strings.ToLower(hash[:noderecord.IDLength])
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

// Credentials are the client certificates of a Node's kubelet. The zero value means that none is known.
type Credentials struct {
	Record noderecord.Record
	// Issued are the certificates that were issued for the Node within the last hour or so. The API server forgets older
	// requests.
	Issued []ClientCertificate
	// NodeCreated is when the Node was created.
	NodeCreated time.Time
}

// Follow returns the record after all rotations of the recorded certificate. Following them again changes nothing. If the
// machine stated the present certificate, the previous one may be that of a disk that it no longer has.
func (c Credentials) Follow() noderecord.Record {
	r := c.Record
	issued := slices.SortedFunc(slices.Values(c.Issued), func(a, b ClientCertificate) int {
		return cmp.Or(a.RequestedAt.Compare(b.RequestedAt), cmp.Compare(a.ID, b.ID))
	})

	for _, certificate := range issued {
		isOutdated := r.Stated == r.Credential && certificate.RequestedWith == r.Previous
		if r.Has(certificate.RequestedWith) && !r.Has(certificate.ID) && !isOutdated {
			r.Credential, r.Previous = certificate.ID, certificate.RequestedWith
			r.Issuer, r.Expires = certificate.Issuer, certificate.Expires
		}
	}

	if !r.Has(r.Stated) {
		r.Stated = ""
	}

	return r
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

// root returns the certificate that a bootstrap token obtained and that a certificate goes back to; the zero value if that
// is not known.
func (c Credentials) root(certificate ClientCertificate) ClientCertificate {
	for range c.Issued {
		if certificate.Bootstrapped {
			return certificate
		}

		certificate = c.issuedAs(certificate.RequestedWith)
	}

	return ClientCertificate{}
}

// isLate reports whether a certificate goes back to a bootstrap token that was used after the Node had registered.
func (c Credentials) isLate(certificate ClientCertificate) bool {
	return c.root(certificate).RequestedAt.After(c.NodeCreated.Add(registrationSlack))
}

// checkCredential compares the credential with which the request was made with the recorded one. The kubelet's names are
// not enough: a bootstrap token obtains a client certificate for any Node.
func (c *checker) checkCredential() {
	id := CredentialID(c.request.csr)
	if !c.machineKnown() || !c.Node.managed() {
		return
	}

	if id == "" {
		c.record = c.reinstalled(c.Credentials.Record)

		return
	}

	certificate := c.Credentials.issuedAs(id)
	record := c.Credentials.Follow()

	switch {
	case record.Has(id):
	case !c.replaces(certificate, record):
		c.unexpected = fmt.Sprintf("Client certificate %s, %s, is not the recorded one of Node %.80q: %s",
			id, certificate.origin(c.request.csr.CreationTimestamp.Time), c.nodename, c.describe(record, certificate))
		if c.Policy.EnforceCredential {
			c.pending(CodeUnexpectedCredential, "%s", c.unexpected)
		}

		return
	case record.Credential == "" && record.Matches(c.Machine):
		record.Credential = id
	default:
		record = noderecord.Record{Credential: id, IsWorker: c.Node == NodeWorker}
	}

	record = record.Locate(c.Machine)
	if record.Credential == certificate.ID {
		record.Issuer, record.Expires = certificate.Issuer, certificate.Expires
	}

	c.record = record
}

// reinstalled returns the record of a worker that was reinstalled at its recorded address; the zero value for others. It is
// for API servers before 1.32, which do not report the client certificate.
func (c *checker) reinstalled(before noderecord.Record) noderecord.Record {
	if c.Node != NodeWorker || before.Credential != "" || !before.IsAt(c.Machine) || !before.Contradicts(c.Machine) {
		return noderecord.Record{}
	}

	return noderecord.Record{IsWorker: true}.Locate(c.Machine)
}

// replaces reports whether a certificate that is not recorded replaces the record, or is added to a record of the machine
// without a certificate. certificate is the zero value if nothing is known of it.
func (c *checker) replaces(certificate ClientCertificate, record noderecord.Record) bool {
	isOther := record != (noderecord.Record{}) && !record.Matches(c.Machine)

	switch {
	case record.Stated != "":
		return false
	case record.Credential != "", isOther:
		return !c.Policy.RequireStatement && c.isLost(record, certificate)
	case c.Policy.RequireStatement:
		return c.Credentials.root(certificate).Bootstrapped && !c.Credentials.isLate(certificate)
	default:
		return !c.Credentials.isLate(certificate)
	}
}

// isLost reports whether the kubelet can no longer have the recorded certificate. Only the machine at the recorded address
// counts, because a kubelet can change the address that is dialed. renewed is the certificate with which the request was
// made; the zero value if it is not known.
func (c *checker) isLost(record noderecord.Record, renewed ClientCertificate) bool {
	expired := !record.Expires.IsZero() && record.Expires.Before(c.Now)
	otherCA := record.Issuer != "" && renewed.Issuer != "" && record.Issuer != renewed.Issuer

	return record.IsAt(c.Machine) && (expired || otherCA || record.Contradicts(c.Machine))
}

// describe describes the record for people, and why the certificate does not replace it.
func (c *checker) describe(record noderecord.Record, certificate ClientCertificate) string {
	text := cmp.Or(record.Credential, "none is recorded")

	switch {
	case record.Stated != "":
		return text + ", which the machine itself stated"
	case record.Credential == "" && c.Credentials.isLate(certificate):
		text += ", and this one goes back to a bootstrap token that was used after the Node was created"
	case record.Address.IsValid() && !record.IsAt(c.Machine):
		text += fmt.Sprintf(", of the machine at %s; now a machine at %s responds", record.Address, c.Machine.Endpoint)
	}

	if c.Policy.RequireStatement {
		text += "; a machine that runs the talos-ccm extension states its own"
	}

	return text
}
