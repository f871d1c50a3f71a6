package kube_test

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"net"
	"os"
	"slices"
	"testing"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/talos-ccm/talos-ccm/test/kube"
)

// testServingCertificate may be called more than once on a cluster.
func testServingCertificate(t *testing.T, cluster *kube.Cluster) {
	const node = "served"

	request := &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "csr-"},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			SignerName: certificatesv1.KubeletServingSignerName,
			Usages:     []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageServerAuth},
			Request:    servingRequest(t, node),
		},
	}

	posted, err := client(t, kubeletConfig(t, cluster, node)).CertificatesV1().CertificateSigningRequests().
		Create(t.Context(), request, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}

	if posted.Spec.Username != "system:node:"+node {
		t.Errorf("the request is %s's", posted.Spec.Username)
	}

	approve(t, cluster, posted)

	certificate := issued(t, cluster, posted.Name)

	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(cluster.ClientCA())

	if _, err := certificate.Verify(x509.VerifyOptions{Roots: roots, DNSName: node}); err != nil {
		t.Error(err)
	}
}

// TestKubelet shows what a cloud controller manager causes: a kubelet without a node IP asks for its certificate once the Node has one.
func TestKubelet(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	t.Setenv("KUBEBUILDER_ASSETS", "") // whose kubelets have no container runtime inside

	sysctls := readSysctls(t)
	cluster := start(t, kube.Options{})

	kubelet, err := cluster.StartKubelet(t.Context(), kube.KubeletSpec{NodeName: "real"})
	if err != nil {
		t.Fatal(err)
	}

	if cluster.PIDs()["kubelet-real"] != kubelet.PID() {
		t.Errorf("processes are %v, want kubelet-real to be %d", cluster.PIDs(), kubelet.PID())
	}

	nodes := client(t, cluster.Config()).CoreV1().Nodes()

	node, err := nodes.Get(t.Context(), "real", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}

	if keys := taintKeys(node); !slices.Contains(keys, uninitialized) {
		t.Errorf("taints are %v, want %s", keys, uninitialized)
	}

	patch := []byte(`{"status":{"addresses":[{"type":"InternalIP","address":"10.9.9.9"},{"type":"Hostname","address":"real"}]}}`)
	if _, err := nodes.Patch(t.Context(), "real", "application/merge-patch+json", patch, metav1.PatchOptions{}, "status"); err != nil {
		t.Fatal(err)
	}

	requested := servingRequestOf(t, cluster, "system:node:real")
	approve(t, cluster, requested)

	certificate := issued(t, cluster, requested.Name)
	if len(certificate.IPAddresses) != 1 || !certificate.IPAddresses[0].Equal(net.IPv4(10, 9, 9, 9)) {
		t.Errorf("the certificate is for %v, want 10.9.9.9", certificate.IPAddresses)
	}

	if err := kubelet.Stop(); err != nil {
		t.Error(err)
	}

	if alive(kubelet.PID()) {
		t.Error("a stopped kubelet runs")
	}

	if after := readSysctls(t); after != sysctls {
		t.Errorf("the kubelet changed sysctls of this machine: from %q to %q", sysctls, after)
	}
}

// readSysctls reads those that a kubelet sets at its start.
func readSysctls(t *testing.T) string {
	t.Helper()

	var all bytes.Buffer

	for _, path := range []string{
		"/proc/sys/vm/overcommit_memory", "/proc/sys/vm/panic_on_oom", "/proc/sys/kernel/panic", "/proc/sys/kernel/panic_on_oops",
	} {
		content, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}

		all.Write(content)
	}

	return all.String()
}

func servingRequest(t *testing.T, node string) []byte {
	t.Helper()

	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}

	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{
		Subject:     pkix.Name{CommonName: "system:node:" + node, Organization: []string{"system:nodes"}},
		DNSNames:    []string{node},
		IPAddresses: []net.IP{net.IPv4(10, 5, 0, 8)},
	}, key)
	if err != nil {
		t.Fatal(err)
	}

	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der})
}

// servingRequestOf waits for the first request that the user posts.
func servingRequestOf(t *testing.T, cluster *kube.Cluster, user string) *certificatesv1.CertificateSigningRequest {
	t.Helper()

	var found *certificatesv1.CertificateSigningRequest

	eventually(t, user+" posts a request", func(ctx context.Context) error {
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

		return errors.New("there is none yet")
	})

	return found
}

func approve(t *testing.T, cluster *kube.Cluster, request *certificatesv1.CertificateSigningRequest) {
	t.Helper()

	approved := request.DeepCopy()
	approved.Status.Conditions = append(approved.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{
		Type: certificatesv1.CertificateApproved, Status: corev1.ConditionTrue, Reason: "Test", Message: "approved by a test",
	})

	if _, err := client(t, cluster.Config()).CertificatesV1().CertificateSigningRequests().
		UpdateApproval(t.Context(), approved.Name, approved, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// issued waits for the certificate of the request.
func issued(t *testing.T, cluster *kube.Cluster, name string) *x509.Certificate {
	t.Helper()

	var certificate *x509.Certificate

	eventually(t, "the certificate is issued", func(ctx context.Context) error {
		request, err := client(t, cluster.Config()).CertificatesV1().CertificateSigningRequests().Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}

		block, _ := pem.Decode(request.Status.Certificate)
		if block == nil {
			return errors.New("not yet")
		}

		certificate, err = x509.ParseCertificate(block.Bytes)

		return err
	})

	return certificate
}
