package kube

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

const (
	bootstrapTokenSecret = "0123456789abcdef"
	groupBootstrappers   = "system:bootstrappers:nodes"
)

// BootstrapToken creates a bootstrap token unless it exists, and allows what Talos allows (k8s/ManifestController): a token
// obtains a client certificate for any Node, which kube-controller-manager approves, and kubelets rotate their client
// certificates.
func (c *Cluster) BootstrapToken(ctx context.Context) (string, error) {
	const requests = "system:certificates.k8s.io:certificatesigningrequests:"

	for role, groups := range map[string][]string{
		"system:node-bootstrapper":  {groupBootstrappers, groupNodes},
		requests + "nodeclient":     {groupBootstrappers},
		requests + "selfnodeclient": {groupNodes},
	} {
		binding := &rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: role},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role},
		}

		for _, group := range groups {
			binding.Subjects = append(binding.Subjects, rbacv1.Subject{APIGroup: rbacv1.GroupName, Kind: rbacv1.GroupKind, Name: group})
		}

		if _, err := kubernetes.NewForConfigOrDie(c.Config()).RbacV1().ClusterRoleBindings().Create(ctx, binding, metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
			return "", fmt.Errorf("bind %s: %w", role, err)
		}
	}

	return c.CreateBootstrapToken(ctx, "talosb")
}

// CreateBootstrapToken creates another bootstrap token, with an ID of six characters, unless it exists.
func (c *Cluster) CreateBootstrapToken(ctx context.Context, id string) (string, error) {
	_, err := kubernetes.NewForConfigOrDie(c.Config()).CoreV1().Secrets(metav1.NamespaceSystem).Create(ctx, &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: "bootstrap-token-" + id},
		Type:       corev1.SecretTypeBootstrapToken,
		StringData: map[string]string{
			"token-id": id, "token-secret": bootstrapTokenSecret,
			"usage-bootstrap-authentication": "true", "auth-extra-groups": groupBootstrappers,
		},
	}, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return "", fmt.Errorf("create bootstrap token: %w", err)
	}

	return id + "." + bootstrapTokenSecret, nil
}
