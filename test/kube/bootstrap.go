package kube

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

const (
	bootstrapTokenSecret = "0123456789abcdef"
	groupBootstrappers   = "system:bootstrappers:nodes"
)

// BootstrapToken creates a bootstrap token, and allows what Talos allows (k8s/ManifestController): a token obtains a client certificate for any
// Node, which kube-controller-manager approves, and kubelets rotate their client certificates.
func (c *Cluster) BootstrapToken(ctx context.Context) (string, error) {
	client, err := kubernetes.NewForConfig(c.Config())
	if err != nil {
		return "", fmt.Errorf("create bootstrap token: %w", err)
	}

	const requests = "system:certificates.k8s.io:certificatesigningrequests:"

	for _, binding := range []struct {
		name, role string
		groups     []string
	}{
		{"system-bootstrap-node-bootstrapper", "system:node-bootstrapper", []string{groupBootstrappers, groupNodes}},
		{"system-bootstrap-approve-node-client-csr", requests + "nodeclient", []string{groupBootstrappers}},
		{"system-bootstrap-node-renewal", requests + "selfnodeclient", []string{groupNodes}},
	} {
		object := &rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: binding.name},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: binding.role},
		}

		for _, group := range binding.groups {
			object.Subjects = append(object.Subjects, rbacv1.Subject{APIGroup: rbacv1.GroupName, Kind: rbacv1.GroupKind, Name: group})
		}

		if _, err := client.RbacV1().ClusterRoleBindings().Create(ctx, object, metav1.CreateOptions{}); err != nil {
			return "", fmt.Errorf("bind %s: %w", binding.role, err)
		}
	}

	return c.CreateBootstrapToken(ctx, "talosb")
}

// CreateBootstrapToken creates another bootstrap token with an ID of six characters.
func (c *Cluster) CreateBootstrapToken(ctx context.Context, id string) (string, error) {
	client, err := kubernetes.NewForConfig(c.Config())
	if err != nil {
		return "", fmt.Errorf("create bootstrap token: %w", err)
	}

	_, err = client.CoreV1().Secrets(metav1.NamespaceSystem).Create(ctx, &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: "bootstrap-token-" + id},
		Type:       corev1.SecretTypeBootstrapToken,
		StringData: map[string]string{
			"token-id": id, "token-secret": bootstrapTokenSecret,
			"usage-bootstrap-authentication": "true", "auth-extra-groups": groupBootstrappers,
		},
	}, metav1.CreateOptions{})
	if err != nil {
		return "", fmt.Errorf("create bootstrap token: %w", err)
	}

	return id + "." + bootstrapTokenSecret, nil
}

// TokenConfig is that of a bearer token.
func (c *Cluster) TokenConfig(token string) *rest.Config {
	config := rest.AnonymousClientConfig(c.Config())
	config.BearerToken = token

	return config
}

// CertificateConfig is that of a client certificate and its key, both in PEM encoding.
func (c *Cluster) CertificateConfig(certificate, key []byte) *rest.Config {
	config := rest.AnonymousClientConfig(c.Config())
	config.CertData, config.KeyData = certificate, key

	return config
}
