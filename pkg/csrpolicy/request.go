package csrpolicy

import (
	"bytes"
	"cmp"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/pem"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

// Codes of reasons to deny a request that is malformed or breaks a rule of the signer.
const (
	CodeTooLarge     = "RequestTooLarge"
	CodeMalformed    = "MalformedRequest"
	CodeSubject      = "InvalidSubject"
	CodeKey          = "WeakKey"
	CodeSignature    = "BadSignature"
	CodeExtension    = "ForbiddenExtension" // an attribute or extension other than subjectAltName
	CodeNoSANs       = "NoSANs"
	CodeTooManySANs  = "TooManySANs"
	CodeForbiddenSAN = "ForbiddenSANType" // neither a DNS name nor an IP address
	CodeUsages       = "InvalidUsages"
	CodeExpiration   = "InvalidExpiration"
)

// Limits of a request, besides machine.MaxSubjects. A kubelet's request is smaller than a kilobyte, or 25 for 1,000
// addresses, and its keys are shorter than these: verifying a signature of a key of half a million bits takes seconds.
const (
	maxRequest  = 64 << 10
	minRSABits  = 2048
	maxRSABits  = 8192
	minExponent = 65537
)

// Usages of a kubelet-serving certificate, sorted (DefaultKubeletServingGetUsages in
// k8s.io/client-go/util/certificate).
var (
	usagesOfAny = []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageServerAuth}
	usagesOfRSA = []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageKeyEncipherment, certificatesv1.UsageServerAuth}
)

// pemType is the only type that the signer accepts (k8s.io/kubernetes/pkg/apis/certificates.ParseCSR).
const pemType = "CERTIFICATE REQUEST"

// First bytes of GeneralNames (RFC 5280, section 4.2.1.6).
const (
	tagDNSName   = 2 | 0x80
	tagIPAddress = 7 | 0x80
)

var (
	oidCommonName       = asn1.ObjectIdentifier{2, 5, 4, 3}
	oidOrganization     = asn1.ObjectIdentifier{2, 5, 4, 10}
	oidSubjectAltName   = asn1.ObjectIdentifier{2, 5, 29, 17}
	oidExtensionRequest = asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 9, 14}
)

// Request is a CertificateSigningRequest with its parsed PKCS#10 request. Use Parse.
type Request struct {
	reasons // to deny the request whatever the evidence is

	// Subjects are the DNS names of the request and then its IP addresses, each sorted and unique: names in lower case
	// without a trailing dot, IPv4-mapped IPv6 addresses as IPv4. There are none if the request is invalid in any way.
	Subjects []string

	csr     *certificatesv1.CertificateSigningRequest
	x509    *x509.CertificateRequest // nil if the request is malformed
	subject *subject                 // nil if it is invalid
	names   []string                 // canonical, sorted, unique
	ips     []netip.Addr             // unmapped, sorted, unique
}

type subject struct{ commonName, organization string }

// certificationRequest is the outer structure of a PKCS#10 request (RFC 2986, section 4).
type certificationRequest struct {
	Info struct {
		Version                        int
		Subject, PublicKey, Attributes asn1.RawValue
	}
	Algorithm, Signature asn1.RawValue
}

type extensionRequest struct {
	ID     asn1.ObjectIdentifier
	Values [][]pkix.Extension `asn1:"set"`
}

// relativeDistinguishedNameSET is encoded as a SET because of its name.
type relativeDistinguishedNameSET []struct {
	Type  asn1.ObjectIdentifier
	Value asn1.RawValue
}

// Parse parses a request and verifies its signature; Review reports the errors. The caller must not modify csr while it
// uses the result.
//
// crypto/x509 ignores unknown parts: attributes, SANs of other types, all but the last of several common names,
// additional elements of a SEQUENCE. Therefore every part but the key and the signature algorithm must also encode to
// the same bytes again.
func Parse(csr *certificatesv1.CertificateSigningRequest) *Request {
	r, raw := &Request{csr: csr}, csr.Spec.Request

	if len(raw) > maxRequest {
		r.denied(CodeTooLarge, "Request has %d bytes; the limit is %d", len(raw), maxRequest)

		return r
	}

	parsed, attributes, err := decode(raw)
	if err != nil {
		r.denied(CodeMalformed, "Request is malformed: %v", err)

		return r
	}

	r.x509 = parsed

	if r.subject = parseSubject(parsed.RawSubject); r.subject == nil {
		r.denied(CodeSubject, "Subject must consist of one common name and one organization")
	}

	r.parseSANs(attributes)
	r.checkKey()

	if len(r.reasons) == 0 {
		r.Subjects = slices.Clone(r.names)

		for _, ip := range r.ips {
			r.Subjects = append(r.Subjects, ip.String())
		}
	}

	return r
}

// decode decodes the PEM and DER encodings of a request. The PEM block must be formatted as encoding/pem does: that
// leaves no room before, inside or after it for data that another parser takes for the request.
func decode(raw []byte) (parsed *x509.CertificateRequest, attributes asn1.RawValue, err error) {
	block, _ := pem.Decode(raw)

	switch {
	case block == nil:
		return nil, attributes, errors.New("no PEM block")
	case block.Type != pemType:
		return nil, attributes, fmt.Errorf("PEM type is %.40q, not %q", block.Type, pemType)
	case len(block.Headers) > 0:
		return nil, attributes, errors.New("PEM block has headers")
	case !bytes.Equal(bytes.TrimSpace(raw), bytes.TrimSpace(pem.EncodeToMemory(block))):
		return nil, attributes, errors.New("not a single PEM block in standard format")
	}

	parsed, err = x509.ParseCertificateRequest(block.Bytes)

	switch {
	case errors.As(err, &asn1.StructuralError{}), errors.As(err, &asn1.SyntaxError{}):
		// These errors contain addresses in memory.
		return nil, attributes, errors.New("not the DER encoding of PKCS#10")
	case err != nil:
		return nil, attributes, fmt.Errorf("%.200q", err.Error())
	}

	outer, ok := decodeDER[certificationRequest](block.Bytes)
	if !ok || outer.Info.Version != 0 {
		return nil, attributes, errors.New("not PKCS#10 version 1, or with additional elements")
	}

	return parsed, outer.Info.Attributes, nil
}

// decodeDER decodes DER and reports whether T represents all of it: encoding/asn1 ignores elements of a SEQUENCE after
// those that T has fields for.
func decodeDER[T any](der []byte) (value T, ok bool) {
	if rest, err := asn1.Unmarshal(der, &value); err != nil || len(rest) > 0 {
		return value, false
	}

	encoded, err := asn1.Marshal(value)

	return value, err == nil && bytes.Equal(encoded, der)
}

// parseSubject returns nil unless each RDN holds one attribute, and these are at most one common name and one
// organization. An empty value would be mistaken for a missing one, so that it is invalid too.
func parseSubject(der []byte) *subject {
	rdns, ok := decodeDER[[]relativeDistinguishedNameSET](der)
	if !ok {
		return nil
	}

	var s subject

	for _, rdn := range rdns {
		if len(rdn) != 1 || len(rdn[0].Value.Bytes) == 0 {
			return nil
		}

		if tag := rdn[0].Value.FullBytes[0]; tag != asn1.TagPrintableString && tag != asn1.TagUTF8String {
			return nil
		}

		switch kind := rdn[0].Type; {
		case kind.Equal(oidCommonName) && s.commonName == "":
			s.commonName = string(rdn[0].Value.Bytes)
		case kind.Equal(oidOrganization) && s.organization == "":
			s.organization = string(rdn[0].Value.Bytes)
		default:
			return nil
		}
	}

	return &s
}

// parseSANs reads the names and addresses. The only attribute must be a request for the extension subjectAltName;
// whether that is critical does not matter, because the signer writes its own.
func (r *Request) parseSANs(attributes asn1.RawValue) {
	if len(attributes.Bytes) == 0 {
		r.denied(CodeNoSANs, "Request contains neither a DNS name nor an IP address")

		return
	}

	extensions := r.x509.Extensions

	only, err := asn1.MarshalWithParams([]extensionRequest{{oidExtensionRequest, [][]pkix.Extension{extensions}}}, "tag:0")
	if err != nil || !bytes.Equal(only, attributes.FullBytes) || len(extensions) != 1 || !extensions[0].Id.Equal(oidSubjectAltName) {
		r.denied(CodeExtension, "Request contains attributes or extensions other than one subjectAltName")

		return
	}

	sans, ok := decodeDER[[]asn1.RawValue](extensions[0].Value)

	switch {
	case !ok:
		r.denied(CodeExtension, "Request contains data after the subjectAltName")
	case len(sans) == 0:
		r.denied(CodeNoSANs, "Request contains neither a DNS name nor an IP address")
	case len(sans) > machine.MaxSubjects:
		r.denied(CodeTooManySANs, "Request contains %d subject alternative names; the limit is %d", len(sans), machine.MaxSubjects)
	default:
		r.readSANs(sans)
	}
}

func (r *Request) readSANs(sans []asn1.RawValue) {
	for _, san := range sans {
		ip, isIP := netip.AddrFromSlice(san.Bytes)

		switch tag := san.FullBytes[0]; {
		case tag == tagDNSName:
			r.names = append(r.names, machine.CanonicalName(string(san.Bytes)))
		case tag == tagIPAddress && isIP:
			r.ips = append(r.ips, ip.Unmap())
		default:
			r.denied(CodeForbiddenSAN, "Request contains a subject alternative name that is neither a DNS name nor an IP address (GeneralName tag %d)", san.Tag)
		}
	}

	slices.Sort(r.names)
	r.names = slices.Compact(r.names)
	slices.SortFunc(r.ips, netip.Addr.Compare)
	r.ips = slices.Compact(r.ips)
}

// checkKey verifies the signature only if the key is acceptable: verification with any other can take long.
func (r *Request) checkKey() {
	if problem := keyProblem(r.x509.PublicKey); problem != "" {
		r.denied(CodeKey, "Key %s", problem)

		return
	}

	switch r.x509.SignatureAlgorithm {
	case x509.SHA256WithRSA, x509.SHA384WithRSA, x509.SHA512WithRSA, x509.SHA256WithRSAPSS, x509.SHA384WithRSAPSS, x509.SHA512WithRSAPSS,
		x509.ECDSAWithSHA256, x509.ECDSAWithSHA384, x509.ECDSAWithSHA512, x509.PureEd25519:
		if err := r.x509.CheckSignature(); err != nil {
			r.denied(CodeSignature, "Signature does not match the request and its key: %.200q", err)
		}
	default:
		r.denied(CodeSignature, "Signature algorithm %s is not allowed", r.x509.SignatureAlgorithm)
	}
}

// keyProblem returns why a public key is not acceptable, as a predicate; empty if it is.
func keyProblem(key any) string {
	switch key := key.(type) {
	case *rsa.PublicKey:
		if bits := key.N.BitLen(); bits < minRSABits || bits > maxRSABits {
			return fmt.Sprintf("is RSA with %d bits, not %d to %d", bits, minRSABits, maxRSABits)
		}

		if key.E < minExponent {
			return fmt.Sprintf("is RSA with exponent %d, less than %d", key.E, minExponent)
		}
	case *ecdsa.PublicKey:
		if key.Curve != elliptic.P256() && key.Curve != elliptic.P384() && key.Curve != elliptic.P521() {
			return "is ECDSA on curve " + key.Curve.Params().Name
		}
	case ed25519.PublicKey:
	default:
		return "is not RSA, ECDSA or Ed25519"
	}

	return ""
}

// checkTerms checks the usages, the lifetime and the subject.
func (c *checker) checkTerms() {
	request, spec := c.request, c.request.csr.Spec
	usages := slices.Sorted(slices.Values(spec.Usages))
	mayBeRSA := request.x509 == nil // one reason is enough for a malformed request

	if !mayBeRSA {
		_, mayBeRSA = request.x509.PublicKey.(*rsa.PublicKey)
	}

	if !slices.Equal(usages, usagesOfAny) && !(mayBeRSA && slices.Equal(usages, usagesOfRSA)) {
		c.denied(CodeUsages, "Usages must be digital signature and server auth; RSA keys may add key encipherment")
	}

	if spec.ExpirationSeconds != nil {
		lifetime, longest := time.Duration(*spec.ExpirationSeconds)*time.Second, cmp.Or(c.Policy.MaxExpiration, DefaultMaxExpiration)
		if lifetime < MinExpiration || lifetime > longest {
			c.denied(CodeExpiration, "Lifetime %s is not between %s and %s", lifetime, MinExpiration, longest)
		}
	}

	if s := request.subject; s != nil && s.commonName != spec.Username {
		c.denied(CodeSubject, "Common name %.80q is not the user %.80q", s.commonName, spec.Username)
	}

	if s := request.subject; s != nil && s.organization != groupNodes {
		c.denied(CodeSubject, "Organization %.80q is not %s", s.organization, groupNodes)
	}
}
