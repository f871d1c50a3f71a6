//go:build e2e

package e2e_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/cosi-project/runtime/pkg/safe"
	"github.com/siderolabs/talos/pkg/machinery/resources/cluster"
	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/talos-ccm/talos-ccm/test/talos"
)

// kubeletPort is where a kubelet serves.
const kubeletPort = "10250"

// issued says whether no serving certificate of a Node's kubelet that is valid for all of ips has been approved and
// issued, and returns the request.
func issued(ctx context.Context, name string, ips ...netip.Addr) (certificatesv1.CertificateSigningRequest, string) {
	requests, err := client.CertificatesV1().CertificateSigningRequests().List(ctx, metav1.ListOptions{FieldSelector: "spec.signerName=" + certificatesv1.KubeletServingSignerName})
	if err != nil {
		return certificatesv1.CertificateSigningRequest{}, err.Error()
	}

	missing := fmt.Sprintf("the kubelet of %s has not asked for a serving certificate", name)

	for _, request := range requests.Items {
		if request.Spec.Username != "system:node:"+name {
			continue
		}

		if missing = lacks(request, ips); missing == "" {
			return request, ""
		}
	}

	return certificatesv1.CertificateSigningRequest{}, missing
}

// lacks says what a request is short of.
func lacks(request certificatesv1.CertificateSigningRequest, ips []netip.Addr) string {
	block, _ := pem.Decode(request.Status.Certificate)
	if block == nil {
		return fmt.Sprintf("%s of %s is not issued: %v", request.Name, request.Spec.Username, request.Status.Conditions)
	}

	certificate, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return err.Error()
	}

	for _, ip := range ips {
		if !slices.ContainsFunc(certificate.IPAddresses, func(other net.IP) bool { return other.Equal(ip.AsSlice()) }) {
			return fmt.Sprintf("%s of %s is for %v, not for %s", request.Name, request.Spec.Username, certificate.IPAddresses, ip)
		}
	}

	return ""
}

func TestServingCertificates_AreIssued(t *testing.T) {
	eventually(t, bothInitialized)

	for _, m := range bed.Machines() {
		var request certificatesv1.CertificateSigningRequest

		eventually(t, func(ctx context.Context) (missing string) {
			request, missing = issued(ctx, m.Name(), m.Address())

			return missing
		})

		for _, condition := range request.Status.Conditions {
			t.Logf("%s: %s asked for at %s, %s at %s: %s", m.Name(), request.Name, request.CreationTimestamp.UTC().Format(time.TimeOnly),
				condition.Type, condition.LastTransitionTime.UTC().Format(time.TimeOnly), condition.Message)
		}
	}
}

// TestServingCertificates_MatchKubelets is what the API server does for logs and exec, with the cluster's CA.
func TestServingCertificates_MatchKubelets(t *testing.T) {
	eventually(t, bothInitialized)

	for _, m := range bed.Machines() {
		took := eventually(t, func(ctx context.Context) string {
			healthz, err := kubeletOf(m).Discovery().RESTClient().Get().AbsPath("/healthz").DoRaw(ctx)
			if err != nil {
				return err.Error()
			}

			if string(healthz) != "ok" {
				return fmt.Sprintf("the kubelet of %s is %q", m.Name(), healthz)
			}

			return ""
		})

		t.Logf("%s: /healthz was ok after %s", m.Name(), took.Round(time.Millisecond))
	}
}

// kubeletOf is an admin's client for m's kubelet, which must have a certificate of the cluster's CA for m's address.
func kubeletOf(m *talos.Machine) kubernetes.Interface {
	config, err := bed.RESTConfig()
	if err != nil {
		panic(err)
	}

	config = rest.CopyConfig(config)
	config.Host = "https://" + net.JoinHostPort(m.Address().String(), kubeletPort)

	return kubernetes.NewForConfigOrDie(config)
}

func TestServingCertificates_AreRenewedForAddedAddress(t *testing.T) {
	eventually(t, bothInitialized)
	eventually(t, func(ctx context.Context) string {
		_, missing := issued(ctx, bed.Worker.Name(), bed.Worker.Address())

		return missing
	})

	prefix := netip.MustParsePrefix("203.0.113.20/32")
	start := time.Now()

	addAddress(t, bed.Worker, prefix)

	// A kubelet that was denied an address which its machine has no longer asks again with growing intervals, of up to half a minute.
	eventually(t, func(ctx context.Context) string {
		_, missing := issued(ctx, bed.Worker.Name(), bed.Worker.Address(), prefix.Addr())

		return missing
	})
	t.Logf("a certificate for it was issued after %s", time.Since(start).Round(time.Millisecond))

	eventually(t, func(ctx context.Context) string { return serves(ctx, bed.Worker, prefix.Addr()) })
	t.Logf("the kubelet served it after %s", time.Since(start).Round(time.Millisecond))

	removeAddress(t, bed.Worker, prefix)
}

// A worker that is installed again has the same Node, another identity, and no certificates.
func TestServingCertificates_AreIssuedAfterReinstallation(t *testing.T) {
	eventually(t, bothInitialized)
	enforcePinning(t)

	node, identity := nodeOf(t, bed.Worker).UID, identityOf(t, bed.Worker)
	start := time.Now()

	install(t)
	eventually(t, func(ctx context.Context) string { return serves(ctx, bed.Worker, bed.Worker.Address()) })
	t.Logf("the kubelet served a certificate %s after the installation", time.Since(start).Round(time.Millisecond))

	if after := identityOf(t, bed.Worker); after == identity {
		t.Errorf("the machine still has the node ID %s", after)
	}

	if after := nodeOf(t, bed.Worker).UID; after != node {
		t.Errorf("the Node is another: its UID is %s, not %s", after, node)
	}
}

// identityOf is m's Talos node ID.
func identityOf(t *testing.T, m *talos.Machine) (id string) {
	t.Helper()

	eventually(t, func(ctx context.Context) string {
		api, err := m.TalosClient(ctx)
		if err != nil {
			return err.Error()
		}
		defer api.Close()

		identity, err := safe.StateGetByID[*cluster.Identity](ctx, api.COSI, cluster.LocalIdentity)
		if err != nil {
			return err.Error()
		}

		id = identity.TypedSpec().NodeID

		return ""
	})

	return id
}

// serves says whether m's kubelet does not show a certificate of the cluster's CA for ip.
func serves(ctx context.Context, m *talos.Machine, ip netip.Addr) string {
	config, err := bed.RESTConfig()
	if err != nil {
		return err.Error()
	}

	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(config.CAData)

	raw, err := bed.DialContext(ctx, "tcp", net.JoinHostPort(m.Address().String(), kubeletPort))
	if err != nil {
		return err.Error()
	}
	defer raw.Close()

	conn := tls.Client(raw, &tls.Config{RootCAs: roots, ServerName: ip.String(), MinVersion: tls.VersionTLS12})
	if err := conn.HandshakeContext(ctx); err != nil {
		return err.Error()
	}

	return ""
}
