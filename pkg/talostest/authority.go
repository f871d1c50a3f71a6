package talostest

import (
	"bytes"
	"crypto/tls"
	stdx509 "crypto/x509"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/siderolabs/crypto/x509"
	"github.com/siderolabs/talos/pkg/machinery/config/generate/secrets"
	"github.com/siderolabs/talos/pkg/machinery/role"
)

// Like Talos, apid renews its certificate at half of its lifetime of one day.
const (
	serverCertificateValidity = 24 * time.Hour
	serverCertificateRenewal  = serverCertificateValidity / 2
	clientCertificateValidity = 365 * 24 * time.Hour // talosctl config new
)

// OldCA determines whether a CA stays accepted after its rotation.
type OldCA int

const (
	// AcceptOldCA keeps trusting certificates of the old CA, as Talos does during a rotation.
	AcceptOldCA OldCA = iota
	// DropOldCA trusts only the new CA, as Talos does after a rotation.
	DropOldCA
)

// authority is the Talos (OS) CA of a cluster.
type authority struct {
	now func() time.Time

	mu         sync.Mutex
	generation int
	issuing    *x509.CertificateAuthority
	accepted   [][]byte // PEM, the issuing CA first
}

func newAuthority(now func() time.Time) (*authority, error) {
	a := &authority{now: now}

	return a, a.rotate(DropOldCA)
}

func (a *authority) rotate(old OldCA) error {
	ca, err := secrets.NewTalosCA(a.now())
	if err != nil {
		return fmt.Errorf("generate Talos CA: %w", err)
	}

	a.mu.Lock()
	defer a.mu.Unlock()

	if old == DropOldCA {
		a.accepted = nil
	}

	a.generation++
	a.issuing = ca
	a.accepted = slices.Insert(a.accepted, 0, ca.CrtPEM)

	return nil
}

// current returns the issuing CA with its key, and all accepted CAs.
func (a *authority) current() (*x509.PEMEncodedCertificateAndKey, []*x509.PEMEncodedCertificate) {
	a.mu.Lock()
	defer a.mu.Unlock()

	accepted := make([]*x509.PEMEncodedCertificate, 0, len(a.accepted))
	for _, crt := range a.accepted {
		accepted = append(accepted, &x509.PEMEncodedCertificate{Crt: crt})
	}

	return &x509.PEMEncodedCertificateAndKey{Crt: a.issuing.CrtPEM, Key: a.issuing.KeyPEM}, accepted
}

// acceptedPEM returns all accepted CA certificates, the issuing one first.
func (a *authority) acceptedPEM() []byte {
	a.mu.Lock()
	defer a.mu.Unlock()

	return bytes.Join(a.accepted, nil)
}

func (a *authority) pool() *stdx509.CertPool {
	pool := stdx509.NewCertPool()
	pool.AppendCertsFromPEM(a.acceptedPEM())

	return pool
}

// clientCertificate issues a certificate for client authentication with the roles as Organization.
func (a *authority) clientCertificate(roles role.Set, ttl time.Duration) (*x509.PEMEncodedCertificateAndKey, error) {
	issuing, _ := a.current()

	crt, err := secrets.NewAdminCertificateAndKey(a.now(), issuing, roles, ttl)
	if err != nil {
		return nil, fmt.Errorf("issue client certificate for %v: %w", roles.Strings(), err)
	}

	return crt, nil
}

// serverNames holds the subject alternative names of a server certificate.
type serverNames struct {
	fqdn string
	dns  []string
	ips  []net.IP
}

// serverCertificate issues a certificate of apid that becomes valid at notBefore.
func (a *authority) serverCertificate(names serverNames, notBefore time.Time) (*tls.Certificate, error) {
	a.mu.Lock()
	issuing := a.issuing
	a.mu.Unlock()

	pair, err := x509.NewKeyPair(issuing,
		x509.IPAddresses(names.ips),
		x509.DNSNames(names.dns),
		x509.CommonName(names.fqdn),
		x509.NotBefore(notBefore),
		x509.NotAfter(notBefore.Add(serverCertificateValidity)),
		x509.KeyUsage(stdx509.KeyUsageDigitalSignature),
		x509.ExtKeyUsage([]stdx509.ExtKeyUsage{stdx509.ExtKeyUsageServerAuth}),
	)
	if err != nil {
		return nil, fmt.Errorf("issue server certificate for %s: %w", names.fqdn, err)
	}

	return pair.Certificate, nil
}

func (a *authority) currentGeneration() int {
	a.mu.Lock()
	defer a.mu.Unlock()

	return a.generation
}

// errNotClientOnly is apid's error for certificates that are valid for server authentication, too.
var errNotClientOnly = errors.New("certificate is not for client authentication only")

// requireClientOnly accepts a leaf whose extended key usage is exactly client authentication, as apid does.
func requireClientOnly(_ [][]byte, chains [][]*stdx509.Certificate) error {
	if len(chains) == 0 || len(chains[0]) == 0 {
		return errors.New("no verified certificate chain")
	}

	leaf := chains[0][0]
	if !slices.Equal(leaf.ExtKeyUsage, []stdx509.ExtKeyUsage{stdx509.ExtKeyUsageClientAuth}) {
		return fmt.Errorf("%q: %w", leaf.Subject, errNotClientOnly)
	}

	return nil
}
