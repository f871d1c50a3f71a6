package csrapproval

import (
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
)

func TestPinOf_ReadsWhatWasWritten(t *testing.T) {
	full := csrpolicy.Record{
		Credential: csrpolicy.CertificateID([]byte("a")), Previous: csrpolicy.CertificateID([]byte("b")),
		NodeID: csrpolicy.Fingerprint("n"), Volume: csrpolicy.Fingerprint("v"), Issuer: csrpolicy.Fingerprint("i"),
		Expires: time.Date(2126, 1, 2, 3, 4, 5, 0, time.UTC), Address: netip.MustParseAddr("2001:db8::"),
	}
	ipv4 := csrpolicy.Record{Credential: full.Credential, Volume: full.Volume, Address: netip.MustParseAddr("10.0.0.1")}

	for _, pin := range []csrpolicy.Record{full, {Credential: full.Credential}, ipv4} {
		context := pinContext(pin)
		assert.Empty(t, validation.IsValidLabelValue(context))

		n := node("a")
		n.Labels = map[string]string{LabelCredential: pin.Credential, LabelPrevious: pin.Previous, LabelContext: context}

		if pin.Address.IsValid() {
			n.Labels[nodespec.LabelAddress] = nodespec.AddressLabel(pin.Address)
			assert.Empty(t, validation.IsValidLabelValue(n.Labels[nodespec.LabelAddress]))
		}

		assert.Equal(t, pin, pinOf(n))

		// An operator has accepted another certificate.
		n.Labels[LabelCredential] = full.Previous
		assert.Equal(t, csrpolicy.Record{Credential: full.Previous, Address: pin.Address}, pinOf(n))
	}

	for _, context := range []string{"", "a", "a.b.c.d.e", pinContext(full) + ".f"} {
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{LabelCredential: full.Credential, LabelContext: context}}}
		assert.Equal(t, csrpolicy.Record{Credential: full.Credential}, pinOf(n), context)
	}
}

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
