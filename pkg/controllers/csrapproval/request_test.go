package csrapproval_test

import (
	"cmp"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"net"
	"net/netip"

	"github.com/stretchr/testify/require"
	certificatesv1 "k8s.io/api/certificates/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

type usages = []certificatesv1.KeyUsage

// request describes a request. Zero fields have the values of the worker's kubelet.
type request struct {
	signer       string
	commonName   string
	organization string
	names        []string
	ips          []netip.Addr
	usages       usages
	// user and groups are the requester's, in addition to system:authenticated.
	user   string
	groups []string
	key    crypto.Signer
	// config is the requester's. Without one, an administrator impersonates the user, and the API server knows no
	// credential of the user.
	config *rest.Config
}

func newKey() *ecdsa.PrivateKey {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		panic(err)
	}

	return key
}

// post creates a request of the worker's kubelet and returns its name. It is deleted when the test ends.
func (s suite) post(w worker, r request) string {
	s.Helper()

	csr, err := s.create(s.Context(), w, r)
	require.NoError(s, err)
	s.Cleanup(func() { s.remove(csr.Name) })

	return csr.Name
}

// remove deletes a request if it exists.
func (s suite) remove(name string) {
	s.Helper()

	if err := s.requests().Delete(context.WithoutCancel(s.Context()), name, metav1.DeleteOptions{}); !apierrors.IsNotFound(err) {
		require.NoError(s, err)
	}
}

// create creates a request as the requesting user.
func (e *environment) create(ctx context.Context, w worker, r request) (*certificatesv1.CertificateSigningRequest, error) {
	user := "system:node:" + w.name

	if r.key == nil {
		r.key = newKey()
	}

	if r.names == nil && r.ips == nil {
		r.names, r.ips = []string{w.name}, []netip.Addr{w.addr}
	}

	if r.usages == nil {
		r.usages = usages{certificatesv1.UsageDigitalSignature, certificatesv1.UsageServerAuth}
	}

	if r.groups == nil {
		r.groups = []string{"system:nodes"}
	}

	template := &x509.CertificateRequest{
		Subject:  pkix.Name{CommonName: cmp.Or(r.commonName, user), Organization: []string{cmp.Or(r.organization, "system:nodes")}},
		DNSNames: r.names,
	}
	for _, ip := range r.ips {
		template.IPAddresses = append(template.IPAddresses, net.IP(ip.AsSlice()))
	}

	der, err := x509.CreateCertificateRequest(rand.Reader, template, r.key)
	if err != nil {
		return nil, err
	}

	if r.config == nil {
		r.config = e.bed.Kube.Config()
		r.config.Impersonate = rest.ImpersonationConfig{UserName: cmp.Or(r.user, user), Groups: append(r.groups, "system:authenticated")}
	}

	client, err := kubernetes.NewForConfig(r.config)
	if err != nil {
		return nil, err
	}

	return client.CertificatesV1().CertificateSigningRequests().Create(ctx, &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "csr-"},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			SignerName: cmp.Or(r.signer, certificatesv1.KubeletServingSignerName),
			Usages:     r.usages,
			Request:    pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}),
		},
	}, metav1.CreateOptions{})
}
