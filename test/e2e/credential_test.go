//go:build e2e

package e2e_test

import (
	"context"
	"crypto/x509/pkix"
	"net"
	"path/filepath"
	"testing"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/constants"
	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/util/cert"
	"k8s.io/client-go/util/keyutil"

	"github.com/talos-ccm/talos-ccm/pkg/controllers/csrapproval"
)

// enforcePinning has requests with unexpected client certificates left pending, until the test ends.
func enforcePinning(t *testing.T) {
	t.Helper()

	const value = "pinned"

	applyConfig(t, rule(value)+"csrApproval: {credentialPinning: enforce}\n")
	eventually(t, labeled("example.org/e2e", value))
}

// The bootstrap token of any worker obtains a client certificate for the control plane's Node. That must not obtain a
// serving certificate: it would be for the API server's address.
func TestServingCertificates_AreNotIssuedToBootstrapToken(t *testing.T) {
	eventually(t, bothInitialized)
	eventually(t, func(ctx context.Context) string {
		_, missing := issued(ctx, bed.ControlPlane.Name(), bed.ControlPlane.Address())

		return missing
	})
	enforcePinning(t)

	token := anonymous(t)
	token.BearerToken = bootstrapToken(t)

	name, key := requestCertificate(t, token, certificatesv1.KubeAPIServerClientKubeletSignerName, certificatesv1.UsageClientAuth)
	stolen := anonymous(t)
	stolen.KeyData = key

	took := eventually(t, func(ctx context.Context) string {
		request, err := client.CertificatesV1().CertificateSigningRequests().Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err.Error()
		}

		stolen.CertData = request.Status.Certificate

		return lacks(*request, nil)
	})
	t.Logf("the bootstrap token had a client certificate for %s after %s", bed.ControlPlane.Name(), took.Round(time.Millisecond))

	start := time.Now()
	name, _ = requestCertificate(t, stolen, certificatesv1.KubeletServingSignerName, certificatesv1.UsageServerAuth)

	// It would be approved with the default configuration.
	t.Cleanup(func() {
		if err := client.CertificatesV1().CertificateSigningRequests().Delete(context.WithoutCancel(t.Context()), name, metav1.DeleteOptions{}); err != nil {
			t.Error(err)
		}
	})

	t.Logf("%s was reported after %s", name, eventually(t, eventOf(csrapproval.ReasonUnexpectedCredential, start)).Round(time.Millisecond))

	request, err := client.CertificatesV1().CertificateSigningRequests().Get(t.Context(), name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}

	if len(request.Status.Conditions) > 0 {
		t.Errorf("%s is not pending: %v", name, request.Status.Conditions)
	}
}

// anonymous is a configuration for the API server without credentials.
func anonymous(t *testing.T) *rest.Config {
	t.Helper()

	admin, err := bed.RESTConfig()
	if err != nil {
		t.Fatal(err)
	}

	return rest.AnonymousClientConfig(admin)
}

// bootstrapToken is what Talos gives to the worker's kubelet.
func bootstrapToken(t *testing.T) string {
	t.Helper()

	config, err := clientcmd.BuildConfigFromFlags("", filepath.Join(bed.Worker.Root(), constants.KubeletBootstrapKubeconfig))
	if err != nil {
		t.Fatal(err)
	}

	return config.BearerToken
}

// requestCertificate requests a certificate of the control plane's kubelet for a new key, and returns the name of the
// request and the key.
func requestCertificate(t *testing.T, credential *rest.Config, signer string, usage certificatesv1.KeyUsage) (name string, key []byte) {
	t.Helper()

	key, err := keyutil.MakeEllipticPrivateKeyPEM()
	if err != nil {
		t.Fatal(err)
	}

	private, err := keyutil.ParsePrivateKeyPEM(key)
	if err != nil {
		t.Fatal(err)
	}

	subject := pkix.Name{CommonName: "system:node:" + bed.ControlPlane.Name(), Organization: []string{"system:nodes"}}

	var (
		names []string
		ips   []net.IP
	)

	if usage == certificatesv1.UsageServerAuth {
		names, ips = []string{bed.ControlPlane.Name()}, []net.IP{bed.ControlPlane.Address().AsSlice()}
	}

	text, err := cert.MakeCSR(private, &subject, names, ips)
	if err != nil {
		t.Fatal(err)
	}

	kubelet, err := kubernetes.NewForConfig(credential)
	if err != nil {
		t.Fatal(err)
	}

	request, err := kubelet.CertificatesV1().CertificateSigningRequests().Create(t.Context(), &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "csr-"},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			Request: text, SignerName: signer, Usages: []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, usage},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}

	return request.Name, key
}
