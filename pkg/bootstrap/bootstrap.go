// Package bootstrap turns this machine's admin kubeconfig into credentials of little power and short life.
//
// With the admin kubeconfig it does two things: it applies RBAC and the ServiceAccount, and has a token of at most one hour
// issued. The admin kubeconfig lives in memory, for the time that takes, and is never written. What is written, to a folder of the
// caller's choice, is the token, the CA and a kubeconfig that names both.
package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/cosi-project/runtime/pkg/state"
	"github.com/siderolabs/go-retry/retry"
	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/extension"
)

const (
	// tokenLifetime is asked for; the API server may grant less.
	tokenLifetime = time.Hour

	// fieldManager owns the RBAC objects.
	fieldManager = "talos-ccm"

	attemptTimeout = 15 * time.Second
	// cycle bounds a series of attempts, and with it the back-off between them; the next series follows at once.
	cycle = time.Minute
)

// Admin is where the admin kubeconfig comes from: talosapi.Admin.
type Admin interface {
	LocalhostAdminKubeconfig(ctx context.Context) ([]byte, error)
	WatchLocalhostAdminKubeconfig(ctx context.Context, ch chan<- state.Event) error
}

// Bootstrap keeps the credentials in a folder fresh. Use New and Run.
type Bootstrap struct {
	admin Admin
	dir   string
	clock clock.Clock
}

// New makes a Bootstrap that writes to dir, which must exist and should be in memory (tmpfs).
func New(admin Admin, dir string, clk clock.Clock) *Bootstrap {
	return &Bootstrap{admin: admin, dir: dir, clock: clk}
}

// Kubeconfig is the path of the kubeconfig that Run keeps fresh. It names files for token and CA, which client-go
// reads again by itself.
func (b *Bootstrap) Kubeconfig() string { return filepath.Join(b.dir, "kubeconfig") }

// Run renews the credentials until ctx ends: when half of the token's life is over, and when Talos issues the admin kubeconfig anew,
// as it does when the cluster's CA is rotated. After the first success it calls ready. It never gives up.
func (b *Bootstrap) Run(ctx context.Context, ready func()) {
	logger := klog.FromContext(ctx)

	for ctx.Err() == nil {
		var lifetime time.Duration

		err := retry.Exponential(cycle, retry.WithUnits(time.Second), retry.WithJitter(time.Second), retry.WithAttemptTimeout(attemptTimeout)).
			RetryWithContext(ctx, func(ctx context.Context) (err error) {
				lifetime, err = b.renew(ctx)

				return retry.ExpectedError(err)
			})
		if err != nil {
			if ctx.Err() == nil {
				logger.Info("No Kubernetes credentials yet, trying on", "err", err)
			}

			continue
		}

		ready()
		b.waitForReason(ctx, lifetime/2)
	}
}

// waitForReason returns when after has passed or the admin kubeconfig has been issued anew.
func (b *Bootstrap) waitForReason(ctx context.Context, after time.Duration) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()

	events := make(chan state.Event)
	timer := b.clock.NewTimer(after)

	defer timer.Stop()

	if err := b.admin.WatchLocalhostAdminKubeconfig(ctx, events); err != nil {
		klog.FromContext(ctx).Info("Not told of new admin kubeconfigs, renewing by the clock", "err", err)
	}

	for seen := 0; ; {
		select {
		case <-ctx.Done():
			return
		case <-timer.C():
			return
		case event := <-events:
			if event.Type == state.Errored {
				continue // machined is gone for a moment; the clock remains
			}

			// The first event is the present kubeconfig.
			if seen++; seen > 1 {
				return
			}
		}
	}
}

// renew does one round and returns how long the new token lives.
func (b *Bootstrap) renew(ctx context.Context) (time.Duration, error) {
	config, err := b.adminConfig(ctx)
	if err != nil {
		return 0, err
	}

	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return 0, fmt.Errorf("connect to %s: %w", config.Host, err)
	}

	if err := applyManifests(ctx, client, extension.RBAC); err != nil {
		return 0, err
	}

	seconds := int64(tokenLifetime.Seconds())

	request, err := client.CoreV1().ServiceAccounts(extension.Namespace).CreateToken(ctx, extension.ServiceAccount, &authenticationv1.TokenRequest{
		Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: &seconds},
	}, metav1.CreateOptions{})
	if err != nil {
		return 0, fmt.Errorf("request a token for service account %s/%s: %w", extension.Namespace, extension.ServiceAccount, err)
	}

	if err := b.write(config, request.Status.Token); err != nil {
		return 0, err
	}

	return request.Status.ExpirationTimestamp.Sub(b.clock.Now()), nil
}

func (b *Bootstrap) adminConfig(ctx context.Context) (*rest.Config, error) {
	kubeconfig, err := b.admin.LocalhostAdminKubeconfig(ctx)
	if err != nil {
		return nil, err
	}

	if len(kubeconfig) == 0 {
		return nil, errors.New("read the localhost admin kubeconfig: Talos has not issued it yet")
	}

	config, err := clientcmd.RESTConfigFromKubeConfig(kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("read the localhost admin kubeconfig: %w", err)
	}

	return config, nil
}

// write puts the files in place, each at once, the kubeconfig last.
func (b *Bootstrap) write(admin *rest.Config, token string) error {
	ca, tokenPath := filepath.Join(b.dir, "ca.crt"), filepath.Join(b.dir, "token")

	kubeconfig, err := clientcmd.Write(clientcmdapi.Config{
		CurrentContext: "talos-ccm",
		Clusters:       map[string]*clientcmdapi.Cluster{"talos-ccm": {Server: admin.Host, CertificateAuthority: ca, TLSServerName: admin.ServerName}},
		AuthInfos:      map[string]*clientcmdapi.AuthInfo{"talos-ccm": {TokenFile: tokenPath}},
		Contexts:       map[string]*clientcmdapi.Context{"talos-ccm": {Cluster: "talos-ccm", AuthInfo: "talos-ccm"}},
	})
	if err != nil {
		return fmt.Errorf("write kubeconfig: %w", err)
	}

	for _, file := range []struct {
		path string
		data []byte
	}{{ca, admin.CAData}, {tokenPath, []byte(token)}, {b.Kubeconfig(), kubeconfig}} {
		if err := replaceFile(file.path, file.data); err != nil {
			return err
		}
	}

	return nil
}

// replaceFile leaves either the old or the new file, never a part.
func replaceFile(path string, data []byte) error {
	next := path + ".next"

	if err := os.WriteFile(next, data, 0o600); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}

	if err := os.Rename(next, path); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}

	return nil
}
