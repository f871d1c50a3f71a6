package csrapproval_test

import (
	"testing"

	authorizationv1 "k8s.io/api/authorization/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

// account returns a client of the product's service account.
func (s suite) account() kubernetes.Interface {
	s.Helper()

	client, err := kubernetes.NewForConfig(s.product)
	s.require(err)

	return client
}

func TestRBAC_AllowsApprovalForOneSignerOnly(t *testing.T) {
	s := parallel(t)

	const group = "certificates.k8s.io"

	for _, test := range []struct {
		verb, resource, subresource, name string
		want                              bool
	}{
		{"list", "certificatesigningrequests", "", "", true},
		{"watch", "certificatesigningrequests", "", "", true},
		{"update", "certificatesigningrequests", "approval", "", true},
		{"approve", "signers", "", certificatesv1.KubeletServingSignerName, true},

		{"approve", "signers", "", "", false},
		{"approve", "signers", "", "kubernetes.io/*", false},
		{"approve", "signers", "", certificatesv1.KubeAPIServerClientSignerName, false},
		{"approve", "signers", "", certificatesv1.KubeAPIServerClientKubeletSignerName, false},
		{"approve", "signers", "", "kubernetes.io/legacy-unknown", false},
		{"approve", "signers", "", "example.org/any", false},
		{"sign", "signers", "", certificatesv1.KubeletServingSignerName, false},
		{"attest", "signers", "", certificatesv1.KubeletServingSignerName, false},
		{"create", "certificatesigningrequests", "", "", false},
		{"update", "certificatesigningrequests", "", "", false},
		{"patch", "certificatesigningrequests", "", "", false},
		{"delete", "certificatesigningrequests", "", "", false},
		{"deletecollection", "certificatesigningrequests", "", "", false},
		{"patch", "certificatesigningrequests", "approval", "", false},
		{"update", "certificatesigningrequests", "status", "", false},
		{"create", "certificatesigningrequests", "nodeclient", "", false},
		{"create", "clustertrustbundles", "", "", false},
	} {
		review, err := s.account().AuthorizationV1().SelfSubjectAccessReviews().Create(t.Context(), &authorizationv1.SelfSubjectAccessReview{
			Spec: authorizationv1.SelfSubjectAccessReviewSpec{ResourceAttributes: &authorizationv1.ResourceAttributes{
				Group: group, Verb: test.verb, Resource: test.resource, Subresource: test.subresource, Name: test.name,
			}},
		}, metav1.CreateOptions{})
		s.require(err)

		if review.Status.Allowed != test.want {
			t.Errorf("%s %s/%s %s: %t, want %t", test.verb, test.resource, test.subresource, test.name, review.Status.Allowed, test.want)
		}
	}
}

func TestRBAC_APIServerRefusesOtherRequests(t *testing.T) {
	s := parallel(t)

	var (
		requests = s.account().CertificatesV1().CertificateSigningRequests()
		options  = metav1.UpdateOptions{}
		serving  = s.get(s.post(s.plan(), request{}))
	)

	for _, signer := range []string{certificatesv1.KubeAPIServerClientSignerName, certificatesv1.KubeAPIServerClientKubeletSignerName, "example.org/any"} {
		csr, err := s.client.CertificatesV1().CertificateSigningRequests().Create(t.Context(), &certificatesv1.CertificateSigningRequest{
			ObjectMeta: metav1.ObjectMeta{GenerateName: "csr-"},
			Spec: certificatesv1.CertificateSigningRequestSpec{
				SignerName: signer,
				Usages:     []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageClientAuth},
				Request:    serving.Spec.Request,
			},
		}, metav1.CreateOptions{})
		s.require(err)

		csr.Status.Conditions = []certificatesv1.CertificateSigningRequestCondition{
			{Type: certificatesv1.CertificateApproved, Status: corev1.ConditionTrue, Reason: "Test", Message: "must not be possible"},
		}

		_, err = requests.UpdateApproval(t.Context(), csr.Name, csr, options)
		s.wantForbidden("approve for "+signer, err)
	}

	_, err := requests.Create(t.Context(), &certificatesv1.CertificateSigningRequest{ObjectMeta: metav1.ObjectMeta{GenerateName: "csr-"}, Spec: serving.Spec}, metav1.CreateOptions{})
	s.wantForbidden("create", err)

	_, err = requests.Update(t.Context(), serving, options)
	s.wantForbidden("update", err)

	issued := serving.DeepCopy()
	issued.Status.Certificate = []byte("-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----\n")

	_, err = requests.UpdateStatus(t.Context(), issued, options)
	s.wantForbidden("issue", err)

	s.wantForbidden("delete", requests.Delete(t.Context(), serving.Name, metav1.DeleteOptions{}))
}

func (s suite) wantForbidden(what string, err error) {
	s.Helper()

	if !apierrors.IsForbidden(err) {
		s.Errorf("%s: %v", what, err)
	}
}
