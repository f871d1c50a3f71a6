package talosapi_test

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
)

const (
	// readerTTL is how long a minted certificate is valid.
	readerTTL = time.Hour

	// caGrace is how long the previous CA stays trusted.
	caGrace = 24 * time.Hour

	// plannedTimers are those of a renewal that is planned: half of the certificate's life, and the pause before machines are heard.
	plannedTimers = 2
)

// newTimedSite has a clock that stands still until it is stepped, for the machines and for us. We check their certificates by the
// system's clock all the same, so time passes after the first contact only.
func newTimedSite(t *testing.T) (*site, *clocktesting.FakeClock, *talosapi.IssuedCredentials) {
	t.Helper()

	clk := clocktesting.NewFakeClock(time.Now())
	s := newSite(t, clk)

	return s, clk, s.mint(t, clk)
}

// present is the certificate that credentials hold now.
func present(t *testing.T, creds talosapi.Credentials) tls.Certificate {
	t.Helper()

	config, err := creds.TLSConfig()
	must(t, err)

	if len(config.Certificates) != 1 {
		t.Fatalf("%d certificates, want 1", len(config.Certificates))
	}

	return config.Certificates[0]
}

func sameCertificate(a, b tls.Certificate) bool {
	return bytes.Equal(a.Certificate[0], b.Certificate[0])
}

// awaitPlan waits until the next renewal is planned. Time that passes before both timers are set would not count for the second.
func awaitPlan(t *testing.T, clk *clocktesting.FakeClock) {
	t.Helper()
	eventually(t, "the next renewal is planned", func() bool { return clk.Waiters() == plannedTimers })
}

// stepAndRenew lets time pass and waits for the certificate that comes of it.
func stepAndRenew(t *testing.T, clk *clocktesting.FakeClock, minted *talosapi.IssuedCredentials, d time.Duration) {
	t.Helper()

	before := present(t, minted)

	awaitPlan(t, clk)
	clk.Step(d)
	awaitRenewal(t, minted, before)
}

func awaitRenewal(t *testing.T, minted *talosapi.IssuedCredentials, before tls.Certificate) {
	t.Helper()
	eventually(t, "the certificate is renewed", func() bool { return !sameCertificate(before, present(t, minted)) })
}

func requireRefused(t *testing.T, st talosapi.State) {
	t.Helper()

	if _, err := nodename(t, st); status.Code(err) != codes.Unavailable {
		t.Errorf("got %v, want a connection that was refused", err)
	}
}

func TestMintedCertificateOpensEveryMachine(t *testing.T) {
	s, _, minted := newTimedSite(t)

	for _, m := range s.cluster.Machines() {
		requireNodename(t, dial(t, minted, m), m.Nodename())
	}
}

func TestCertificateIsRenewedAtHalfOfItsLife(t *testing.T) {
	_, clk, minted := newTimedSite(t)
	first := present(t, minted)

	if leaf := first.Leaf; leaf.NotAfter.Sub(leaf.NotBefore) != readerTTL || strings.Join(leaf.Subject.Organization, " ") != "os:reader" {
		t.Errorf("the certificate is for %v, valid for %s", leaf.Subject.Organization, leaf.NotAfter.Sub(leaf.NotBefore))
	}

	if got := samples(t)[sample{metric: "talosccm_reader_certificate_expiry_timestamp_seconds"}]; got != float64(first.Leaf.NotAfter.Unix()) {
		t.Errorf("the metric says that it expires at %.0f, want %s", got, first.Leaf.NotAfter)
	}

	awaitPlan(t, clk)
	clk.Step(readerTTL/2 - time.Second)

	if !clk.HasWaiters() || !sameCertificate(first, present(t, minted)) {
		t.Error("it was renewed too early")
	}

	clk.Step(time.Second)
	awaitRenewal(t, minted, first)
}

func TestExpiredCertificateIsRefusedAndTheRenewedIsNot(t *testing.T) {
	s, clk, minted := newTimedSite(t)

	config, err := minted.TLSConfig()
	must(t, err)

	outdated := fixed{config}
	open := dial(t, outdated, s.worker)
	requireNodename(t, open, s.worker.Nodename())

	stepAndRenew(t, clk, minted, readerTTL/2)
	clk.Step(readerTTL/2 + time.Second)

	requireRefused(t, dial(t, outdated, s.worker))
	requireNodename(t, dial(t, minted, s.worker), s.worker.Nodename())

	// What is open stays open: the certificate matters while dialing.
	requireNodename(t, open, s.worker.Nodename())
}

func TestRenewalIsTriedUntilTheMachineAnswers(t *testing.T) {
	s, clk, minted := newTimedSite(t)
	first := present(t, minted)

	must(t, s.controlPlane.Stop(t.Context()))
	awaitPlan(t, clk)
	clk.Step(readerTTL / 2)
	eventually(t, "the renewal is under way", func() bool { return !clk.HasWaiters() })

	if !sameCertificate(first, present(t, minted)) {
		t.Error("the certificate that is still valid was given up")
	}

	s.controlPlane.Start()
	awaitRenewal(t, minted, first)
}

func TestRotationOfTheCA(t *testing.T) {
	for name, old := range map[string]talostest.OldCA{"old one accepted": talostest.AcceptOldCA, "old one dropped": talostest.DropOldCA} {
		t.Run(name, func(t *testing.T) {
			s, clk, minted := newTimedSite(t)
			requireNodename(t, dial(t, minted, s.worker), s.worker.Nodename())

			must(t, s.cluster.RotateCA(t.Context(), old))

			// A machine that shows a certificate of a CA that is not known yet is reason enough to ask for it.
			requireRefused(t, dial(t, minted, s.worker))
			stepAndRenew(t, clk, minted, time.Minute)
			requireNodename(t, dial(t, minted, s.worker), s.worker.Nodename())
		})
	}
}

func TestMachineOfAnUnknownCACausesFewRenewals(t *testing.T) {
	s, clk, minted := newTimedSite(t)
	foreign := newSite(t, clk)

	const duration = 6 * time.Hour

	renewals := 0
	began := clk.Now()

	requireNodename(t, dial(t, minted, s.worker), s.worker.Nodename())

	for before := present(t, minted); clk.Since(began) < duration; {
		refused := dial(t, minted, foreign.worker)
		requireRefused(t, refused)
		must(t, refused.Close()) // else each of hundreds would try again and again beside the rest

		eventually(t, "the next renewal is planned", clk.HasWaiters)
		clk.Step(time.Minute)

		if now := present(t, minted); !sameCertificate(before, now) {
			before = now
			renewals++
		}
	}

	if most := int(duration/(readerTTL/2)) + 10; renewals > most {
		t.Errorf("%d renewals within %s, want no more than %d", renewals, duration, most)
	}

	requireNodename(t, dial(t, minted, s.worker), s.worker.Nodename())
}

func TestPreviousCAStaysTrustedForADay(t *testing.T) {
	s, clk, minted := newTimedSite(t)
	previous := s.cluster.CA()

	must(t, s.cluster.RotateCA(t.Context(), talostest.DropOldCA))
	stepAndRenew(t, clk, minted, readerTTL/2)

	if !trusts(t, minted, s.cluster.CA()) {
		t.Error("the new CA is not trusted")
	}

	for since := readerTTL / 2; since < caGrace; since += readerTTL / 2 {
		if !trusts(t, minted, previous) {
			t.Fatalf("the previous CA is no longer trusted %s after it was seen", since)
		}

		stepAndRenew(t, clk, minted, readerTTL/2)
	}

	if trusts(t, minted, previous) {
		t.Errorf("the previous CA is still trusted %s after it was seen", caGrace)
	}
}

// trusts tells whether credentials trust a CA.
func trusts(t *testing.T, creds talosapi.Credentials, ca []byte) bool {
	t.Helper()

	block, _ := pem.Decode(ca)

	certificate, err := x509.ParseCertificate(block.Bytes)
	must(t, err)

	config, err := creds.TLSConfig()
	must(t, err)

	_, err = certificate.Verify(x509.VerifyOptions{Roots: config.RootCAs})

	return err == nil
}
