package kube

import (
	stdx509 "crypto/x509"
	"fmt"
	"net"
	"time"

	"github.com/siderolabs/crypto/x509"
	"github.com/siderolabs/talos/pkg/machinery/config/generate/secrets"
)

const (
	certificateTTL = 7 * 24 * time.Hour
	// clockSkew antedates certificates, for processes whose injected or slow clock is behind.
	clockSkew = time.Hour
)

// pki is what a cluster's components identify themselves by. It has two authorities, so that the one that clients trust
// can be replaced while the clients' own certificates stay valid.
type pki struct {
	directory *directory
	// clients signs client certificates and, through kube-controller-manager, the kubelets' serving certificates.
	clients *x509.CertificateAuthority
	// serving signs the API server's certificate; guarded by the cluster's mutex.
	serving *x509.CertificateAuthority
	// admin is the client certificate of an administrator.
	admin *x509.KeyPair
}

// Files in a cluster's directory.
const (
	clientCAFile      = "client-ca.crt"
	clientCAKeyFile   = "client-ca.key"
	frontProxyCAFile  = "front-proxy-ca.crt"
	servingCAFile     = "serving-ca.crt"
	servingCertFile   = "apiserver.crt"
	servingKeyFile    = "apiserver.key"
	signingKeyFile    = "service-account.key"
	managerConfigFile = "kube-controller-manager.kubeconfig"
)

func newPKI(d *directory) (p *pki, err error) {
	p = &pki{directory: d}

	if p.clients, err = secrets.NewKubernetesCA(time.Now().Add(-clockSkew), nil); err != nil {
		return nil, fmt.Errorf("create CA of clients: %w", err)
	}

	if p.admin, err = p.issueClient("admin", groupMasters); err != nil {
		return nil, err
	}

	frontProxy, err := secrets.NewAggregatorCA(time.Now().Add(-clockSkew), nil)
	if err != nil {
		return nil, fmt.Errorf("create CA of front proxies: %w", err)
	}

	signing, err := x509.NewECDSAKey()
	if err != nil {
		return nil, fmt.Errorf("create service account key: %w", err)
	}

	if err := p.renewServing(); err != nil {
		return nil, err
	}

	return p, p.write(map[string][]byte{
		frontProxyCAFile: frontProxy.CrtPEM,
		clientCAFile:     p.clients.CrtPEM,
		clientCAKeyFile:  p.clients.KeyPEM,
		signingKeyFile:   signing.GetPrivateKeyPEM(),
	})
}

// renewServing creates a new serving authority and the API server's certificate.
func (p *pki) renewServing() (err error) {
	if p.serving, err = secrets.NewKubernetesCA(time.Now().Add(-clockSkew), nil); err != nil {
		return fmt.Errorf("create CA of servers: %w", err)
	}

	names := []string{"localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local"}

	pair, err := issue(p.serving, stdx509.ExtKeyUsageServerAuth, x509.CommonName(apiServer), x509.DNSNames(names),
		x509.IPAddresses([]net.IP{net.IPv4(127, 0, 0, 1), net.ParseIP(serviceAddress)}))
	if err != nil {
		return err
	}

	return p.write(map[string][]byte{
		servingCAFile:   p.serving.CrtPEM,
		servingCertFile: pair.CrtPEM,
		servingKeyFile:  pair.KeyPEM,
	})
}

func (p *pki) write(files map[string][]byte) error {
	for name, content := range files {
		if err := p.directory.write(name, content); err != nil {
			return fmt.Errorf("write the cluster's certificates: %w", err)
		}
	}

	return nil
}

// issueClient issues the client certificate of a user.
func (p *pki) issueClient(user string, groups ...string) (*x509.KeyPair, error) {
	return issue(p.clients, stdx509.ExtKeyUsageClientAuth, x509.CommonName(user), x509.Organization(groups...))
}

// issue creates a key and a certificate for it.
func issue(ca *x509.CertificateAuthority, usage stdx509.ExtKeyUsage, subject ...x509.Option) (*x509.KeyPair, error) {
	pair, err := x509.NewKeyPair(ca, append(subject, x509.ExtKeyUsage([]stdx509.ExtKeyUsage{usage}),
		x509.NotBefore(time.Now().Add(-clockSkew)), x509.NotAfter(time.Now().Add(certificateTTL)))...)
	if err != nil {
		return nil, fmt.Errorf("issue certificate: %w", err)
	}

	return pair, nil
}
