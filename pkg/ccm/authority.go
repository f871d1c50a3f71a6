package ccm

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/klog/v2"

	"github.com/talos-ccm/talos-ccm/pkg/bootstrap"
)

// kubernetesCredentials keeps those that bootstrap makes fresh, and returns the path of their kubeconfig once it is there, or when ctx ends.
//
// The kubeconfig that is returned has the cluster's CA in it. From a file client-go reads a CA again only every five minutes, which is
// more than a lease lasts; so when the CA is replaced, replaced is called, and the clients are to be made anew.
func (a *App) kubernetesCredentials(ctx context.Context, group *sync.WaitGroup, replaced func()) string {
	b := bootstrap.New(a.socket.Admin, a.options.RunDir, a.clock)
	pinned := filepath.Join(a.options.RunDir, "kubeconfig-with-ca")

	var trusted []byte

	keepFresh(ctx, group, func(ctx context.Context, ready func()) {
		b.Run(ctx, func() {
			ca, err := pinAuthority(b.Kubeconfig(), pinned)
			if err != nil {
				klog.FromContext(ctx).Error(err, "Could not take over the Kubernetes credentials")

				return
			}

			if trusted != nil && !bytes.Equal(trusted, ca) {
				klog.FromContext(ctx).Info("The cluster's CA was replaced, connecting anew")
				replaced()
			}

			trusted = ca

			ready()
		})
	})

	return pinned
}

// pinAuthority writes kubeconfig to path with the CA of its current context in place of the name of the CA's file, and returns the CA.
func pinAuthority(kubeconfig, path string) (ca []byte, err error) {
	config, err := clientcmd.LoadFromFile(kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("read kubeconfig %s: %w", kubeconfig, err)
	}

	if err := clientcmdapi.MinifyConfig(config); err != nil {
		return nil, fmt.Errorf("read kubeconfig %s: %w", kubeconfig, err)
	}

	cluster := config.Clusters[config.Contexts[config.CurrentContext].Cluster]

	if cluster.CertificateAuthority != "" {
		if cluster.CertificateAuthorityData, err = os.ReadFile(cluster.CertificateAuthority); err != nil {
			return nil, fmt.Errorf("read the cluster's CA: %w", err)
		}

		cluster.CertificateAuthority = ""
	}

	// Readers must see the old or the new one.
	next := path + ".next"

	if err := clientcmd.WriteToFile(*config, next); err != nil {
		return nil, fmt.Errorf("write kubeconfig %s: %w", next, err)
	}

	if err := os.Rename(next, path); err != nil {
		return nil, fmt.Errorf("write kubeconfig %s: %w", path, err)
	}

	return cluster.CertificateAuthorityData, nil
}
