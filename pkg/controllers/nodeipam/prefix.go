package nodeipam

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/talos-ccm/talos-ccm/pkg/cidrset"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

// sitePrefixBits is the length of the prefix that is cut of whatever is larger: the subnet, as IPv6 has it (RFC 4291).
const sitePrefixBits = 64

// smallestBlockBits is the length of the smallest block of a machine's own prefix: 256 addresses, for the 110 pods of a kubelet.
const smallestBlockBits = 120

// fromMachine asks for a block of the machine's own global prefix.
func (d demand) fromMachine(wanted int) (request, *finding) {
	if problem := d.unknown(); problem != nil {
		return request{}, problem
	}

	prefix, problem := ownPrefix(d.entry.Machine)
	if problem != nil {
		return request{}, problem
	}

	pool, err := cidrset.NewPool(prefix, blockBits(prefix, wanted))
	if err != nil {
		message := fmt.Sprintf("The machine's IPv6 prefix %s is too small to be cut: blocks are of /%d or larger, and one holds the machine", prefix, smallestBlockBits)

		return request{}, &finding{reason: ReasonPrefixTooSmall, message: message}
	}

	return request{family: ipv6, pool: poolMachine, pools: []cidrset.Pool{pool}}, nil
}

// maxKept bounds how many addresses a machine can keep from all Nodes, for it says itself which it has.
const maxKept = 64

// kept is what no Node may be given because of a machine: its addresses, and those of the routers of its own prefix. What a CNI has given the machine is
// in the block of its Node, and must not keep that from the Node when it is registered again.
func kept(m machine.Machine) []netip.Prefix {
	var addrs []netip.Addr

	for _, a := range m.Addresses {
		if !a.OnCNILink() {
			addrs = append(addrs, a.Prefix.Addr())
		}
	}

	all := hosts(addrs)
	all = all[:min(len(all), maxKept)]

	if prefix, problem := ownPrefix(m); problem == nil {
		// The first address is every router's (the subnet-router anycast address, RFC 4291 2.6.1), the one after it commonly the gateway's.
		all = append(all, netip.PrefixFrom(prefix.Addr(), 127))
	}

	return all
}

// hosts are the prefixes of single addresses that others can know, in order.
func hosts(addrs []netip.Addr) []netip.Prefix {
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

// ownPrefix is the global IPv6 prefix that the machine is in: the one of its IPv6 node IP; if that is not global or there is none, the lowest.
func ownPrefix(m machine.Machine) (netip.Prefix, *finding) {
	var candidates []machine.Address

	for _, a := range m.Addresses {
		if isOwn(m, a) {
			candidates = append(candidates, a)
		}
	}

	if len(candidates) == 0 {
		return netip.Prefix{}, &finding{reason: ReasonPrefixMissing, message: "The machine has no global IPv6 address of its own"}
	}

	rank := func(a machine.Address) int {
		if slices.ContainsFunc(m.NodeIPs, a.Prefix.Masked().Contains) {
			return 0
		}

		return 1
	}

	subnets := slices.DeleteFunc(candidates, func(a machine.Address) bool { return a.Prefix.IsSingleIP() })
	if len(subnets) == 0 {
		return netip.Prefix{}, &finding{reason: ReasonPrefixMissing, message: "The machine's global IPv6 addresses are single ones (/128), without a prefix"}
	}

	best := slices.MinFunc(subnets, func(a, b machine.Address) int {
		return cmp.Or(rank(a)-rank(b), a.Prefix.Addr().Compare(b.Prefix.Addr()))
	})

	if best.Prefix.Bits() < sitePrefixBits {
		return netip.PrefixFrom(best.Prefix.Addr(), sitePrefixBits).Masked(), nil
	}

	return best.Prefix.Masked(), nil
}

// isOwn tells whether a global IPv6 address is one by which the machine itself is reached, for good.
func isOwn(m machine.Machine, a machine.Address) bool {
	ip := a.Prefix.Addr()

	return ip.Is6() && !ip.Is4In6() && !strings.HasPrefix(a.Link, "lo") && m.IsStable(a)
}

// blockBits is the prefix length of the blocks that a machine's prefix is cut into: that of the options for a whole subnet, and of smaller ones the
// upstream Talos CCM's, which leave room for at least one Node and make no block smaller than a /120. A prefix for which there is none is answered with
// its own length or less.
func blockBits(prefix netip.Prefix, wanted int) int {
	own := prefix.Bits()

	switch {
	case own == sitePrefixBits && wanted > own:
		return wanted
	case own >= smallestBlockBits:
		return -1
	case own == smallestBlockBits-1:
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
