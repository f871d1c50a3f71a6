package csrpolicy

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rsa"
	"crypto/x509"
	"encoding/asn1"
	"encoding/pem"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/crypto/cryptobyte"
	cryptobyteasn1 "golang.org/x/crypto/cryptobyte/asn1"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

// Limits on what is read. A kubelet's request is below a kilobyte and names a handful of subjects; its keys are never longer, and a check of a
// signature by a key of half a million bits would take seconds.
const (
	maxRequest  = 64 << 10
	maxSubjects = 64
	minRSABits  = 2048
	maxRSABits  = 8192
	minExponent = 65537
)

// pemType is the one type that the signer takes (k8s.io/kubernetes/pkg/apis/certificates.ParseCSR).
const pemType = "CERTIFICATE REQUEST"

var (
	oidCommonName       = asn1.ObjectIdentifier{2, 5, 4, 3}
	oidOrganization     = asn1.ObjectIdentifier{2, 5, 4, 10}
	oidSubjectAltName   = asn1.ObjectIdentifier{2, 5, 29, 17}
	oidExtensionRequest = asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 9, 14}
)

// Tags of a GeneralName (RFC 5280, section 4.2.1.6).
const (
	tagDNSName   = cryptobyteasn1.Tag(2) | 0x80
	tagIPAddress = cryptobyteasn1.Tag(7) | 0x80
)

// request is what a PKCS#10 request asks for. Everything in it is read here, strictly: crypto/x509 passes over what it does not know, takes the last of
// several common names, and leaves unread what follows in a sequence.
type request struct {
	x509    *x509.CertificateRequest // nil if the request is malformed
	subject *subject                 // nil if it is none
	names   []string                 // canonical, sorted, each once
	ips     []netip.Addr             // unmapped, sorted, each once
}

type subject struct{ commonName, organization string }

// read takes a request apart. All it may find makes the request wrong for good.
func read(raw []byte) (request, []Reason) {
	if len(raw) > maxRequest {
		return request{}, []Reason{deny(CodeTooLarge, "The request has %d bytes, more than %d", len(raw), maxRequest)}
	}

	der, err := decode(raw)
	if err != nil {
		return request{}, []Reason{deny(CodeMalformed, "The request is malformed: %v", err)}
	}

	parsed, err := x509.ParseCertificateRequest(der)
	if err != nil {
		return request{}, []Reason{deny(CodeMalformed, "The request is malformed: %.200q", err)}
	}

	subject, attributes, ok := dissect(der)
	if !ok {
		return request{}, []Reason{deny(CodeMalformed, "The request is malformed: it is no PKCS#10 request, version 1, and nothing else")}
	}

	r := request{x509: parsed}
	reasons := append(r.readSubject(subject), r.readAttributes(attributes)...)

	return r, append(reasons, checkKey(parsed)...)
}

// decode returns the one PEM block that is all of raw. It must be written as encoding/pem writes it: that leaves no place before, in
// or after the block for what another reader could take for the request.
func decode(raw []byte) ([]byte, error) {
	block, _ := pem.Decode(raw)

	switch {
	case block == nil:
		return nil, errors.New("it holds no PEM block")
	case block.Type != pemType:
		return nil, fmt.Errorf("its PEM block is %.40q and not %q", block.Type, pemType)
	case len(block.Headers) > 0:
		return nil, errors.New("its PEM block has headers")
	case !bytes.Equal(bytes.TrimSpace(raw), bytes.TrimSpace(pem.EncodeToMemory(block))):
		return nil, errors.New("it holds more than one PEM block in its usual form")
	}

	return block.Bytes, nil
}

// dissect returns the content of a PKCS#10 request's subject and attributes (RFC 2986, section 4); false if anything is there that should not be.
func dissect(der []byte) (subject, attributes cryptobyte.String, ok bool) {
	const attributesTag = cryptobyteasn1.Tag(0) | 0xa0

	input := cryptobyte.String(der)

	var (
		whole, info cryptobyte.String
		version     int
	)

	ok = readOnly(&input, &whole, cryptobyteasn1.SEQUENCE) && whole.ReadASN1(&info, cryptobyteasn1.SEQUENCE) &&
		whole.SkipASN1(cryptobyteasn1.SEQUENCE) && whole.SkipASN1(cryptobyteasn1.BIT_STRING) && whole.Empty()

	ok = ok && info.ReadASN1Integer(&version) && version == 0 && info.ReadASN1(&subject, cryptobyteasn1.SEQUENCE) &&
		info.SkipASN1(cryptobyteasn1.SEQUENCE) && readOnly(&info, &attributes, attributesTag)

	return subject, attributes, ok
}

// readOnly reads what must be the last element of s.
func readOnly(s, element *cryptobyte.String, tag cryptobyteasn1.Tag) bool {
	return s.ReadASN1(element, tag) && s.Empty()
}

// readSubject accepts one common name and one organization, each in an RDN of its own, and nothing else.
func (r *request) readSubject(names cryptobyte.String) []Reason {
	var found subject

	for !names.Empty() {
		oid, value, ok := readRDN(&names)

		switch {
		case ok && oid.Equal(oidCommonName) && found.commonName == "":
			found.commonName = value
		case ok && oid.Equal(oidOrganization) && found.organization == "":
			found.organization = value
		default:
			return []Reason{deny(CodeSubject, "The subject is not one common name and one organization")}
		}
	}

	r.subject = &found

	return nil
}

// readRDN takes no empty value: it would pass for one that is not there.
func readRDN(names *cryptobyte.String) (oid asn1.ObjectIdentifier, value string, ok bool) {
	var (
		rdn, pair, text cryptobyte.String
		tag             cryptobyteasn1.Tag
	)

	ok = names.ReadASN1(&rdn, cryptobyteasn1.SET) && readOnly(&rdn, &pair, cryptobyteasn1.SEQUENCE) &&
		pair.ReadASN1ObjectIdentifier(&oid) && pair.ReadAnyASN1(&text, &tag) && pair.Empty()

	return oid, string(text), ok && len(text) > 0 && (tag == cryptobyteasn1.PrintableString || tag == cryptobyteasn1.UTF8String)
}

// readAttributes accepts one request for one extension, subjectAltName, and nothing else.
func (r *request) readAttributes(attributes cryptobyte.String) []Reason {
	if attributes.Empty() {
		return []Reason{deny(CodeNoSANs, "The request has neither a DNS name nor an address")}
	}

	extensions, ok := readExtensionRequest(attributes)
	if !ok {
		return []Reason{deny(CodeExtension, "The request has attributes other than one request for extensions")}
	}

	subjects, ok := readSubjectAltName(extensions)
	if !ok {
		return []Reason{deny(CodeExtension, "The request asks for other than one subjectAltName extension")}
	}

	return r.readSubjects(subjects)
}

func readExtensionRequest(attributes cryptobyte.String) (extensions cryptobyte.String, ok bool) {
	var (
		attribute, values cryptobyte.String
		oid               asn1.ObjectIdentifier
	)

	ok = readOnly(&attributes, &attribute, cryptobyteasn1.SEQUENCE) && attribute.ReadASN1ObjectIdentifier(&oid) && oid.Equal(oidExtensionRequest) &&
		readOnly(&attribute, &values, cryptobyteasn1.SET) && readOnly(&values, &extensions, cryptobyteasn1.SEQUENCE)

	return extensions, ok
}

// readSubjectAltName accepts the extension whether it is critical or not: the signer writes its own.
func readSubjectAltName(extensions cryptobyte.String) (subjects cryptobyte.String, ok bool) {
	var (
		extension, value cryptobyte.String
		oid              asn1.ObjectIdentifier
	)

	ok = readOnly(&extensions, &extension, cryptobyteasn1.SEQUENCE) && extension.ReadASN1ObjectIdentifier(&oid) && oid.Equal(oidSubjectAltName) &&
		extension.SkipOptionalASN1(cryptobyteasn1.BOOLEAN) && readOnly(&extension, &value, cryptobyteasn1.OCTET_STRING) &&
		readOnly(&value, &subjects, cryptobyteasn1.SEQUENCE)

	return subjects, ok
}

func (r *request) readSubjects(subjects cryptobyte.String) []Reason {
	if subjects.Empty() {
		return []Reason{deny(CodeNoSANs, "The request has neither a DNS name nor an address")}
	}

	var reasons []Reason

	for count := 1; !subjects.Empty(); count++ {
		if count > maxSubjects {
			r.names, r.ips = nil, nil

			return []Reason{deny(CodeTooManySANs, "The request has more than %d subjects", maxSubjects)}
		}

		if reason := r.readGeneralName(&subjects); reason != nil {
			reasons = append(reasons, *reason)
		}
	}

	slices.Sort(r.names)
	r.names = slices.Compact(r.names)
	slices.SortFunc(r.ips, netip.Addr.Compare)
	r.ips = slices.Compact(r.ips)

	return reasons
}

// readGeneralName reads all that is left if it is no GeneralName.
func (r *request) readGeneralName(subjects *cryptobyte.String) *Reason {
	var (
		value cryptobyte.String
		tag   cryptobyteasn1.Tag
	)

	if !subjects.ReadAnyASN1(&value, &tag) {
		*subjects = nil

		return new(deny(CodeMalformed, "The request is malformed: its subjectAltName cannot be read"))
	}

	switch tag {
	case tagDNSName:
		r.names = append(r.names, machine.CanonicalName(string(value)))
	case tagIPAddress:
		ip, ok := netip.AddrFromSlice(value)
		if !ok {
			return new(deny(CodeMalformed, "The request is malformed: an address has %d bytes", len(value)))
		}

		r.ips = append(r.ips, ip.Unmap())
	default:
		return new(deny(CodeForbiddenSAN, "The request has a subject that is neither a DNS name nor an address (GeneralName, tag %d)", tag&0x1f))
	}

	return nil
}

// checkKey does not verify a signature by a key that is refused: that could take long.
func checkKey(parsed *x509.CertificateRequest) []Reason {
	if weakness := weakness(parsed.PublicKey); weakness != "" {
		return []Reason{deny(CodeKey, "The key is %s", weakness)}
	}

	switch parsed.SignatureAlgorithm {
	case x509.SHA256WithRSA, x509.SHA384WithRSA, x509.SHA512WithRSA, x509.SHA256WithRSAPSS, x509.SHA384WithRSAPSS, x509.SHA512WithRSAPSS,
		x509.ECDSAWithSHA256, x509.ECDSAWithSHA384, x509.ECDSAWithSHA512, x509.PureEd25519:
	default:
		return []Reason{deny(CodeSignature, "The request is signed by %s", parsed.SignatureAlgorithm)}
	}

	if err := parsed.CheckSignature(); err != nil {
		return []Reason{deny(CodeSignature, "The request is not signed by its own key: %.200q", err)}
	}

	return nil
}

// weakness says what is wrong with a key, or nothing.
func weakness(key any) string {
	switch key := key.(type) {
	case *rsa.PublicKey:
		if bits := key.N.BitLen(); bits < minRSABits || bits > maxRSABits {
			return fmt.Sprintf("RSA with %d bits, and not %d to %d", bits, minRSABits, maxRSABits)
		}

		if key.E < minExponent {
			return fmt.Sprintf("RSA with exponent %d, below %d", key.E, minExponent)
		}
	case *ecdsa.PublicKey:
		if key.Curve != elliptic.P256() && key.Curve != elliptic.P384() && key.Curve != elliptic.P521() {
			return "ECDSA on curve " + key.Curve.Params().Name
		}
	case ed25519.PublicKey:
	default:
		return "neither RSA, ECDSA nor Ed25519"
	}

	return ""
}
