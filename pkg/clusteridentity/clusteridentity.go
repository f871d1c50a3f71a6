// Package clusteridentity gathers the names and addresses that stand for the cluster, from whoever can be trusted to know them: the
// certificate that the API server shows us, Kubernetes' own objects, and the control-plane machines.
//
// It never asks a worker, and never believes a machine that it is of the control plane: the Node's label says so, which no kubelet can set.
// It writes nothing.
package clusteridentity

import (
	"context"
	"errors"
	"reflect"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
)

const (
	// renewal is how old the identity can be. What is added meanwhile is protected only by the claims of the machine that has it.
	renewal = 30 * time.Second

	// While something is not known nothing is approved.
	retryFirst = 500 * time.Millisecond
	retryMax   = 5 * time.Second

	// timeout bounds each question.
	timeout = 10 * time.Second
)

// Config is all a Gatherer needs. Every field must be set.
type Config struct {
	// Kubernetes is how the API server is reached, and Client a client for it.
	Kubernetes *rest.Config
	Client     kubernetes.Interface
	Nodes      corelisters.NodeLister
	// Dial connects to the machine that is said to be nodename's, at addr.
	Dial  talosapi.DialFunc
	Clock clock.Clock
}

// Gatherer holds the cluster's identity. Use New and Run. Its methods are safe for concurrent use.
type Gatherer struct {
	cfg Config

	mu       sync.Mutex
	handlers []func()
	current  csrpolicy.ClusterIdentity
	// The last answers, by source; nil: none yet.
	certificate *csrpolicy.ClusterIdentity
	objects     *csrpolicy.ClusterIdentity
	machines    map[string]csrpolicy.ClusterIdentity // by nodename
}

// New makes a Gatherer that knows nothing yet.
func New(cfg Config) *Gatherer {
	return &Gatherer{cfg: cfg, machines: map[string]csrpolicy.ClusterIdentity{}}
}

// Subscribe has handler called after every change. It must not block. Subscribe before Run.
func (g *Gatherer) Subscribe(handler func()) {
	g.mu.Lock()
	defer g.mu.Unlock()

	g.handlers = append(g.handlers, handler)
}

// Current is what is known. Known is true once every source has answered, and then stays: a source that no longer answers is known by
// its last answer.
func (g *Gatherer) Current() csrpolicy.ClusterIdentity {
	g.mu.Lock()
	defer g.mu.Unlock()

	return g.current
}

// Run gathers, and gathers anew every half a minute, until ctx ends.
func (g *Gatherer) Run(ctx context.Context) {
	backoff := newBackoff()

	for ctx.Err() == nil {
		err := g.gather(ctx)
		pause := renewal

		switch known := g.Current().Known; {
		case ctx.Err() != nil:
			return
		case !known:
			pause = backoff.Step()
			klog.FromContext(ctx).Info("Not all is known yet that stands for the cluster, and no certificate is approved before; trying again", "err", err)
		case err != nil:
			klog.FromContext(ctx).V(2).Info("Some of what stands for the cluster could not be read again, keeping what is known", "err", err)
		}

		select {
		case <-ctx.Done():
		case <-g.cfg.Clock.After(pause):
		}
	}
}

func newBackoff() wait.Backoff {
	return wait.Backoff{Duration: retryFirst, Factor: 2, Jitter: 0.1, Steps: 10, Cap: retryMax}
}

// gather asks every source once.
func (g *Gatherer) gather(ctx context.Context) error {
	certificate, certificateErr := fromCertificate(ctx, g.cfg.Kubernetes)
	objects, objectsErr := fromObjects(ctx, g.cfg.Client)
	machines, machinesErr := g.fromMachines(ctx)

	g.mu.Lock()

	if certificateErr == nil {
		g.certificate = &certificate
	}

	if objectsErr == nil {
		g.objects = &objects
	}

	g.machines = machines

	before := g.current
	g.current = g.merge()
	changed := !reflect.DeepEqual(before, g.current)
	handlers := g.handlers
	g.mu.Unlock()

	if changed {
		klog.FromContext(ctx).V(2).Info("What stands for the cluster has changed", "identity", g.Current())

		for _, handler := range handlers {
			handler()
		}
	}

	return errors.Join(certificateErr, objectsErr, machinesErr)
}

// merge is all that was answered. g.mu is held.
func (g *Gatherer) merge() csrpolicy.ClusterIdentity {
	all := csrpolicy.ClusterIdentity{
		Known: g.certificate != nil && g.objects != nil && len(g.machines) > 0,
		// What everybody calls it, whether or not it is called so here.
		Domains: []string{"cluster.local"},
	}

	for _, part := range g.machines {
		add(&all, part)
	}

	for _, part := range []*csrpolicy.ClusterIdentity{g.certificate, g.objects} {
		if part != nil {
			add(&all, *part)
		}
	}

	return normal(all)
}
