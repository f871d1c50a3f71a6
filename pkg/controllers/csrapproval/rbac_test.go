package csrapproval_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	authorizationv1 "k8s.io/api/authorization/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestRBAC_AllowsApprovalForOneSignerOnly(t *testing.T) {
	s := parallel(t)

	for want, list := range map[bool][]string{
		true: {
			"list certificatesigningrequests", "watch certificatesigningrequests", "update certificatesigningrequests/approval",
			"approve signers " + certificatesv1.KubeletServingSignerName,
		},
		false: {
			"approve signers", "approve signers kubernetes.io/*", "approve signers " + certificatesv1.KubeAPIServerClientSignerName,
			"approve signers " + certificatesv1.KubeAPIServerClientKubeletSignerName, "approve signers kubernetes.io/legacy-unknown",
			"approve signers example.org/any", "sign signers " + certificatesv1.KubeletServingSignerName,
			"attest signers " + certificatesv1.KubeletServingSignerName, "create certificatesigningrequests", "update certificatesigningrequests",
			"patch certificatesigningrequests", "delete certificatesigningrequests", "deletecollection certificatesigningrequests",
			"patch certificatesigningrequests/approval", "update certificatesigningrequests/status", "create certificatesigningrequests/nodeclient",
			"create clustertrustbundles",
		},
	} {
		for _, what := range list {
			attributes := &authorizationv1.ResourceAttributes{Group: "certificates.k8s.io"}
			attributes.Verb, attributes.Resource, _ = strings.Cut(what, " ")
			attributes.Resource, attributes.Name, _ = strings.Cut(attributes.Resource, " ")

			if attributes.Name == "" {
				attributes.Resource, attributes.Subresource, _ = strings.Cut(attributes.Resource, "/")
			}

			review, err := s.main.Client.AuthorizationV1().SelfSubjectAccessReviews().Create(t.Context(), &authorizationv1.SelfSubjectAccessReview{
				Spec: authorizationv1.SelfSubjectAccessReviewSpec{ResourceAttributes: attributes},
			}, metav1.CreateOptions{})
			require.NoError(t, err)
			assert.Equal(t, want, review.Status.Allowed, what)
		}
	}
}

func TestRBAC_APIServerRefusesOtherRequests(t *testing.T) {
	s := parallel(t)

	var (
		requests  = s.main.Client.CertificatesV1().CertificateSigningRequests() // of the product's service account
		options   = metav1.UpdateOptions{}
		serving   = s.get(s.post(s.plan(), request{}))
		forbidden = func(what string, err error) { assert.True(t, apierrors.IsForbidden(err), "%s: %v", what, err) }
	)

	for _, signer := range []string{certificatesv1.KubeAPIServerClientSignerName, certificatesv1.KubeAPIServerClientKubeletSignerName, "example.org/any"} {
		csr := s.get(s.post(s.plan(), request{
			signer: signer, usages: usages{certificatesv1.UsageDigitalSignature, certificatesv1.UsageClientAuth}, config: s.Kube.Config(),
		}))
		csr.Status.Conditions = decided(certificatesv1.CertificateApproved)

		_, err := requests.UpdateApproval(t.Context(), csr.Name, csr, options)
		forbidden("approve for "+signer, err)
	}

	_, err := requests.Create(t.Context(), &certificatesv1.CertificateSigningRequest{ObjectMeta: metav1.ObjectMeta{GenerateName: "csr-"}, Spec: serving.Spec}, metav1.CreateOptions{})
	forbidden("create", err)

	_, err = requests.Update(t.Context(), serving, options)
	forbidden("update", err)

	issued := serving.DeepCopy()
	issued.Status.Certificate = []byte("-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----\n")

	_, err = requests.UpdateStatus(t.Context(), issued, options)
	forbidden("issue", err)
	forbidden("delete", requests.Delete(t.Context(), serving.Name, metav1.DeleteOptions{}))
}
