//go:build e2e

package e2e_test

import (
	"context"
	"fmt"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"
)

// podCIDRsEnvironment enables talos-ccm's node-ipam-controller. The default of the cluster CIDR, Talos's podSubnets, has no
// IPv6 subnet in the bed.
const podCIDRsEnvironment = `environment:
  - TALOS_CCM_CONTROLLERS=*,node-ipam-controller
  - TALOS_CCM_ALLOCATE_NODE_CIDRS=true
  - TALOS_CCM_CIDR_ALLOCATOR_TYPE=CloudAllocator
  - TALOS_CCM_CLUSTER_CIDR=10.244.0.0/16,fd00:10:244::/56
`

// TestPodCIDRs requires that each Node gets an IPv4 CIDR of the cluster CIDR and an IPv6 CIDR of its machine's prefix.
func TestPodCIDRs(t *testing.T) {
	ctx := t.Context()

	for _, m := range bed.Machines() {
		require.Empty(t, nodeOf(t, m).Spec.PodCIDRs, m.Name())
	}

	addresses := map[string]netip.Prefix{
		controlPlane.Name(): netip.MustParsePrefix("2001:db8:77:a::2/64"),
		worker.Name():       netip.MustParsePrefix("2001:db8:77:b::3/64"),
	}

	for _, m := range bed.Machines() {
		require.NoError(t, m.AddAddress(ctx, addresses[m.Name()]))
		t.Cleanup(func() { removeAddress(t, m, addresses[m.Name()]) })
	}

	t.Cleanup(func() { removeDocument(t) })
	patchDocument(t, podCIDRsEnvironment)

	took := eventually(t, func(ctx context.Context) error { return checkPodCIDRs(ctx, addresses) })
	t.Logf("both Nodes had podCIDRs %s after the configuration was applied", took)
}

// checkPodCIDRs returns an error unless each Node has a unique IPv4 CIDR of the cluster CIDR, and an IPv6 CIDR of the prefix
// of its machine's address that does not contain the address.
func checkPodCIDRs(ctx context.Context, addresses map[string]netip.Prefix) error {
	owners := map[string]string{}

	for name, address := range addresses {
		node, err := getNode(ctx, name)
		if err != nil {
			return err
		}

		if len(node.Spec.PodCIDRs) != 2 || node.Spec.PodCIDR != node.Spec.PodCIDRs[0] {
			return fmt.Errorf("%s has podCIDR %q and podCIDRs %v", name, node.Spec.PodCIDR, node.Spec.PodCIDRs)
		}

		ipv4, ipv6 := netip.MustParsePrefix(node.Spec.PodCIDRs[0]), netip.MustParsePrefix(node.Spec.PodCIDRs[1])

		if owner := owners[ipv4.String()]; owner != "" || ipv4.Bits() != 24 || !netip.MustParsePrefix("10.244.0.0/16").Contains(ipv4.Addr()) {
			return fmt.Errorf("%s has %s, want a /24 of the cluster CIDR; the owner is %q", name, ipv4, owner)
		}

		if ipv6.Bits() != 80 || !address.Masked().Contains(ipv6.Addr()) || ipv6.Contains(address.Addr()) {
			return fmt.Errorf("%s has %s, want a /80 of %s without the machine's address", name, ipv6, address)
		}

		owners[ipv4.String()] = name
	}

	return nil
}
