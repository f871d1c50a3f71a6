// Package kube starts a real Kubernetes control plane for tests and demos: etcd, kube-apiserver and
// kube-controller-manager on loopback, with certificates and signing keys of its own, the Node and RBAC authorizers and
// the NodeRestriction admission of a Talos cluster. On top of it, it registers Nodes as the kubelet of a Talos machine
// does, and starts real kubelets that run no containers.
//
// The components are upstream's, built once and cached ([Assets]), or those that KUBEBUILDER_ASSETS names.
//
// It never touches a cluster it did not start, listens on nothing but loopback, needs no privileges (a kubelet needs user
// namespaces), and leaves neither processes nor files: components die with the process that started them, also when it
// is killed, and a shell that outlives it removes their files.
package kube

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/talos-ccm/talos-ccm/test/process"
)

// Options choose what [Start] starts. The zero value is a control plane with nothing unusual.
type Options struct {
	// LogDir is where the components' logs go, to be kept after the cluster was stopped. It is created if missing. If
	// empty, logs live and die with the cluster's temporary folder.
	LogDir string
	// Progress receives lines for a human while components are built and started. A nil writer discards it.
	Progress io.Writer
	// APIServerFlags are appended to kube-apiserver's flags, where a later flag overrides an earlier one.
	APIServerFlags []string
	// ControllerManager says what kube-controller-manager does.
	ControllerManager ControllerManager
}

// Cluster is a running control plane. Its methods may be called concurrently.
type Cluster struct {
	options Options
	assets  string
	folder  *folder
	pki     *pki
	ports   [allPorts]*Port

	// mu is held while processes or the serving authority change.
	mu                sync.Mutex
	etcd              *process.Process
	apiserver         *process.Process
	controllerManager *process.Process
	kubelets          []*Kubelet
}

// The ports that the components listen on.
const (
	etcdPort = iota
	etcdPeerPort
	apiServerPort
	controllerManagerPort
	allPorts
)

// Start starts a control plane and returns when it serves and its controllers run. ctx bounds the start only: the cluster
// lives until [Cluster.Stop]. A start that fails has stopped everything again, and its error ends with the log of the
// component that failed.
func Start(ctx context.Context, options Options) (*Cluster, error) {
	assets, err := Assets(ctx, options.Progress)
	if err != nil {
		return nil, err
	}

	c := &Cluster{options: options, assets: assets}

	if err := c.start(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("start the control plane: %w", err), c.Stop())
	}

	return c, nil
}

func (c *Cluster) start(ctx context.Context) (err error) {
	c.mu.Lock()
	defer c.mu.Unlock()

	began := time.Now()

	if c.folder, err = newFolder(c.options.LogDir); err != nil {
		return err
	}

	for i := range c.ports {
		if c.ports[i], err = ReservePort(); err != nil {
			return err
		}
	}

	if c.pki, err = newPKI(c.folder); err != nil {
		return err
	}

	if err := c.startEtcd(); err != nil {
		return err
	}

	if err := c.startAPIServer(ctx); err != nil {
		return err
	}

	if err := c.startControllerManager(ctx); err != nil {
		return err
	}

	report(c.options.Progress, "Kubernetes control plane ready at %s after %.1f s", c.Endpoint(), time.Since(began).Seconds())

	return nil
}

// Endpoint is the URL of the API server; it stays the same when the API server restarts.
func (c *Cluster) Endpoint() string { return "https://" + c.ports[apiServerPort].Address() }

// LogDir is the folder with the components' logs, named etcd.log, kube-apiserver.log, kube-controller-manager.log and
// kubelet-<node>.log.
func (c *Cluster) LogDir() string { return c.folder.logs }

// PIDs are the ids of the running processes by component; a kubelet's component is kubelet-<node>.
func (c *Cluster) PIDs() map[string]int {
	c.mu.Lock()
	defer c.mu.Unlock()

	pids := make(map[string]int)

	for _, p := range []*process.Process{c.etcd, c.apiserver, c.controllerManager} {
		if p != nil {
			pids[p.Name] = p.PID()
		}
	}

	for _, k := range c.kubelets {
		pids[k.process.Name] = k.PID()
	}

	return pids
}

// Stop ends every component, first with SIGTERM and after five seconds with SIGKILL, and removes the cluster's files. It
// is safe to call again, and on a cluster of which parts were stopped.
func (c *Cluster) Stop() error {
	c.mu.Lock()
	defer c.mu.Unlock()

	// Clients end before their servers, or they spend their grace retrying.
	c.controllerManager.Terminate()

	for _, k := range c.kubelets {
		k.process.Terminate()
	}

	var errs []error

	for _, k := range c.kubelets {
		errs = append(errs, k.end())
	}

	for _, p := range []*process.Process{c.controllerManager, c.apiserver, c.etcd} {
		p.Stop(context.Background())
	}

	c.kubelets, c.controllerManager, c.apiserver, c.etcd = nil, nil, nil, nil

	for _, p := range c.ports {
		p.Release()
	}

	return errors.Join(append(errs, c.folder.remove())...)
}

// startProcess starts a component of the assets with its log in the log folder.
func (c *Cluster) startProcess(component string, args []string) (*process.Process, error) {
	return process.Start(process.Command{
		Name: component,
		Path: filepath.Join(c.assets, component),
		Args: args,
		Log:  filepath.Join(c.folder.logs, component+".log"),
	})
}

func (c *Cluster) startEtcd() (err error) {
	client, peer := "http://"+c.ports[etcdPort].Address(), "http://"+c.ports[etcdPeerPort].Address()

	c.etcd, err = c.startProcess("etcd", []string{
		"--data-dir=" + c.folder.path("etcd"),
		"--name=default",
		// The data need not survive a crash of the machine, and fsync is most of what etcd waits for.
		"--unsafe-no-fsync",
		"--log-level=warn",
		"--socket-reuse-port",
		"--listen-client-urls=" + client,
		"--advertise-client-urls=" + client,
		"--listen-peer-urls=" + peer,
		"--initial-advertise-peer-urls=" + peer,
		"--initial-cluster=default=" + peer,
	})

	return err
}

// report writes a line for a human. A nil writer discards it.
func report(w io.Writer, format string, args ...any) {
	if w != nil {
		fmt.Fprintf(w, format+"\n", args...)
	}
}

// writeFile writes a file that only this user can read.
func writeFile(path string, content []byte) error { return os.WriteFile(path, content, 0o600) }
