//go:build e2e

package e2e_test

import (
	"context"
	"fmt"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"
)

// noAllocatorPatch turns kube-controller-manager's allocator off, as docs/explanation/pod-cidrs.md has it.
const noAllocatorPatch = `cluster: {controllerManager: {extraArgs: {controllers: "-node-ipam-controller"}}}`

// podCIDRsEnvironment turns ours on. That there is to be IPv6 Talos does not know here: the bed's network has none.
const podCIDRsEnvironment = `environment:
  - TALOS_CCM_CONTROLLERS=*,node-ipam-controller
  - TALOS_CCM_ALLOCATE_NODE_CIDRS=true
  - TALOS_CCM_CIDR_ALLOCATOR_TYPE=CloudAllocator
  - TALOS_CCM_CLUSTER_CIDR=10.244.0.0/16,fd00:10:244::/56
`

// Each Node gets an IPv4 block of the cluster's and an IPv6 block of its own machine's prefix, and keeps them.
func TestPodCIDRs(t *testing.T) {
	ctx := t.Context()

	for _, m := range bed.Machines() {
		require.Empty(t, nodeOf(t, m).Spec.PodCIDRs, m.Name())
	}

	// Two sites.
	sites := map[string]netip.Prefix{
		bed.ControlPlane.Name(): netip.MustParsePrefix("2001:db8:77:a::2/64"),
		bed.Worker.Name():       netip.MustParsePrefix("2001:db8:77:b::3/64"),
	}

	for _, m := range bed.Machines() {
		require.NoError(t, m.AddAddress(ctx, sites[m.Name()]))

		// What comes next compares Nodes with machines.
		t.Cleanup(func() { removeAddress(t, m, sites[m.Name()]) })
	}

	t.Cleanup(func() { removeDocument(t) })
	patchDocument(t, podCIDRsEnvironment)

	took := eventually(t, func(ctx context.Context) error { return withoutPodCIDRs(ctx, sites) })
	t.Logf("podCIDRs are there %s after the document", took)
}

// withoutPodCIDRs says which machine's Node has not got one block of each family where it should be from.
func withoutPodCIDRs(ctx context.Context, sites map[string]netip.Prefix) error {
	seen := map[string]string{}

	for name, site := range sites {
		node, err := getNode(ctx, name)
		if err != nil {
			return err
		}

		if len(node.Spec.PodCIDRs) != 2 || node.Spec.PodCIDR != node.Spec.PodCIDRs[0] {
			return fmt.Errorf("%s has podCIDR %q and podCIDRs %v", name, node.Spec.PodCIDR, node.Spec.PodCIDRs)
		}

		ipv4, ipv6 := netip.MustParsePrefix(node.Spec.PodCIDRs[0]), netip.MustParsePrefix(node.Spec.PodCIDRs[1])

		if other := seen[ipv4.String()]; other != "" || ipv4.Bits() != 24 || !netip.MustParsePrefix("10.244.0.0/16").Contains(ipv4.Addr()) {
			return fmt.Errorf("%s has %s, and so has %q", name, ipv4, other)
		}

		if ipv6.Bits() != 80 || !site.Masked().Contains(ipv6.Addr()) || ipv6.Contains(site.Addr()) {
			return fmt.Errorf("%s has %s, and its machine is %s", name, ipv6, site)
		}

		seen[ipv4.String()] = name
	}

	return nil
}
