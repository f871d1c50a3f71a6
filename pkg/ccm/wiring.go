package ccm

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/informers"
	coreinformers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	controllerhealthz "k8s.io/controller-manager/pkg/healthz"
	"k8s.io/klog/v2"

	"github.com/talos-ccm/talos-ccm/pkg/config"
	"github.com/talos-ccm/talos-ccm/pkg/controllers/csrapproval"
	"github.com/talos-ccm/talos-ccm/pkg/controllers/lifecycle"
	nodecontroller "github.com/talos-ccm/talos-ccm/pkg/controllers/node"
	"github.com/talos-ccm/talos-ccm/pkg/controllers/nodeipam"
	"github.com/talos-ccm/talos-ccm/pkg/controllers/service"
	"github.com/talos-ccm/talos-ccm/pkg/controlplane"
	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	nodeevents "github.com/talos-ccm/talos-ccm/pkg/internal/nodes"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/pkg/recorder"
	"github.com/talos-ccm/talos-ccm/pkg/reflector"
	"github.com/talos-ccm/talos-ccm/pkg/rules"
	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
)

// csrWorkers is the number of requests that are reviewed concurrently. A review mostly waits for the API server.
const csrWorkers = 10

// controller is what all controllers have in common.
type controller interface {
	// Run runs the controller until ctx ends and its work has finished.
	Run(ctx context.Context)
	// Resync makes the controller re-evaluate its objects after the settings have changed.
	Resync()
}

// controllerType is a controller that --controllers can enable.
type controllerType struct {
	name, alias      string
	enabledByDefault bool
	// section is the key of the configuration that only this controller reads.
	section   string
	construct func(m *Manager, in inputs) (controller, error)
}

var controllers = []controllerType{
	{csrapproval.Name, csrapproval.Alias, true, "csrApproval", (*Manager).newCSRApproval},
	{nodecontroller.Name, nodecontroller.Alias, true, "transformations", (*Manager).newNodeController},
	{lifecycle.Name, lifecycle.Alias, true, "lifecycle", (*Manager).newLifecycle},
	{nodeipam.Name, nodeipam.Alias, false, "ipam", (*Manager).newNodeIPAM},
	{service.Name, service.Alias, false, "service", (*Manager).newService},
}

type inputs struct {
	conn         connection
	client       kubernetes.Interface // the controller's own, so that controllers do not share a rate limit
	nodes        coreinformers.NodeInformer
	inventory    *inventory.Inventory
	hasNodes     func() bool // the inventory has the claims of all Nodes that existed at the start
	probe        func(nodename string)
	controlPlane *controlplane.Reader
	podCIDRs     func() []netip.Prefix // which talos-ccm allocates from
	isRecorded   func(node *corev1.Node) bool
}

// control runs the reflector and the controllers until ctx ends and they have stopped. It sends an error to exceeded if
// they use too much memory. If the configuration uses facts for the first time, everything starts again, as on a new leader:
// a machine that was not read with these facts is like one that has not responded yet.
func (m *Manager) control(ctx context.Context, conn connection, exceeded chan<- error) (err error) {
	for _, c := range controllers {
		if m.options.Enabled(c.name) {
			conn.checks.AddHealthChecker(controllerhealthz.NamedPingChecker(c.name))
		}
	}

	for ctx.Err() == nil && err == nil {
		err = m.controlWithFacts(ctx, conn, exceeded)
	}

	return err
}

// controlWithFacts is control until the configuration uses facts that were not read.
func (m *Manager) controlWithFacts(ctx context.Context, conn connection, exceeded chan<- error) error {
	var group sync.WaitGroup
	defer group.Wait()

	ctx, cancel := context.WithCancel(ctx)
	defer cancel()

	defer m.store.Subscribe(func() {
		if m.settings() != m.store.Current() {
			klog.FromContext(ctx).Info("Configuration needs further facts; starting controllers again")
			cancel()
		}
	})()

	inv := inventory.New(m.clock.Now)
	defer countMachines(inv)()

	client, err := conn.newClient()
	if err != nil {
		return err
	}

	resync := conn.config.ComponentConfig.Generic.MinResyncPeriod.Duration
	factory := informers.NewSharedInformerFactoryWithOptions(client, resync, informers.WithTransform(trim))
	nodes := factory.Core().V1().Nodes()
	hasNodes, watchErr := nodeevents.Watch(nodes, inv.Claims.NodeChanged)

	refl := reflector.New(inv, m.dialer(conn.creds, client, nodes), m.clock)
	refl.ReadsMembers = func() bool { return m.settings().Lifecycle.Discovery }
	refl.Kinds = refl.Kinds.WithFacts(m.needFacts())

	records, err := recorder.NewLeader(client, nodes, inv, conn.recorder, m.clock, m.documentHash)
	if err := errors.Join(refl.FollowNodes(nodes), watchErr, err); err != nil {
		return err
	}

	readerConfig := controlplane.Config{Kubernetes: conn.config.Kubeconfig, Client: client, Nodes: nodes, Machines: inv, Clock: m.clock}
	if m.socket != nil {
		readerConfig.Local = refl.Local
	}

	readerConfig.Hosted, _ = m.options.hosted() // was validated
	controlPlane := controlplane.New(readerConfig)

	for _, c := range controllers {
		if !m.options.Enabled(c.name) {
			continue
		}

		client, err := conn.newClient()
		if err != nil {
			return err
		}

		ctrl, err := c.construct(m, inputs{conn, client, nodes, inv, hasNodes, refl.Probe, controlPlane, m.podCIDRs, records.IsRecorded})
		if err != nil {
			return fmt.Errorf("create %s: %w", c.name, err)
		}

		m.start(ctx, &group, c.name, ctrl)
	}

	group.Go(func() { m.limitMemory(ctx, nodes.Lister(), exceeded) })
	group.Go(func() { m.trackLocal(ctx, refl) })
	group.Go(func() { refl.Run(ctx) })
	group.Go(func() { records.Run(ctx) })
	group.Go(func() { controlPlane.Run(ctx) })
	factory.Start(ctx.Done())

	<-ctx.Done()

	return nil
}

// trim removes what no controller reads from a Node.
func trim(obj any) (any, error) {
	if node, ok := obj.(*corev1.Node); ok {
		node.Status.Images, node.Status.VolumesInUse, node.Status.VolumesAttached = nil, nil, nil
	}

	return obj, nil
}

func (m *Manager) start(ctx context.Context, group *sync.WaitGroup, name string, ctrl controller) {
	logger := klog.FromContext(ctx)

	group.Go(func() {
		defer m.store.Subscribe(ctrl.Resync)()

		ctrl.Run(klog.NewContext(ctx, klog.LoggerWithName(logger, name)))
	})

	logger.Info("Started controller", "controller", name)
}

// newClient returns a client with a rate limit of its own.
func (c connection) newClient() (kubernetes.Interface, error) {
	config := rest.CopyConfig(c.config.Kubeconfig)
	config.Wrap(c.guard)

	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("create Kubernetes client: %w", err)
	}

	return client, nil
}

// dialer dials machines over the network; control-plane machines only at addresses that no kubelet can write.
func (m *Manager) dialer(creds talosapi.Credentials, client kubernetes.Interface, nodes coreinformers.NodeInformer) talosapi.DialFunc {
	var etcdMembers controlplane.EtcdMembers
	if m.socket != nil {
		etcdMembers = m.socket.EtcdMembers
	}

	addresses := controlplane.NewAddresses(client, nodes.Lister(), etcdMembers, m.clock)

	return addresses.Guard(func(ctx context.Context, _ string, addr netip.Addr) (talosapi.State, error) {
		return talosapi.Dial(ctx, creds, addr)
	})
}

func (m *Manager) nodeOptions() nodespec.Options {
	return NodeOptions(m.settings(), m.options.ProviderIDFallback)
}

func (m *Manager) managed(node *corev1.Node, talos machine.Machine) bool {
	return nodespec.Selected(nodespec.NewInput(node, talos, m.nodeOptions()))
}

func (m *Manager) newNodeController(in inputs) (controller, error) {
	identity := in.controlPlane.Identity()

	ctrl, err := nodecontroller.New(nodecontroller.Config{
		Client:    in.client,
		Nodes:     in.nodes,
		Inventory: in.inventory,
		HasNodes:  in.hasNodes,
		Recorder:  in.conn.recorder,
		Clock:     m.clock,
		Options: func() nodespec.Options {
			options, current := m.nodeOptions(), identity.Current()
			options.Domains = current.Domains // known only if the identity is read
			options.ClusterAddress = func(ip netip.Addr) (source string, isKnown bool) {
				return current.SourceOf(ip, in.podCIDRs()), current.Known
			}

			return options
		},
		IsRecorded: in.isRecorded,
		Workers:    int(in.conn.config.ComponentConfig.NodeController.ConcurrentNodeSyncs),
	})
	if err != nil {
		return nil, err
	}

	if m.readsIdentity { // else nothing may read it
		identity.Subscribe(ctrl.Resync)
	}

	return ctrl, nil
}

func (m *Manager) newLifecycle(in inputs) (controller, error) {
	members := in.controlPlane.Members()

	ctrl, err := lifecycle.New(lifecycle.Config{
		Client:    in.client,
		Nodes:     in.nodes,
		Inventory: in.inventory,
		Recorder:  in.conn.recorder,
		Clock:     m.clock,
		Settings:  func() config.CompiledLifecycle { return m.settings().Lifecycle },
		Selected: func(node *corev1.Node, talos machine.Machine) bool {
			settings := m.settings()
			selector := cmp.Or(settings.Lifecycle.Selector, settings.NodeSelector)

			return lifecycle.Selects(selector, node, talos)
		},
		Spec: func(node *corev1.Node, talos machine.Machine) nodespec.Spec {
			spec, _ := nodespec.FromMetadata(nodespec.NewInput(node, talos, m.nodeOptions()))

			return spec
		},
		Absent:    func(nodename, nodeID string) string { return members.Current().Absent(nodename, nodeID) },
		Members:   func() map[string]netip.Addr { return members.Current().Addresses() },
		Resetting: m.resetting,
	})
	if err != nil {
		return nil, err
	}

	members.Subscribe(ctrl.Resync)

	return ctrl, nil
}

// podCIDRs returns the CIDRs that pod CIDRs are allocated from, without those of Talos, and without those that contain
// machines.
func (m *Manager) podCIDRs() []netip.Prefix {
	if !m.options.Enabled(nodeipam.Name) {
		return nil
	}

	options, _ := m.options.ipam() // was validated
	cidrs := slices.Clone(options.ClusterCIDRs)

	for _, pool := range m.settings().Pools {
		if !pool.ContainsMachines {
			cidrs = append(cidrs, pool.CIDRs...)
		}
	}

	return cidrs
}

func (m *Manager) newCSRApproval(in inputs) (controller, error) {
	return csrapproval.New(csrapproval.Config{
		Client:    in.client,
		Nodes:     in.nodes,
		Inventory: in.inventory,
		HasNodes:  in.hasNodes,
		Identity:  in.controlPlane.Identity(),
		Recorder:  in.conn.recorder,
		Clock:     m.clock,
		Managed: func(node *corev1.Node, talos machine.Machine) bool {
			return m.settings().CSRSelector.Matches(nodespec.FactsOf(node, talos))
		},
		Policy: func(node *corev1.Node, talos machine.Machine) csrpolicy.Policy {
			settings := m.settings()
			input := nodespec.NewInput(node, talos, NodeOptions(settings, m.options.ProviderIDFallback)).WithPeers(in.inventory, node.Name, in.nodes.Lister().Get)

			policy := csrapproval.PolicyFor(settings, node, input)
			policy.PodCIDRs = in.podCIDRs()
			policy.RequireStatement = m.socket != nil && nodespec.IsControlPlane(node)

			return policy
		},
		Workers: csrWorkers,
	})
}

func (m *Manager) newNodeIPAM(in inputs) (controller, error) {
	options, err := m.options.ipam()
	if err != nil {
		return nil, err
	}

	return nodeipam.New(nodeipam.Config{
		Client:       in.client,
		Nodes:        in.nodes,
		Inventory:    in.inventory,
		ControlPlane: in.controlPlane.Network(),
		Recorder:     in.conn.recorder,
		Clock:        m.clock,
		Selector:     func() *rules.Selector { return m.settings().IPAMSelector },
		Pools:        func() []nodeipam.Pool { return m.settings().Pools },
		Fallback:     func() bool { return m.settings().IPAMFallback },
		Options:      options,
	})
}

func (m *Manager) newService(in inputs) (controller, error) {
	identity := in.controlPlane.Identity()

	ctrl, err := service.New(service.Config{
		Client:    in.client,
		Nodes:     in.nodes,
		Inventory: in.inventory,
		Recorder:  in.conn.recorder,
		Probe:     in.probe,
		Managed:   m.managed,
		Identity: func() csrpolicy.ClusterIdentity {
			current := identity.Current()
			current.Reported = append(slices.Clone(current.Reported), csrpolicy.Report{ClusterSubjects: csrpolicy.ClusterSubjects{PodCIDRs: in.podCIDRs()}})

			return current
		},
		Options: func() config.Service { return m.settings().Service },
	})
	if err != nil {
		return nil, err
	}

	identity.Subscribe(ctrl.Resync)

	return ctrl, nil
}
