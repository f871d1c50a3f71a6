package nodeipam

import (
	"cmp"
	"fmt"
	"math/bits"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	corev1 "k8s.io/api/core/v1"

	"github.com/talos-ccm/talos-ccm/pkg/cidrset"
	"github.com/talos-ccm/talos-ccm/pkg/config"
	"github.com/talos-ccm/talos-ccm/pkg/controlplane"
	"github.com/talos-ccm/talos-ccm/pkg/internal/events"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
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
	// ClusterCIDRs determine the IP families of podCIDRs and their order. Of several CIDRs of one family, the first that is
	// not exhausted is used. Empty: the CIDRs that Talos passes to kube-controller-manager.
	ClusterCIDRs []netip.Prefix
	// ServiceCIDRs are never allocated, in addition to the CIDRs of the ServiceCIDR API. Empty: the CIDRs that Talos passes
	// to kube-controller-manager.
	ServiceCIDRs []netip.Prefix
	// MaskSizeIPv4 and MaskSizeIPv6 are the prefix lengths of blocks. Zero: the mask sizes of kube-controller-manager for
	// blocks of the cluster CIDRs, and the defaults for all others.
	MaskSizeIPv4, MaskSizeIPv6 int

	// kcmMaskSizes are the prefix lengths that kube-controller-manager is configured with.
	kcmMaskSizes map[corev1.IPFamily]int
}

// Validate returns the first invalid setting, with defaults applied.
func (o Options) Validate() error {
	if !slices.Contains([]Allocator{"", RangeAllocator, CloudAllocator}, o.Allocator) {
		return fmt.Errorf("unknown CIDR allocator type %q: must be %s or %s", o.Allocator, RangeAllocator, CloudAllocator)
	}

	if o.MaskSizeIPv4 < 0 || o.MaskSizeIPv4 > 32 {
		return fmt.Errorf("invalid IPv4 mask size %d: must be 1 to 32", o.MaskSizeIPv4)
	}

	if o.MaskSizeIPv6 < 0 || o.MaskSizeIPv6 > 128 {
		return fmt.Errorf("invalid IPv6 mask size %d: must be 1 to 128", o.MaskSizeIPv6)
	}

	for i, cidr := range o.ClusterCIDRs {
		contains := func(other netip.Prefix) bool { return other.Bits() <= cidr.Bits() && other.Overlaps(cidr) }
		if j := slices.IndexFunc(o.ClusterCIDRs[:i], cidr.Overlaps); j >= 0 {
			return fmt.Errorf("--cluster-cidr: %s overlaps %s", cidr, o.ClusterCIDRs[j])
		} else if j := slices.IndexFunc(o.ServiceCIDRs, contains); j >= 0 {
			return fmt.Errorf("--cluster-cidr: %s is within the service CIDR %s", cidr, o.ServiceCIDRs[j])
		}

		err := cidrset.CheckPods(cidr)
		if err == nil {
			_, err = cidrset.NewPool(cidr, o.maskSize(Pool{}, familyOf(cidr.Addr())))
		}

		if err != nil {
			return fmt.Errorf("--cluster-cidr: %w", err)
		}
	}

	return nil
}

// maskSize returns the prefix length of the blocks for a pool's Nodes. It does not apply to IPv4 if BlockSizeAuto is
// set.
func (o Options) maskSize(pool Pool, f corev1.IPFamily) int {
	kcm := o.kcmMaskSizes[f]
	if len(ofFamily(pool.CIDRs, f)) > 0 {
		kcm = 0 // kube-controller-manager has no pools
	}

	if f == ipv4 {
		return cmp.Or(pool.MaskSizeIPv4, o.MaskSizeIPv4, kcm, DefaultMaskSizeIPv4)
	}

	return cmp.Or(pool.MaskSizeIPv6, o.MaskSizeIPv6, kcm, DefaultMaskSizeIPv6)
}

// setKCMMaskSizes fills in the mask sizes of kube-controller-manager, and returns why the sizes of blocks of the cluster
// CIDRs are not certain; nil if they are. A machine without a size has the default.
func (o *Options) setKCMMaskSizes(network *controlplane.Network) (uncertain *events.Problem) {
	o.kcmMaskSizes = map[corev1.IPFamily]int{}
	configured := map[corev1.IPFamily]int{ipv4: o.MaskSizeIPv4, ipv6: o.MaskSizeIPv6}

	for _, f := range []corev1.IPFamily{ipv4, ipv6} {
		cidrs := ofFamily(o.ClusterCIDRs, f)
		if len(cidrs) == 0 {
			continue
		}

		sizes := map[int]bool{}

		for _, config := range network.KCMConfigs {
			size := config.MaskSizes[f]

			// A size that does not fit is ignored. Nothing checks the arguments while kube-controller-manager's allocator is
			// disabled, and Talos 1.14 sets 64 for any podSubnet.
			doesNotFit := func(cidr netip.Prefix) bool {
				_, err := cidrset.NewPool(cidr, size)

				return err != nil || size < cidr.Bits()+minKCMBits
			}
			if slices.ContainsFunc(cidrs, doesNotFit) {
				size = 0
			}

			o.kcmMaskSizes[f] = size
			sizes[o.maskSize(Pool{}, f)] = true
		}

		if configured[f] == 0 && (len(sizes) > 1 || !network.IsMajority()) {
			uncertain = newProblem(ReasonAllocatorUnknown, "The control-plane machines have different mask sizes (node-cidr-mask-size of "+
				"kube-controller-manager), or too few of them can be read (%d of %d); configure the same ones and check the others, "+
				"or set --node-cidr-mask-size-ipv4 and --node-cidr-mask-size-ipv6", len(network.KCMConfigs), network.Machines)
		}
	}

	return uncertain
}

// Pool assigns blocks of its CIDRs to the Nodes that it selects. Of several CIDRs of one family, the first that is not
// exhausted is used. For IP families without a CIDR in the pool, the Allocator applies.
type Pool = config.CompiledPool

// IP families, as in metrics and Events.
const (
	ipv4 = corev1.IPv4Protocol
	ipv6 = corev1.IPv6Protocol
)

func familyOf(addr netip.Addr) corev1.IPFamily {
	if addr.Is4() {
		return ipv4
	}

	return ipv6
}

func ofFamily(cidrs []netip.Prefix, f corev1.IPFamily) []netip.Prefix {
	return slices.DeleteFunc(slices.Clone(cidrs), func(cidr netip.Prefix) bool { return familyOf(cidr.Addr()) != f })
}

const (
	// poolCluster and poolMachine name the cluster CIDRs and the prefixes of machines in metrics and Events.
	poolCluster = "cluster"
	poolMachine = "machine"

	// maxPods is more than any kubelet runs. The kubelet reports its own limit, and must not get a whole pool for it.
	maxPods = 4096

	// subnetBits is the prefix length of an IPv6 subnet (RFC 4291). Of a shorter prefix only the machine's subnet is
	// used.
	subnetBits = 64

	// minBlockBits is the prefix length of the smallest block of a machine's prefix: 256 addresses, for 110 pods.
	minBlockBits = 120

	// maxReserved bounds the number of addresses that one machine can reserve, because the machine reports them itself.
	maxReserved = 64

	// addressGracePeriod is the time after the registration of a Node in which its machine may get its first global IPv6
	// address. The kernel solicits routers for 12 seconds after a link comes up (RFC 4861, section 10).
	addressGracePeriod = time.Minute

	// quarterBits is the difference between the prefix lengths of a pool and of its quarter.
	quarterBits = 2

	// minKCMBits is the least difference between the prefix lengths of a cluster CIDR and of the blocks that
	// kube-controller-manager is configured with: 16 blocks.
	minKCMBits = 4
)

// familySources are the sources of a block of one IP family. The first one with a free block is used.
type familySources struct {
	family  corev1.IPFamily
	sources []source
}

type source struct {
	cidrset.Pool

	// name is the name of the pool in metrics and Events.
	name string
	// limit is the prefix length of the largest podCIDR that counts in the CIDR.
	limit int
}

// assignment determines the podCIDRs of a Node. It consists of all inputs but the allocations.
type assignment struct {
	node     *corev1.Node
	entry    inventory.Entry
	selector *rules.Selector
	pools    []Pool
	// options contain the cluster CIDRs.
	options Options
	// blocked is the reason why blocks cannot be allocated for any Node; nil if they can.
	blocked *events.Problem
	// fallback allows IPv6 blocks of the cluster CIDRs for machines without a prefix.
	fallback bool
	now      time.Time
}

// selected reports whether the Node is selected, or returns a problem if that depends on a machine that does not respond.
func (a assignment) selected() (bool, *events.Problem) {
	if a.selector == nil {
		return true, nil
	}

	if problem := a.machineUnavailable(); problem != nil {
		return false, problem
	}

	return a.selector.Matches(nodespec.FactsOf(a.node, a.entry.Machine)), nil
}

// machineUnavailable returns a problem unless the inventory has a current view of the machine.
func (a assignment) machineUnavailable() *events.Problem {
	if a.entry.Condition == inventory.Current {
		return nil
	}

	detail := a.entry.Condition.String()
	if a.entry.Reason != "" {
		detail += ": " + a.entry.Reason
	}

	return newProblem(ReasonMachineUnknown, "Waiting for the Talos API of the machine (%s)", detail)
}

// sourcesByFamily returns one entry for each IP family, in the order of podCIDRs; none for a Node that is not selected. It
// returns a problem if the Node has to wait. podCIDRs cannot be changed once set, so nothing is guessed.
func (a assignment) sourcesByFamily() ([]familySources, *events.Problem) {
	if selected, problem := a.selected(); problem != nil || !selected {
		return nil, problem
	}

	if a.blocked != nil {
		return nil, a.blocked
	}

	pool, problem := a.pool()
	if problem != nil {
		return nil, problem
	}

	var sources []familySources

	for _, f := range a.families(pool) {
		r, problem := a.sourcesOf(pool, f)
		if problem != nil {
			return nil, problem
		}

		sources = append(sources, r)
	}

	if len(sources) == 0 {
		return nil, newProblem(ReasonClusterCIDRMissing, "No cluster CIDRs are configured; set --cluster-cidr, or podSubnets in Talos")
	}

	return sources, nil
}

// families returns the IP families of the podCIDRs of a pool's Nodes, in order.
func (a assignment) families(pool Pool) (families []corev1.IPFamily) {
	for _, cidr := range slices.Concat(a.options.ClusterCIDRs, pool.CIDRs) {
		if f := familyOf(cidr.Addr()); !slices.Contains(families, f) {
			families = append(families, f)
		}
	}

	return families
}

// pool returns the first pool that selects the Node; the zero Pool if there is none. The labels of a Node are complete
// when it is initialized.
func (a assignment) pool() (Pool, *events.Problem) {
	if slices.ContainsFunc(a.pools, func(pool Pool) bool { return pool.Selector != nil }) {
		if problem := a.machineUnavailable(); problem != nil {
			return Pool{}, problem
		}
	}

	if slices.ContainsFunc(a.pools, func(pool Pool) bool { return pool.Selector.ReadsLabels() }) && nodespec.IsUninitialized(a.node) {
		return Pool{}, newProblem(ReasonNotInitialized, "Waiting for the Node to be initialized, because pools select Nodes by label")
	}

	facts := nodespec.FactsOf(a.node, a.entry.Machine)
	facts.NodeLabels = a.node.Labels

	i := slices.IndexFunc(a.pools, func(pool Pool) bool { return pool.Selector.Matches(facts) })
	if i < 0 {
		return Pool{}, nil
	}

	return a.pools[i], nil
}

func (a assignment) sourcesOf(pool Pool, f corev1.IPFamily) (familySources, *events.Problem) {
	name, cidrs, size := pool.Name, ofFamily(pool.CIDRs, f), a.options.maskSize(pool, f)

	if len(cidrs) == 0 {
		if f == ipv6 && a.options.Allocator == CloudAllocator {
			s, problem := a.machineSource(pool)
			if problem == nil || problem.Reason != ReasonPrefixMissing || !a.fallsBack() {
				return familySources{family: f, sources: []source{s}}, problem
			}
		}

		name, cidrs = poolCluster, ofFamily(a.options.ClusterCIDRs, f)
	}

	if pool.BlockSizeAuto && f == ipv4 {
		var known bool
		if size, known = maskSizeFor(a.node); !known {
			return familySources{}, newProblem(ReasonMaxPodsUnknown, "Waiting for the kubelet to report a pod capacity between 1 and %d", maxPods)
		}
	}

	r := familySources{family: f}

	for _, cidr := range cidrs {
		s, err := a.source(name, cidr, size)
		if err != nil {
			return familySources{}, newProblem(ReasonPrefixTooSmall, "Pool %q: %v", name, err)
		}

		r.sources = append(r.sources, s)
	}

	return r, nil
}

// fallsBack reports whether the Node of a machine without a prefix gets a block of the cluster CIDRs. The addresses of a
// machine may be incomplete while it boots, and for some time afterwards.
func (a assignment) fallsBack() bool {
	return a.fallback && a.entry.Machine.Stage == runtime.MachineStageRunning && a.now.Sub(a.node.CreationTimestamp.Time) >= addressGracePeriod
}

// sources returns the sources of all pools and the cluster CIDRs. It omits a CIDR that cannot be divided: the Nodes that
// need the CIDR report it.
func (a assignment) sources() (list []source) {
	add := func(name string, cidrs []netip.Prefix, pool Pool) {
		for _, cidr := range cidrs {
			if s, err := a.source(name, cidr, a.options.maskSize(pool, familyOf(cidr.Addr()))); err == nil {
				list = append(list, s)
			}
		}
	}

	for _, pool := range a.pools {
		add(pool.Name, pool.CIDRs, pool)
	}

	add(poolCluster, a.options.ClusterCIDRs, Pool{})

	return list
}

// source divides a CIDR into blocks with the given prefix length. A podCIDR counts up to a quarter of the CIDR, or up to
// the largest block that the configuration assigns of the CIDR to any Node. A kubelet can register its Node with any
// podCIDRs, and could otherwise exhaust the CIDR. This does not apply to podCIDRs that the controller has assigned.
func (a assignment) source(name string, cidr netip.Prefix, size int) (source, error) {
	blocks, err := cidrset.NewPool(cidr, size)
	f, limit := familyOf(cidr.Addr()), cidr.Bits()+quarterBits

	for _, pool := range slices.Concat(a.pools, []Pool{{}}) {
		cidrs := ofFamily(pool.CIDRs, f)
		if len(cidrs) == 0 {
			cidrs = ofFamily(a.options.ClusterCIDRs, f)
		}

		switch {
		case !slices.ContainsFunc(cidrs, cidr.Overlaps):
		case pool.BlockSizeAuto && f == ipv4:
			limit = min(limit, maskSizeOf(maxPods))
		default:
			limit = min(limit, a.options.maskSize(pool, f))
		}
	}

	return source{Pool: blocks, name: name, limit: limit}, err
}

// unusable returns a problem if podCIDRs do not count.
func (a assignment) unusable() *events.Problem {
	if isAssigned(a.node) {
		return nil
	}

	sources := a.sources()
	if s, problem := a.machineSource(Pool{}); problem == nil && a.options.Allocator == CloudAllocator {
		sources = append(sources, s)
	}

	tooLarge := slices.DeleteFunc(podCIDRs(a.node), func(podCIDR netip.Prefix) bool {
		return !slices.ContainsFunc(sources, func(s source) bool { return podCIDR.Overlaps(s.CIDR()) && podCIDR.Bits() < s.limit })
	})
	if len(tooLarge) == 0 {
		return nil
	}

	return newProblem(ReasonTooLarge, "podCIDRs %v are larger than all blocks of a pool and than a quarter of it, and may be assigned to other Nodes; "+
		"delete the Node and let it register again without podCIDRs", tooLarge)
}

// prefixChanged returns a problem if an IPv6 podCIDR is not in the prefix that the machine reported last.
func (a assignment) prefixChanged() *events.Problem {
	pool, problem := a.pool()
	if selected, _ := a.selected(); problem != nil || !selected || a.options.Allocator != CloudAllocator || len(ofFamily(pool.CIDRs, ipv6)) > 0 {
		return nil
	}

	prefix, found := machinePrefix(a.entry.Machine)
	if !found || !nodespec.IsTalos(a.node) {
		return nil
	}

	expected := machineSubnets(a.entry.Machine)
	for _, pool := range slices.Concat(a.pools, []Pool{{CIDRs: a.options.ClusterCIDRs}}) {
		expected = append(expected, pool.CIDRs...)
	}

	for _, podCIDR := range ofFamily(podCIDRs(a.node), ipv6) {
		if !slices.ContainsFunc(expected, podCIDR.Overlaps) {
			return newProblem(ReasonPrefixChanged,
				"The podCIDR %s is not in the machine's prefix, which is %s; delete the Node and let it register again to have another one assigned", podCIDR, prefix)
		}
	}

	return nil
}

// maskSizeFor returns the prefix length of the smallest IPv4 block with two addresses per pod of the kubelet, so that
// the address of a deleted pod is not reused at once (GKE has the same rule: a /24 for 110 pods). It is not known if
// the kubelet reports no plausible pod capacity.
func maskSizeFor(node *corev1.Node) (size int, known bool) {
	pods := node.Status.Allocatable.Pods()
	if pods.IsZero() {
		pods = node.Status.Capacity.Pods()
	}

	count := pods.Value()
	if count < 1 || count > maxPods {
		return 0, false
	}

	return maskSizeOf(count), true
}

func maskSizeOf(pods int64) int { return 32 - bits.Len64(uint64(2*pods-1)) } //nolint:gosec // is positive

// machineSource divides the machine's own global IPv6 prefix into blocks for the Nodes of a pool.
func (a assignment) machineSource(pool Pool) (source, *events.Problem) {
	if problem := a.machineUnavailable(); problem != nil {
		return source{}, problem
	}

	prefix, found := machinePrefix(a.entry.Machine)
	if !found {
		return source{}, newProblem(ReasonPrefixMissing, "The machine has no global IPv6 address of its own with a prefix, which a /128 does not have; "+
			"the Node waits for a prefix, with ipam.fallbackToClusterCIDRs for a minute")
	}

	size := func(pool Pool) int {
		return machineBlockBits(prefix, cmp.Or(pool.MaskSizeIPv6, a.options.MaskSizeIPv6, DefaultMaskSizeIPv6))
	}

	s, err := a.source(poolMachine, prefix, size(pool))
	if err != nil {
		return source{}, newProblem(ReasonPrefixTooSmall,
			"The machine's IPv6 prefix %s is too small; it must hold at least two blocks of /%d, one of which contains the machine", prefix, minBlockBits)
	}

	for _, pool := range slices.Concat(a.pools, []Pool{{}}) {
		s.limit = min(s.limit, size(pool))
	}

	return s, nil
}

// machinePrefix returns the global IPv6 prefix of the machine's subnet: the prefix of its IPv6 node IP, or the lowest
// prefix if that address is not global or missing.
func machinePrefix(m machine.Machine) (prefix netip.Prefix, found bool) {
	subnets := machineSubnets(m)
	if len(subnets) == 0 {
		return netip.Prefix{}, false
	}

	rank := func(subnet netip.Prefix) int {
		if slices.ContainsFunc(m.NodeIPs, subnet.Contains) {
			return 0
		}

		return 1
	}

	best := slices.MinFunc(subnets, func(a, b netip.Prefix) int {
		return cmp.Or(rank(a)-rank(b), a.Addr().Compare(b.Addr()))
	})

	return netip.PrefixFrom(best.Addr(), max(best.Bits(), subnetBits)).Masked(), true
}

// machineSubnets returns the machine's global IPv6 addresses with their prefix lengths, without single addresses.
func machineSubnets(m machine.Machine) (subnets []netip.Prefix) {
	for _, a := range m.Addresses {
		addr := a.Prefix.Addr()
		if addr.Is6() && !addr.Is4In6() && !a.Prefix.IsSingleIP() && !strings.HasPrefix(a.Link, "lo") && m.IsStable(a) {
			subnets = append(subnets, a.Prefix)
		}
	}

	return subnets
}

// machineBlockBits returns the prefix length of the blocks of a machine's prefix: size for a whole subnet, and for a
// longer prefix the length of the upstream Talos CCM. That leaves room for at least one Node and makes no block smaller
// than a /120. It returns -1 if the prefix is too small.
func machineBlockBits(prefix netip.Prefix, size int) int {
	own := prefix.Bits()

	switch {
	case own == subnetBits && size > own:
		return size
	case own >= minBlockBits:
		return -1
	case own == minBlockBits-1:
		return own + 1
	case own > 111:
		return own + 2
	case own > 105:
		return own + 4
	case own > 99:
		return own + 8
	default:
		return own + 16
	}
}

// reservedPrefixes returns the prefixes that are never allocated because of a machine: its addresses, and the addresses of
// the routers of its prefix. Addresses on CNI links are excluded: they are in the block of the machine's Node, which must
// be able to get the same block again. Of more than maxReserved addresses, it prefers node IPs, the dialed address, and
// those that a block could contain: in the given CIDRs or in the machine's own prefix.
func reservedPrefixes(m machine.Machine, cidrs []netip.Prefix) []netip.Prefix {
	var addrs []netip.Addr

	for _, a := range m.Addresses {
		if !a.OnCNILink() {
			addrs = append(addrs, a.Prefix.Addr())
		}
	}

	prefix, found := machinePrefix(m)
	if found {
		cidrs = append(slices.Clip(cidrs), prefix)
	}

	used := hostPrefixes(append(slices.Clip(m.NodeIPs), m.Endpoint))
	rank := func(p netip.Prefix) int {
		return slices.IndexFunc([][]netip.Prefix{used, cidrs, {p}}, func(list []netip.Prefix) bool { return slices.ContainsFunc(list, p.Overlaps) })
	}

	prefixes := hostPrefixes(addrs)
	slices.SortStableFunc(prefixes, func(a, b netip.Prefix) int { return rank(a) - rank(b) })
	prefixes = prefixes[:min(len(prefixes), maxReserved)]

	if found {
		// The first address is the subnet-router anycast address (RFC 4291, section 2.6.1), the second is commonly the
		// gateway.
		prefixes = append(prefixes, netip.PrefixFrom(prefix.Addr(), 127))
	}

	return prefixes
}

// hostPrefixes returns the sorted single-address prefixes of the addresses that are valid outside of their machine and
// link.
func hostPrefixes(addrs []netip.Addr) []netip.Prefix {
	var prefixes []netip.Prefix

	for _, addr := range addrs {
		addr = addr.Unmap().WithZone("")
		if !addr.IsLoopback() && !addr.IsLinkLocalUnicast() {
			prefixes = append(prefixes, netip.PrefixFrom(addr, addr.BitLen()))
		}
	}

	slices.SortFunc(prefixes, netip.Prefix.Compare)

	return slices.Compact(prefixes)
}
