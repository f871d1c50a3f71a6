//go:build e2e

package e2e_test

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/resources/cluster"
	"github.com/stretchr/testify/assert"
	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/test/talos"
)

// kubeletPort is where a kubelet serves.
const kubeletPort = "10250"

// certified returns an error unless a serving certificate of a Node's kubelet that is valid for all of ips has been issued.
func certified(name string, ips ...netip.Addr) func(context.Context) error {
	return func(ctx context.Context) error {
		requests, err := client.CertificatesV1().CertificateSigningRequests().List(ctx, metav1.ListOptions{FieldSelector: "spec.signerName=" + certificatesv1.KubeletServingSignerName})
		if err != nil {
			return err
		}

		err = fmt.Errorf("the kubelet of %s has not requested a serving certificate", name)

		for _, request := range requests.Items {
			if request.Spec.Username != "system:node:"+name {
				continue
			}

			verified := func(c certificatesv1.CertificateSigningRequestCondition) bool {
				return c.Reason == csrpolicy.CodeVerified
			}
			if !slices.ContainsFunc(request.Status.Conditions, verified) {
				err = fmt.Errorf("%s is not approved by talos-ccm: %v", request.Name, request.Status.Conditions)

				continue
			}

			if err = lacks(request, ips); err == nil {
				return nil
			}
		}

		return err
	}
}

// lacks returns an error unless a certificate has been issued that is valid for all of ips.
func lacks(request certificatesv1.CertificateSigningRequest, ips []netip.Addr) error {
	block, _ := pem.Decode(request.Status.Certificate)
	if block == nil {
		return fmt.Errorf("%s of %s is not issued: %v", request.Name, request.Spec.Username, request.Status.Conditions)
	}

	certificate, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return err
	}

	for _, ip := range ips {
		if !slices.ContainsFunc(certificate.IPAddresses, func(other net.IP) bool { return other.Equal(ip.AsSlice()) }) {
			return fmt.Errorf("%s of %s is for %v, not for %s", request.Name, request.Spec.Username, certificate.IPAddresses, ip)
		}
	}

	return nil
}

func TestServingCertificates_AreIssued(t *testing.T) {
	eventually(t, bothInitialized)

	for _, m := range bed.Machines() {
		eventually(t, certified(m.Name(), m.Address()))
	}
}

// TestServingCertificates_MatchKubelets is what the API server does for logs and exec, with the cluster's CA.
func TestServingCertificates_MatchKubelets(t *testing.T) {
	eventually(t, bothInitialized)

	for _, m := range bed.Machines() {
		took := eventually(t, func(ctx context.Context) error { return serves(ctx, m, m.Address()) })
		t.Logf("%s: /healthz was ok after %s", m.Name(), took.Round(time.Millisecond))
	}
}

func TestServingCertificates_AreRenewedForAddedAddress(t *testing.T) {
	eventually(t, bothInitialized)
	eventually(t, certified(bed.Worker.Name(), bed.Worker.Address()))

	prefix := netip.MustParsePrefix("203.0.113.20/32")
	start := time.Now()

	addAddress(t, bed.Worker, prefix)

	// A kubelet that was denied an address which its machine has no longer asks again with growing intervals, of up to half a minute.
	eventually(t, certified(bed.Worker.Name(), bed.Worker.Address(), prefix.Addr()))
	t.Logf("a certificate for it was issued after %s", time.Since(start).Round(time.Millisecond))

	eventually(t, func(ctx context.Context) error { return serves(ctx, bed.Worker, prefix.Addr()) })
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
	eventually(t, func(ctx context.Context) error { return serves(ctx, bed.Worker, bed.Worker.Address()) })
	t.Logf("the kubelet served a certificate %s after the installation", time.Since(start).Round(time.Millisecond))

	assert.NotEqual(t, identity, identityOf(t, bed.Worker), "node ID of the machine")
	assert.Equal(t, node, nodeOf(t, bed.Worker).UID, "UID of the Node")
}

// identityOf returns the Talos node ID of m.
func identityOf(t *testing.T, m *talos.Machine) string {
	t.Helper()

	var identity *cluster.Identity

	eventually(t, func(ctx context.Context) (err error) {
		identity, err = resource[*cluster.Identity](ctx, m, cluster.LocalIdentity)

		return err
	})

	return identity.TypedSpec().NodeID
}

// serves returns an error unless m's kubelet is healthy, with a certificate of the cluster's CA for ip.
func serves(ctx context.Context, m *talos.Machine, ip netip.Addr) error {
	config, err := bed.RESTConfig()
	if err != nil {
		return err
	}

	config.Host = "https://" + net.JoinHostPort(m.Address().String(), kubeletPort)
	config.ServerName = ip.String()

	kubelet, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}

	return kubelet.Discovery().RESTClient().Get().AbsPath("/healthz").Do(ctx).Error()
}
