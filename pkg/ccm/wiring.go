package ccm

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
	cloudprovider "k8s.io/cloud-provider"
	"k8s.io/cloud-provider/app"
	cloudconfig "k8s.io/cloud-provider/app/config"
	"k8s.io/cloud-provider/names"
	genericcontrollermanager "k8s.io/controller-manager/app"
	"k8s.io/controller-manager/controller"

	"github.com/talos-ccm/talos-ccm/pkg/clusteridentity"
	"github.com/talos-ccm/talos-ccm/pkg/config"
	"github.com/talos-ccm/talos-ccm/pkg/controllers/csrapproval"
	nodecontroller "github.com/talos-ccm/talos-ccm/pkg/controllers/node"
	"github.com/talos-ccm/talos-ccm/pkg/controllers/nodeipam"
	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/pkg/rules"
	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
)

// csrApproval is the controller's name upstream, and node-csr-approval another for it.
const (
	csrApproval      = "certificatesigningrequest-approving-controller"
	csrApprovalAlias = "node-csr-approval"
)

// csrWorkers review requests side by side: each waits for the API server most of the time.
const csrWorkers = 10

// controllers are what our own controllers have in common.
type controllers struct {
	*leader

	group     *sync.WaitGroup
	inventory *inventory.Inventory
	dial      talosapi.DialFunc
}

// starter starts one of our controllers in c.group, or returns false if there is nothing for it to do.
type starter func(ctx context.Context) (started bool, err error)

// constructors are the framework's and ours. Our node controller takes the place, and the name, of the framework's.
func (c controllers) constructors() map[string]app.ControllerInitFuncConstructor {
	constructors := maps.Clone(app.DefaultInitFuncConstructors)

	for name, start := range map[string]starter{
		names.CloudNodeController: c.startNode,
		csrApproval:               c.startCSRApproval,
		nodeipam.Name:             c.startNodeIPAM,
	} {
		constructors[name] = app.ControllerInitFuncConstructor{
			InitContext: app.ControllerInitContext{ClientName: component},
			Constructor: start.construct,
		}
	}

	return constructors
}

func (start starter) construct(app.ControllerInitContext, *cloudconfig.CompletedConfig, cloudprovider.Interface) app.InitFunc {
	return func(ctx context.Context, _ genericcontrollermanager.ControllerContext) (controller.Interface, bool, error) {
		started, err := start(ctx)

		return nil, started, err
	}
}

// client is one controller's own, and with it the rate limit: none of them is to wait for another's writes.
func (c controllers) client() (kubernetes.Interface, error) {
	client, err := kubernetes.NewForConfig(c.config.Kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("connect to Kubernetes: %w", err)
	}

	return client, nil
}

func (c controllers) startNode(ctx context.Context) (bool, error) {
	client, err := c.client()
	if err != nil {
		return false, err
	}

	ctrl, err := nodecontroller.New(nodecontroller.Config{
		Client:    client,
		Nodes:     c.config.SharedInformers.Core().V1().Nodes(),
		Inventory: c.inventory,
		Recorder:  c.recorder,
		Clock:     c.clock,
		Options:   c.nodeOptions,
	})
	if err != nil {
		return false, err
	}

	c.group.Go(func() {
		defer c.settings.Subscribe(ctrl.Resync)()

		ctrl.Run(ctx, int(c.config.ComponentConfig.NodeController.ConcurrentNodeSyncs))
	})

	return true, nil
}

func (c controllers) startCSRApproval(ctx context.Context) (bool, error) {
	nodes := c.config.SharedInformers.Core().V1().Nodes()

	client, err := c.client()
	if err != nil {
		return false, err
	}

	identity := clusteridentity.New(clusteridentity.Config{
		Kubernetes: c.config.Kubeconfig,
		Client:     client,
		Nodes:      nodes.Lister(),
		Dial:       c.dial,
		Clock:      c.clock,
	})

	ctrl, err := csrapproval.New(csrapproval.Config{
		Client:    client,
		Nodes:     nodes,
		Inventory: c.inventory,
		Identity:  identity,
		Recorder:  c.recorder,
		Clock:     c.clock,
		Managed:   c.claims,
		Policy:    c.csrPolicy,
	})
	if err != nil {
		return false, err
	}

	c.group.Go(func() { identity.Run(ctx) })
	c.group.Go(func() {
		defer c.settings.Subscribe(ctrl.Requeue)()

		ctrl.Run(ctx, csrWorkers)
	})

	return true, nil
}

// claims tells whether a Node that runs Talos is ours, as far as its machine is known.
func (c controllers) claims(node *corev1.Node) bool {
	return nodespec.Managed(nodespec.NewInput(node, c.inventory.Get(node.Name).Machine, c.nodeOptions()))
}

func (c controllers) csrPolicy(node *corev1.Node, m machine.Machine) csrpolicy.Policy {
	return csrPolicy(c.settings.Current(), node, m)
}

// csrPolicy is what the configuration allows the machine: the names that rules give it, which its kubelet asks for since they are on its Node, and what
// is allowed by name.
func csrPolicy(current *config.Compiled, node *corev1.Node, m machine.Machine) csrpolicy.Policy {
	policy := csrpolicy.Policy{MaxExpiration: current.MaxExpiration}

	if m.Type.IsControlPlane() && !clusteridentity.IsControlPlane(node) {
		return policy // a machine can say so of itself as it likes
	}

	facts := nodespec.NewInput(node, m, nodespec.Options{}).Facts()

	transformed := current.Rules.Apply(facts)
	for field, name := range map[string]string{"InternalDNS": transformed.Platform.InternalDNS, "ExternalDNS": transformed.Platform.ExternalDNS} {
		if _, replaced := transformed.Replaced[field]; replaced && name != "" {
			policy.ExtraNames = append(policy.ExtraNames, name)
		}
	}

	for _, allowed := range current.AllowedSANs {
		if allowed.Selector.Matches(facts) {
			policy.ExtraNames = append(policy.ExtraNames, allowed.DNSNames...)
			policy.ExtraIPs = append(policy.ExtraIPs, allowed.IPAddresses...)
		}
	}

	return policy
}

func (c controllers) startNodeIPAM(ctx context.Context) (bool, error) {
	if !c.options.Framework.KubeCloudShared.AllocateNodeCIDRs {
		return false, nil
	}

	options, err := c.options.ipam()
	if err != nil {
		return false, err
	}

	client, err := c.client()
	if err != nil {
		return false, err
	}

	var own talosapi.State
	if c.socket != nil {
		own = c.socket.Reader
	}

	ctrl, err := nodeipam.New(nodeipam.Config{
		Client:     client,
		Nodes:      c.config.SharedInformers.Core().V1().Nodes(),
		Inventory:  c.inventory,
		Recorder:   c.recorder,
		Clock:      c.clock,
		LocalState: own,
		Dial:       c.dial,
		Selector:   func() *rules.Selector { return c.settings.Current().NodeSelector },
		Pools:      c.pools,
		Options:    options,
	})
	if err != nil {
		return false, err
	}

	c.group.Go(func() {
		defer c.settings.Subscribe(ctrl.Resync)()

		ctrl.Run(ctx)
	})

	return true, nil
}

// pools are those of the configuration.
func (c controllers) pools() []nodeipam.Pool {
	var pools []nodeipam.Pool

	for _, pool := range c.settings.Current().Pools {
		pools = append(pools, nodeipam.Pool{
			Name:          pool.Name,
			Selector:      pool.Selector,
			CIDRs:         slices.Clone(pool.CIDRs),
			MaskSizeIPv4:  pool.MaskSizeIPv4,
			MaskSizeIPv6:  pool.MaskSizeIPv6,
			BlockSizeAuto: pool.BlockSizeAuto,
		})
	}

	return pools
}
