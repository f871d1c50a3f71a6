package nodeipam

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"github.com/talos-ccm/talos-ccm/pkg/cidrset"
	"github.com/talos-ccm/talos-ccm/pkg/rules"
)

// Allocator is the source of blocks for Nodes and IP families without a pool.
type Allocator string

const (
	// RangeAllocator allocates blocks of all IP families from the cluster CIDRs. The default.
	RangeAllocator Allocator = "RangeAllocator"
	// CloudAllocator allocates IPv4 blocks from the cluster CIDRs, and IPv6 blocks from the global prefix of each
	// machine.
	CloudAllocator Allocator = "CloudAllocator"
)

// Default prefix lengths of blocks, as in the upstream Talos CCM.
const (
	DefaultMaskSizeIPv4 = 24
	DefaultMaskSizeIPv6 = 80
)

// Options are the cluster-wide settings. The zero value is a RangeAllocator with the CIDRs of the Talos configuration
// and the default sizes.
type Options struct {
	// Allocator defaults to RangeAllocator.
	Allocator Allocator
	// ClusterCIDRs determine the IP families of podCIDRs and their order, and where the blocks come from. Of several
	// CIDRs of one family the first that is not exhausted is used. Empty: the CIDRs that Talos passes to
	// kube-controller-manager.
	ClusterCIDRs []netip.Prefix
	// ServiceCIDRs are never allocated, in addition to those of the ServiceCIDR API. Empty: the CIDRs that Talos passes
	// to kube-controller-manager.
	ServiceCIDRs []netip.Prefix
	// MaskSizeIPv4 and MaskSizeIPv6 are the prefix lengths of blocks; zero: the defaults.
	MaskSizeIPv4, MaskSizeIPv6 int
}

func (o Options) withDefaults() Options {
	o.Allocator = cmp.Or(o.Allocator, RangeAllocator)
	o.MaskSizeIPv4 = cmp.Or(o.MaskSizeIPv4, DefaultMaskSizeIPv4)
	o.MaskSizeIPv6 = cmp.Or(o.MaskSizeIPv6, DefaultMaskSizeIPv6)

	return o
}

// Validate returns the first invalid setting, with defaults applied.
func (o Options) Validate() error {
	o = o.withDefaults()

	if !slices.Contains([]Allocator{RangeAllocator, CloudAllocator}, o.Allocator) {
		return fmt.Errorf("unknown CIDR allocator type %q: must be %s or %s", o.Allocator, RangeAllocator, CloudAllocator)
	}

	if o.MaskSizeIPv4 < 1 || o.MaskSizeIPv4 > 32 {
		return fmt.Errorf("invalid IPv4 mask size %d: must be 1 to 32", o.MaskSizeIPv4)
	}

	if o.MaskSizeIPv6 < 1 || o.MaskSizeIPv6 > 128 {
		return fmt.Errorf("invalid IPv6 mask size %d: must be 1 to 128", o.MaskSizeIPv6)
	}

	for _, cidr := range o.ClusterCIDRs {
		if _, err := cidrset.NewPool(cidr, o.maskSize(Pool{}, familyOf(cidr.Addr()))); err != nil {
			return fmt.Errorf("cluster CIDRs: %w", err)
		}
	}

	return nil
}

// maskSize returns the prefix length of a pool's blocks. It does not apply to IPv4 if BlockSizeAuto is set.
func (o Options) maskSize(pool Pool, f family) int {
	if f == ipv4 {
		return cmp.Or(pool.MaskSizeIPv4, o.MaskSizeIPv4)
	}

	return cmp.Or(pool.MaskSizeIPv6, o.MaskSizeIPv6)
}

// Pool assigns the Nodes that it selects blocks of its own CIDRs. For IP families without a CIDR in the pool, the
// Allocator applies.
type Pool struct {
	// Name identifies the pool in metrics and Events.
	Name string
	// Selector selects machines; nil: all.
	Selector *rules.Selector
	// CIDRs may be of one IP family or both. Of several CIDRs of one family the first that is not exhausted is used.
	CIDRs []netip.Prefix
	// MaskSizeIPv4 and MaskSizeIPv6 are the prefix lengths of blocks; zero: those of the Options.
	MaskSizeIPv4, MaskSizeIPv6 int
	// BlockSizeAuto makes an IPv4 block the smallest with two addresses per pod of the kubelet. It does not apply to
	// IPv6.
	BlockSizeAuto bool
}

// family is an IP family, as in metrics and Events.
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
