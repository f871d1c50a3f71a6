package talosapi

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/siderolabs/go-retry/retry"
	clientconfig "github.com/siderolabs/talos/pkg/machinery/client/config"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
)

const (
	// readerTTL is how long a minted certificate is valid; it is replaced at half of that. It matters only while dialing.
	readerTTL = time.Hour

	// caGrace is how long the previous OS CA stays trusted after Talos has started to issue from another: the longest a
	// machine's server certificate lives (24 h, machinery's x509 constants).
	caGrace = 24 * time.Hour

	// firstPause is the least time between two certificates, however many machines show one of an unknown CA. It doubles each time
	// that a new certificate brought no new CA: then it is the machine that is foreign.
	firstPause = time.Minute

	mintTimeout = 10 * time.Second
	// mintCycle bounds a series of attempts, and with it the back-off between them, to some eight seconds; the next follows at once.
	mintCycle = 15 * time.Second
)

// errNotMinted is returned by IssuedCredentials.TLSConfig before the first certificate is there.
var errNotMinted = errors.New("no os:reader certificate has been minted yet")

// IssuedCredentials are Credentials that Talos itself mints over machine.sock. Use NewIssuedCredentials and Run.
type IssuedCredentials struct {
	mint    func(ctx context.Context, ttl time.Duration) (ReaderCertificate, error)
	clock   clock.Clock
	unknown chan struct{} // holds one word from UnknownCA

	mu    sync.Mutex
	cert  *tls.Certificate
	roots []trustedCA
}

type trustedCA struct {
	pem      string
	lastSeen time.Time
}

// NewIssuedCredentials returns credentials minted by admin.
func NewIssuedCredentials(admin *Admin, clk clock.Clock) *IssuedCredentials {
	return &IssuedCredentials{mint: admin.IssueReader, clock: clk, unknown: make(chan struct{}, 1)}
}

// Run keeps the certificate fresh until ctx ends: it is renewed at half of its life, and before that if a machine shows a certificate
// of a CA that is not known, as after a rotation of the OS CA. ready is called after each renewal.
func (m *IssuedCredentials) Run(ctx context.Context, ready func()) {
	logger := klog.FromContext(ctx)
	pause := firstPause

	for asked := false; ctx.Err() == nil; {
		var rotated bool

		err := retry.Exponential(mintCycle, retry.WithUnits(time.Second), retry.WithJitter(time.Second), retry.WithAttemptTimeout(mintTimeout)).
			RetryWithContext(ctx, func(ctx context.Context) (err error) {
				rotated, err = m.renew(ctx)

				return retry.ExpectedError(err)
			})
		if err != nil {
			if ctx.Err() == nil {
				logger.Error(err, "Could not mint a Talos client certificate, trying on")
			}

			continue
		}

		ready()

		if asked && !rotated {
			pause = min(2*pause, readerTTL/2)
		} else {
			pause = firstPause
		}

		asked = m.wait(ctx, pause)
	}
}

// wait returns when the certificate is to be renewed, and whether a machine's CA is a reason.
func (m *IssuedCredentials) wait(ctx context.Context, pause time.Duration) (asked bool) {
	var unknown <-chan struct{} // nobody is heard before pause is over

	half, pauseOver := m.clock.After(readerTTL/2), m.clock.After(pause)

	for {
		select {
		case <-ctx.Done():
			return false
		case <-half:
			return len(m.unknown) > 0
		case <-pauseOver:
			unknown = m.unknown
		case <-unknown:
			return true
		}
	}
}

// UnknownCA has the certificate renewed, and with it the CA, since a machine has shown a certificate of a CA that is not known.
func (m *IssuedCredentials) UnknownCA() {
	select {
	case m.unknown <- struct{}{}:
	default:
	}
}

// renew has a certificate minted, and tells whether another CA has issued it than the one before.
func (m *IssuedCredentials) renew(ctx context.Context) (rotated bool, err error) {
	minted, err := m.mint(ctx, readerTTL)
	if err != nil {
		return false, err
	}

	cert, err := tls.X509KeyPair(minted.Certificate, minted.Key)
	if err != nil {
		return false, fmt.Errorf("load the minted os:reader certificate: %w", err)
	}

	if !x509.NewCertPool().AppendCertsFromPEM(minted.CA) {
		return false, errors.New("load the minted os:reader certificate: its CA is not PEM")
	}

	m.mu.Lock()
	defer m.mu.Unlock()

	issuing := string(minted.CA)
	rotated = len(m.roots) > 0 && m.roots[0].pem != issuing

	m.cert = &cert
	readerExpiry.Set(float64(cert.Leaf.NotAfter.Unix()))

	m.roots = trust(m.roots, issuing, m.clock.Now())

	return rotated, nil
}

// trust puts the CA that issues now first and drops those that no machine can still hold a certificate of.
func trust(roots []trustedCA, issuing string, now time.Time) []trustedCA {
	kept := []trustedCA{{pem: issuing, lastSeen: now}}

	for _, root := range roots {
		if root.pem != issuing && now.Sub(root.lastSeen) < caGrace {
			kept = append(kept, root)
		}
	}

	return kept
}

// TLSConfig implements Credentials.
func (m *IssuedCredentials) TLSConfig() (*tls.Config, error) {
	m.mu.Lock()
	defer m.mu.Unlock()

	if m.cert == nil {
		return nil, errNotMinted
	}

	pool := x509.NewCertPool()
	for _, root := range m.roots {
		pool.AppendCertsFromPEM([]byte(root.pem))
	}

	return &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: pool, Certificates: []tls.Certificate{*m.cert}}, nil
}

// Talosconfig are Credentials from the current context of a talosconfig file, read again at each dial.
type Talosconfig struct {
	Path string
}

// TLSConfig implements Credentials.
func (t Talosconfig) TLSConfig() (*tls.Config, error) {
	// Not clientconfig.Open: that creates the file if it is missing.
	content, err := os.ReadFile(t.Path)
	if err != nil {
		return nil, fmt.Errorf("read talosconfig: %w", err)
	}

	config, err := clientconfig.FromBytes(content)
	if err != nil {
		return nil, fmt.Errorf("read talosconfig %s: %w", t.Path, err)
	}

	current, ok := config.Contexts[config.Context]
	if !ok {
		return nil, fmt.Errorf("read talosconfig %s: it has no context %q", t.Path, config.Context)
	}

	pem := make([][]byte, 3)

	for i, field := range []struct{ name, value string }{{"ca", current.CA}, {"crt", current.Crt}, {"key", current.Key}} {
		if pem[i], err = base64.StdEncoding.DecodeString(field.value); err != nil || field.value == "" {
			return nil, fmt.Errorf("read talosconfig %s: context %q: field %q is not base64 of a PEM document", t.Path, config.Context, field.name)
		}
	}

	cert, err := tls.X509KeyPair(pem[1], pem[2])
	if err != nil {
		return nil, fmt.Errorf("read talosconfig %s: context %q: fields \"crt\" and \"key\": %w", t.Path, config.Context, err)
	}

	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem[0]) {
		return nil, fmt.Errorf("read talosconfig %s: context %q: field \"ca\" is not PEM", t.Path, config.Context)
	}

	return &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: pool, Certificates: []tls.Certificate{cert}}, nil
}
