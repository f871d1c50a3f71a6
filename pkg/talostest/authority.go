package talostest

import (
	"bytes"
	stdx509 "crypto/x509"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/siderolabs/crypto/x509"
	"github.com/siderolabs/talos/pkg/machinery/config/generate/secrets"
	"github.com/siderolabs/talos/pkg/machinery/role"
)

const (
	serverCertificateValidity = 24 * time.Hour       // as on Talos
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

	mu       sync.Mutex
	issuing  *x509.CertificateAuthority
	accepted [][]byte // PEM, the issuing CA first
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

	a.issuing = ca
	a.accepted = slices.Insert(a.accepted, 0, ca.CrtPEM)

	return nil
}

// current returns the issuing CA.
func (a *authority) current() *x509.CertificateAuthority {
	a.mu.Lock()
	defer a.mu.Unlock()

	return a.issuing
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
	ca := a.current()

	crt, err := secrets.NewAdminCertificateAndKey(a.now(), &x509.PEMEncodedCertificateAndKey{Crt: ca.CrtPEM, Key: ca.KeyPEM}, roles, ttl)
	if err != nil {
		return nil, fmt.Errorf("issue client certificate for %v: %w", roles.Strings(), err)
	}

	return crt, nil
}
