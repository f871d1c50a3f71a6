package main

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/util/workqueue"

	"github.com/talos-ccm/talos-ccm/test/kube"
)

const (
	userPrefix = "system:node:"
	groupNodes = "system:nodes"
)

// kubelets are what the machines' kubelets do about their serving certificates: each asks for one for all that its Node lists, and for
// another when that has changed. The certificates are not used for serving, so the keys are discarded.
//
// Unlike a real one, such a kubelet does not ask before its Node is initialized: until then the Node lists the loopback address at which the
// simulated machine is reached, for which no certificate is issued.
type kubelets struct {
	cluster  *kube.Cluster
	observer *observer
	// failed is called for a request that could not be created.
	failed func(error)
	queue  workqueue.TypedInterface[string] // of nodenames
}

// start has the kubelets look at their Nodes until ctx ends. Stop them by the function that it returns.
func (k *kubelets) start(ctx context.Context) (shutdown func()) {
	var group sync.WaitGroup

	for range parallel {
		group.Go(func() { k.work(ctx) })
	}

	return func() {
		k.queue.ShutDown()
		group.Wait()
	}
}

func (k *kubelets) work(ctx context.Context) {
	for {
		nodename, shutdown := k.queue.Get()
		if shutdown {
			return
		}

		if request, wanted := k.observer.nextRequest(nodename); wanted {
			if err := k.ask(ctx, nodename, request); err != nil && ctx.Err() == nil {
				k.failed(err)
			}
		}

		k.queue.Done(nodename)
	}
}

// ask makes a request in the name of a Node's kubelet.
func (k *kubelets) ask(ctx context.Context, nodename string, r request) error {
	csr, err := r.object(nodename)
	if err != nil {
		return fmt.Errorf("create certificate request of %s: %w", nodename, err)
	}

	client, err := kubernetes.NewForConfig(k.cluster.KubeletConfig(nodename))
	if err != nil {
		return fmt.Errorf("create client for the kubelet of %s: %w", nodename, err)
	}

	if _, err := client.CertificatesV1().CertificateSigningRequests().Create(ctx, csr, metav1.CreateOptions{}); err != nil {
		return fmt.Errorf("request certificate for %s: %w", nodename, err)
	}

	return nil
}

// object is the request as the kubelet of a Node makes it (k8s.io/kubernetes/pkg/kubelet/certificate).
func (r request) object(nodename string) (*certificatesv1.CertificateSigningRequest, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}

	template := x509.CertificateRequest{Subject: pkix.Name{CommonName: userPrefix + nodename, Organization: []string{groupNodes}}}

	for _, subject := range r.subjects {
		if ip := net.ParseIP(subject); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
		} else {
			template.DNSNames = append(template.DNSNames, subject)
		}
	}

	der, err := x509.CreateCertificateRequest(rand.Reader, &template, key)
	if err != nil {
		return nil, err
	}

	return &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{Name: r.name},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			Request:    pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}),
			SignerName: certificatesv1.KubeletServingSignerName,
			Usages:     []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageServerAuth},
		},
	}, nil
}

// subjectsOf are the names and addresses that a kubelet asks for: all that its Node lists.
func subjectsOf(node *corev1.Node) []string {
	var subjects []string
	for _, address := range node.Status.Addresses {
		subjects = append(subjects, address.Address)
	}

	slices.Sort(subjects)

	return slices.Compact(subjects)
}

var errNoCertificate = errors.New("not a PEM certificate")

// checkCertificate fails unless the certificate is a server's, of the authority, for the kubelet of the Node, and for the subjects alone.
func checkCertificate(certificate []byte, authority *x509.CertPool, nodename string, subjects []string) error {
	block, _ := pem.Decode(certificate)
	if block == nil {
		return errNoCertificate
	}

	parsed, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return err
	}

	_, err = parsed.Verify(x509.VerifyOptions{Roots: authority, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}})
	if err != nil {
		return err
	}

	has := slices.Clone(parsed.DNSNames)
	for _, ip := range parsed.IPAddresses {
		has = append(has, ip.String())
	}

	switch {
	case parsed.Subject.CommonName != userPrefix+nodename:
		return errors.New(differ("subject", parsed.Subject.CommonName, userPrefix+nodename))
	case !sameElements(has, subjects):
		return errors.New(differ("SANs", has, subjects))
	}

	return nil
}
