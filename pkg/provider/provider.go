// Package provider implements cloudprovider.Interface on top of the inventory, for the controllers of
// k8s.io/cloud-provider.
//
// It is read-only and makes no remote calls. It never reports a machine as deleted or shut down, since these answers
// make the framework delete or taint the Node, and an unreachable machine proves neither.
package provider

import (
	"cmp"
	"context"

	corev1 "k8s.io/api/core/v1"
	cloudprovider "k8s.io/cloud-provider"

	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
)

// Name is the name of the provider and the scheme of generated providerIDs.
const Name = "talos"

// Provider implements cloudprovider.Interface and cloudprovider.InstancesV2. Use New.
type Provider struct {
	inventory *inventory.Inventory
	options   func() nodespec.Options
}

var (
	_ cloudprovider.Interface   = (*Provider)(nil)
	_ cloudprovider.InstancesV2 = (*Provider)(nil)
)

// New returns a Provider that reads inv. options returns the options in force.
func New(inv *inventory.Inventory, options func() nodespec.Options) *Provider {
	return &Provider{inventory: inv, options: options}
}

// Initialize does nothing.
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

// InstanceExists always returns true; see the package comment.
func (*Provider) InstanceExists(context.Context, *corev1.Node) (bool, error) { return true, nil }

// InstanceShutdown always returns false; see the package comment.
func (*Provider) InstanceShutdown(context.Context, *corev1.Node) (bool, error) { return false, nil }

// InstanceMetadata returns cloudprovider.InstanceNotFound for a Node that is not managed, and while the metadata of
// its machine is not current or not complete.
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
		// A providerID cannot be changed once set, even if another one would be chosen now, such as when a second
		// machine has the same SMBIOS UUID.
		ProviderID:    cmp.Or(node.Spec.ProviderID, spec.ProviderID),
		InstanceType:  spec.Labels[corev1.LabelInstanceTypeStable],
		NodeAddresses: spec.Addresses,
		Zone:          spec.Labels[corev1.LabelTopologyZone],
		Region:        spec.Labels[corev1.LabelTopologyRegion],
	}, nil
}
