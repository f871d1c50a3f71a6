// Package bootstrap obtains short-lived, least-privilege Kubernetes credentials with the admin kubeconfig of the
// local machine.
//
// With the admin kubeconfig it applies the ServiceAccount and its RBAC, deletes the RBAC of disabled controllers, and
// requests a token that is valid for at most one hour. It repeats that every ten minutes, which restores deleted objects,
// and whenever Talos issues a new admin kubeconfig. The admin kubeconfig is held in memory only while it is in use and is
// never written to disk. Only the token and a kubeconfig that refers to it are.
//
// The kubeconfig contains the cluster CA as a value: client-go would reload a CA file only after minutes, when the lease
// has expired. When the CA changes, the caller recreates its clients with the same lease identity.
package bootstrap

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/cosi-project/runtime/pkg/state"
	"github.com/siderolabs/talos/pkg/machinery/resources/secrets"
	authenticationv1 "k8s.io/api/authentication/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
	"sigs.k8s.io/yaml"

	"github.com/talos-ccm/talos-ccm/extension"
	"github.com/talos-ccm/talos-ccm/pkg/internal/backoff"
	"github.com/talos-ccm/talos-ccm/pkg/internal/metric"
)

const (
	// tokenLifetime is the requested lifetime; the API server may grant less.
	tokenLifetime = time.Hour

	// fieldManager owns the ServiceAccount and the RBAC objects.
	fieldManager = "talos-ccm"

	// maxInterval is the longest time between two renewals, whatever the lifetime of the token. It bounds how long a
	// deleted ServiceAccount or RBAC object is missing.
	maxInterval = 10 * time.Minute
	// minInterval is the shortest time between two renewals, even if clock skew makes the token look expired.
	minInterval = time.Minute

	attemptTimeout = 15 * time.Second
)

var tokenExpiry = metric.NewGauge("talosccm_token_expiry_timestamp_seconds",
	"Unix time at which the current ServiceAccount token expires; 0 if there is none.")

// Admin provides the admin kubeconfig. It is implemented by talosapi.Admin.
type Admin interface {
	LocalhostAdminKubeconfig(ctx context.Context) ([]byte, error)
	WatchLocalhostAdminKubeconfig(ctx context.Context, ch chan<- state.Event) error
}

// Bootstrap keeps the credentials in a directory fresh. Use New and Run.
type Bootstrap struct {
	// LocalAPIServer returns the host and the port of the API server of the local machine; empty if they are unknown. Nil
	// if only KubePrism is used.
	LocalAPIServer func(ctx context.Context) string

	admin   Admin
	dir     string
	enabled func(feature string) bool
	local   atomic.Pointer[string] // last result of LocalAPIServer
	clock   clock.Clock
	// foundNewer reports whether RBAC of a newer version was found and logged.
	foundNewer bool
}

// New returns a Bootstrap that writes to dir, which must exist and should be on a tmpfs. enabled reports whether the RBAC
// objects with the given value of extension.ControllerLabel are needed.
func New(admin Admin, dir string, enabled func(feature string) bool, clk clock.Clock) *Bootstrap {
	return &Bootstrap{admin: admin, dir: dir, enabled: enabled, clock: clk}
}

// Kubeconfig returns the path of the kubeconfig that Run writes. The kubeconfig refers to a token file, which
// client-go reloads.
func (b *Bootstrap) Kubeconfig() string { return filepath.Join(b.dir, "kubeconfig") }

// Run renews the token and reapplies RBAC until ctx ends: at half of the token's lifetime but at least every ten
// minutes, and whenever Talos issues a new admin kubeconfig. It calls ready after the first success. Failures are
// retried.
//
// Run returns early if the API server endpoint or its CA has changed. Clients must then be recreated.
func (b *Bootstrap) Run(ctx context.Context, ready func()) {
	var first []byte

	for {
		var current renewal

		err := backoff.Retry(ctx, "Failed to renew Kubernetes credentials; retrying", func(ctx context.Context) (err error) {
			current, err = b.renew(ctx)

			return err
		})

		switch {
		case err != nil: // ctx has ended
			return
		case first == nil:
			first = current.kubeconfig

			ready()
		case !bytes.Equal(first, current.kubeconfig):
			klog.FromContext(ctx).Info("API server endpoint or CA changed; recreating clients")

			return
		}

		b.wait(ctx, current)
	}
}

type renewal struct {
	kubeconfig []byte // as written
	lifetime   time.Duration
	admin      [sha256.Size]byte // fingerprint of the admin kubeconfig
}

func (b *Bootstrap) renew(ctx context.Context) (renewal, error) {
	ctx, cancel := context.WithTimeout(ctx, attemptTimeout)
	defer cancel()

	kubeconfig, err := b.admin.LocalhostAdminKubeconfig(ctx)
	if err != nil {
		return renewal{}, err
	}

	if len(kubeconfig) == 0 {
		return renewal{}, errors.New("get localhost admin kubeconfig: not issued by Talos yet")
	}

	config, err := clientcmd.RESTConfigFromKubeConfig(kubeconfig)
	if err != nil {
		return renewal{}, fmt.Errorf("parse localhost admin kubeconfig: %w", err)
	}

	if b.LocalAPIServer != nil {
		if local := b.LocalAPIServer(ctx); local != "" {
			b.local.Store(&local)
		}

		config.Wrap(b.PreferLocal)
	}

	// A client without a rate limit, because it makes few requests, one after the other.
	config.QPS = -1

	transport, err := rest.HTTPClientFor(config)
	if err != nil {
		return renewal{}, fmt.Errorf("connect to %s: %w", config.Host, err)
	}

	// No connection with the admin's privileges stays open.
	defer utilnet.CloseIdleConnectionsFor(transport.Transport)

	client, err := kubernetes.NewForConfigAndClient(config, transport)
	if err != nil {
		return renewal{}, fmt.Errorf("connect to %s: %w", config.Host, err)
	}

	objects, err := metadata.NewForConfigAndClient(config, transport)
	if err != nil {
		return renewal{}, fmt.Errorf("connect to %s: %w", config.Host, err)
	}

	if err := b.applyRBAC(ctx, objects); err != nil {
		return renewal{}, err
	}

	request, err := client.CoreV1().ServiceAccounts(extension.Namespace).CreateToken(ctx, extension.ServiceAccount, &authenticationv1.TokenRequest{
		Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: new(int64(tokenLifetime.Seconds()))},
	}, metav1.CreateOptions{})
	if err != nil {
		return renewal{}, fmt.Errorf("request token for ServiceAccount %s/%s: %w", extension.Namespace, extension.ServiceAccount, err)
	}

	written, err := b.write(config, request.Status.Token)
	if err != nil {
		return renewal{}, err
	}

	expiry := request.Status.ExpirationTimestamp
	tokenExpiry.Set(float64(expiry.Unix()))

	return renewal{kubeconfig: written, lifetime: expiry.Sub(b.clock.Now()), admin: sha256.Sum256(kubeconfig)}, nil
}

// PreferLocal returns a RoundTripper that sends requests to the API server of the local machine or, if it does not
// listen, to KubePrism, which the kubeconfig names. After an API server was down, KubePrism does not use it for up to a
// minute.
func (b *Bootstrap) PreferLocal(next http.RoundTripper) http.RoundTripper {
	return &preferLocal{next, &b.local}
}

type preferLocal struct {
	next  http.RoundTripper
	local *atomic.Pointer[string]
}

// RoundTrip implements http.RoundTripper.
func (p *preferLocal) RoundTrip(request *http.Request) (*http.Response, error) {
	local := p.local.Load()
	if local == nil {
		return p.next.RoundTrip(request)
	}

	preferred := request.Clone(request.Context())
	preferred.URL.Host = *local

	response, err := p.next.RoundTrip(preferred)
	if dial := (*net.OpError)(nil); !errors.As(err, &dial) || dial.Op != "dial" {
		return response, err
	}

	fallback := request.Clone(request.Context())

	if request.GetBody != nil {
		if fallback.Body, err = request.GetBody(); err != nil {
			return nil, err
		}
	}

	return p.next.RoundTrip(fallback)
}

// WrappedRoundTripper implements utilnet.RoundTripperWrapper, with which idle connections are closed.
func (p *preferLocal) WrappedRoundTripper() http.RoundTripper { return p.next }

// wait returns when the token is due for renewal or Talos has issued another admin kubeconfig, before or during the
// watch, or when ctx ends.
func (b *Bootstrap) wait(ctx context.Context, current renewal) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()

	go func() {
		defer cancel()

		backoff.Sleep(ctx, b.clock, min(max(current.lifetime/2, minInterval), maxInterval))
	}()

	backoff.WatchLocal(ctx, b.clock, "localhost admin kubeconfig", b.admin.WatchLocalhostAdminKubeconfig, func(event state.Event) bool {
		certs, ok := event.Resource.(*secrets.Kubernetes)
		if !ok || event.Type == state.Destroyed {
			return false
		}

		kubeconfig := certs.TypedSpec().LocalhostAdminKubeconfig

		return kubeconfig != "" && sha256.Sum256([]byte(kubeconfig)) != current.admin
	})
}

// write writes the token and the kubeconfig, in this order and each atomically, and returns the kubeconfig.
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

// replaceFile writes a file atomically.
func replaceFile(path string, data []byte) error {
	next := path + ".next"

	err := os.WriteFile(next, data, 0o600)
	if err == nil {
		err = os.Rename(next, path)
	}

	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}

	return nil
}

func (b *Bootstrap) applyRBAC(ctx context.Context, client metadata.Interface) error {
	documents := utilyaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(extension.RBAC)))

	for {
		document, err := documents.Read()
		if errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return fmt.Errorf("read RBAC: %w", err)
		}

		var object unstructured.Unstructured
		if err := yaml.Unmarshal(document, &object.Object); err != nil {
			return fmt.Errorf("parse RBAC: %w", err)
		}

		resource, _ := meta.UnsafeGuessKindToResource(object.GroupVersionKind())

		if err := b.applyObject(ctx, client.Resource(resource).Namespace(object.GetNamespace()), &object); err != nil {
			return fmt.Errorf("apply %s %s: %w", object.GetKind(), object.GetName(), err)
		}
	}
}

// applyObject applies an object by server-side apply, or deletes it if what needs it is not enabled. It overrides
// conflicts, since talos-ccm owns objects of these names. During a rolling upgrade it leaves the objects of the newer
// version alone; the resource version of each write ensures that none was applied since it was read.
func (b *Bootstrap) applyObject(ctx context.Context, client metadata.ResourceInterface, object *unstructured.Unstructured) error {
	feature, optional := object.GetLabels()[extension.ControllerLabel]
	isDisabled := optional && !b.enabled(feature)

	existing, err := client.Get(ctx, object.GetName(), metav1.GetOptions{})

	switch {
	case apierrors.IsNotFound(err) && isDisabled:
		return nil
	case apierrors.IsNotFound(err):
	case err != nil:
		return err
	case rbacVersion(existing) > rbacVersion(object):
		if !b.foundNewer {
			klog.FromContext(ctx).Info("Left RBAC of a newer version unchanged", "version", rbacVersion(object), "newerVersion", rbacVersion(existing))
		}

		b.foundNewer = true

		return nil
	case isDisabled:
		err := client.Delete(ctx, existing.Name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{ResourceVersion: &existing.ResourceVersion}})
		if apierrors.IsNotFound(err) {
			return nil
		}

		return err
	default:
		object.SetResourceVersion(existing.ResourceVersion)
	}

	data, err := object.MarshalJSON()
	if err != nil {
		return err
	}

	_, err = client.Patch(ctx, object.GetName(), types.ApplyPatchType, data, metav1.PatchOptions{FieldManager: fieldManager, Force: new(true)})

	return err
}

func rbacVersion(object metav1.Object) int {
	version, _ := strconv.Atoi(object.GetAnnotations()[extension.RBACVersionAnnotation])

	return version
}
