// Package controlplane reads the facts about the control plane that controllers depend on: the names and addresses of
// the cluster itself, for which no kubelet may get a certificate, and how kube-controller-manager assigns pod CIDRs.
//
// The facts come from the API server's serving certificate, from Kubernetes objects and from the control-plane
// machines. A machine is a control-plane machine if its Node has a label that no kubelet can set; the role that the
// machine reports does not count. Its answers count for the whole cluster. Therefore it is dialed only at addresses that
// no kubelet can write: TLS proves only that some machine of the cluster has an address. The package writes nothing.
package controlplane

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/cosi-project/runtime/pkg/state"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	utilerrors "k8s.io/apimachinery/pkg/util/errors"
	coreinformers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"

	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/internal/backoff"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
)

const (
	// refreshInterval bounds the age of the facts.
	refreshInterval = 30 * time.Second

	// retryFirst and retryMax pace refreshes while a fact that a controller needs is unknown.
	retryFirst = 500 * time.Millisecond
	retryMax   = 5 * time.Second

	// timeout bounds each source.
	timeout = 10 * time.Second
)

// Config configures a Reader. All fields are required unless noted.
type Config struct {
	// Kubernetes is the connection to the API server, and Client a client for it.
	Kubernetes *rest.Config
	Client     kubernetes.Interface
	// Nodes must not have been started before New.
	Nodes coreinformers.NodeInformer
	// Dial returns a talosapi.ControlPlane for the machine of each control-plane Node.
	Dial talosapi.DialFunc
	// LocalState is the state of this machine. Its kube-controller-manager configuration is read even while no Node has
	// the label of the control plane. Nil outside Talos.
	LocalState state.CoreState
	// Hosted contains the names and addresses of a control plane that has no machines in the cluster, according to the
	// operator. While no Node has the label of the control plane, no machine has to answer. Nil if the control plane has
	// machines.
	Hosted *csrpolicy.ClusterSubjects
	// ReadMembers reports whether Members is needed now. Nil means never.
	ReadMembers func() bool
	Clock       clock.Clock
}

// Network describes how the control plane is configured to assign addresses.
type Network struct {
	// Problem explains to operators why too little is known to assign addresses: the last refresh failed to read the
	// ServiceCIDRs, or the configuration of kube-controller-manager has not been read on any machine. It is empty if
	// there is no problem.
	Problem string
	// Machines is the number of control-plane machines, whether or not they have been read.
	Machines int
	// KCMConfigs are sorted by nodename. A machine that does not respond is listed with its last known configuration,
	// or not at all.
	KCMConfigs []KCMConfig
	// ServiceCIDRs are the CIDRs of the ServiceCIDR API; none in clusters without it. They are kept when they cannot be
	// read again.
	ServiceCIDRs []netip.Prefix
}

// IsMajority reports whether the configuration of kube-controller-manager is known for most of the control-plane
// machines.
func (n *Network) IsMajority() bool { return n.Machines == 0 || 2*len(n.KCMConfigs) > n.Machines }

// Allocators returns the nodenames of the kube-controller-managers that assign pod CIDRs.
func (n *Network) Allocators() []string {
	var names []string

	for _, config := range n.KCMConfigs {
		if config.AllocatesNodeCIDRs {
			names = append(names, config.Nodename)
		}
	}

	return names
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

	// The last answer of each source; nil or absent if it has never answered. Only Run uses them.
	certificate, service, serviceCIDRs *csrpolicy.ClusterSubjects                    // certificate is of all API servers
	certificates                       map[netip.AddrPort]*csrpolicy.ClusterSubjects // by endpoint; see readAPIServers
	endpoints                          []netip.AddrPort
	machines                           map[string]machineFacts // by nodename
	labeled                            bool                    // a Node has the label of the control plane
	local                              string                  // nodename of the local machine; empty if unknown
	paused                             bool                    // it was logged that the identity is incomplete
}

// New returns a Reader that has read nothing yet.
func New(cfg Config) *Reader {
	cfg.Nodes.Informer() // has the factory start it

	return &Reader{cfg: cfg, members: Value[*Members]{current: &Members{}}}
}

// Identity returns the names and addresses for which no kubelet may get a certificate. Its Known becomes true once the
// API server has answered, and the local machine or more than half of the control-plane machines. A hosted control plane
// has no machines. A source that stops responding keeps its last answer.
func (r *Reader) Identity() *Value[csrpolicy.ClusterIdentity] { return &r.identity }

// Network returns how the control plane is configured to assign addresses; nil before the first refresh.
func (r *Reader) Network() *Value[*Network] { return &r.network }

// Members returns the members of the cluster as of the last refresh; none while Config.ReadMembers returns false.
func (r *Reader) Members() *Value[*Members] { return &r.members }

// Run refreshes the facts until ctx ends. It returns at once if nothing has subscribed to them.
func (r *Reader) Run(ctx context.Context) {
	if !r.identity.subscribed() && !r.network.subscribed() && !r.members.subscribed() {
		return
	}

	// Without the Nodes, control-plane machines would be missed.
	if !cache.WaitForNamedCacheSyncWithContext(ctx, r.cfg.Nodes.Informer().HasSynced) {
		return
	}

	delays := backoff.New(retryFirst, retryMax)

	for r.refresh(ctx) {
		pause, network := refreshInterval, r.network.Current()

		if r.identity.subscribed() && !r.identity.Current().Known || r.network.subscribed() && (network.Problem != "" || !network.IsMajority()) {
			pause = delays.Step()
		} else {
			delays = backoff.New(retryFirst, retryMax)
		}

		if !backoff.Sleep(ctx, r.cfg.Clock, pause) {
			return
		}
	}
}

// refresh reads every source once and publishes the facts. It returns false if ctx has ended.
func (r *Reader) refresh(ctx context.Context) bool {
	var (
		group         sync.WaitGroup
		apiServersErr error
	)

	group.Go(func() { apiServersErr = r.readAPIServers(ctx) })

	serviceCIDRs, serviceCIDRsErr := readServiceCIDRs(ctx, r.cfg.Client)
	machineErrs := r.readMachines(ctx)

	group.Wait()

	if ctx.Err() != nil {
		return false // the errors say nothing about the sources
	}

	r.serviceCIDRs = cmp.Or(serviceCIDRs, r.serviceCIDRs)

	identity, logger := r.mergeIdentity(), klog.FromContext(ctx)
	if r.identity.set(identity) {
		logger.V(2).Info("Updated names and addresses of the cluster", "identity", identity)
	}

	r.network.set(r.mergeNetwork(serviceCIDRsErr, machineErrs))

	members := &Members{SeenBy: map[string]MemberList{}}

	for nodename, facts := range r.machines {
		if nodename != localMachine {
			members.ControlPlane++
		}

		if facts.members != nil {
			members.SeenBy[nodename] = facts.members
		}
	}

	r.members.set(members)

	err := utilerrors.NewAggregate(append(machineErrs, apiServersErr, serviceCIDRsErr))
	wasPaused := r.paused
	r.paused = !identity.Known && r.identity.subscribed()

	switch {
	case r.paused && !wasPaused:
		logger.Info("Cluster identity incomplete; CSR approval paused, retrying", "err", err)
	case wasPaused && !r.paused:
		logger.Info("Cluster identity complete; CSR approval resumed")
	case err != nil:
		logger.V(2).Info("Failed to read some facts about the control plane; using their last known values", "err", err)
	}

	return true
}

// mergeIdentity returns the last answers of all sources, in a fixed order: equal answers must compare as equal.
func (r *Reader) mergeIdentity() csrpolicy.ClusterIdentity {
	var none csrpolicy.ClusterSubjects

	certificate, service, serviceCIDRs := ptr.Deref(r.certificate, none), ptr.Deref(r.service, none), ptr.Deref(r.serviceCIDRs, none)
	answered := !slices.Contains([]*csrpolicy.ClusterSubjects{r.certificate, r.service, r.serviceCIDRs}, nil)

	// The default domain is reserved whether or not the cluster uses it.
	domains := append(domainsIn(certificate.APIServerNames), machine.DefaultDomain)
	slices.Sort(domains)

	id := csrpolicy.ClusterIdentity{Domains: slices.Compact(domains), Stated: csrpolicy.ClusterSubjects{
		APIServerNames: certificate.APIServerNames,
		APIServerIPs:   slices.Concat(certificate.APIServerIPs, service.APIServerIPs),
		VIPs:           service.VIPs,
	}}

	for _, endpoint := range r.endpoints {
		id.APIServerPorts = append(id.APIServerPorts, int32(endpoint.Port()))
	}

	report := func(source string, subjects csrpolicy.ClusterSubjects) {
		id.Reported = append(id.Reported, csrpolicy.Report{Source: source, ClusterSubjects: subjects})
	}

	nodes, _ := r.cfg.Nodes.Lister().List(labels.Everything()) // a list from the cache cannot fail

	// The kubelets of Nodes in a ServiceCIDR must not have all their requests denied.
	for _, cidr := range serviceCIDRs.ServiceCIDRs {
		inCIDR := func(node *corev1.Node) bool { return slices.ContainsFunc(nodespec.DialAddresses(node), cidr.Contains) }
		if slices.ContainsFunc(nodes, inCIDR) {
			report("a ServiceCIDR that contains addresses of Nodes", csrpolicy.ClusterSubjects{ServiceCIDRs: []netip.Prefix{cidr}})
		} else {
			id.Stated.ServiceCIDRs = append(id.Stated.ServiceCIDRs, cidr)
		}
	}

	if r.cfg.Hosted != nil {
		report("the flags about the hosted control plane", *r.cfg.Hosted)
	}

	known := 0

	for _, nodename := range slices.Sorted(maps.Keys(r.machines)) {
		if subjects := r.machines[nodename].subjects; subjects != nil {
			known++

			report(fmt.Sprintf("machine %q", nodename), *subjects)
		}
	}

	hasServices := func(report csrpolicy.Report) bool { return len(report.ServiceCIDRs) > 0 }
	knowsMachines := r.machines[r.local].subjects != nil || 2*known > len(r.machines) || r.isHosted()
	id.Known = answered && knowsMachines && (len(id.Stated.ServiceCIDRs) > 0 || slices.ContainsFunc(id.Reported, hasServices))

	return id
}

// isHosted reports whether Config.Hosted replaces the data of control-plane machines.
func (r *Reader) isHosted() bool { return r.cfg.Hosted != nil && !r.labeled }

func (r *Reader) mergeNetwork(serviceCIDRsErr error, machineErrs []error) *Network {
	network := &Network{Machines: len(r.machines)}

	for _, nodename := range slices.Sorted(maps.Keys(r.machines)) {
		if config := r.machines[nodename].kcm; config != nil {
			network.KCMConfigs = append(network.KCMConfigs, *config)
		}
	}

	if r.serviceCIDRs != nil {
		network.ServiceCIDRs = r.serviceCIDRs.ServiceCIDRs
	}

	switch {
	case serviceCIDRsErr != nil:
		network.Problem = "Failed to " + serviceCIDRsErr.Error()
	case len(network.KCMConfigs) == 0 && !r.isHosted():
		network.Problem = "The configuration of kube-controller-manager is not known for any control-plane machine"

		for _, err := range machineErrs {
			network.Problem += "; " + err.Error()
		}
	}

	return network
}
