//go:build e2e

package e2e_test

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/resources/cluster"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/noderecord"
	"github.com/talos-ccm/talos-ccm/test/talos"
)

// kubeletPort is the port of the kubelet's API.
const kubeletPort = "10250"

// checkServingCertificate returns a condition: talos-ccm has approved a serving certificate of a Node's kubelet for all ips.
func checkServingCertificate(name string, ips ...netip.Addr) func(context.Context) error {
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
				err = fmt.Errorf("talos-ccm has not approved CSR %s: %v", request.Name, request.Status.Conditions)

				continue
			}

			if err = checkCertificate(request, ips); err == nil {
				return nil
			}
		}

		return err
	}
}

// checkCertificate returns an error unless a request has a certificate that is valid for all ips.
func checkCertificate(request certificatesv1.CertificateSigningRequest, ips []netip.Addr) error {
	block, _ := pem.Decode(request.Status.Certificate)
	if block == nil {
		return fmt.Errorf("CSR %s of %s has no certificate: %v", request.Name, request.Spec.Username, request.Status.Conditions)
	}

	certificate, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return err
	}

	for _, ip := range ips {
		if !slices.ContainsFunc(certificate.IPAddresses, func(other net.IP) bool { return other.Equal(ip.AsSlice()) }) {
			return fmt.Errorf("CSR %s of %s is for %v, want %s", request.Name, request.Spec.Username, certificate.IPAddresses, ip)
		}
	}

	return nil
}

func TestServingCertificates_AreIssued(t *testing.T) {
	eventually(t, checkNodesInitialized)

	for _, m := range bed.Machines() {
		eventually(t, checkServingCertificate(m.Name(), m.Address()))
	}
}

// TestServingCertificates_MatchKubelets connects to kubelets as the API server does for logs and exec.
func TestServingCertificates_MatchKubelets(t *testing.T) {
	eventually(t, checkNodesInitialized)

	for _, m := range bed.Machines() {
		took := eventually(t, func(ctx context.Context) error { return checkKubelet(ctx, m, m.Address()) })
		t.Logf("%s: the kubelet was healthy after %s", m.Name(), took.Round(time.Millisecond))
	}
}

func TestServingCertificates_AreRenewedForAddedAddress(t *testing.T) {
	eventually(t, checkNodesInitialized)
	eventually(t, checkServingCertificate(worker.Name(), worker.Address()))

	prefix := netip.MustParsePrefix("203.0.113.20/32")
	start := time.Now()

	addAddress(t, worker, prefix)

	// After a denial for an address that an earlier test removed, the kubelet backs off for up to 30 s.
	eventually(t, checkServingCertificate(worker.Name(), worker.Address(), prefix.Addr()))
	t.Logf("a certificate for the address was issued after %s", time.Since(start).Round(time.Millisecond))

	eventually(t, func(ctx context.Context) error { return checkKubelet(ctx, worker, prefix.Addr()) })
	t.Logf("the kubelet used it after %s", time.Since(start).Round(time.Millisecond))

	removeAddress(t, worker, prefix)
}

// TestServingCertificates_AreIssuedAfterReinstallation reinstalls the worker: it has the same Node, a new Talos node ID,
// and no certificates.
func TestServingCertificates_AreIssuedAfterReinstallation(t *testing.T) {
	eventually(t, checkNodesInitialized)
	enforcePinning(t)

	node, identity := nodeOf(t, worker).UID, identityOf(t, worker)
	start := time.Now()

	install(t)
	eventually(t, func(ctx context.Context) error { return checkKubelet(ctx, worker, worker.Address()) })
	t.Logf("the kubelet used a certificate %s after the installation", time.Since(start).Round(time.Millisecond))

	assert.NotEqual(t, identity, identityOf(t, worker), "node ID of the machine")
	assert.Equal(t, node, nodeOf(t, worker).UID, "UID of the Node")
}

// TestServingCertificates_AreIssuedToReinstalledControlPlane reinstalls the control plane and restores etcd. By default,
// its kubelet needs the recorded client certificate or, as here, that which the machine itself states. Then the kubelet
// rotates its client certificate.
func TestServingCertificates_AreIssuedToReinstalledControlPlane(t *testing.T) {
	eventually(t, checkNodesInitialized)

	recorded := func(label, before string) time.Duration {
		return eventually(t, func(ctx context.Context) error {
			node, err := getNode(ctx, controlPlane.Name())
			if err == nil && (node.Labels[label] == "" || node.Labels[label] == before) {
				err = fmt.Errorf("%s has labels %v", node.Name, node.Labels)
			}

			return err
		})
	}
	recorded(noderecord.LabelCredential, "")

	m, before, identity := controlPlane, nodeOf(t, controlPlane), identityOf(t, controlPlane)
	snapshot := filepath.Join(t.TempDir(), "etcd.snapshot")
	start := time.Now()

	shell(t, fmt.Sprintf("talosctl -n %s etcd snapshot %s", m.Address(), snapshot))

	// kube-controller-manager backdates certificates by five minutes. The kubelet rotates this one when 70 to 90 % of nine
	// minutes have passed.
	signFor := func(duration string) {
		patchMachine(t, m, "no-reboot", talos.ControllerManagerPatch(bed.Release(), map[string]string{"cluster-signing-duration": duration}))
	}

	t.Cleanup(func() { signFor("8760h") })

	require.NoError(t, m.Wipe(t.Context()))
	require.NoError(t, m.PowerOn())
	assert.NotEqual(t, identity, identityOf(t, m), "node ID of the machine")
	signFor("4m")
	eventually(t, func(context.Context) error {
		_, err := bed.Shell(t.Context(), fmt.Sprintf("talosctl -n %s bootstrap --recover-from=%s", m.Address(), snapshot))

		return err
	})

	recorded(noderecord.LabelCredential, before.Labels[noderecord.LabelCredential])
	t.Logf("the new client certificate was recorded %s after the snapshot", time.Since(start).Round(time.Second))
	eventually(t, func(ctx context.Context) error { return checkKubelet(ctx, m, m.Address()) })
	assert.Equal(t, before.UID, nodeOf(t, m).UID, "UID of the Node")

	eventually(t, checkStated)

	issued, reinstalled := time.Now(), nodeOf(t, m).Labels[noderecord.LabelCredential]
	signFor("8760h")
	t.Logf("the kubelet's rotation was recorded after %s", recorded(noderecord.LabelCredential, reinstalled).Round(time.Second))
	eventually(t, checkStated)
	assert.Equal(t, reinstalled, nodeOf(t, m).Labels[noderecord.LabelPrevious], "previous certificate")

	// The serving certificate was as short-lived.
	eventually(t, func(ctx context.Context) error {
		requests, err := client.CertificatesV1().CertificateSigningRequests().List(ctx, metav1.ListOptions{FieldSelector: "spec.signerName=" + certificatesv1.KubeletServingSignerName})
		if err != nil {
			return err
		}

		for _, request := range requests.Items {
			if request.Spec.Username == "system:node:"+m.Name() && request.CreationTimestamp.After(issued) {
				return checkCertificate(request, []netip.Addr{m.Address()})
			}
		}

		return fmt.Errorf("the kubelet of %s has not requested another serving certificate", m.Name())
	})

	// Rotations would change the Node during later tests.
	eventually(t, func(ctx context.Context) error {
		node, err := getNode(ctx, m.Name())
		if err == nil && time.Until(noderecord.Of(node).Expires) < time.Hour {
			err = fmt.Errorf("the client certificate of %s expires at %s", m.Name(), noderecord.Of(node).Expires)
		}

		return err
	})
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

// checkKubelet returns an error unless m's kubelet is healthy and has a certificate of the cluster's CA for ip.
func checkKubelet(ctx context.Context, m *talos.Machine, ip netip.Addr) error {
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
