// Package kube starts a real Kubernetes control plane for tests and demos: etcd, kube-apiserver and
// kube-controller-manager on loopback, with certificates and signing keys of its own, the Node and RBAC authorizers and
// the NodeRestriction admission of a Talos cluster. On top of it, it registers Nodes as the kubelet of a Talos machine
// does, and starts real kubelets that run no containers.
//
// The components are upstream's with talos-ccm's versions of their dependencies, built once and cached ([AssetsOf]), or those
// that KUBEBUILDER_ASSETS names.
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
	"path/filepath"
	"sync"
	"time"

	"github.com/talos-ccm/talos-ccm/test/process"
)

// Options choose what [Start] starts. The zero value is a control plane with nothing unusual.
type Options struct {
	// Progress receives lines for a human while components are built and started. A nil writer discards it.
	Progress io.Writer
	// APIServerFlags are appended to kube-apiserver's flags, where a later flag overrides an earlier one.
	APIServerFlags []string
	// ControllerManager says what kube-controller-manager does.
	ControllerManager ControllerManager
}

// Cluster is a running control plane. Its methods may be called concurrently.
type Cluster struct {
	options   Options
	assets    string
	directory *directory
	pki       *pki
	ports     [allPorts]*Port

	// mu is held while processes or the serving authority change.
	mu                sync.Mutex
	etcd              *process.Process
	apiserver         *process.Process
	controllerManager *process.Process
	kubelets          []*process.Process
}

// The ports that the components listen on.
const (
	etcdPort = iota
	apiServerPort
	controllerManagerPort
	allPorts
)

// Start starts a control plane and returns when it serves and its controllers run. ctx bounds the start only: the cluster
// lives until [Cluster.Stop]. A start that fails has stopped everything again, and its error ends with the log of the
// component that failed.
func Start(ctx context.Context, options Options) (*Cluster, error) {
	assets, err := AssetsOf(ctx, KubernetesVersion, options.Progress)
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

	if c.directory, err = newDirectory(); err != nil {
		return err
	}

	for i := range c.ports {
		if c.ports[i], err = ReservePort(); err != nil {
			return err
		}
	}

	if c.pki, err = newPKI(c.directory); err != nil {
		return err
	}

	if c.etcd, err = process.Start(c.command("etcd", c.etcdFlags())); err != nil {
		return err
	}

	if err := c.startAPIServer(ctx); err != nil {
		return err
	}

	if err := c.startControllerManager(ctx); err != nil {
		return err
	}

	if c.options.Progress != nil {
		fmt.Fprintf(c.options.Progress, "Kubernetes control plane ready at %s after %.1f s\n", c.Endpoint(), time.Since(began).Seconds())
	}

	return nil
}

// Endpoint is the URL of the API server; it stays the same when the API server restarts.
func (c *Cluster) Endpoint() string { return "https://" + c.ports[apiServerPort].Address() }

// LogDir is the directory with the components' logs, named etcd.log, kube-apiserver.log, kube-controller-manager.log and
// kubelet-<node>.log. Files that others create in it are removed with the cluster.
func (c *Cluster) LogDir() string { return c.directory.root }

// PIDs are the ids of the running processes by component; a kubelet's component is kubelet-<node>.
func (c *Cluster) PIDs() map[string]int {
	c.mu.Lock()
	defer c.mu.Unlock()

	pids := make(map[string]int)

	for _, p := range append([]*process.Process{c.etcd, c.apiserver, c.controllerManager}, c.kubelets...) {
		if p != nil && p.Ended() == nil {
			pids[p.Name] = p.PID()
		}
	}

	return pids
}

// Stop ends every component, first with SIGTERM and after five seconds with SIGKILL, and removes the cluster's files. It
// is safe to call again, and on a cluster of which parts were stopped.
func (c *Cluster) Stop() error {
	c.mu.Lock()
	defer c.mu.Unlock()

	// Clients end before their servers, or they spend their grace retrying.
	clients := append([]*process.Process{c.controllerManager}, c.kubelets...)
	for _, p := range clients {
		p.Terminate()
	}

	for _, p := range append(clients, c.apiserver, c.etcd) {
		p.Stop(context.Background())
	}

	c.kubelets, c.controllerManager, c.apiserver, c.etcd = nil, nil, nil, nil

	for _, p := range c.ports {
		p.Release()
	}

	return c.directory.remove()
}

// command runs a component of the assets with its log in the cluster's directory.
func (c *Cluster) command(component string, args []string) process.Command {
	return process.Command{Name: component, Path: filepath.Join(c.assets, component), Args: args, Log: c.directory.path(component + ".log")}
}

// startReady starts a process and waits until check succeeds. It stops a process that does not become ready.
func startReady(ctx context.Context, command process.Command, check func(context.Context) error) (*process.Process, error) {
	p, err := process.Start(command)
	if err != nil {
		return nil, err
	}

	if err := p.WaitReady(ctx, check); err != nil {
		p.Stop(ctx)

		return nil, err
	}

	return p, nil
}

func (c *Cluster) etcdFlags() []string {
	client := "http://" + c.ports[etcdPort].Address()

	return []string{
		"--data-dir=" + c.directory.path("etcd"),
		// The data need not survive a crash of the machine, and fsync is most of what etcd waits for.
		"--unsafe-no-fsync",
		"--log-level=warn",
		"--socket-reuse-port",
		"--listen-client-urls=" + client,
		"--advertise-client-urls=" + client,
		"--listen-peer-urls=http://127.0.0.1:0", // there is no peer
	}
}
