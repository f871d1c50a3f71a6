package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"testing"
	"time"
)

// authority issues certificates.
type authority struct {
	*testing.T

	key         *ecdsa.PrivateKey
	certificate *x509.Certificate
}

func newAuthority(t *testing.T) authority {
	t.Helper()

	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}

	a := authority{T: t, key: key, certificate: &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "authority"},
		IsCA: true, BasicConstraintsValid: true, NotAfter: time.Now().Add(time.Hour),
	}}

	return authority{T: t, key: key, certificate: a.issue(a.certificate)}
}

func (a authority) issue(template *x509.Certificate) *x509.Certificate {
	a.Helper()

	der, err := x509.CreateCertificate(rand.Reader, template, a.certificate, a.key.Public(), a.key)
	if err != nil {
		a.Fatal(err)
	}

	issued, err := x509.ParseCertificate(der)
	if err != nil {
		a.Fatal(err)
	}

	return issued
}

func TestCheckCertificate_RejectsWrongCertificates(t *testing.T) {
	t.Parallel()

	ours, others := newAuthority(t), newAuthority(t)
	pool := x509.NewCertPool()
	pool.AddCert(ours.certificate)

	for name, test := range map[string]struct {
		issuer authority
		change func(*x509.Certificate)
		right  bool
	}{
		"what was asked for is right":            {issuer: ours, change: func(*x509.Certificate) {}, right: true},
		"an authority that is not the cluster's": {issuer: others, change: func(*x509.Certificate) {}},
		"a client's certificate":                 {issuer: ours, change: func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth} }},
		"another Node's":                         {issuer: ours, change: func(c *x509.Certificate) { c.Subject.CommonName = "system:node:b" }},
		"an address is missing":                  {issuer: ours, change: func(c *x509.Certificate) { c.IPAddresses = nil }},
		"a name more than was asked for":         {issuer: ours, change: func(c *x509.Certificate) { c.DNSNames = append(c.DNSNames, "b") }},
		"it has expired":                         {issuer: ours, change: func(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Minute) }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			template := &x509.Certificate{
				SerialNumber: big.NewInt(2),
				Subject:      pkix.Name{CommonName: "system:node:a"},
				NotAfter:     time.Now().Add(time.Hour),
				ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
				DNSNames:     []string{"a"},
				IPAddresses:  []net.IP{net.ParseIP("198.18.0.1"), net.ParseIP("2001:db8::1")},
			}
			test.change(template)

			certificate := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: test.issuer.issue(template).Raw})

			err := checkCertificate(certificate, pool, "a", []string{"198.18.0.1", "2001:db8::1", "a"})
			if (err == nil) != test.right {
				t.Errorf("got %v", err)
			}
		})
	}

	if err := checkCertificate([]byte("none"), pool, "a", nil); err == nil {
		t.Error("no certificate is right")
	}
}
