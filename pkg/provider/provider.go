// Package provider shows the inventory to the framework's own controllers as a cloudprovider.Interface.
//
// It is read-only and answers from memory. It never says that a machine is gone or shut down: a machine that does not answer
// proves neither, and both answers have Nodes deleted or tainted.
package provider

import (
	"cmp"
	"context"

	corev1 "k8s.io/api/core/v1"
	cloudprovider "k8s.io/cloud-provider"

	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
)

// Name is the provider's name, and the scheme of the providerIDs we make.
const Name = "talos"

// Inventory is what the provider reads.
type Inventory interface {
	nodespec.Peers

	Get(nodename string) inventory.Entry
}

// Provider implements cloudprovider.Interface and cloudprovider.InstancesV2. Use New.
type Provider struct {
	inventory Inventory
	options   func() nodespec.Options
}

var (
	_ cloudprovider.Interface   = (*Provider)(nil)
	_ cloudprovider.InstancesV2 = (*Provider)(nil)
)

// New makes a Provider over the inventory; options returns the choices now in force.
func New(inv Inventory, options func() nodespec.Options) *Provider {
	return &Provider{inventory: inv, options: options}
}

// Initialize does nothing: all there is to know is in the inventory.
func (*Provider) Initialize(cloudprovider.ControllerClientBuilder, <-chan struct{}) {}

// ProviderName implements cloudprovider.Interface.
func (*Provider) ProviderName() string { return Name }

// HasClusterID implements cloudprovider.Interface.
func (*Provider) HasClusterID() bool { return true }

// InstancesV2 implements cloudprovider.Interface.
func (p *Provider) InstancesV2() (cloudprovider.InstancesV2, bool) { return p, true }

// LoadBalancer is not supported.
func (*Provider) LoadBalancer() (cloudprovider.LoadBalancer, bool) { return nil, false }

// Instances is superseded by InstancesV2.
func (*Provider) Instances() (cloudprovider.Instances, bool) { return nil, false }

// Zones is superseded by InstancesV2.
func (*Provider) Zones() (cloudprovider.Zones, bool) { return nil, false }

// Clusters is not supported.
func (*Provider) Clusters() (cloudprovider.Clusters, bool) { return nil, false }

// Routes is not supported.
func (*Provider) Routes() (cloudprovider.Routes, bool) { return nil, false }

// InstanceExists is always true: see the package comment.
func (*Provider) InstanceExists(context.Context, *corev1.Node) (bool, error) { return true, nil }

// InstanceShutdown is always false: see the package comment.
func (*Provider) InstanceShutdown(context.Context, *corev1.Node) (bool, error) { return false, nil }

// InstanceMetadata returns cloudprovider.InstanceNotFound while the machine cannot be relied on.
func (p *Provider) InstanceMetadata(_ context.Context, node *corev1.Node) (*cloudprovider.InstanceMetadata, error) {
	entry := p.inventory.Get(node.Name)
	if entry.Condition != inventory.Current {
		return nil, cloudprovider.InstanceNotFound
	}

	in := nodespec.NewInput(node, entry.Machine, p.options()).WithPeers(p.inventory, node.Name)

	spec, _, pending := nodespec.Desired(in)
	if pending != "" || !nodespec.Managed(in) {
		return nil, cloudprovider.InstanceNotFound
	}

	return &cloudprovider.InstanceMetadata{
		// The one it has stays, whatever would be chosen today: with a second machine of the same SMBIOS UUID, say.
		ProviderID:    cmp.Or(node.Spec.ProviderID, spec.ProviderID),
		InstanceType:  spec.Labels[corev1.LabelInstanceTypeStable],
		NodeAddresses: spec.Addresses,
		Zone:          spec.Labels[corev1.LabelTopologyZone],
		Region:        spec.Labels[corev1.LabelTopologyRegion],
	}, nil
}
