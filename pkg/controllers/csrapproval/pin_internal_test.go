package csrapproval

import (
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
)

func TestPinOf_ReadsWhatWasWritten(t *testing.T) {
	full := csrpolicy.Pin{
		Credential: csrpolicy.CertificateID([]byte("a")), Previous: csrpolicy.CertificateID([]byte("b")),
		NodeID: csrpolicy.Fingerprint("n"), Volume: csrpolicy.Fingerprint("v"), Issuer: csrpolicy.Fingerprint("i"),
		Expires: time.Date(2126, 1, 2, 3, 4, 5, 0, time.UTC),
	}

	for _, pin := range []csrpolicy.Pin{full, {Credential: full.Credential}, {Credential: full.Credential, Volume: full.Volume}} {
		context := pinContext(pin)
		if reasons := validation.IsValidLabelValue(context); len(reasons) > 0 {
			t.Errorf("%q is not a label value: %v", context, reasons)
		}

		n := node("a")
		n.Labels = map[string]string{LabelCredential: pin.Credential, LabelPrevious: pin.Previous, LabelContext: context}

		if got := pinOf(n); got != pin {
			t.Errorf("got  %+v\nwant %+v", got, pin)
		}

		// An operator has accepted another certificate.
		n.Labels[LabelCredential] = full.Previous

		if got := pinOf(n); got != (csrpolicy.Pin{Credential: full.Previous}) {
			t.Errorf("got %+v for another certificate", got)
		}
	}

	for _, context := range []string{"", "a", "a.b.c.d.e", pinContext(full) + ".f"} {
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{LabelCredential: full.Credential, LabelContext: context}}}
		if got := pinOf(n); got.NodeID+got.Volume+got.Issuer != "" || !got.Expires.IsZero() {
			t.Errorf("%q: got %+v", context, got)
		}
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
		if err != nil {
			t.Fatal(err)
		}

		if _, kept := kept.(*certificatesv1.CertificateSigningRequest); kept != keeps {
			t.Errorf("%s: kept %t", signer, kept)
		}

		if names, _ := issuedFor(kept); len(names) > 0 {
			t.Errorf("%s: issued for %v", signer, names)
		}

		if again, _ := compact(kept); again != kept {
			t.Errorf("%s: compacted again", signer)
		}
	}
}
