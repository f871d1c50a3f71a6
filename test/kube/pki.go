package kube

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"time"
)

const (
	certificateTTL = 7 * 24 * time.Hour
	// clockSkew antedates certificates, for processes whose injected or slow clock is behind.
	clockSkew = time.Hour
)

// authority is a certificate authority with its key.
type authority struct {
	certificate *x509.Certificate
	pair        keyPair
	key         crypto.Signer
}

// keyPair is a certificate and its private key, both PEM.
type keyPair struct {
	certificate []byte
	key         []byte
}

// subject says whom a certificate is for. Without hosts it is a client's, with hosts a server's.
type subject struct {
	name   string
	groups []string
	hosts  []string
}

func newAuthority(name string) (*authority, error) {
	key, keyPEM, err := newKey()
	if err != nil {
		return nil, fmt.Errorf("make certificate authority %s: %w", name, err)
	}

	template, err := newTemplate(subject{name: name})
	if err != nil {
		return nil, fmt.Errorf("make certificate authority %s: %w", name, err)
	}

	template.IsCA = true
	template.KeyUsage = x509.KeyUsageCertSign | x509.KeyUsageCRLSign | x509.KeyUsageDigitalSignature
	template.ExtKeyUsage = nil

	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("make certificate authority %s: %w", name, err)
	}

	certificate, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("make certificate authority %s: %w", name, err)
	}

	return &authority{certificate: certificate, key: key, pair: keyPair{certificate: pemBlock("CERTIFICATE", der), key: keyPEM}}, nil
}

// issue makes a key and a certificate for it.
func (a *authority) issue(s subject) (keyPair, error) {
	key, keyPEM, err := newKey()
	if err != nil {
		return keyPair{}, fmt.Errorf("issue certificate for %s: %w", s.name, err)
	}

	template, err := newTemplate(s)
	if err != nil {
		return keyPair{}, fmt.Errorf("issue certificate for %s: %w", s.name, err)
	}

	der, err := x509.CreateCertificate(rand.Reader, template, a.certificate, key.Public(), a.key)
	if err != nil {
		return keyPair{}, fmt.Errorf("issue certificate for %s: %w", s.name, err)
	}

	return keyPair{certificate: pemBlock("CERTIFICATE", der), key: keyPEM}, nil
}

func newTemplate(s subject) (*x509.Certificate, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		return nil, err
	}

	now := time.Now()
	template := &x509.Certificate{
		SerialNumber:          serial,
		Subject:               pkix.Name{CommonName: s.name, Organization: s.groups},
		NotBefore:             now.Add(-clockSkew),
		NotAfter:              now.Add(certificateTTL),
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageDigitalSignature,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}

	for _, host := range s.hosts {
		template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}

		if ip := net.ParseIP(host); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
		} else {
			template.DNSNames = append(template.DNSNames, host)
		}
	}

	return template, nil
}

// newSigningKey makes the key pair that signs service account tokens.
func newSigningKey() (private, public []byte, err error) {
	key, private, err := newKey()
	if err != nil {
		return nil, nil, fmt.Errorf("make service account key: %w", err)
	}

	der, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		return nil, nil, fmt.Errorf("make service account key: %w", err)
	}

	return private, pemBlock("PUBLIC KEY", der), nil
}

func newKey() (crypto.Signer, []byte, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}

	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return nil, nil, err
	}

	return key, pemBlock("EC PRIVATE KEY", der), nil
}

func pemBlock(kind string, der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
}

// pki is what a cluster's components identify themselves by. Two authorities, so that the one that clients trust can be replaced while the
// clients' own certificates stay valid.
type pki struct {
	folder *folder
	// clients signs client certificates and, through kube-controller-manager, the kubelets' serving certificates.
	clients *authority
	// serving signs the API server's certificate; guarded by the cluster's mutex.
	serving *authority
	// admin is the client certificate of an administrator.
	admin keyPair
}

// Files in a cluster's folder.
const (
	clientCAFile          = "client-ca.crt"
	clientCAKeyFile       = "client-ca.key"
	frontProxyCAFile      = "front-proxy-ca.crt"
	servingCAFile         = "serving-ca.crt"
	servingCertFile       = "apiserver.crt"
	servingKeyFile        = "apiserver.key"
	kubeletClientCertFile = "apiserver-kubelet-client.crt"
	kubeletClientKeyFile  = "apiserver-kubelet-client.key"
	signingKeyFile        = "service-account.key"
	verifyingKeyFile      = "service-account.pub"
	managerConfigFile     = "kube-controller-manager.kubeconfig"
)

func newPKI(f *folder) (*pki, error) {
	clients, err := newAuthority("talos-ccm-test-clients")
	if err != nil {
		return nil, err
	}

	admin, err := clients.issue(subject{name: "admin", groups: []string{groupMasters}})
	if err != nil {
		return nil, err
	}

	p := &pki{folder: f, clients: clients, admin: admin}

	if err := p.renewServing(); err != nil {
		return nil, err
	}

	kubeletClient, err := clients.issue(subject{name: "kube-apiserver-kubelet-client", groups: []string{groupMasters}})
	if err != nil {
		return nil, err
	}

	frontProxy, err := newAuthority("talos-ccm-test-front-proxy")
	if err != nil {
		return nil, err
	}

	signing, verifying, err := newSigningKey()
	if err != nil {
		return nil, err
	}

	return p, p.write(map[string][]byte{
		frontProxyCAFile:      frontProxy.pair.certificate,
		clientCAFile:          clients.pair.certificate,
		clientCAKeyFile:       clients.pair.key,
		kubeletClientCertFile: kubeletClient.certificate,
		kubeletClientKeyFile:  kubeletClient.key,
		signingKeyFile:        signing,
		verifyingKeyFile:      verifying,
	})
}

// renewServing makes a new serving authority and the API server's certificate.
func (p *pki) renewServing() error {
	serving, err := newAuthority("talos-ccm-test-serving")
	if err != nil {
		return err
	}

	pair, err := serving.issue(subject{name: "kube-apiserver", hosts: []string{
		"127.0.0.1", serviceAddress, "localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local",
	}})
	if err != nil {
		return err
	}

	p.serving = serving

	return p.write(map[string][]byte{
		servingCAFile:   serving.pair.certificate,
		servingCertFile: pair.certificate,
		servingKeyFile:  pair.key,
	})
}

func (p *pki) write(files map[string][]byte) error {
	for name, content := range files {
		if err := writeFile(p.folder.path(name), content); err != nil {
			return fmt.Errorf("write the cluster's certificates: %w", err)
		}
	}

	return nil
}
