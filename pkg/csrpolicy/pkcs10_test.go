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
	"sync"
	"testing"

	"golang.org/x/crypto/cryptobyte"
	cryptobyteasn1 "golang.org/x/crypto/cryptobyte/asn1"
)

const (
	tagPrintable = cryptobyteasn1.PrintableString
	tagDNS       = cryptobyteasn1.Tag(0x82)
	tagIP        = cryptobyteasn1.Tag(0x87)

	sequence  = cryptobyteasn1.SEQUENCE
	set       = cryptobyteasn1.SET
	bitString = cryptobyteasn1.BIT_STRING
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
	key        string                  // one of keys
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

func (p *pkcs10) addDNS(name string) { p.sans = append(p.sans, general{tagDNS, []byte(name)}) }

// addIP encodes an IPv4-mapped IPv6 address in 16 bytes.
func (p *pkcs10) addIP(ip netip.Addr) { p.sans = append(p.sans, general{tagIP, ip.AsSlice()}) }

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
	for i, r := range p.subject {
		if r.has(kind) {
			p.subject[i] = append(r, attribute)
		}
	}
}

func (p *pkcs10) has(flaw string) bool { return slices.Contains(p.flaws, flaw) }

func (p *pkcs10) encode(t testing.TB) []byte {
	t.Helper()

	return p.wrap(p.spoil(p.sign(t, p.info(t))))
}

// info returns the CertificationRequestInfo, which is signed.
func (p *pkcs10) info(t testing.TB) []byte {
	t.Helper()

	var b cryptobyte.Builder

	b.AddASN1(sequence, func(b *cryptobyte.Builder) {
		b.AddASN1Int64(int64(map[bool]int{true: 1}[p.has("version-2")]))
		b.AddASN1(sequence, p.addSubject)
		b.AddBytes(publicKey(t, p.key))

		if !p.has("no-attributes-field") {
			b.AddASN1(cryptobyteasn1.Tag(0xa0), p.addAttributes)
		}

		p.addTrailing(b, "trailing-in-info")
	})

	return mustBytes(t, &b)
}

func mustBytes(t testing.TB, b *cryptobyte.Builder) []byte {
	t.Helper()

	der, err := b.Bytes()
	if err != nil {
		t.Fatal(err)
	}

	return der
}

// addTrailing adds an element that encoding/asn1 ignores.
func (p *pkcs10) addTrailing(b *cryptobyte.Builder, flaw string) {
	if p.has(flaw) {
		b.AddASN1OctetString([]byte("system:masters"))
	}
}

func (p *pkcs10) addSubject(b *cryptobyte.Builder) {
	for _, rdn := range p.subject {
		b.AddASN1(set, func(b *cryptobyte.Builder) {
			for _, pair := range rdn {
				b.AddASN1(sequence, func(b *cryptobyte.Builder) {
					b.AddASN1ObjectIdentifier(pair.oid)
					b.AddASN1(pair.tag, func(b *cryptobyte.Builder) { b.AddBytes([]byte(pair.value)) })
					p.addTrailing(b, "trailing-in-subject")
				})
			}
		})
	}
}

func (p *pkcs10) addAttributes(b *cryptobyte.Builder) {
	times := 1

	switch {
	case p.has("no-attributes"):
		times = 0
	case p.has("two-extension-requests"):
		times = 2
	}

	for range times {
		b.AddASN1(sequence, func(b *cryptobyte.Builder) {
			b.AddASN1ObjectIdentifier(oidExtensionRequest)
			b.AddASN1(set, func(b *cryptobyte.Builder) {
				b.AddASN1(sequence, p.addExtensions)

				if p.has("two-values") {
					b.AddASN1(sequence, p.addExtensions)
				}
			})
			p.addTrailing(b, "trailing-in-attribute")
		})
	}

	for _, oid := range p.attributes {
		b.AddASN1(sequence, func(b *cryptobyte.Builder) {
			b.AddASN1ObjectIdentifier(oid)
			b.AddASN1(set, func(b *cryptobyte.Builder) {
				b.AddASN1(tagPrintable, func(b *cryptobyte.Builder) { b.AddBytes([]byte("secret")) })
			})
		})
	}
}

func (p *pkcs10) addExtensions(b *cryptobyte.Builder) {
	times := 1

	switch {
	case p.has("no-san-extension"):
		times = 0
	case p.has("two-san-extensions"):
		times = 2
	}

	for range times {
		p.addExtension(b, oidSubjectAltName, p.addSANs)
	}

	for _, oid := range p.extensions {
		p.addExtension(b, oid, func(b *cryptobyte.Builder) { b.AddASN1(sequence, func(*cryptobyte.Builder) {}) })
	}
}

func (p *pkcs10) addExtension(b *cryptobyte.Builder, oid asn1.ObjectIdentifier, value cryptobyte.BuilderContinuation) {
	b.AddASN1(sequence, func(b *cryptobyte.Builder) {
		b.AddASN1ObjectIdentifier(oid)

		if p.has("critical") || p.has("not-critical") {
			b.AddASN1Boolean(p.has("critical"))
		}

		b.AddASN1(cryptobyteasn1.OCTET_STRING, value)
		p.addTrailing(b, "trailing-in-extension")
	})
}

func (p *pkcs10) addSANs(b *cryptobyte.Builder) {
	b.AddASN1(sequence, func(b *cryptobyte.Builder) {
		for _, san := range p.sans {
			b.AddASN1(san.tag, func(b *cryptobyte.Builder) { b.AddBytes(san.value) })
		}

		if p.has("unreadable-san") {
			b.AddBytes([]byte{0x82, 0x7f, 'x'})
		}
	})
	p.addTrailing(b, "trailing-in-san")
}

// sign returns the signed request. The signature is a dummy if the private key does not exist.
func (p *pkcs10) sign(t testing.TB, info []byte) []byte {
	t.Helper()

	algorithm, signature := p.signature(t, info)

	var b cryptobyte.Builder

	b.AddASN1(sequence, func(b *cryptobyte.Builder) {
		if p.has("changed-after-signing") {
			info = bytes.Replace(info, []byte("system:nodes"), []byte("system:nodez"), 1)
		}

		b.AddBytes(info)
		b.AddBytes(algorithm)
		b.AddASN1(bitString, func(b *cryptobyte.Builder) { b.AddBytes(append([]byte{0}, signature...)) })
		p.addTrailing(b, "trailing-in-request")
	})

	return mustBytes(t, &b)
}

func (p *pkcs10) signature(t testing.TB, info []byte) (algorithm, signature []byte) {
	t.Helper()

	signer, ok := key(p.key).(crypto.Signer)
	if p.has("foreign-signature") {
		signer, ok = key("p256-other").(crypto.Signer)
	}

	if !ok || p.has("no-signature") {
		return algorithmIdentifier(t, schemes["rsa"]), make([]byte, 256)
	}

	kind := "ecdsa"

	switch signer.(type) {
	case *rsa.PrivateKey:
		kind = "rsa"
	case ed25519.PrivateKey:
		kind = "ed25519"
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

	signature, err := signer.Sign(rand.Reader, digest, scheme.hash)
	if err != nil {
		t.Fatal(err)
	}

	return algorithmIdentifier(t, scheme), signature
}

// scheme is a signature algorithm. Only RSA has parameters, which are NULL.
type scheme struct {
	oid        asn1.ObjectIdentifier
	hash       crypto.Hash
	parameters []byte
}

var schemes = map[string]scheme{
	"rsa":        {asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 1, 11}, crypto.SHA256, asn1.NullBytes},
	"rsa-sha1":   {asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 1, 5}, crypto.SHA1, asn1.NullBytes},
	"rsa-md5":    {asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 1, 4}, crypto.MD5, asn1.NullBytes},
	"ecdsa":      {asn1.ObjectIdentifier{1, 2, 840, 10045, 4, 3, 2}, crypto.SHA256, nil},
	"ecdsa-sha1": {asn1.ObjectIdentifier{1, 2, 840, 10045, 4, 1}, crypto.SHA1, nil},
	"ed25519":    {asn1.ObjectIdentifier{1, 3, 101, 112}, 0, nil},
}

func algorithmIdentifier(t testing.TB, s scheme) []byte {
	t.Helper()

	var b cryptobyte.Builder

	b.AddASN1(sequence, func(b *cryptobyte.Builder) {
		b.AddASN1ObjectIdentifier(s.oid)
		b.AddBytes(s.parameters)
	})

	return mustBytes(t, &b)
}

// spoil applies the flaws of the signed DER.
func (p *pkcs10) spoil(der []byte) []byte {
	for _, flaw := range p.flaws {
		if spoil, ok := spoils[flaw]; ok && len(der) > 4 {
			der = spoil(der)
		}
	}

	return der
}

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

// wrap encodes the DER as PEM.
func (p *pkcs10) wrap(der []byte) []byte {
	for _, flaw := range p.flaws {
		if wrap, ok := wraps[flaw]; ok {
			return wrap(der)
		}
	}

	return inPEM(der)
}

func inPEM(der []byte) []byte { return pem.EncodeToMemory(&pem.Block{Type: pemType, Bytes: der}) }

const pemType = "CERTIFICATE REQUEST"

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

var (
	keysLock sync.Mutex
	keys     = map[string]any{}
)

// key generates each key once per process.
func key(name string) any {
	keysLock.Lock()
	defer keysLock.Unlock()

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
		return makeRSA(number(parameter))
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

func makeRSA(bits int) *rsa.PrivateKey { return must(rsa.GenerateKey(rand.Reader, bits)) }

// halfRSA returns a public key without a private key: only the length of the modulus matters.
func halfRSA(bits, exponent int) *rsa.PublicKey {
	return &rsa.PublicKey{N: new(big.Int).SetBit(big.NewInt(1), bits-1, 1), E: exponent}
}

// publicKey returns a SubjectPublicKeyInfo.
func publicKey(t testing.TB, name string) []byte {
	t.Helper()

	switch name {
	case "dsa":
		return unusualKey(t, asn1.ObjectIdentifier{1, 2, 840, 10040, 4, 1})
	case "x25519":
		return unusualKey(t, asn1.ObjectIdentifier{1, 3, 101, 110})
	case "ed448":
		return unusualKey(t, asn1.ObjectIdentifier{1, 3, 101, 113})
	case "unknown":
		return unusualKey(t, asn1.ObjectIdentifier{1, 3, 6, 1, 4, 1, 99999})
	}

	k := key(name)
	if signer, ok := k.(crypto.Signer); ok {
		k = signer.Public()
	}

	der, err := x509.MarshalPKIXPublicKey(k)
	if err != nil {
		t.Fatal(err)
	}

	return der
}

func unusualKey(t testing.TB, oid asn1.ObjectIdentifier) []byte {
	t.Helper()

	var b cryptobyte.Builder

	b.AddASN1(sequence, func(b *cryptobyte.Builder) {
		b.AddASN1(sequence, func(b *cryptobyte.Builder) {
			b.AddASN1ObjectIdentifier(oid)

			if oid.String() == "1.2.840.10040.4.1" {
				b.AddASN1(sequence, func(b *cryptobyte.Builder) {
					for _, n := range []int64{23, 11, 4} {
						b.AddASN1Int64(n)
					}
				})
			}
		})
		b.AddASN1(bitString, func(b *cryptobyte.Builder) {
			b.AddUint8(0)

			if oid.String() == "1.2.840.10040.4.1" {
				b.AddASN1Int64(9)
			} else {
				b.AddBytes(make([]byte, 32))
			}
		})
	})

	return mustBytes(t, &b)
}
