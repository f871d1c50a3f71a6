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

	// tokenSecret and a token's ID are the name of the token's Secret.
	tokenSecret = "bootstrap-token-"
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
	eventually(t, certified(bed.ControlPlane.Name(), bed.ControlPlane.Address()))
	enforcePinning(t)

	token := anonymous(t)
	token.BearerToken = bootstrapToken(t)

	name, key := requestCertificate(t, token, certificatesv1.KubeAPIServerClientKubeletSignerName, certificatesv1.UsageClientAuth)
	stolen := anonymous(t)
	stolen.KeyData = key

	took := eventually(t, func(ctx context.Context) error {
		request, err := client.CertificatesV1().CertificateSigningRequests().Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}

		stolen.CertData = request.Status.Certificate

		return lacks(*request, nil)
	})
	t.Logf("the bootstrap token had a client certificate for %s after %s", bed.ControlPlane.Name(), took.Round(time.Millisecond))

	start := time.Now()
	name, _ = requestCertificate(t, stolen, certificatesv1.KubeletServingSignerName, certificatesv1.UsageServerAuth)

	// It would be approved with the default configuration.
	t.Cleanup(func() {
		assert.NoError(t, client.CertificatesV1().CertificateSigningRequests().Delete(context.WithoutCancel(t.Context()), name, metav1.DeleteOptions{}))
	})

	t.Logf("%s was reported after %s", name, eventually(t, eventOf(csrapproval.ReasonUnexpectedCredential, start)).Round(time.Millisecond))

	request, err := client.CertificatesV1().CertificateSigningRequests().Get(t.Context(), name, metav1.GetOptions{})
	require.NoError(t, err)
	assert.Empty(t, request.Status.Conditions, "%s is not pending", name)
}

// The guide makes the token on the workers invalid. It is of no use then, and a worker that has joined does not need it.
func TestDocs_LimitsBootstrapToken(t *testing.T) {
	eventually(t, bothInitialized)

	secrets := client.CoreV1().Secrets(metav1.NamespaceSystem)
	before := activeConfig(t).Config().Cluster().Token()
	stolen := anonymous(t)
	stolen.BearerToken = bootstrapToken(t)

	secret, err := secrets.Get(t.Context(), tokenSecret+before.ID(), metav1.GetOptions{})
	require.NoError(t, err)

	// Other tests need the token: they install the worker again.
	t.Cleanup(func() {
		patchMachine(t, bed.ControlPlane, "no-reboot", fmt.Sprintf("cluster: {token: %s.%s}", before.ID(), before.Secret()))

		// Talos does not create it again: it is in the inventory of bootstrap manifests.
		secret.ResourceVersion, secret.UID = "", ""
		_, err := secrets.Create(context.WithoutCancel(t.Context()), secret, metav1.CreateOptions{})
		assert.NoError(t, err)
	})
	patchMachine(t, bed.ControlPlane, "no-reboot", yamlBlocks(t, servingPage, "Limit the bootstrap token")[0])

	after := activeConfig(t).Config().Cluster().Token()
	require.NotEqual(t, before.ID(), after.ID(), "the token is still the same")

	took := eventually(t, func(ctx context.Context) error {
		_, err := secrets.Get(ctx, tokenSecret+after.ID(), metav1.GetOptions{})

		return err
	})
	t.Logf("the new token was valid after %s", took.Round(time.Millisecond))

	require.NoError(t, secrets.Delete(t.Context(), secret.Name, metav1.DeleteOptions{}))

	took = eventually(t, func(ctx context.Context) error {
		if err := selfReview(ctx, stolen); !apierrors.IsUnauthorized(err) {
			return fmt.Errorf("the old token is accepted: %v", err) //nolint:errorlint // may be nil
		}

		return nil
	})
	t.Logf("the old token was invalid after %s", took.Round(time.Millisecond))

	require.NoError(t, bed.Worker.Reboot(t.Context()))

	start := time.Now()
	took = eventually(t, func(ctx context.Context) error {
		lease, err := client.CoordinationV1().Leases(corev1.NamespaceNodeLease).Get(ctx, bed.Worker.Name(), metav1.GetOptions{})

		switch {
		case err != nil:
			return err
		case lease.Spec.RenewTime == nil || lease.Spec.RenewTime.Before(&metav1.MicroTime{Time: start}):
			return fmt.Errorf("the lease of %s was last renewed at %v", lease.Name, lease.Spec.RenewTime)
		}

		return nil
	})
	t.Logf("the kubelet of the worker worked %s after a reboot", took.Round(time.Millisecond))
}

// selfReview asks the API server who the credential belongs to.
func selfReview(ctx context.Context, credential *rest.Config) error {
	as, err := kubernetes.NewForConfig(credential)
	if err != nil {
		return err
	}

	_, err = as.AuthenticationV1().SelfSubjectReviews().Create(ctx, &authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})

	return err
}

// anonymous is a configuration for the API server without credentials.
func anonymous(t *testing.T) *rest.Config {
	t.Helper()

	admin, err := bed.RESTConfig()
	require.NoError(t, err)

	return rest.AnonymousClientConfig(admin)
}

// bootstrapToken is what Talos gives to the worker's kubelet.
func bootstrapToken(t *testing.T) string {
	t.Helper()

	config, err := clientcmd.BuildConfigFromFlags("", filepath.Join(bed.Worker.Root(), constants.KubeletBootstrapKubeconfig))
	require.NoError(t, err)

	return config.BearerToken
}

// requestCertificate requests a certificate of the control plane's kubelet for a new key, and returns the name of the
// request and the key.
func requestCertificate(t *testing.T, credential *rest.Config, signer string, usage certificatesv1.KeyUsage) (name string, key []byte) {
	t.Helper()

	key, err := keyutil.MakeEllipticPrivateKeyPEM()
	require.NoError(t, err)

	private, err := keyutil.ParsePrivateKeyPEM(key)
	require.NoError(t, err)

	subject := pkix.Name{CommonName: "system:node:" + bed.ControlPlane.Name(), Organization: []string{"system:nodes"}}

	var (
		names []string
		ips   []net.IP
	)

	if usage == certificatesv1.UsageServerAuth {
		names, ips = []string{bed.ControlPlane.Name()}, []net.IP{bed.ControlPlane.Address().AsSlice()}
	}

	text, err := cert.MakeCSR(private, &subject, names, ips)
	require.NoError(t, err)

	kubelet, err := kubernetes.NewForConfig(credential)
	require.NoError(t, err)

	name, _, err = csr.RequestCertificateWithContext(t.Context(), kubelet, text, "", signer, nil, []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, usage}, private)
	require.NoError(t, err)

	return name, key
}
