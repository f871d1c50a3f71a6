package csrapproval_test

import (
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

	certificatesv1 "k8s.io/api/certificates/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// request describes a request. Zero fields have the values of the worker's kubelet.
type request struct {
	commonName   string
	organization string
	names        []string
	ips          []netip.Addr
	usages       []certificatesv1.KeyUsage
	// user and groups are the requester's, in addition to system:authenticated.
	user   string
	groups []string
	key    crypto.Signer
	// config is the requester's; without one, an administrator impersonates the user, of which the API server knows no
	// credential.
	config *rest.Config
}

// of sets zero fields to the values of the worker's kubelet.
func (r request) of(w worker) request {
	user := "system:node:" + w.name

	if r.user == "" {
		r.user = user
	}

	if r.commonName == "" {
		r.commonName = user
	}

	if r.organization == "" {
		r.organization = "system:nodes"
	}

	if r.names == nil && r.ips == nil {
		r.names, r.ips = []string{w.name}, []netip.Addr{w.addr}
	}

	if r.usages == nil {
		r.usages = []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageServerAuth}
	}

	if r.groups == nil {
		r.groups = []string{"system:nodes"}
	}

	return r
}

// pem returns the encoded request.
func (r request) pem() ([]byte, error) {
	if r.key == nil {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			return nil, err
		}

		r.key = key
	}

	template := &x509.CertificateRequest{
		Subject:  pkix.Name{CommonName: r.commonName, Organization: []string{r.organization}},
		DNSNames: r.names,
	}

	for _, ip := range r.ips {
		template.IPAddresses = append(template.IPAddresses, net.IP(ip.AsSlice()))
	}

	der, err := x509.CreateCertificateRequest(rand.Reader, template, r.key)
	if err != nil {
		return nil, err
	}

	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}), nil
}

// post creates a request of the worker's kubelet and returns its name. It is deleted when the test ends.
func (s suite) post(w worker, r request) string {
	s.Helper()

	csr, err := s.create(s.Context(), w, r)
	s.require(err)
	s.Cleanup(func() { s.remove(csr.Name) })

	return csr.Name
}

// remove deletes a request if it exists.
func (s suite) remove(name string) {
	s.Helper()

	err := s.client.CertificatesV1().CertificateSigningRequests().Delete(context.Background(), name, metav1.DeleteOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		s.Error(err)
	}
}

// create creates a request as the requesting user.
func (b *bed) create(ctx context.Context, w worker, r request) (*certificatesv1.CertificateSigningRequest, error) {
	r = r.of(w)

	content, err := r.pem()
	if err != nil {
		return nil, err
	}

	if r.config == nil {
		r.config = b.kube.Config()
		r.config.Impersonate = rest.ImpersonationConfig{UserName: r.user, Groups: append(r.groups, "system:authenticated")}
	}

	client, err := kubernetes.NewForConfig(r.config)
	if err != nil {
		return nil, err
	}

	return client.CertificatesV1().CertificateSigningRequests().Create(ctx, &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "csr-"},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			SignerName: certificatesv1.KubeletServingSignerName,
			Usages:     r.usages,
			Request:    content,
		},
	}, metav1.CreateOptions{})
}
