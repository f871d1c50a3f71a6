package nodeipam

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"github.com/talos-ccm/talos-ccm/pkg/cidrset"
	"github.com/talos-ccm/talos-ccm/pkg/rules"
)

// Allocator says where blocks come from where no pool says otherwise.
type Allocator string

const (
	// RangeAllocator takes the blocks of every family from the cluster CIDRs. The default.
	RangeAllocator Allocator = "RangeAllocator"
	// CloudAllocator takes IPv4 from the cluster CIDRs and IPv6 from each machine's own global prefix.
	CloudAllocator Allocator = "CloudAllocator"
)

// The upstream Talos CCM's defaults.
const (
	DefaultMaskSizeIPv4 = 24
	DefaultMaskSizeIPv6 = 80
)

// Options are the cluster-wide choices. The zero value is a RangeAllocator of what Talos has configured, with the default sizes.
type Options struct {
	// Allocator is RangeAllocator if it is empty.
	Allocator Allocator
	// ClusterCIDRs say which families a Node has, the first family first, and where its blocks come from; of one family the first CIDR that is not
	// exhausted. None: those that Talos gives to kube-controller-manager.
	ClusterCIDRs []netip.Prefix
	// ServiceCIDRs are reserved, besides those of the ServiceCIDR API. None: those that Talos gives to kube-controller-manager.
	ServiceCIDRs []netip.Prefix
	// MaskSizeIPv4 and MaskSizeIPv6 are the prefix lengths of blocks; zero: the defaults.
	MaskSizeIPv4, MaskSizeIPv6 int
}

func (o Options) withDefaults() Options {
	if o.Allocator == "" {
		o.Allocator = RangeAllocator
	}

	if o.MaskSizeIPv4 == 0 {
		o.MaskSizeIPv4 = DefaultMaskSizeIPv4
	}

	if o.MaskSizeIPv6 == 0 {
		o.MaskSizeIPv6 = DefaultMaskSizeIPv6
	}

	return o
}

// Validate says what is wrong with the options, defaults included.
func (o Options) Validate() error {
	o = o.withDefaults()

	if !slices.Contains([]Allocator{RangeAllocator, CloudAllocator}, o.Allocator) {
		return fmt.Errorf("unknown CIDR allocator type %q: want %s or %s", o.Allocator, RangeAllocator, CloudAllocator)
	}

	if o.MaskSizeIPv4 < 1 || o.MaskSizeIPv4 > 32 {
		return fmt.Errorf("mask size %d: IPv4 has 1 to 32", o.MaskSizeIPv4)
	}

	if o.MaskSizeIPv6 < 1 || o.MaskSizeIPv6 > 128 {
		return fmt.Errorf("mask size %d: IPv6 has 1 to 128", o.MaskSizeIPv6)
	}

	for _, cidr := range o.ClusterCIDRs {
		if _, err := cidrset.NewPool(cidr, o.maskSize(Pool{}, familyOf(cidr.Addr()))); err != nil {
			return fmt.Errorf("cluster CIDRs: %w", err)
		}
	}

	return nil
}

// maskSize is the prefix length of pool's blocks, unless they follow the Node's max-pods.
func (o Options) maskSize(pool Pool, f family) int {
	if f == ipv4 {
		return cmp.Or(pool.MaskSizeIPv4, o.MaskSizeIPv4)
	}

	return cmp.Or(pool.MaskSizeIPv6, o.MaskSizeIPv6)
}

// Pool gives the Nodes that it selects blocks of its own. The families that it has no CIDR of come from where they come from without it.
type Pool struct {
	// Name tells it from others in metrics and Events.
	Name string
	// Selector chooses machines; nil: all of them.
	Selector *rules.Selector
	// CIDRs of either family or both; of one family the first that is not exhausted.
	CIDRs []netip.Prefix
	// MaskSizeIPv4 and MaskSizeIPv6 are the prefix lengths of blocks; zero: those of the Options.
	MaskSizeIPv4, MaskSizeIPv6 int
	// BlockSizeAuto makes an IPv4 block the smallest that has two addresses for each pod that the Node's kubelet would run. IPv6 has no lack of
	// addresses and keeps its size.
	BlockSizeAuto bool
}

// family is an IP family; as text it is a label of metrics.
type family string

const (
	ipv4 family = "IPv4"
	ipv6 family = "IPv6"
)

func familyOf(addr netip.Addr) family {
	if addr.Is4() {
		return ipv4
	}

	return ipv6
}
