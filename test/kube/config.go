package kube

import (
	"crypto/tls"
	stdx509 "crypto/x509"
	"encoding/base64"
	"fmt"
	"net"

	"github.com/siderolabs/crypto/x509"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
)

const (
	groupMasters = "system:masters"
	groupNodes   = "system:nodes"
	userNode     = "system:node:"

	// clientQPS and clientBurst do not hold back a client that registers a thousand Nodes.
	clientQPS   = 2000
	clientBurst = 4000
)

// Config returns a copy of the administrator's configuration: a client certificate of group system:masters, with a high
// rate limit.
func (c *Cluster) Config() *rest.Config {
	c.mu.Lock()
	defer c.mu.Unlock()

	return c.config(c.pki.admin)
}

// UserConfig returns a configuration with a client certificate for the user and groups, such as system:node:a and
// system:nodes to act as the kubelet of Node a. RBAC decides what it may do.
func (c *Cluster) UserConfig(user string, groups ...string) (*rest.Config, error) {
	pair, err := c.pki.issueClient(user, groups...)
	if err != nil {
		return nil, err
	}

	return c.CertificateConfig(pair.CrtPEM, pair.KeyPEM), nil
}

// KubeletConfig returns the configuration of a Node's kubelet: user system:node:<nodename> of group system:nodes. The user is
// impersonated by the administrator: all kubelets of a cluster, thousands as well, share one connection.
func (c *Cluster) KubeletConfig(nodename string) *rest.Config {
	config := c.Config()
	// The API server uses the first part as the field manager, which later conflicts report.
	config.UserAgent = kubelet + "/" + KubernetesVersion
	config.ContentType = runtime.ContentTypeProtobuf // as kubelets do
	config.Impersonate = rest.ImpersonationConfig{UserName: userNode + nodename, Groups: []string{groupNodes, "system:authenticated"}}

	return config
}

// TokenConfig returns a configuration with a bearer token.
func (c *Cluster) TokenConfig(token string) *rest.Config {
	config := rest.AnonymousClientConfig(c.Config())
	config.BearerToken = token

	return config
}

// CertificateConfig is that of a client certificate and its key, both in PEM encoding.
func (c *Cluster) CertificateConfig(certificate, key []byte) *rest.Config {
	config := c.Config()
	config.CertData, config.KeyData = certificate, key

	return config
}

// config is for callers that hold the cluster's mutex.
func (c *Cluster) config(client *x509.KeyPair) *rest.Config {
	return &rest.Config{
		Host:            c.Endpoint(),
		TLSClientConfig: rest.TLSClientConfig{CAData: c.pki.serving.CrtPEM, CertData: client.CrtPEM, KeyData: client.KeyPEM},
		QPS:             clientQPS,
		Burst:           clientBurst,
	}
}

// ServingCertificate issues a certificate of another API server of the cluster.
func (c *Cluster) ServingCertificate(names []string, addresses ...net.IP) (tls.Certificate, error) {
	c.mu.Lock()
	defer c.mu.Unlock()

	pair, err := issue(c.pki.serving, stdx509.ExtKeyUsageServerAuth, x509.DNSNames(names), x509.IPAddresses(addresses))
	if err != nil {
		return tls.Certificate{}, err
	}

	return tls.X509KeyPair(pair.CrtPEM, pair.KeyPEM)
}

// CA returns the PEM certificate of the authority that signed the API server's certificate: what a client must trust.
func (c *Cluster) CA() []byte { return c.Config().CAData }

// ClientCA returns the PEM certificate of the authority that signs client certificates and the kubelets' serving certificates.
func (c *Cluster) ClientCA() []byte { return c.pki.clients.CrtPEM }

// Kubeconfig returns [Cluster.Config] as a kubeconfig with embedded certificates.
func (c *Cluster) Kubeconfig() []byte { return Kubeconfig(c.Config()) }

// Kubeconfig returns a configuration of this package as a kubeconfig. Only the server, the CA, and the client certificate
// or token are kept.
func Kubeconfig(config *rest.Config) []byte {
	encode := base64.StdEncoding.EncodeToString

	user := fmt.Sprintf("client-certificate-data: %s, client-key-data: %s", encode(config.CertData), encode(config.KeyData))
	if config.BearerToken != "" {
		user = fmt.Sprintf("token: %q", config.BearerToken)
	}

	return fmt.Appendf(nil, `apiVersion: v1
kind: Config
clusters:
  - name: cluster
    cluster: {server: %q, certificate-authority-data: %s}
users:
  - name: user
    user: {%s}
contexts:
  - name: context
    context: {cluster: cluster, user: user}
current-context: context
`, config.Host, encode(config.CAData), user)
}
