//go:build e2e

package e2e_test

import (
	"context"
	"crypto/x509/pkix"
	"fmt"
	"net"
	"path/filepath"
	"testing"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/constants"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	authenticationv1 "k8s.io/api/authentication/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/util/cert"
	"k8s.io/client-go/util/certificate/csr"
	"k8s.io/client-go/util/keyutil"

	"github.com/talos-ccm/talos-ccm/pkg/controllers/csrapproval"
)

const (
	servingPage = "../../docs/guides/serving-certificates.md"

	// tokenSecretPrefix and the ID of a bootstrap token are the name of its Secret.
	tokenSecretPrefix = "bootstrap-token-"
)

// enforcePinning enforces credential pinning for workers, too, until the test ends: requests with unexpected client
// certificates stay pending.
func enforcePinning(t *testing.T) {
	t.Helper()

	const value = "pinned"

	applyConfig(t, labelRule(value)+"csrApproval: {credentialPinning: enforce}\n")
	eventually(t, checkLabel("example.org/e2e", value))
}

// TestServingCertificates_AreNotIssuedToBootstrapToken uses the bootstrap token of a worker to obtain a client certificate
// for the control plane's Node. With it, a client must not obtain a serving certificate for the control plane's address.
// That is the default for the Nodes of the control plane.
func TestServingCertificates_AreNotIssuedToBootstrapToken(t *testing.T) {
	eventually(t, checkNodesInitialized)
	eventually(t, checkServingCertificate(controlPlane.Name(), controlPlane.Address()))

	token := anonymousConfig(t)
	token.BearerToken = bootstrapToken(t)

	name, key := requestCertificate(t, token, certificatesv1.KubeAPIServerClientKubeletSignerName, certificatesv1.UsageClientAuth)
	stolen := anonymousConfig(t)
	stolen.KeyData = key

	took := eventually(t, func(ctx context.Context) error {
		request, err := client.CertificatesV1().CertificateSigningRequests().Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}

		stolen.CertData = request.Status.Certificate

		return checkCertificate(*request, nil)
	})
	t.Logf("the bootstrap token obtained a client certificate for %s after %s", controlPlane.Name(), took.Round(time.Millisecond))

	start := time.Now()
	name, _ = requestCertificate(t, stolen, certificatesv1.KubeletServingSignerName, certificatesv1.UsageServerAuth)

	t.Cleanup(func() {
		assert.NoError(t, client.CertificatesV1().CertificateSigningRequests().Delete(context.WithoutCancel(t.Context()), name, metav1.DeleteOptions{}))
	})

	t.Logf("%s was reported after %s", name, eventually(t, checkEvent(csrapproval.ReasonUnexpectedCredential, start)).Round(time.Millisecond))

	request, err := client.CertificatesV1().CertificateSigningRequests().Get(t.Context(), name, metav1.GetOptions{})
	require.NoError(t, err)
	assert.Empty(t, request.Status.Conditions, "conditions of CSR %s", name)
}

// TestDocs_LimitsBootstrapToken deletes the Secret of the workers' bootstrap token, as in the guide. A worker that has
// joined does not need a valid token. The guide's token is configured on the worker, because a new token on the only
// control-plane machine would restart its API server, for which other tests would wait.
func TestDocs_LimitsBootstrapToken(t *testing.T) {
	eventually(t, checkNodesInitialized)

	secrets := client.CoreV1().Secrets(metav1.NamespaceSystem)
	before := activeConfig(t).Config().Cluster().Token()
	stolen := anonymousConfig(t)
	stolen.BearerToken = bootstrapToken(t)

	secret, err := secrets.Get(t.Context(), tokenSecretPrefix+before.ID(), metav1.GetOptions{})
	require.NoError(t, err)

	// Tests that reinstall the worker need the old token.
	t.Cleanup(func() {
		patchMachine(t, worker, "no-reboot", fmt.Sprintf("cluster: {token: %s.%s}", before.ID(), before.Secret()))

		// Talos 1.13 and later do not recreate the Secret, because the inventory of bootstrap manifests contains it.
		secret.ResourceVersion, secret.UID = "", ""
		if _, err := secrets.Create(context.WithoutCancel(t.Context()), secret, metav1.CreateOptions{}); !apierrors.IsAlreadyExists(err) {
			assert.NoError(t, err)
		}
	})
	patchMachine(t, worker, "no-reboot", yamlBlocks(t, servingPage, "Limit the bootstrap token")[0])
	require.NoError(t, secrets.Delete(t.Context(), secret.Name, metav1.DeleteOptions{}))

	took := eventually(t, func(ctx context.Context) error {
		if err := selfReview(ctx, stolen); !apierrors.IsUnauthorized(err) {
			return fmt.Errorf("the old token is not rejected: %v", err) //nolint:errorlint // may be nil
		}

		return nil
	})
	t.Logf("the old token was invalid after %s", took.Round(time.Millisecond))

	require.NoError(t, worker.Reboot(t.Context()))

	start := time.Now()
	took = eventually(t, func(ctx context.Context) error {
		lease, err := client.CoordinationV1().Leases(corev1.NamespaceNodeLease).Get(ctx, worker.Name(), metav1.GetOptions{})

		switch {
		case err != nil:
			return err
		case lease.Spec.RenewTime == nil || lease.Spec.RenewTime.Before(&metav1.MicroTime{Time: start}):
			return fmt.Errorf("the lease of %s was last renewed at %v", lease.Name, lease.Spec.RenewTime)
		}

		return nil
	})
	t.Logf("the worker's kubelet renewed its lease %s after a reboot", took.Round(time.Millisecond))
}

// selfReview creates a SelfSubjectReview with a credential.
func selfReview(ctx context.Context, credential *rest.Config) error {
	api, err := kubernetes.NewForConfig(credential)
	if err != nil {
		return err
	}

	_, err = api.AuthenticationV1().SelfSubjectReviews().Create(ctx, &authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})

	return err
}

// anonymousConfig returns a REST configuration without credentials.
func anonymousConfig(t *testing.T) *rest.Config {
	t.Helper()

	admin, err := bed.RESTConfig()
	require.NoError(t, err)

	return rest.AnonymousClientConfig(admin)
}

// bootstrapToken returns the bootstrap token of the worker's kubelet.
func bootstrapToken(t *testing.T) string {
	t.Helper()

	config, err := clientcmd.BuildConfigFromFlags("", filepath.Join(worker.Root(), constants.KubeletBootstrapKubeconfig))
	require.NoError(t, err)

	return config.BearerToken
}

// requestCertificate requests a certificate for the control plane's kubelet and a new key, and returns the name of the CSR
// and the key.
func requestCertificate(t *testing.T, credential *rest.Config, signer string, usage certificatesv1.KeyUsage) (name string, key []byte) {
	t.Helper()

	key, err := keyutil.MakeEllipticPrivateKeyPEM()
	require.NoError(t, err)

	private, err := keyutil.ParsePrivateKeyPEM(key)
	require.NoError(t, err)

	subject := pkix.Name{CommonName: "system:node:" + controlPlane.Name(), Organization: []string{"system:nodes"}}

	var (
		names []string
		ips   []net.IP
	)

	if usage == certificatesv1.UsageServerAuth {
		names, ips = []string{controlPlane.Name()}, []net.IP{controlPlane.Address().AsSlice()}
	}

	text, err := cert.MakeCSR(private, &subject, names, ips)
	require.NoError(t, err)

	kubelet, err := kubernetes.NewForConfig(credential)
	require.NoError(t, err)

	name, _, err = csr.RequestCertificateWithContext(t.Context(), kubelet, text, "", signer, nil, []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, usage}, private)
	require.NoError(t, err)

	return name, key
}
