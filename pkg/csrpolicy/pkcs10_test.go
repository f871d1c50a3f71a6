package csrpolicy_test

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/asn1"
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"math/big"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/crypto/cryptobyte"
	cryptobyteasn1 "golang.org/x/crypto/cryptobyte/asn1"
)

const (
	tagPrintable  = cryptobyteasn1.PrintableString
	tagDNS        = cryptobyteasn1.Tag(0x82)
	tagIP         = cryptobyteasn1.Tag(0x87)
	tagAttributes = cryptobyteasn1.Tag(0xa0)

	sequence    = cryptobyteasn1.SEQUENCE
	set         = cryptobyteasn1.SET
	bitString   = cryptobyteasn1.BIT_STRING
	octetString = cryptobyteasn1.OCTET_STRING
)

var (
	oidSubjectAltName   = asn1.ObjectIdentifier{2, 5, 29, 17}
	oidExtensionRequest = asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 9, 14}
)

// pkcs10 describes a PKCS#10 request, including flaws of its encoding.
type pkcs10 struct {
	subject    []rdn
	sans       []general
	extensions []asn1.ObjectIdentifier // in addition to subjectAltName
	attributes []asn1.ObjectIdentifier // in addition to the request for extensions
	key        string                  // see key and publicKey
	flaws      []string                // of DER, signature and PEM, by name
}

type (
	rdn  []pair
	pair struct {
		oid   asn1.ObjectIdentifier
		tag   cryptobyteasn1.Tag
		value string
	}
	general struct {
		tag   cryptobyteasn1.Tag
		value []byte
	}
)

func (p *pkcs10) addDNS(name string) { add(&p.sans, general{tagDNS, []byte(name)}) }

// addIP encodes an IPv4-mapped IPv6 address in 16 bytes.
func (p *pkcs10) addIP(ip netip.Addr) { add(&p.sans, general{tagIP, ip.AsSlice()}) }

// eachOf changes all attributes of one type.
func (p *pkcs10) eachOf(kind string, change func(*pair)) {
	for _, rdn := range p.subject {
		for i := range rdn {
			if rdn[i].oid.String() == kind {
				change(&rdn[i])
			}
		}
	}
}

func (r rdn) has(kind string) bool {
	return slices.ContainsFunc(r, func(p pair) bool { return p.oid.String() == kind })
}

func (p *pkcs10) drop(kind string) {
	p.subject = slices.DeleteFunc(p.subject, func(r rdn) bool { return r.has(kind) })
}

// join adds an attribute to the RDNs that contain one of the given type.
func (p *pkcs10) join(kind string, attribute pair) {
	for i := range p.subject {
		if p.subject[i].has(kind) {
			add((*[]pair)(&p.subject[i]), attribute)
		}
	}
}

func (p *pkcs10) has(flaw string) bool { return slices.Contains(p.flaws, flaw) }

// tlv encodes an element; marshal encodes one of a Go type.
func tlv(tag cryptobyteasn1.Tag, content ...[]byte) []byte {
	var b cryptobyte.Builder

	b.AddASN1(tag, func(b *cryptobyte.Builder) { b.AddBytes(slices.Concat(content...)) })

	return b.BytesOrPanic()
}

func marshal(value any) []byte { return must(asn1.Marshal(value)) }

// copies returns an element once, or zero or two times if the request has the given flaws.
func (p *pkcs10) copies(element []byte, none, twice string) []byte {
	switch {
	case p.has(none):
		return nil
	case p.has(twice):
		return slices.Concat(element, element)
	default:
		return element
	}
}

// trailing returns an element that encoding/asn1 ignores.
func (p *pkcs10) trailing(flaw string) []byte {
	if !p.has(flaw) {
		return nil
	}

	return tlv(octetString, []byte("system:masters"))
}

// encode returns the signed request in PEM, with its flaws.
func (p *pkcs10) encode() []byte {
	der, wrap := p.sign(p.info()), inPEM

	for _, flaw := range p.flaws {
		if spoil, ok := spoils[flaw]; ok && len(der) > 4 {
			der = spoil(der)
		}

		if special, ok := wraps[flaw]; ok {
			wrap = special
		}
	}

	return wrap(der)
}

// info returns the CertificationRequestInfo, which is signed.
func (p *pkcs10) info() []byte {
	var version int
	if p.has("version-2") {
		version = 1
	}

	return tlv(sequence, marshal(version), p.encodeSubject(), publicKey(p.key), p.encodeAttributes(), p.trailing("trailing-in-info"))
}

func (p *pkcs10) encodeSubject() []byte {
	var rdns []byte

	for _, rdn := range p.subject {
		var pairs []byte
		for _, pair := range rdn {
			pairs = append(pairs, tlv(sequence, marshal(pair.oid), tlv(pair.tag, []byte(pair.value)), p.trailing("trailing-in-subject"))...)
		}

		rdns = append(rdns, tlv(set, pairs)...)
	}

	return tlv(sequence, rdns)
}

func (p *pkcs10) encodeAttributes() []byte {
	values := p.copies(p.encodeExtensions(), "", "two-values")
	list := p.copies(tlv(sequence, marshal(oidExtensionRequest), tlv(set, values), p.trailing("trailing-in-attribute")), "no-attributes", "two-extension-requests")

	for _, oid := range p.attributes {
		list = append(list, tlv(sequence, marshal(oid), tlv(set, tlv(tagPrintable, []byte("secret"))))...)
	}

	return p.copies(tlv(tagAttributes, list), "no-attributes-field", "")
}

func (p *pkcs10) encodeExtensions() []byte {
	var sans []byte
	for _, san := range p.sans {
		sans = append(sans, tlv(san.tag, san.value)...)
	}

	if p.has("unreadable-san") {
		sans = append(sans, 0x82, 0x7f, 'x')
	}

	list := p.copies(p.extension(oidSubjectAltName, tlv(sequence, sans), p.trailing("trailing-in-san")), "no-san-extension", "two-san-extensions")
	for _, oid := range p.extensions {
		list = append(list, p.extension(oid, tlv(sequence))...)
	}

	return tlv(sequence, list)
}

func (p *pkcs10) extension(oid asn1.ObjectIdentifier, value ...[]byte) []byte {
	var critical []byte
	if p.has("critical") || p.has("not-critical") {
		critical = marshal(p.has("critical"))
	}

	return tlv(sequence, marshal(oid), critical, tlv(octetString, value...), p.trailing("trailing-in-extension"))
}

// sign returns the signed request. The signature is a dummy if the private key does not exist.
func (p *pkcs10) sign(info []byte) []byte {
	algorithm, signature := p.signature(info)

	if p.has("changed-after-signing") {
		info = bytes.Replace(info, []byte("system:nodes"), []byte("system:nodez"), 1)
	}

	return tlv(sequence, info, algorithm, tlv(bitString, []byte{0}, signature), p.trailing("trailing-in-request"))
}

func (p *pkcs10) signature(info []byte) (algorithm, signature []byte) {
	name := p.key
	if p.has("foreign-signature") {
		name = "p256-other"
	}

	signer, ok := key(name).(crypto.Signer)
	if !ok || p.has("no-signature") {
		return schemes["rsa"].algorithm(), make([]byte, 256)
	}

	kind, _, _ := strings.Cut(name, "-")
	if _, known := schemes[kind]; !known {
		kind = "ecdsa"
	}

	for _, weak := range []string{"sha1", "md5"} {
		if _, known := schemes[kind+"-"+weak]; known && p.has(weak) {
			kind += "-" + weak
		}
	}

	scheme, digest := schemes[kind], info

	if scheme.hash != 0 {
		h := scheme.hash.New()
		h.Write(info)
		digest = h.Sum(nil)
	}

	return scheme.algorithm(), must(signer.Sign(rand.Reader, digest, scheme.hash))
}

// scheme is a signature algorithm. Only RSA has parameters, which are NULL.
type scheme struct {
	oid        asn1.ObjectIdentifier
	hash       crypto.Hash
	parameters []byte
}

func (s scheme) algorithm() []byte { return tlv(sequence, marshal(s.oid), s.parameters) }

var schemes = map[string]scheme{
	"rsa":        {asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 1, 11}, crypto.SHA256, asn1.NullBytes},
	"rsa-sha1":   {asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 1, 5}, crypto.SHA1, asn1.NullBytes},
	"rsa-md5":    {asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 1, 4}, crypto.MD5, asn1.NullBytes},
	"ecdsa":      {asn1.ObjectIdentifier{1, 2, 840, 10045, 4, 3, 2}, crypto.SHA256, nil},
	"ecdsa-sha1": {asn1.ObjectIdentifier{1, 2, 840, 10045, 4, 1}, crypto.SHA1, nil},
	"ed25519":    {asn1.ObjectIdentifier{1, 3, 101, 112}, 0, nil},
}

// spoils are flaws of the signed DER.
var spoils = map[string]func(der []byte) []byte{
	"der-empty":             func([]byte) []byte { return nil },
	"der-truncated":         func(der []byte) []byte { return der[:len(der)-1] },
	"der-half":              func(der []byte) []byte { return der[:len(der)/2] },
	"der-appended":          func(der []byte) []byte { return append(der, 0) },
	"der-twice":             func(der []byte) []byte { return slices.Concat(der, der) },
	"der-indefinite-length": func(der []byte) []byte { return slices.Concat([]byte{0x30, 0x80}, der[4:], []byte{0, 0}) },
	"der-long-length":       func(der []byte) []byte { return slices.Concat([]byte{0x30, 0x83, 0}, der[2:]) },
	"der-enormous-length":   func(der []byte) []byte { return slices.Concat([]byte{0x30, 0x84, 0xff, 0xff, 0xff, 0xff}, der[4:]) },
	"der-zeros":             func(der []byte) []byte { return make([]byte, len(der)) },
	"der-nested":            func([]byte) []byte { return bytes.Repeat([]byte{0x30, 0x80}, 10000) },
}

func inPEM(der []byte) []byte { return pem.EncodeToMemory(&pem.Block{Type: pemType, Bytes: der}) }

const pemType = "CERTIFICATE REQUEST"

// wraps are flaws of the PEM.
var wraps = map[string]func(der []byte) []byte{
	"pem-none":        func([]byte) []byte { return nil },
	"pem-der":         func(der []byte) []byte { return der },
	"pem-text":        func([]byte) []byte { return []byte("not PEM") },
	"pem-new-type":    func(der []byte) []byte { return pem.EncodeToMemory(&pem.Block{Type: "NEW " + pemType, Bytes: der}) },
	"pem-certificate": func(der []byte) []byte { return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}) },
	"pem-headers": func(der []byte) []byte {
		return pem.EncodeToMemory(&pem.Block{Type: pemType, Bytes: der, Headers: map[string]string{"Proc-Type": "4,ENCRYPTED"}})
	},
	"pem-before":    func(der []byte) []byte { return slices.Concat([]byte("subject: cp-1\n"), inPEM(der)) },
	"pem-after":     func(der []byte) []byte { return append(inPEM(der), "subject: cp-1\n"...) },
	"pem-nul-after": func(der []byte) []byte { return append(inPEM(der), 0) },
	"pem-twice":     func(der []byte) []byte { return slices.Concat(inPEM(der), inPEM(der)) },
	"pem-broken": func(der []byte) []byte {
		return slices.Concat([]byte("-----BEGIN "+pemType+"-----\nAAAA\n"), inPEM(der))
	},
	"pem-unended": func(der []byte) []byte { return bytes.TrimSuffix(inPEM(der), []byte(pemType+"-----\n")) },
	"pem-one-line": func(der []byte) []byte {
		return fmt.Appendf(nil, "-----BEGIN %s-----\n%s\n-----END %[1]s-----\n", pemType, base64.StdEncoding.EncodeToString(der))
	},
	"pem-crlf":         func(der []byte) []byte { return bytes.ReplaceAll(inPEM(der), []byte("\n"), []byte("\r\n")) },
	"pem-huge-comment": func(der []byte) []byte { return append(inPEM(der), strings.Repeat("\n", 1<<20)...) },
	"pem-spaces":       func(der []byte) []byte { return slices.Concat([]byte("\n\n"), inPEM(der), []byte("\n \n")) },
}

var keys = map[string]any{}

// key returns a private key, or a public key that has none; it generates each once per process.
func key(name string) any {
	if keys[name] == nil {
		keys[name] = makeKey(name)
	}

	return keys[name]
}

func makeKey(name string) any {
	switch kind, parameter, _ := strings.Cut(name, "-"); kind {
	case "ed25519":
		return ed25519.NewKeyFromSeed(make([]byte, ed25519.SeedSize)) // the same in all workers of the fuzzer
	case "rsa":
		return must(rsa.GenerateKey(rand.Reader, number(parameter)))
	case "modulus":
		return halfRSA(number(parameter), 65537)
	case "exponent":
		return halfRSA(2048, number(parameter))
	case "p224":
		return must(ecdsa.GenerateKey(elliptic.P224(), rand.Reader))
	case "p384":
		return must(ecdsa.GenerateKey(elliptic.P384(), rand.Reader))
	case "p521":
		return must(ecdsa.GenerateKey(elliptic.P521(), rand.Reader))
	default:
		return must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	}
}

// halfRSA returns a public key without a private key: only the length of the modulus matters.
func halfRSA(bits, exponent int) *rsa.PublicKey {
	return &rsa.PublicKey{N: new(big.Int).SetBit(big.NewInt(1), bits-1, 1), E: exponent}
}

// publicKey returns a SubjectPublicKeyInfo.
func publicKey(name string) []byte {
	if info, ok := unusualKeys[name]; ok {
		return info
	}

	k := key(name)
	if signer, ok := k.(crypto.Signer); ok {
		k = signer.Public()
	}

	return must(x509.MarshalPKIXPublicKey(k))
}

// unusualKeys are keys that requests are signed without.
var unusualKeys = map[string][]byte{
	"dsa":     keyInfo(marshal(9), oid("1.2.840.10040.4.1"), tlv(sequence, marshal(23), marshal(11), marshal(4))),
	"x25519":  keyInfo(make([]byte, 32), oid("1.3.101.110")),
	"ed448":   keyInfo(make([]byte, 32), oid("1.3.101.113")),
	"unknown": keyInfo(make([]byte, 32), oid("1.3.6.1.4.1.99999")),
}

func keyInfo(key []byte, oid asn1.ObjectIdentifier, parameters ...[]byte) []byte {
	return tlv(sequence, tlv(sequence, marshal(oid), slices.Concat(parameters...)), tlv(bitString, []byte{0}, key))
}
