package talostest_test

import (
	"bytes"
	"crypto/tls"
	stdx509 "crypto/x509"
	"testing"
	"time"

	"github.com/cosi-project/runtime/pkg/safe"
	"github.com/siderolabs/crypto/x509"
	"github.com/siderolabs/talos/pkg/machinery/client"
	"github.com/siderolabs/talos/pkg/machinery/resources/secrets"
	"google.golang.org/grpc/codes"
	clocktesting "k8s.io/utils/clock/testing"

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

// certificateForBoth returns a certificate of the cluster's CA that is valid for client and server authentication.
func certificateForBoth(t *testing.T, cp *talostest.Machine) tls.Certificate {
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

func clientTLS(t *testing.T, cluster *talostest.Cluster, roles ...string) *tls.Config {
	t.Helper()

	config, err := cluster.ClientTLS(roles...)
	if err != nil {
		t.Fatal(err)
	}

	return config
}

func TestRotateCA_AcceptsOldCA(t *testing.T) {
	cluster, cp := newControlPlane(t)
	before := clientTLS(t, cluster, "os:reader")

	if err := cluster.RotateCA(t.Context(), talostest.AcceptOldCA); err != nil {
		t.Fatal(err)
	}

	// The machine presents a certificate of the new CA, which the old client does not trust.
	requireCode(t, version(withDeadline(t), dial(t, cp, before)), codes.Unavailable)

	// The old client certificate is still accepted.
	informed := before.Clone()
	informed.RootCAs = clientTLS(t, cluster).RootCAs

	requireCode(t, version(withDeadline(t), dial(t, cp, informed)), codes.OK)

	root := osRoot(t, cp)
	if len(root.AcceptedCAs) != 2 {
		t.Fatalf("got %d accepted CAs, want 2", len(root.AcceptedCAs))
	}

	if !bytes.Equal(root.AcceptedCAs[1].Crt, root.IssuingCA.Crt) {
		t.Error("issuing CA is not the last accepted CA")
	}
}

func TestRotateCA_DropsOldCA(t *testing.T) {
	cluster, cp := newControlPlane(t)
	before := clientTLS(t, cluster, "os:reader")

	if err := cluster.RotateCA(t.Context(), talostest.DropOldCA); err != nil {
		t.Fatal(err)
	}

	informed := before.Clone()
	informed.RootCAs = clientTLS(t, cluster).RootCAs

	requireCode(t, version(withDeadline(t), dial(t, cp, informed)), codes.Unavailable)
	requireCode(t, version(withDeadline(t), dialAs(t, cluster, cp, "os:reader")), codes.OK)
}

func TestOSRoot_WorkerHasNoCAKey(t *testing.T) {
	_, worker := newWorker(t)

	root := osRoot(t, worker)
	if root.IssuingCA != nil || len(root.AcceptedCAs) != 1 {
		t.Errorf("got issuing %v and %d accepted CAs", root.IssuingCA, len(root.AcceptedCAs))
	}
}

func TestClientCertificate_ExpiresByClusterClock(t *testing.T) {
	clock := clocktesting.NewFakePassiveClock(time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC))
	cluster := newCluster(t, talostest.Options{Clock: clock})
	cp := addControlPlane(t, cluster, "cp-1")

	issued, err := issueReader(withRoles(withDeadline(t), "os:admin"), dialSocket(t, cp), time.Hour)
	if err != nil {
		t.Fatal(err)
	}

	pair, err := tls.X509KeyPair(issued.GetCrt(), issued.GetKey())
	if err != nil {
		t.Fatal(err)
	}

	config := clientTLS(t, cluster)
	config.Certificates = []tls.Certificate{pair}

	requireCode(t, version(withDeadline(t), dial(t, cp, config)), codes.OK)

	clock.SetTime(clock.Now().Add(2 * time.Hour))
	requireCode(t, version(withDeadline(t), dial(t, cp, config)), codes.Unavailable)
}

func TestServerCertificate_IsRenewedByClusterClock(t *testing.T) {
	clock := clocktesting.NewFakePassiveClock(time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC))
	cluster := newCluster(t, talostest.Options{Clock: clock})
	cp := addControlPlane(t, cluster, "cp-1")

	for range 5 {
		requireCode(t, version(withDeadline(t), dialAs(t, cluster, cp, "os:reader")), codes.OK)
		clock.SetTime(clock.Now().Add(20 * time.Hour))
	}
}

func TestTalosconfig_UsesControlPlanesAsEndpoints(t *testing.T) {
	cluster, cp := newControlPlane(t)
	addMachine(t, cluster, talostest.MachineSpec{Nodename: "worker-1"})

	talosconfig, err := cluster.Talosconfig("os:reader")
	if err != nil {
		t.Fatal(err)
	}

	requireCode(t, version(withDeadline(t), newClient(t, client.WithConfig(talosconfig))), codes.OK)

	if got := len(cp.Calls()); got != 1 {
		t.Errorf("control plane received %d calls, want 1", got)
	}
}
