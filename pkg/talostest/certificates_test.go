package talostest_test

import (
	"crypto/tls"
	stdx509 "crypto/x509"
	"testing"
	"time"

	"github.com/cosi-project/runtime/pkg/safe"
	"github.com/siderolabs/crypto/x509"
	"github.com/siderolabs/talos/pkg/machinery/resources/secrets"

	"github.com/talos-ccm/talos-ccm/pkg/talostest"
)

func osRoot(t *testing.T, cp *talostest.Machine) *secrets.OSRootSpec {
	t.Helper()

	root, err := safe.StateGetByID[*secrets.OSRoot](t.Context(), cp.State(), secrets.OSRootID)
	if err != nil {
		t.Fatal(err)
	}

	return root.TypedSpec()
}

// certificateForBoth is a certificate of the right CA and the right role, but not for client authentication alone.
func certificateForBoth(t *testing.T, _ *talostest.Cluster, cp *talostest.Machine) tls.Certificate {
	t.Helper()

	ca, err := x509.NewCertificateAuthorityFromCertificateAndKey(osRoot(t, cp).IssuingCA)
	if err != nil {
		t.Fatal(err)
	}

	pair, err := x509.NewKeyPair(ca,
		x509.Organization("os:admin"),
		x509.NotAfter(time.Now().Add(time.Hour)),
		x509.ExtKeyUsage([]stdx509.ExtKeyUsage{stdx509.ExtKeyUsageClientAuth, stdx509.ExtKeyUsageServerAuth}),
	)
	if err != nil {
		t.Fatal(err)
	}

	return *pair.Certificate
}
