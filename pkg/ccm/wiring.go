package ccm

import (
	"context"
	"fmt"
	"net/netip"
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/cloud-provider/app"
	"k8s.io/cloud-provider/names"
	genericcontrollermanager "k8s.io/controller-manager/app"
	"k8s.io/controller-manager/pkg/clientbuilder"
	controllerhealthz "k8s.io/controller-manager/pkg/healthz"
	"k8s.io/klog/v2"

	"github.com/talos-ccm/talos-ccm/pkg/controllers/csrapproval"
	nodecontroller "github.com/talos-ccm/talos-ccm/pkg/controllers/node"
	"github.com/talos-ccm/talos-ccm/pkg/controllers/nodeipam"
	"github.com/talos-ccm/talos-ccm/pkg/controlplane"
	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/pkg/provider"
	"github.com/talos-ccm/talos-ccm/pkg/reflector"
	"github.com/talos-ccm/talos-ccm/pkg/rules"
	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
)

// csrApproval is the name of the upstream Talos CCM for the controller.
const (
	csrApproval      = "certificatesigningrequest-approving-controller"
	csrApprovalAlias = "node-csr-approval"
)

// csrWorkers is the number of requests that are reviewed concurrently. A review mostly waits for the API server.
const csrWorkers = 10

// control runs the reflector and the controllers until ctx ends and they have stopped.
func (m *controllerManager) control(ctx context.Context) error {
	inv := inventory.New(m.app.clock.Now)
	defer countMachines(inv)()

	var group sync.WaitGroup
	defer group.Wait()

	ctx, cancel := context.WithCancel(ctx)
	defer cancel()

	dial := m.dialer(ctx)
	refl := reflector.New(inv, dial, m.app.clock)

	if err := refl.FollowNodes(m.config.SharedInformers.Core().V1().Nodes()); err != nil {
		return err
	}

	controllerContext, err := app.CreateControllerContext(m.config, clientbuilder.SimpleControllerClientBuilder{ClientConfig: m.config.Kubeconfig}, ctx.Done())
	if err != nil {
		return fmt.Errorf("create controller context: %w", err)
	}

	controlPlane, err := m.newControlPlane(dial)
	if err != nil {
		return err
	}

	framework := app.ConstructControllerInitializers(app.DefaultInitFuncConstructors, m.config, provider.New(inv, m.nodeOptions))

	start := func(ctx context.Context, name string) (bool, error) {
		// Each controller has a client of its own, so that controllers do not share a rate limit.
		client, err := kubernetes.NewForConfig(m.config.Kubeconfig)
		if err != nil {
			return false, fmt.Errorf("create Kubernetes client: %w", err)
		}

		var run func(ctx context.Context)

		switch name {
		case names.CloudNodeController:
			run, err = m.newNodeController(client, inv)
		case csrApproval:
			run, err = m.newCSRApproval(client, inv, controlPlane)
		case nodeipam.Name:
			run, err = m.newNodeIPAM(client, inv, controlPlane)
		default:
			_, started, err := framework[name](ctx, controllerContext)

			return started, err
		}

		if run != nil {
			group.Go(func() { run(ctx) })
		}

		return run != nil, err
	}

	if err := m.startControllers(ctx, start); err != nil {
		return err
	}

	group.Go(func() { refl.Run(ctx) })
	group.Go(func() { controlPlane.Run(ctx) })
	m.config.SharedInformers.Start(ctx.Done())
	controllerContext.InformerFactory.Start(ctx.Done())
	close(controllerContext.InformersStarted)

	<-ctx.Done()

	return nil
}

// startControllers starts the enabled controllers. start returns false for a controller that has nothing to do.
func (m *controllerManager) startControllers(ctx context.Context, start func(ctx context.Context, name string) (bool, error)) error {
	logger := klog.FromContext(ctx)

	for _, name := range controllerNames() {
		if !genericcontrollermanager.IsControllerEnabled(name, disabledByDefault(), m.config.ComponentConfig.Generic.Controllers) {
			continue
		}

		started, err := start(klog.NewContext(ctx, klog.LoggerWithName(logger, name)), name)
		if err != nil {
			return fmt.Errorf("start %s: %w", name, err)
		}

		if !started {
			logger.Info("Controller has nothing to do; not started", "controller", name)

			continue
		}

		logger.Info("Started controller", "controller", name)
		m.checks.AddHealthChecker(controllerhealthz.NamedPingChecker(name))
	}

	return nil
}

// dialer dials the local machine over machine.sock, and all others over the network.
func (m *controllerManager) dialer(ctx context.Context) talosapi.DialFunc {
	local := m.app.localNodename(ctx)

	return func(nodename string, addr netip.Addr) (talosapi.State, error) {
		if local != "" && nodename == local {
			return talosapi.DialSocket(m.app.options.MachineSocket)
		}

		return talosapi.Dial(m.creds, addr)
	}
}

// nodeOptions returns the options for Nodes that are in force.
func (m *controllerManager) nodeOptions() nodespec.Options {
	return NodeOptions(m.app.settings.Current(), m.app.options.ProviderIDFallback)
}

// newControlPlane returns the reader of the control plane, which the controllers share.
func (m *controllerManager) newControlPlane(dial talosapi.DialFunc) (*controlplane.Reader, error) {
	client, err := kubernetes.NewForConfig(m.config.Kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("create Kubernetes client: %w", err)
	}

	cfg := controlplane.Config{
		Kubernetes: m.config.Kubeconfig,
		Client:     client,
		Nodes:      m.config.SharedInformers.Core().V1().Nodes(),
		Dial:       dial,
		Clock:      m.app.clock,
	}
	if m.app.socket != nil {
		cfg.LocalState = m.app.socket.Reader
	}

	return controlplane.New(cfg), nil
}

func (m *controllerManager) newNodeController(client kubernetes.Interface, inv *inventory.Inventory) (func(context.Context), error) {
	ctrl, err := nodecontroller.New(nodecontroller.Config{
		Client:    client,
		Nodes:     m.config.SharedInformers.Core().V1().Nodes(),
		Inventory: inv,
		Recorder:  m.recorder,
		Clock:     m.app.clock,
		Options:   m.nodeOptions,
	})
	if err != nil {
		return nil, err
	}

	return func(ctx context.Context) {
		defer m.app.settings.Subscribe(ctrl.Resync)()

		ctrl.Run(ctx, int(m.config.ComponentConfig.NodeController.ConcurrentNodeSyncs))
	}, nil
}

func (m *controllerManager) newCSRApproval(
	client kubernetes.Interface, inv *inventory.Inventory, controlPlane *controlplane.Reader,
) (func(context.Context), error) {
	ctrl, err := csrapproval.New(csrapproval.Config{
		Client:    client,
		Nodes:     m.config.SharedInformers.Core().V1().Nodes(),
		Inventory: inv,
		Identity:  controlPlane.Identity(),
		Recorder:  m.recorder,
		Clock:     m.app.clock,
		Managed: func(node *corev1.Node, talos machine.Machine) bool {
			return nodespec.Managed(nodespec.NewInput(node, talos, m.nodeOptions()))
		},
		Policy: func(node *corev1.Node, talos machine.Machine) csrpolicy.Policy {
			return csrapproval.PolicyFor(m.app.settings.Current(), node, talos)
		},
	})
	if err != nil {
		return nil, err
	}

	return func(ctx context.Context) {
		defer m.app.settings.Subscribe(ctrl.Requeue)()

		ctrl.Run(ctx, csrWorkers)
	}, nil
}

// newNodeIPAM returns nil if the allocation of pod CIDRs is disabled.
func (m *controllerManager) newNodeIPAM(
	client kubernetes.Interface, inv *inventory.Inventory, controlPlane *controlplane.Reader,
) (func(context.Context), error) {
	if !m.app.options.Framework.KubeCloudShared.AllocateNodeCIDRs {
		return nil, nil
	}

	options, err := m.app.options.ipam()
	if err != nil {
		return nil, err
	}

	ctrl, err := nodeipam.New(nodeipam.Config{
		Client:       client,
		Nodes:        m.config.SharedInformers.Core().V1().Nodes(),
		Inventory:    inv,
		ControlPlane: controlPlane.Network(),
		Recorder:     m.recorder,
		Clock:        m.app.clock,
		Selector:     func() *rules.Selector { return m.app.settings.Current().NodeSelector },
		Pools: func() (pools []nodeipam.Pool) {
			for _, pool := range m.app.settings.Current().Pools {
				pools = append(pools, nodeipam.Pool(pool))
			}

			return pools
		},
		Options: options,
	})
	if err != nil {
		return nil, err
	}

	return func(ctx context.Context) {
		defer m.app.settings.Subscribe(ctrl.Resync)()

		ctrl.Run(ctx)
	}, nil
}
