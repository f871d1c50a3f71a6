package csrapproval

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestCompact_KeepsServingRequestsOnly(t *testing.T) {
	for signer, keeps := range map[string]bool{
		certificatesv1.KubeletServingSignerName:             true,
		certificatesv1.KubeAPIServerClientKubeletSignerName: false,
		"example.org/signer":                                false,
	} {
		csr := &certificatesv1.CertificateSigningRequest{ObjectMeta: metav1.ObjectMeta{Name: "csr-1"}}
		csr.Spec.SignerName, csr.Status.Certificate = signer, []byte("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")

		kept, err := compact(csr)
		require.NoError(t, err)

		_, isServing := kept.(*certificatesv1.CertificateSigningRequest)
		assert.Equal(t, keeps, isServing, signer)

		names, _ := issuedFor(kept)
		assert.Empty(t, names, signer)

		again, _ := compact(kept)
		assert.Same(t, kept, again, signer)
	}
}
