package kube_test

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"net"
	"os"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/talos-ccm/talos-ccm/test/ctest"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

// testServingCertificate may be called more than once on a cluster.
func testServingCertificate(t *testing.T, cluster *kube.Cluster) {
	posted, err := cluster.RequestServingCertificate(t.Context(), "served", "", "served", "10.5.0.8")
	require.NoError(t, err)
	assert.Equal(t, "system:node:served", posted.Spec.Username)

	certificate := approve(t, cluster, posted)
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(cluster.ClientCA())

	for _, name := range []string{"served", "10.5.0.8"} {
		_, err = certificate.Verify(x509.VerifyOptions{Roots: roots, DNSName: name})
		require.NoError(t, err)
	}
}

// TestKubelet_RequestsCertificateForItsAddresses shows what a cloud controller manager causes: a kubelet without a node
// IP asks for its certificate once the Node has one.
func TestKubelet_RequestsCertificateForItsAddresses(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	t.Setenv("KUBEBUILDER_ASSETS", "") // whose kubelets have no container runtime inside

	sysctls := readSysctls(t)
	cluster := start(t, kube.Options{})

	kubelet, err := cluster.StartKubelet(t.Context(), kube.KubeletSpec{NodeName: "real"})
	require.NoError(t, err)
	assert.Equal(t, kubelet.PID(), cluster.PIDs()["kubelet-real"])

	nodes := client(t, cluster.Config()).CoreV1().Nodes()

	node, err := nodes.Get(t.Context(), "real", metav1.GetOptions{})
	require.NoError(t, err)
	assert.Contains(t, taintKeys(node), uninitialized)

	_, err = nodes.PatchStatus(t.Context(), "real",
		[]byte(`{"status":{"addresses":[{"type":"InternalIP","address":"10.9.9.9"},{"type":"Hostname","address":"real"}]}}`))
	require.NoError(t, err)

	certificate := approve(t, cluster, requestOf(t, cluster, "system:node:real"))
	require.Len(t, certificate.IPAddresses, 1)
	assert.True(t, certificate.IPAddresses[0].Equal(net.IPv4(10, 9, 9, 9)), "got %v", certificate.IPAddresses)

	kubelet.Stop(t.Context())
	assert.False(t, alive(kubelet.PID()), "a stopped kubelet runs")
	assert.Equal(t, sysctls, readSysctls(t), "the kubelet changed sysctls of this machine")
}

// readSysctls reads those that a kubelet sets at its start.
func readSysctls(t *testing.T) (all string) {
	t.Helper()

	for _, name := range []string{"vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops"} {
		content, err := os.ReadFile("/proc/sys/" + name)
		require.NoError(t, err)

		all += string(content)
	}

	return all
}

// requestOf waits for the first request that the user posts.
func requestOf(t *testing.T, cluster *kube.Cluster, user string) (found *certificatesv1.CertificateSigningRequest) {
	t.Helper()

	ctest.EventuallyNoError(t, func(ctx context.Context) error {
		all, err := client(t, cluster.Config()).CertificatesV1().CertificateSigningRequests().List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}

		for i := range all.Items {
			if all.Items[i].Spec.Username == user {
				found = &all.Items[i]

				return nil
			}
		}

		return errors.New(user + " posts no request")
	})

	return found
}

// approve approves the request and waits for its certificate.
func approve(t *testing.T, cluster *kube.Cluster, request *certificatesv1.CertificateSigningRequest) (certificate *x509.Certificate) {
	t.Helper()

	api := client(t, cluster.Config()).CertificatesV1().CertificateSigningRequests()
	approved := request.DeepCopy()
	approved.Status.Conditions = append(approved.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{
		Type: certificatesv1.CertificateApproved, Status: corev1.ConditionTrue, Reason: "Test", Message: "approved by a test",
	})

	_, err := api.UpdateApproval(t.Context(), approved.Name, approved, metav1.UpdateOptions{})
	require.NoError(t, err)

	ctest.EventuallyNoError(t, func(ctx context.Context) error {
		request, err := api.Get(ctx, approved.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}

		block, _ := pem.Decode(request.Status.Certificate)
		if block == nil {
			return errors.New("no certificate is issued")
		}

		certificate, err = x509.ParseCertificate(block.Bytes)

		return err
	})

	return certificate
}
