package kube

import (
	"context"
	"errors"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/talos-ccm/talos-ccm/test/process"
)

const (
	serviceCIDR    = "10.0.0.0/16"
	serviceAddress = "10.0.0.1"
	apiServer      = "kube-apiserver"
)

// StopAPIServer stops the API server as a restart of its machine would: its port refuses connections until
// [Cluster.StartAPIServer]. An API server does not end by itself while clients watch, and is killed after five seconds,
// or as soon as ctx is done: a shorter deadline makes a shorter stop. It does nothing if the API server is stopped.
func (c *Cluster) StopAPIServer(ctx context.Context) {
	c.mu.Lock()
	defer c.mu.Unlock()

	c.apiserver.Stop(ctx)
	c.apiserver = nil
}

// StartAPIServer starts a stopped API server again, on the same port and with the same data and certificates, and waits
// until it serves. It does nothing if the API server runs. If kube-controller-manager has exited, it is restarted, as a kubelet
// would.
func (c *Cluster) StartAPIServer(ctx context.Context) error {
	c.mu.Lock()
	defer c.mu.Unlock()

	if c.etcd == nil {
		return errors.New("start kube-apiserver: the cluster is stopped")
	}

	if c.apiserver == nil {
		if err := c.startAPIServer(ctx); err != nil {
			return err
		}
	}

	if c.controllerManager == nil || c.controllerManager.Ended() == nil {
		return nil
	}

	return c.startControllerManager(ctx)
}

// RotateServingCA replaces the authority that signed the API server's certificate and restarts the API server, and
// kube-controller-manager with it. From then on [Cluster.CA], [Cluster.Config] and [Cluster.Kubeconfig] give the new
// authority alone; clients that know only the old one no longer trust the API server. Client certificates and tokens
// stay valid. Real kubelets that were started before keep the old authority, as those of a machine would until they are
// restarted.
func (c *Cluster) RotateServingCA(ctx context.Context) error {
	c.mu.Lock()
	defer c.mu.Unlock()

	if c.apiserver == nil {
		return errors.New("rotate the serving authority: kube-apiserver is stopped")
	}

	c.controllerManager.Stop(ctx)
	c.apiserver.Stop(ctx)
	c.controllerManager, c.apiserver = nil, nil

	err := c.pki.renewServing()
	if err == nil {
		err = c.startAPIServer(ctx)
	}

	if err != nil {
		return fmt.Errorf("rotate the serving authority: %w", err)
	}

	return c.startControllerManager(ctx)
}

func (c *Cluster) startAPIServer(ctx context.Context) error {
	var err error
	if c.apiserver, err = startReady(ctx, c.command(apiServer, c.apiServerFlags()), c.serving(c.Endpoint())); err == nil {
		return nil
	}

	if ended := c.etcd.Ended(); ended != nil { // which is why
		err = fmt.Errorf("%w\n%w\n%s", err, ended, c.etcd.LogTail())
	}

	return err
}

func (c *Cluster) apiServerFlags() []string {
	file := c.directory.path

	return append([]string{
		"--etcd-servers=http://" + c.ports[etcdPort].Address(),
		"--bind-address=127.0.0.1",
		"--advertise-address=127.0.0.1",
		fmt.Sprintf("--secure-port=%d", c.ports[apiServerPort].Number()),
		"--permit-port-sharing",
		"--cert-dir=" + file("apiserver-certs"),
		"--tls-cert-file=" + file(servingCertFile),
		"--tls-private-key-file=" + file(servingKeyFile),
		"--client-ca-file=" + file(clientCAFile),
		// As Talos has it: a kubelet may change its own Node and nothing else.
		"--authorization-mode=Node,RBAC",
		"--enable-admission-plugins=NodeRestriction",
		"--enable-bootstrap-token-auth",
		"--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-key-file=" + file(signingKeyFile),
		"--service-account-signing-key-file=" + file(signingKeyFile),
		"--service-cluster-ip-range=" + serviceCIDR,
		"--allow-privileged=true",
		// There is no front proxy, but components that delegate authentication require its CA.
		"--requestheader-client-ca-file=" + file(frontProxyCAFile),
		"--requestheader-allowed-names=front-proxy-client",
		"--requestheader-extra-headers-prefix=X-Remote-Extra-",
		"--requestheader-group-headers=X-Remote-Group",
		"--requestheader-username-headers=X-Remote-User",
		// Nothing routes the service address of the API server, and the reconciler would only delay its end.
		"--endpoint-reconciler-type=none",
	}, c.options.APIServerFlags...)
}

// serving returns a check that succeeds once the API server is ready and has created the namespace in which cluster
// components keep their objects.
func (c *Cluster) serving(endpoint string) func(context.Context) error {
	config := c.config(c.pki.admin)
	config.Host = endpoint
	client := kubernetes.NewForConfigOrDie(config)

	return func(ctx context.Context) error {
		if err := client.Discovery().RESTClient().Get().AbsPath("/readyz").Do(ctx).Error(); err != nil {
			return err
		}

		_, err := client.CoreV1().Namespaces().Get(ctx, metav1.NamespaceSystem, metav1.GetOptions{})

		return err
	}
}

// APIServer is an additional API server of a cluster, with the same data and certificates, as on a second control-plane
// machine. Its methods must not be called concurrently.
type APIServer struct {
	cluster *Cluster
	port    *Port
	process *process.Process
}

// AddAPIServer returns an API server that is not running. The caller stops it, and releases its port, before the cluster
// stops.
func (c *Cluster) AddAPIServer() (*APIServer, error) {
	port, err := ReservePort()

	return &APIServer{cluster: c, port: port}, err
}

// Port is the port on which the API server listens while it runs.
func (a *APIServer) Port() *Port { return a.port }

// Start starts a process, and waits until it serves.
func (a *APIServer) Start(ctx context.Context) (err error) {
	command := a.cluster.command(apiServer, append(a.cluster.apiServerFlags(), fmt.Sprintf("--secure-port=%d", a.port.Number())))
	command.Log = a.cluster.directory.path(fmt.Sprintf("%s-%d.log", apiServer, a.port.Number()))
	a.process, err = startReady(ctx, command, a.cluster.serving("https://"+a.port.Address()))

	return err
}

// Stop stops the process as [Cluster.StopAPIServer] does.
func (a *APIServer) Stop(ctx context.Context) {
	a.process.Stop(ctx)
	a.process = nil
}
