package talosapi_test

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/ctest"
)

const (
	// readerTTL is the lifetime of an issued certificate.
	readerTTL = time.Hour

	// caGrace is how long the previous CA stays trusted.
	caGrace = 24 * time.Hour

	// scheduledTimers is the number of timers of a scheduled renewal: half of the lifetime, and the minimum interval.
	scheduledTimers = 2
)

// newTimedSite uses a fake clock for the machines and the credentials. Clients verify server certificates by the system
// clock, so the fake clock may be stepped only after the first connection.
func newTimedSite(t *testing.T) (*site, *clocktesting.FakeClock, *talosapi.IssuedCredentials) {
	t.Helper()

	clk := clocktesting.NewFakeClock(time.Now())
	s := newSite(t, clk)

	return s, clk, s.issue(t, clk)
}

// current returns the current certificate of creds.
func current(t *testing.T, creds talosapi.Credentials) tls.Certificate {
	t.Helper()

	config, err := creds.TLSConfig()
	require.NoError(t, err)
	require.Len(t, config.Certificates, 1)

	return config.Certificates[0]
}

func sameCertificate(a, b tls.Certificate) bool {
	return bytes.Equal(a.Certificate[0], b.Certificate[0])
}

// awaitSchedule waits until the next renewal is scheduled. A step before both timers are set would not count for the second.
func awaitSchedule(t *testing.T, clk *clocktesting.FakeClock) {
	t.Helper()
	ctest.Eventually(t, "the next renewal is scheduled", func() bool { return clk.Waiters() == scheduledTimers })
}

// stepAndRenew steps the clock by d and waits for the renewed certificate.
func stepAndRenew(t *testing.T, clk *clocktesting.FakeClock, issued *talosapi.IssuedCredentials, d time.Duration) {
	t.Helper()

	before := current(t, issued)

	awaitSchedule(t, clk)
	clk.Step(d)
	awaitRenewal(t, issued, before)
}

func awaitRenewal(t *testing.T, issued *talosapi.IssuedCredentials, before tls.Certificate) {
	t.Helper()
	ctest.Eventually(t, "the certificate is renewed", func() bool { return !sameCertificate(before, current(t, issued)) })
}

func requireRefused(t *testing.T, st talosapi.State) {
	t.Helper()

	_, err := nodename(t, st)
	assert.Equal(t, codes.Unavailable, status.Code(err), err)
}

func TestIssuedCredentials_ConnectToEveryMachine(t *testing.T) {
	s, _, issued := newTimedSite(t)

	for _, m := range s.cluster.Machines() {
		requireNodename(t, dial(t, issued, m), m.Nodename())
	}
}

func TestIssuedCredentials_RenewAtHalfOfLifetime(t *testing.T) {
	_, clk, issued := newTimedSite(t)
	first := current(t, issued)

	leaf := first.Leaf
	assert.Equal(t, readerTTL, leaf.NotAfter.Sub(leaf.NotBefore))
	assert.Equal(t, "os:reader", strings.Join(leaf.Subject.Organization, " "))
	assert.Equal(t, float64(first.Leaf.NotAfter.Unix()), ctest.Metrics(t)["talosccm_reader_certificate_expiry_timestamp_seconds"], first.Leaf.NotAfter)

	awaitSchedule(t, clk)
	clk.Step(readerTTL/2 - time.Second)
	assert.True(t, clk.HasWaiters(), "certificate was renewed too early")
	assert.True(t, sameCertificate(first, current(t, issued)), "certificate was renewed too early")

	clk.Step(time.Second)
	awaitRenewal(t, issued, first)
}

func TestIssuedCredentials_RenewedCertificateReplacesExpired(t *testing.T) {
	s, clk, issued := newTimedSite(t)

	config, err := issued.TLSConfig()
	require.NoError(t, err)

	outdated := fixed{config}
	open := dial(t, outdated, s.worker)
	requireNodename(t, open, s.worker.Nodename())

	stepAndRenew(t, clk, issued, readerTTL/2)
	clk.Step(readerTTL/2 + time.Second)

	requireRefused(t, dial(t, outdated, s.worker))
	requireNodename(t, dial(t, issued, s.worker), s.worker.Nodename())

	// Open connections outlive the certificate.
	requireNodename(t, open, s.worker.Nodename())
}

func TestIssuedCredentials_RetryUntilMachineResponds(t *testing.T) {
	s, clk, issued := newTimedSite(t)
	first := current(t, issued)

	require.NoError(t, s.controlPlane.Stop(t.Context()))
	awaitSchedule(t, clk)
	clk.Step(readerTTL / 2)
	ctest.Eventually(t, "the renewal is in progress", func() bool { return !clk.HasWaiters() })
	assert.True(t, sameCertificate(first, current(t, issued)), "valid certificate was replaced")

	s.controlPlane.Start()
	awaitRenewal(t, issued, first)
}

func TestIssuedCredentials_RenewAfterCARotation(t *testing.T) {
	for name, old := range map[string]talostest.OldCA{"old CA accepted": talostest.AcceptOldCA, "old CA dropped": talostest.DropOldCA} {
		t.Run(name, func(t *testing.T) {
			s, clk, issued := newTimedSite(t)
			requireNodename(t, dial(t, issued, s.worker), s.worker.Nodename())

			require.NoError(t, s.cluster.RotateCA(old))

			// A machine with a certificate of an unknown CA causes a renewal.
			requireRefused(t, dial(t, issued, s.worker))
			stepAndRenew(t, clk, issued, time.Minute)
			requireNodename(t, dial(t, issued, s.worker), s.worker.Nodename())
		})
	}
}

func TestIssuedCredentials_LimitRenewalsForUnknownCA(t *testing.T) {
	s, clk, issued := newTimedSite(t)
	foreign := newSite(t, clk)

	const duration = 20 * time.Minute

	renewals := 0
	began := clk.Now()

	requireNodename(t, dial(t, issued, s.worker), s.worker.Nodename())

	for before := current(t, issued); clk.Since(began) < duration; {
		refused := dial(t, issued, foreign.worker)
		requireRefused(t, refused)
		require.NoError(t, refused.Close()) // otherwise dozens of connections would keep reconnecting

		ctest.Eventually(t, "the next renewal is scheduled", clk.HasWaiters)
		clk.Step(15 * time.Second)

		if now := current(t, issued); !sameCertificate(before, now) {
			before = now
			renewals++
		}
	}

	assert.LessOrEqual(t, renewals, int(duration/time.Minute), duration)

	requireNodename(t, dial(t, issued, s.worker), s.worker.Nodename())
}

func TestIssuedCredentials_TrustPreviousCAForADay(t *testing.T) {
	s, clk, issued := newTimedSite(t)
	previous := s.cluster.CA()

	require.NoError(t, s.cluster.RotateCA(talostest.DropOldCA))
	stepAndRenew(t, clk, issued, readerTTL/2)
	assert.True(t, trusts(t, issued, s.cluster.CA()), "new CA is not trusted")

	for since := readerTTL / 2; since < caGrace; since += readerTTL / 2 {
		require.True(t, trusts(t, issued, previous), "previous CA is not trusted %s after it was last seen", since)

		stepAndRenew(t, clk, issued, readerTTL/2)
	}

	assert.False(t, trusts(t, issued, previous), "previous CA is still trusted %s after it was last seen", caGrace)
}

// trusts reports whether creds trust ca.
func trusts(t *testing.T, creds talosapi.Credentials, ca []byte) bool {
	t.Helper()

	block, _ := pem.Decode(ca)

	certificate, err := x509.ParseCertificate(block.Bytes)
	require.NoError(t, err)

	config, err := creds.TLSConfig()
	require.NoError(t, err)

	_, err = certificate.Verify(x509.VerifyOptions{Roots: config.RootCAs})

	return err == nil
}
