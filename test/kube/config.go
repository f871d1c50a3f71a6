package kube

import (
	"encoding/base64"
	"fmt"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

const (
	groupMasters = "system:masters"
	groupNodes   = "system:nodes"

	// clientQPS and clientBurst do not hold back a client that registers a thousand Nodes.
	clientQPS   = 2000
	clientBurst = 4000
)

// Config is an administrator's: a client certificate of group system:masters, and no noticeable rate limit. It is the caller's own copy.
func (c *Cluster) Config() *rest.Config {
	c.mu.Lock()
	defer c.mu.Unlock()

	return c.config(c.pki.admin)
}

// UserConfig is that of a client certificate for the user and the groups, for example system:node:a and system:nodes to act as the kubelet
// of Node a. RBAC decides what it may do.
func (c *Cluster) UserConfig(user string, groups ...string) (*rest.Config, error) {
	pair, err := c.pki.clients.issue(subject{name: user, groups: groups})
	if err != nil {
		return nil, err
	}

	c.mu.Lock()
	defer c.mu.Unlock()

	return c.config(pair), nil
}

// config is for callers that hold the cluster's mutex.
func (c *Cluster) config(client keyPair) *rest.Config {
	return &rest.Config{
		Host: c.Endpoint(),
		TLSClientConfig: rest.TLSClientConfig{
			CAData:   c.pki.serving.pair.certificate,
			CertData: client.certificate,
			KeyData:  client.key,
		},
		QPS:   clientQPS,
		Burst: clientBurst,
	}
}

// Kubeconfig is [Cluster.Config] as the content of a kubeconfig file, with everything embedded.
func (c *Cluster) Kubeconfig() []byte {
	return Kubeconfig(c.Config())
}

// CA is the PEM certificate of the authority that signed the API server's certificate: what a client must trust.
func (c *Cluster) CA() []byte {
	c.mu.Lock()
	defer c.mu.Unlock()

	return c.pki.serving.pair.certificate
}

// ClientCA is the PEM certificate of the authority that signs client certificates and the kubelets' serving certificates.
func (c *Cluster) ClientCA() []byte {
	return c.pki.clients.pair.certificate
}

// Kubeconfig is the content of a kubeconfig file that says the same as a config of this package. Other configs lose what is not a server,
// a CA, and a client certificate or a token, all as data.
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

// adminClient is for callers that hold the cluster's mutex.
func (c *Cluster) adminClient() (kubernetes.Interface, error) {
	config := c.config(c.pki.admin)

	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("make a client for %s: %w", config.Host, err)
	}

	return client, nil
}
