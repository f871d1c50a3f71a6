// Package bootstrap turns this machine's admin kubeconfig into credentials of little power and short life.
//
// With the admin kubeconfig it does two things: it applies RBAC and the ServiceAccount, and has a token of at most one hour
// issued. The admin kubeconfig lives in memory, for the time that takes, and is never written. What is written, to a folder of the
// caller's choice, is the token and a kubeconfig that names its file.
package bootstrap

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/cosi-project/runtime/pkg/state"
	"github.com/siderolabs/go-retry/retry"
	"github.com/siderolabs/talos/pkg/machinery/resources/secrets"
	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apimachinery/pkg/util/wait"
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

	// maxInterval is between two renewals even if the token lives longer: it is how long RBAC or a ServiceAccount that somebody deleted
	// is missing.
	maxInterval = 10 * time.Minute
	// minInterval is between two renewals even if the clocks disagree so much that the token seems to have expired already.
	minInterval = time.Minute

	attemptTimeout = 15 * time.Second
	// cycle bounds a series of attempts, and with it the back-off between them, to some eight seconds; the next series follows at once.
	cycle = 15 * time.Second
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

// Kubeconfig is the path of the kubeconfig that Run writes. It names a file for the token, which client-go reads again by itself.
func (b *Bootstrap) Kubeconfig() string { return filepath.Join(b.dir, "kubeconfig") }

// Run renews the token, and applies RBAC again, until ctx ends: every ten minutes, or sooner if half of the token's life is over by then,
// and when Talos issues the admin kubeconfig anew. After the first
// success it calls ready. It never gives up.
//
// It returns before ctx ends if the kubeconfig has changed: the API server is to be reached elsewhere, or has another CA. Clients made
// from the one before cannot learn that in time (client-go reads a CA file again every five minutes) and have to be made anew.
func (b *Bootstrap) Run(ctx context.Context, ready func()) {
	var first []byte

	for {
		made := b.renewUntilItWorks(ctx)

		switch {
		case ctx.Err() != nil:
			return
		case first == nil:
			first = made.kubeconfig

			ready()
		case !bytes.Equal(first, made.kubeconfig):
			klog.FromContext(ctx).Info("The way to the API server has changed, its clients have to be made anew")

			return
		}

		b.waitForReason(ctx, made)
	}
}

// renewal is the outcome of one round.
type renewal struct {
	kubeconfig []byte // as it was written
	lifetime   time.Duration
	admin      fingerprint
}

// fingerprint tells one admin kubeconfig from another after it has been let go.
type fingerprint [sha256.Size]byte

// renewUntilItWorks returns what renew does once that succeeds, or when ctx ends.
func (b *Bootstrap) renewUntilItWorks(ctx context.Context) (made renewal) {
	for ctx.Err() == nil {
		err := retry.Exponential(cycle, retry.WithUnits(time.Second), retry.WithJitter(time.Second), retry.WithAttemptTimeout(attemptTimeout)).
			RetryWithContext(ctx, func(ctx context.Context) (err error) {
				made, err = b.renew(ctx)

				return retry.ExpectedError(err)
			})
		if err == nil {
			break
		}

		if ctx.Err() == nil {
			klog.FromContext(ctx).Info("No Kubernetes credentials yet, trying on", "err", err)
		}
	}

	return made
}

// waitForReason returns when the token is due for renewal, or Talos has issued another admin kubeconfig than the one it was made with.
func (b *Bootstrap) waitForReason(ctx context.Context, made renewal) {
	ctx, cancel := context.WithCancel(ctx)
	other := make(chan struct{})

	go func() {
		defer close(other)

		b.awaitOther(ctx, made.admin)
	}()

	defer func() {
		cancel()
		<-other
	}()

	timer := b.clock.NewTimer(min(max(made.lifetime/2, minInterval), maxInterval))
	defer timer.Stop()

	select {
	case <-ctx.Done():
	case <-timer.C():
	case <-other:
	}
}

// awaitOther returns when there is another admin kubeconfig than the one that was used, or when ctx ends. A watch that breaks is taken up
// again, and begins with what there is by then.
func (b *Bootstrap) awaitOther(ctx context.Context, used fingerprint) {
	backoff := wait.Backoff{Duration: time.Second, Factor: 2, Jitter: 0.3, Steps: 10, Cap: time.Minute}

	for ctx.Err() == nil {
		err := b.watchForOther(ctx, used)
		if err == nil || ctx.Err() != nil {
			return
		}

		klog.FromContext(ctx).V(2).Info("Not told of new admin kubeconfigs, asking again", "err", err)

		select {
		case <-ctx.Done():
		case <-b.clock.After(backoff.Step()):
		}
	}
}

// watchForOther returns nil when it has seen another admin kubeconfig than the one that was used.
func (b *Bootstrap) watchForOther(ctx context.Context, used fingerprint) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()

	events := make(chan state.Event)

	if err := b.admin.WatchLocalhostAdminKubeconfig(ctx, events); err != nil {
		return err
	}

	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case event := <-events:
			if event.Type == state.Errored {
				return fmt.Errorf("watch the localhost admin kubeconfig: %w", event.Error)
			}

			certs, ok := event.Resource.(*secrets.Kubernetes)
			if !ok || event.Type == state.Destroyed {
				continue
			}

			if kubeconfig := certs.TypedSpec().LocalhostAdminKubeconfig; kubeconfig != "" && sha256.Sum256([]byte(kubeconfig)) != used {
				return nil
			}
		}
	}
}

// renew does one round.
func (b *Bootstrap) renew(ctx context.Context) (renewal, error) {
	config, admin, err := b.adminConfig(ctx)
	if err != nil {
		return renewal{}, err
	}

	transport, err := rest.HTTPClientFor(config)
	if err != nil {
		return renewal{}, fmt.Errorf("connect to %s: %w", config.Host, err)
	}

	// Nothing that the admin may do stays within reach.
	defer utilnet.CloseIdleConnectionsFor(transport.Transport)

	client, err := kubernetes.NewForConfigAndClient(config, transport)
	if err != nil {
		return renewal{}, fmt.Errorf("connect to %s: %w", config.Host, err)
	}

	if err := applyManifests(ctx, client, extension.RBAC); err != nil {
		return renewal{}, err
	}

	seconds := int64(tokenLifetime.Seconds())

	request, err := client.CoreV1().ServiceAccounts(extension.Namespace).CreateToken(ctx, extension.ServiceAccount, &authenticationv1.TokenRequest{
		Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: &seconds},
	}, metav1.CreateOptions{})
	if err != nil {
		return renewal{}, fmt.Errorf("request a token for service account %s/%s: %w", extension.Namespace, extension.ServiceAccount, err)
	}

	kubeconfig, err := b.write(config, request.Status.Token)
	if err != nil {
		return renewal{}, err
	}

	tokenExpiry.Set(float64(request.Status.ExpirationTimestamp.Unix()))

	return renewal{kubeconfig: kubeconfig, lifetime: request.Status.ExpirationTimestamp.Sub(b.clock.Now()), admin: admin}, nil
}

func (b *Bootstrap) adminConfig(ctx context.Context) (*rest.Config, fingerprint, error) {
	kubeconfig, err := b.admin.LocalhostAdminKubeconfig(ctx)
	if err != nil {
		return nil, fingerprint{}, err
	}

	if len(kubeconfig) == 0 {
		return nil, fingerprint{}, errors.New("read the localhost admin kubeconfig: Talos has not issued it yet")
	}

	config, err := clientcmd.RESTConfigFromKubeConfig(kubeconfig)
	if err != nil {
		return nil, fingerprint{}, fmt.Errorf("read the localhost admin kubeconfig: %w", err)
	}

	return config, sha256.Sum256(kubeconfig), nil
}

// write puts the files in place, each at once, the kubeconfig last, and returns that.
func (b *Bootstrap) write(admin *rest.Config, token string) ([]byte, error) {
	tokenPath := filepath.Join(b.dir, "token")
	cluster := clientcmdapi.Cluster{Server: admin.Host, CertificateAuthorityData: admin.CAData, TLSServerName: admin.ServerName}

	kubeconfig, err := clientcmd.Write(clientcmdapi.Config{
		CurrentContext: "talos-ccm",
		Clusters:       map[string]*clientcmdapi.Cluster{"talos-ccm": &cluster},
		AuthInfos:      map[string]*clientcmdapi.AuthInfo{"talos-ccm": {TokenFile: tokenPath}},
		Contexts:       map[string]*clientcmdapi.Context{"talos-ccm": {Cluster: "talos-ccm", AuthInfo: "talos-ccm"}},
	})
	if err != nil {
		return nil, fmt.Errorf("write kubeconfig: %w", err)
	}

	return kubeconfig, errors.Join(replaceFile(tokenPath, []byte(token)), replaceFile(b.Kubeconfig(), kubeconfig))
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
