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

	"github.com/siderolabs/go-retry/retry"
	clientconfig "github.com/siderolabs/talos/pkg/machinery/client/config"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
)

const (
	// readerTTL is the lifetime of an issued certificate, which is renewed at half of it. Open connections outlive it.
	readerTTL = time.Hour

	// caGrace is how long the previous OS CA stays trusted after Talos has switched to another. It is the maximum lifetime
	// of a machine's server certificate (24 h in machinery's x509 constants).
	caGrace = 24 * time.Hour

	// minRenewInterval is the minimum time between two certificates, however many machines present an unknown CA. It doubles
	// after each renewal that brought no new CA: those machines belong to another cluster.
	minRenewInterval = time.Minute

	issueTimeout = 10 * time.Second
	// issueCycle limits a series of attempts, and thereby the delay between them, to about eight seconds. Run starts the
	// next series immediately.
	issueCycle = 15 * time.Second
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
	logger := klog.FromContext(ctx)
	interval := minRenewInterval

	for requested := false; ctx.Err() == nil; {
		var rotated bool

		err := retry.Exponential(issueCycle, retry.WithUnits(time.Second), retry.WithJitter(time.Second), retry.WithAttemptTimeout(issueTimeout)).
			RetryWithContext(ctx, func(ctx context.Context) (err error) {
				rotated, err = c.renew(ctx)

				return retry.ExpectedError(err)
			})
		if err != nil {
			if ctx.Err() == nil {
				logger.Error(err, "Failed to issue Talos client certificate; retrying")
			}

			continue
		}

		ready()

		if requested && !rotated {
			interval = min(2*interval, readerTTL/2)
		} else {
			interval = minRenewInterval
		}

		requested = c.waitForRenewal(ctx, interval)
	}
}

// waitForRenewal blocks until the certificate is to be renewed, which is after interval at the earliest. It reports whether
// UnknownCA has requested the renewal.
func (c *IssuedCredentials) waitForRenewal(ctx context.Context, interval time.Duration) (requested bool) {
	var unknownCA <-chan struct{} // nil, and therefore ignored, until interval has passed

	half, earliest := c.clock.After(readerTTL/2), c.clock.After(interval)

	for {
		select {
		case <-ctx.Done():
			return false
		case <-half:
			return len(c.unknownCA) > 0
		case <-earliest:
			unknownCA = c.unknownCA
		case <-unknownCA:
			return true
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

// renew issues a certificate. It reports whether its CA differs from the previous one.
func (c *IssuedCredentials) renew(ctx context.Context) (rotated bool, err error) {
	issued, err := c.issue(ctx, readerTTL)
	if err != nil {
		return false, err
	}

	cert, err := tls.X509KeyPair(issued.Certificate, issued.Key)
	if err != nil {
		return false, fmt.Errorf("load issued os:reader certificate: %w", err)
	}

	if !x509.NewCertPool().AppendCertsFromPEM(issued.CA) {
		return false, errors.New("load issued os:reader certificate: CA is not PEM")
	}

	c.mu.Lock()
	defer c.mu.Unlock()

	ca, now := string(issued.CA), c.clock.Now()
	rotated = len(c.roots) > 0 && c.roots[0].pem != ca

	c.cert = &cert
	readerExpiry.Set(float64(cert.Leaf.NotAfter.Unix()))

	// The current CA comes first. A previous CA is removed when all server certificates that it issued have expired.
	c.roots = slices.DeleteFunc(c.roots, func(root trustedCA) bool { return root.pem == ca || now.Sub(root.lastSeen) >= caGrace })
	c.roots = slices.Insert(c.roots, 0, trustedCA{pem: ca, lastSeen: now})
	c.pool = x509.NewCertPool()

	for _, root := range c.roots {
		c.pool.AppendCertsFromPEM([]byte(root.pem))
	}

	return rotated, nil
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
