package csrpolicy

import (
	"errors"
	"net/netip"
	"slices"
	"strings"

	"github.com/siderolabs/talos/pkg/machinery/nethelpers"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

// virtualLinks are prefixes of links that hold addresses which are not one machine's: kube-proxy in IPVS mode, kube-router and node-local DNS put
// those of services on every machine, and anycast addresses are put on a dummy.
var virtualLinks = []string{"dummy", "kube-", "nodelocaldns"}

// CheckAllowedAddress returns an error if Review denies the address to every machine of every cluster, so that Policy.ExtraIPs cannot allow it.
// The error is a predicate that omits the address.
func CheckAllowedAddress(addr netip.Addr) error {
	switch addr = addr.Unmap(); {
	case !addr.IsValid():
		return errors.New("is not an IP address")
	case addr.Zone() != "":
		return errors.New("has a zone")
	case isSpecial(addr):
		return errors.New(specialAddress)
	}

	return nil
}

// specialAddress is what isSpecial finds, as a predicate.
const specialAddress = "is a loopback, link-local, multicast, unspecified or broadcast address"

// isSpecial reports whether an unmapped address is not unicast or has no meaning beyond its link.
func isSpecial(ip netip.Addr) bool { return !ip.IsGlobalUnicast() }

// hasAddress tells whether the machine has ip, and no other has it on the same network as far as the kernel has found.
func hasAddress(m machine.Machine, ip netip.Addr) bool {
	const contested = nethelpers.AddressDADFailed | nethelpers.AddressTentative

	return slices.ContainsFunc(m.Addresses, func(a machine.Address) bool {
		return a.Prefix.Addr().Unmap() == ip && nethelpers.AddressFlag(a.Flags)&contested == 0
	})
}

// onNetwork tells whether an address of the machine is on a link to a network, or is the node IP, which may be on any: where machines
// announce their own address by BGP it is on the loopback link or a dummy.
func onNetwork(m machine.Machine, ip netip.Addr) bool {
	return slices.ContainsFunc(m.NodeIPs, is(ip)) || slices.ContainsFunc(m.Addresses, func(a machine.Address) bool {
		return a.Prefix.Addr().Unmap() == ip && !isVirtual(a.Link)
	})
}

func isVirtual(link string) bool {
	return link == "lo" || slices.ContainsFunc(virtualLinks, func(prefix string) bool { return strings.HasPrefix(link, prefix) })
}

// is tells of an address whether it is ip, which is unmapped.
func is(ip netip.Addr) func(netip.Addr) bool {
	return func(other netip.Addr) bool { return other.Unmap() == ip }
}

func within(prefixes []netip.Prefix, ip netip.Addr) bool {
	return slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return p.Contains(ip) })
}

// hasAddress tells whether ip can be no machine's own.
func (c ClusterIdentity) hasAddress(ip netip.Addr) bool {
	return slices.ContainsFunc(c.ServiceIPs, is(ip)) || slices.ContainsFunc(c.VIPs, is(ip)) || within(c.ServiceCIDRs, ip) || within(c.PodCIDRs, ip)
}
