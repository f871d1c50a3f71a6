// Package controlplane merges the facts about the control plane that controllers depend on: the names and addresses of
// the cluster itself, for which no kubelet may get a certificate, how kube-controller-manager assigns pod CIDRs, and the
// members of the cluster.
//
// The facts come from the API server's serving certificate, from Kubernetes objects and from the control-plane
// machines, which the reflector reads. A machine is a control-plane machine if its Node has a label that no kubelet can
// set; the role that the machine reports does not count. Its answers count for the whole cluster. Therefore it is dialed
// only at addresses that no kubelet can write: TLS proves only that some machine of the cluster has an address. The
// package writes nothing.
package controlplane

import (
	"context"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/labels"
	utilerrors "k8s.io/apimachinery/pkg/util/errors"
	"k8s.io/apimachinery/pkg/util/wait"
	coreinformers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/internal/backoff"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
)

const (
	// refreshInterval bounds the age of the API server's answers.
	refreshInterval = 30 * time.Second

	// retryFirst and retryMax pace refreshes while a fact that a controller needs is unknown.
	retryFirst = 500 * time.Millisecond
	retryMax   = 5 * time.Second

	// timeout bounds each source at the API server, and how long the first facts wait for the machines.
	timeout = 10 * time.Second
)

// Config configures a Reader. All fields are required unless noted.
type Config struct {
	// Kubernetes is the connection to the API server, and Client a client for it.
	Kubernetes *rest.Config
	Client     kubernetes.Interface
	// Nodes must not have been started before New.
	Nodes coreinformers.NodeInformer
	// Machines has the machines of all Nodes. It must be empty before New.
	Machines *inventory.Inventory
	// Local returns the nodename of the local machine; an empty string if it is not known yet. The configuration of its
	// kube-controller-manager counts even while no Node has the label of the control plane. Nil outside Talos.
	Local func() string
	// Hosted contains the names and addresses of a control plane that has no machines in the cluster, according to the
	// operator. While no Node has the label of the control plane, no machine has to answer. Nil if the control plane has
	// machines.
	Hosted *csrpolicy.ClusterSubjects
	Clock  clock.Clock
}

// Value is a fact that changes over time. Its methods are safe for concurrent use.
type Value[T any] struct {
	mu       sync.Mutex
	current  T
	handlers []func()
}

// Current returns the fact as of the last refresh. The caller must not change it.
func (v *Value[T]) Current() T {
	v.mu.Lock()
	defer v.mu.Unlock()

	return v.current
}

// Subscribe calls handler after every change. A subscriber that calls Current afterwards misses none. The handler must
// not block.
func (v *Value[T]) Subscribe(handler func()) {
	v.mu.Lock()
	defer v.mu.Unlock()

	v.handlers = append(v.handlers, handler)
}

func (v *Value[T]) subscribed() bool {
	v.mu.Lock()
	defer v.mu.Unlock()

	return len(v.handlers) > 0
}

// set replaces the fact, calls the handlers if it has changed, and reports whether it has.
func (v *Value[T]) set(value T) bool {
	v.mu.Lock()
	changed := !reflect.DeepEqual(v.current, value)
	v.current = value
	handlers := v.handlers
	v.mu.Unlock()

	if changed {
		for _, handler := range handlers {
			handler()
		}
	}

	return changed
}

// Reader keeps the facts up to date. Use New and Run.
type Reader struct {
	cfg      Config
	identity Value[csrpolicy.ClusterIdentity]
	network  Value[*Network]
	members  Value[*Members]
	changed  chan struct{} // receives after a control-plane machine has changed

	// Only Run uses these.
	apiServer apiServer
	paused    bool // it was logged that the identity is incomplete
}

// New returns a Reader that has read nothing yet.
func New(cfg Config) *Reader {
	cfg.Nodes.Informer() // has the factory start it

	r := &Reader{cfg: cfg, members: Value[*Members]{current: &Members{}}, changed: make(chan struct{}, 1)}

	cfg.Machines.Subscribe(func(nodename string) {
		node, err := cfg.Nodes.Lister().Get(nodename)
		if isLabeled := err == nil && nodespec.IsControlPlane(node); isLabeled || cfg.Local != nil && nodename == cfg.Local() {
			select {
			case r.changed <- struct{}{}:
			default: // Run has not received the last one yet
			}
		}
	})

	return r
}

// Identity returns the names and addresses for which no kubelet may get a certificate. Its Known becomes true once the
// API server has answered, and the local machine or more than half of the control-plane machines. A hosted control plane
// has no machines. A source that stops responding keeps its last answer.
func (r *Reader) Identity() *Value[csrpolicy.ClusterIdentity] { return &r.identity }

// Network returns how the control plane is configured to assign addresses; nil before the first refresh.
func (r *Reader) Network() *Value[*Network] { return &r.network }

// Members returns the members of the cluster as the control-plane machines list them; none while they are not read.
func (r *Reader) Members() *Value[*Members] { return &r.members }

// Run keeps the facts up to date until ctx ends. It returns at once if nothing has subscribed to them.
func (r *Reader) Run(ctx context.Context) {
	if !r.identity.subscribed() && !r.network.subscribed() && !r.members.subscribed() {
		return
	}

	// Without the Nodes, control-plane machines would be missed.
	if !cache.WaitForNamedCacheSyncWithContext(ctx, r.cfg.Nodes.Informer().HasSynced) {
		return
	}

	r.apiServer.read(ctx, r.cfg.Kubernetes, r.cfg.Client)

	// A machine that was not read yet may be the one that assigns pod CIDRs.
	timer := r.cfg.Clock.NewTimer(timeout)
	for isWaiting := true; isWaiting && r.facts().isPending(); {
		isWaiting = r.awaitChange(ctx, timer)
	}

	delays := backoff.New(retryFirst, retryMax)

	for ctx.Err() == nil { // else the errors say nothing about the API server
		r.publish(ctx)
		timer.Stop()

		timer = r.cfg.Clock.NewTimer(r.pause(&delays))
		for r.awaitChange(ctx, timer) {
			r.publish(ctx)
		}

		r.apiServer.read(ctx, r.cfg.Kubernetes, r.cfg.Client)
	}

	timer.Stop()
}

// pause returns when to read the API server again.
func (r *Reader) pause(delays *wait.Backoff) time.Duration {
	network := r.network.Current()
	if r.identity.subscribed() && !r.identity.Current().Known || r.network.subscribed() && (network.Problem != "" || !network.IsMajority()) {
		return delays.Step()
	}

	*delays = backoff.New(retryFirst, retryMax)

	return refreshInterval
}

// awaitChange waits for a change of a control-plane machine. It returns false if timer fires or ctx ends first.
func (r *Reader) awaitChange(ctx context.Context, timer clock.Timer) bool {
	select {
	case <-ctx.Done():
		return false
	case <-timer.C():
		return false
	case <-r.changed:
		return true
	}
}

func (r *Reader) facts() *facts {
	f := &facts{apiServer: r.apiServer, hosted: r.cfg.Hosted}
	f.nodes, _ = r.cfg.Nodes.Lister().List(labels.Everything()) // a list from the cache cannot fail

	f.isLabeled = slices.ContainsFunc(f.nodes, nodespec.IsControlPlane)

	for _, node := range f.nodes {
		if !nodespec.IsControlPlane(node) {
			continue
		}

		// The kubelet writes the operating system: a machine that was tracked counts, whatever it is now.
		entry := r.cfg.Machines.Get(node.Name)
		if nodespec.IsTalos(node) || entry.Condition != inventory.Unknown {
			f.machines = append(f.machines, source{node.Name, entry})
		}
	}

	if len(f.machines) == 0 && r.cfg.Local != nil && !f.isHosted() {
		f.machines = []source{{localMachine, r.cfg.Machines.Get(r.cfg.Local())}}
	}

	slices.SortFunc(f.machines, func(a, b source) int { return strings.Compare(a.nodename, b.nodename) })

	return f
}

func (r *Reader) publish(ctx context.Context) {
	facts, logger := r.facts(), klog.FromContext(ctx)

	identity := facts.identity()
	if r.identity.set(identity) {
		logger.V(2).Info("Updated names and addresses of the cluster", "identity", identity)
	}

	r.network.set(facts.network())
	r.members.set(facts.members())

	wasPaused := r.paused
	r.paused = !identity.Known && r.identity.subscribed()

	err := utilerrors.NewAggregate(append(facts.problems(), facts.apiServer.err))

	switch {
	case r.paused && !wasPaused:
		logger.Info("Cluster identity incomplete; retrying", "err", err)
	case wasPaused && !r.paused:
		logger.Info("Cluster identity complete")
	case err != nil:
		logger.V(2).Info("Failed to read some facts about the control plane; using their last known values", "err", err)
	}
}
