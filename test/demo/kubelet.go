package main

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"net"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

const (
	userPrefix = "system:node:"
	groupNodes = "system:nodes"
)

// requestCertificate creates a CSR as the kubelet of a Node does (k8s.io/kubernetes/pkg/kubelet/certificate). The
// certificates are not used, so the keys are discarded.
func (d *demo) requestCertificate(ctx context.Context, nodename, csr string, subjects []string) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}

	template := x509.CertificateRequest{Subject: pkix.Name{CommonName: userPrefix + nodename, Organization: []string{groupNodes}}}

	for _, subject := range subjects {
		if ip := net.ParseIP(subject); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
		} else {
			template.DNSNames = append(template.DNSNames, subject)
		}
	}

	der, err := x509.CreateCertificateRequest(rand.Reader, &template, key)
	if err != nil {
		return err
	}

	client, err := kubernetes.NewForConfig(d.cluster.KubeletConfig(nodename))
	if err != nil {
		return fmt.Errorf("create client for the kubelet of %s: %w", nodename, err)
	}

	_, err = client.CertificatesV1().CertificateSigningRequests().Create(ctx, &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{Name: csr},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			Request:    pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}),
			SignerName: certificatesv1.KubeletServingSignerName,
			Usages:     []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageServerAuth},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("create CSR of %s: %w", nodename, err)
	}

	return nil
}
