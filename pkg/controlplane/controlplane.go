// Package controlplane reads the facts about the control plane that controllers depend on: the names and addresses of
// the cluster itself, for which no kubelet may get a certificate, and how kube-controller-manager assigns pod CIDRs.
//
// The facts come from the API server's serving certificate, from Kubernetes objects and from the control-plane
// machines. Which machines belong to the control plane is decided by a label of their Nodes that no kubelet can set,
// never by what a machine reports about itself; where they are dialed, by what no kubelet can write. The package writes
// only Events.
package controlplane

import (
	"cmp"
	"context"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/cosi-project/runtime/pkg/state"
	utilerrors "k8s.io/apimachinery/pkg/util/errors"
	"k8s.io/apimachinery/pkg/util/sets"
	coreinformers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/internal/backoff"
	"github.com/talos-ccm/talos-ccm/pkg/internal/events"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
)

const (
	// refreshInterval bounds the age of the facts, and conflictInterval while kube-controller-manager keeps another
	// controller from assigning pod CIDRs.
	refreshInterval  = 30 * time.Second
	conflictInterval = 10 * time.Second

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
	// LocalState is the state of this machine, which is certain. Its kube-controller-manager configuration is read even
	// while no Node has the label of the control plane. Nil outside Talos.
	LocalState state.CoreState
	// Hosted is what the operator states about a control plane that has no machines in the cluster. It takes the place
	// of the machines' answers while no Node has the label of the control plane. Nil: there are machines.
	Hosted *csrpolicy.ClusterIdentity
	// PodCIDRs returns the CIDRs that this program allocates pod CIDRs from. Nil means none.
	PodCIDRs func() []netip.Prefix
	// ReadMembers reports whether Members is needed now. Nil means never.
	ReadMembers func() bool
	// Recorder receives Events about Nodes whose machines report implausible CIDRs, or about one control-plane Node if
	// PodCIDRs returns them.
	Recorder record.EventRecorder
	Clock    clock.Clock
}

// Network is how the control plane is configured to assign addresses.
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

// Allocators returns the names of the machines whose kube-controller-manager assigns pod CIDRs.
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
	certificate, service, serviceCIDRs *csrpolicy.ClusterIdentity
	machines                           map[string]machineFacts // by nodename
	labeled                            bool                    // a Node has the label of the control plane
	local                              string                  // nodename of the local machine; empty if unknown

	reporter *events.Reporter
}

type identity = csrpolicy.ClusterIdentity

// New returns a Reader that has read nothing yet.
func New(cfg Config) *Reader {
	cfg.Nodes.Informer() // has the factory start it

	return &Reader{cfg: cfg, reporter: events.New(cfg.Recorder)}
}

// Identity is what no kubelet may get a certificate for. Its Known becomes true once the API server and the local machine
// or most of the control-plane machines have answered, or the API server of a hosted control plane. A source that stops responding is represented by its last answer.
func (r *Reader) Identity() *Value[csrpolicy.ClusterIdentity] { return &r.identity }

// Network is how the control plane is configured to assign addresses; nil before the first refresh.
func (r *Reader) Network() *Value[*Network] { return &r.network }

// Members are the members of the cluster as of the last refresh. They are empty while Config.ReadMembers returns false.
func (r *Reader) Members() *Value[*Members] { return &r.members }

// Run refreshes the facts until ctx ends. It returns at once if nothing has subscribed to them.
func (r *Reader) Run(ctx context.Context) {
	if !r.isNeeded() {
		return
	}

	// Without the Nodes, control-plane machines would be missed.
	if !cache.WaitForNamedCacheSyncWithContext(ctx, r.cfg.Nodes.Informer().HasSynced) {
		return
	}

	delays := backoff.New(retryFirst, retryMax)

	for r.refresh(ctx) {
		network, pause := r.network.Current(), refreshInterval

		switch needsNetwork := r.network.subscribed(); {
		case r.identity.subscribed() && !r.identity.Current().Known, needsNetwork && network.Problem != "":
			pause = delays.Step()
		case needsNetwork && len(network.Allocators()) > 0:
			pause = conflictInterval

			fallthrough
		default:
			delays = backoff.New(retryFirst, retryMax)
		}

		if !backoff.Sleep(ctx, r.cfg.Clock, pause) {
			return
		}
	}
}

// isNeeded reports whether anything has subscribed.
func (r *Reader) isNeeded() bool {
	return r.identity.subscribed() || r.network.subscribed() || r.members.subscribed()
}

// refresh reads every source once and publishes the facts. It returns false if ctx has ended.
func (r *Reader) refresh(ctx context.Context) bool {
	certificate, certificateErr := readCertificate(ctx, r.cfg.Kubernetes)
	service, serviceErr := readService(ctx, r.cfg.Client)
	serviceCIDRs, serviceCIDRsErr := readServiceCIDRs(ctx, r.cfg.Client)
	machineErrs := r.readMachines(ctx)

	if ctx.Err() != nil {
		return false // the errors say nothing about the sources
	}

	r.certificate = cmp.Or(certificate, r.certificate)
	r.service = cmp.Or(service, r.service)
	r.serviceCIDRs = cmp.Or(serviceCIDRs, r.serviceCIDRs)

	r.reportImplausible(ctx)

	identity, logger := r.mergeIdentity(), klog.FromContext(ctx)
	if r.identity.set(identity) {
		logger.V(2).Info("Updated names and addresses of the cluster", "identity", identity)
	}

	r.network.set(r.mergeNetwork(serviceCIDRsErr, machineErrs))
	r.members.set(r.mergeMembers())

	err := utilerrors.NewAggregate(append(machineErrs, certificateErr, serviceErr, serviceCIDRsErr))

	switch {
	case !identity.Known && r.identity.subscribed():
		logger.Info("Cluster identity incomplete; CSR approval paused, retrying", "err", err)
	case err != nil:
		logger.V(2).Info("Failed to read some facts about the control plane; using their last known values", "err", err)
	}

	return true
}

// mergeIdentity returns everything that any source has answered, sorted and without duplicates so that equal identities
// compare as equal. The API server and the local machine are certain; other machines must agree.
func (r *Reader) mergeIdentity() identity {
	// The default domain is reserved whether or not the cluster uses it.
	certain := []*identity{r.certificate, r.service, r.serviceCIDRs, {Domains: []string{machine.DefaultDomain}}}
	answered := !slices.Contains(certain, nil)
	local := r.machines[r.local].identity

	var reported []*identity

	for _, facts := range r.machines {
		if facts.identity != nil {
			reported = append(reported, facts.identity)
		}
	}

	certain = append(certain, r.allocating(), r.cfg.Hosted)
	all := slices.Concat(certain, reported)
	d := dispute{certain: append(certain, local), reported: reported, machines: len(r.machines)}
	names := func(id *identity) []string { return id.APIServerNames }
	ips := func(id *identity) []netip.Addr { return id.APIServerIPs }
	vips := func(id *identity) []netip.Addr { return id.VIPs }

	return identity{
		Known:          answered && (local != nil || 2*len(reported) > len(r.machines) || r.isHosted()),
		Domains:        union(all, cmp.Compare, func(id *identity) []string { return id.Domains }),
		APIServerNames: union(all, cmp.Compare, names),
		APIServerIPs:   union(all, netip.Addr.Compare, ips),
		ServiceIPs:     union(all, netip.Addr.Compare, func(id *identity) []netip.Addr { return id.ServiceIPs }),
		ServiceCIDRs:   union(all, netip.Prefix.Compare, func(id *identity) []netip.Prefix { return id.ServiceCIDRs }),
		PodCIDRs:       union(all, netip.Prefix.Compare, func(id *identity) []netip.Prefix { return id.PodCIDRs }),
		VIPs:           union(all, netip.Addr.Compare, vips),
		Unconfirmed: csrpolicy.Unconfirmed{
			Names: disputed(d, cmp.Compare, names),
			IPs:   slices.Concat(disputed(d, netip.Addr.Compare, ips), disputed(d, netip.Addr.Compare, vips)),
			CIDRs: slices.Concat(disputed(d, netip.Prefix.Compare, cidrsOf), r.findImplausible(all)),
		},
	}
}

// isHosted reports whether Config.Hosted replaces the data of control-plane machines.
func (r *Reader) isHosted() bool { return r.cfg.Hosted != nil && !r.labeled }

// allocating returns what this program allocates from.
func (r *Reader) allocating() *identity {
	if r.cfg.PodCIDRs == nil {
		return &identity{}
	}

	return &identity{PodCIDRs: r.cfg.PodCIDRs()}
}

func cidrsOf(id *identity) []netip.Prefix { return slices.Concat(id.ServiceCIDRs, id.PodCIDRs) }

func union[T comparable](parts []*identity, compare func(a, b T) int, field func(*identity) []T) []T {
	var all []T

	for _, part := range parts {
		if part != nil {
			all = append(all, field(part)...)
		}
	}

	slices.SortFunc(all, compare)

	return slices.Compact(all)
}

// dispute is what several control-plane machines report.
type dispute struct {
	certain, reported []*identity
	// machines is the number of control-plane machines, whether or not they have answered.
	machines int
}

// disputed returns what at most half of the machines report, unless it is certain.
func disputed[T comparable](d dispute, compare func(a, b T) int, field func(*identity) []T) []T {
	certain, count := sets.New(union(d.certain, compare, field)...), map[T]int{}

	for _, id := range d.reported {
		for value := range sets.New(field(id)...) {
			count[value]++
		}
	}

	return slices.DeleteFunc(union(d.reported, compare, field), func(value T) bool { return certain.Has(value) || 2*count[value] > d.machines })
}

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
