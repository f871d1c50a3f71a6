package talosapi

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	clientconfig "github.com/siderolabs/talos/pkg/machinery/client/config"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/internal/backoff"
)

const (
	// readerTTL is the lifetime of an issued certificate, which is renewed at half of it. Open connections outlive it.
	readerTTL = time.Hour

	// caGrace is how long the previous OS CA stays trusted (machinery's x509 constants).
	caGrace = 24 * time.Hour

	// minRenewInterval is the minimum time between two certificates, however many machines present an unknown CA.
	minRenewInterval = time.Minute

	issueTimeout = 10 * time.Second
)

// IssuedCredentials are Credentials with certificates that Talos issues over machine.sock. Create them with
// NewIssuedCredentials; Run issues and renews the certificates.
type IssuedCredentials struct {
	issue     func(ctx context.Context, ttl time.Duration) (ReaderCertificate, error)
	clock     clock.Clock
	unknownCA chan struct{} // capacity 1; pending renewal request

	mu    sync.Mutex
	cert  *tls.Certificate
	roots []trustedCA
	pool  *x509.CertPool // of roots; never changed, because connections share it
}

type trustedCA struct {
	pem      string
	lastSeen time.Time
}

// NewIssuedCredentials returns credentials that admin issues.
func NewIssuedCredentials(admin *Admin, clk clock.Clock) *IssuedCredentials {
	return &IssuedCredentials{issue: admin.IssueReader, clock: clk, unknownCA: make(chan struct{}, 1)}
}

// Run renews the certificate until ctx is done: at half of its lifetime, and earlier if a machine presents a certificate of
// an unknown CA, as after a rotation of the OS CA. It calls ready after each renewal.
func (c *IssuedCredentials) Run(ctx context.Context, ready func()) {
	for ctx.Err() == nil {
		err := backoff.Retry(ctx, "Failed to issue Talos client certificate; retrying", c.renew)
		if err != nil {
			return // ctx has ended
		}

		ready()

		half := c.clock.After(readerTTL / 2)

		backoff.Sleep(ctx, c.clock, minRenewInterval)

		select {
		case <-ctx.Done():
		case <-half:
		case <-c.unknownCA:
		}
	}
}

// UnknownCA requests a renewal of the certificate and the CA, because a machine presented a certificate of an unknown CA.
func (c *IssuedCredentials) UnknownCA() {
	select {
	case c.unknownCA <- struct{}{}:
	default:
	}
}

func (c *IssuedCredentials) renew(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, issueTimeout)
	defer cancel()

	issued, err := c.issue(ctx, readerTTL)
	if err != nil {
		return err
	}

	cert, err := tls.X509KeyPair(issued.Certificate, issued.Key)
	if err != nil {
		return fmt.Errorf("load issued os:reader certificate: %w", err)
	}

	if !x509.NewCertPool().AppendCertsFromPEM(issued.CA) {
		return errors.New("load issued os:reader certificate: CA is not PEM")
	}

	c.mu.Lock()
	defer c.mu.Unlock()

	ca, now := string(issued.CA), c.clock.Now()

	c.cert = &cert
	readerExpiry.Set(float64(cert.Leaf.NotAfter.Unix()))

	// The current CA comes first. A previous CA is removed when all server certificates that it issued have expired.
	c.roots = slices.DeleteFunc(c.roots, func(root trustedCA) bool { return root.pem == ca || now.Sub(root.lastSeen) >= caGrace })
	c.roots = slices.Insert(c.roots, 0, trustedCA{pem: ca, lastSeen: now})
	c.pool = x509.NewCertPool()

	for _, root := range c.roots {
		c.pool.AppendCertsFromPEM([]byte(root.pem))
	}

	return nil
}

// TLSConfig implements Credentials.
func (c *IssuedCredentials) TLSConfig() (*tls.Config, error) {
	c.mu.Lock()
	defer c.mu.Unlock()

	if c.cert == nil {
		return nil, errors.New("no os:reader certificate issued yet")
	}

	return &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: c.pool, Certificates: []tls.Certificate{*c.cert}}, nil
}

// Talosconfig are Credentials from the current context of the talosconfig file at Path, which is read for each Dial.
type Talosconfig struct {
	Path string
}

// TLSConfig implements Credentials.
func (t Talosconfig) TLSConfig() (*tls.Config, error) {
	config, err := ReadTalosconfig(t.Path)
	if err != nil {
		return nil, err
	}

	current, ok := config.Contexts[config.Context]
	if !ok {
		return nil, fmt.Errorf("read talosconfig %s: context %q not found", t.Path, config.Context)
	}

	pem := make([][]byte, 3)

	for i, field := range []struct{ name, value string }{{"ca", current.CA}, {"crt", current.Crt}, {"key", current.Key}} {
		if pem[i], err = base64.StdEncoding.DecodeString(field.value); err != nil || field.value == "" {
			return nil, fmt.Errorf("read talosconfig %s: context %q: field %q is not base64-encoded PEM", t.Path, config.Context, field.name)
		}
	}

	cert, err := tls.X509KeyPair(pem[1], pem[2])
	if err != nil {
		return nil, fmt.Errorf("read talosconfig %s: context %q: fields \"crt\" and \"key\": %w", t.Path, config.Context, err)
	}

	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem[0]) {
		return nil, fmt.Errorf("read talosconfig %s: context %q: field \"ca\" is not base64-encoded PEM", t.Path, config.Context)
	}

	return &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: pool, Certificates: []tls.Certificate{cert}}, nil
}

// ReadTalosconfig reads a talosconfig file. Unlike clientconfig.Open it does not create a missing file.
func ReadTalosconfig(path string) (config *clientconfig.Config, err error) {
	content, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read talosconfig: %w", err)
	}

	// FromBytes panics if a context has no fields (machinery v1.13.5).
	defer func() {
		if cause := recover(); cause != nil {
			config, err = nil, fmt.Errorf("read talosconfig %s: malformed context: %v", path, cause)
		}
	}()

	if config, err = clientconfig.FromBytes(content); err != nil {
		return nil, fmt.Errorf("read talosconfig %s: %w", path, err)
	}

	return config, nil
}
