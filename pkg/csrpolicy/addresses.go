package csrpolicy

import (
	"errors"
	"net/netip"
	"slices"
	"strings"

	"github.com/siderolabs/talos/pkg/machinery/nethelpers"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

// Codes of IP addresses. All are reasons to keep a request pending, except SpecialIPAddress, which is a reason to deny it.
// ClusterIPAddress can be either.
const (
	CodeClusterAddress  = "ClusterIPAddress"
	CodeSpecialAddress  = "SpecialIPAddress"  // loopback, link-local, multicast, unspecified, broadcast
	CodeUnknownAddress  = "UnknownIPAddress"  // not reported by the machine
	CodeExcludedAddress = "ExcludedIPAddress" // reported by the machine, and excluded from its node IPs
	CodeVirtualAddress  = "VirtualIPAddress"  // on a link for addresses that several machines share, and not the node IP
)

// specialAddress is the predicate of addresses for which IsGlobalUnicast is false.
const specialAddress = "is a loopback, link-local, multicast, unspecified or broadcast address"

// CheckAllowedAddress returns an error if Review denies the address to every machine of every cluster, so that
// Policy.ExtraIPs cannot allow it. The error is a predicate that omits the address.
func CheckAllowedAddress(addr netip.Addr) error {
	switch addr = addr.Unmap(); {
	case !addr.IsValid():
		return errors.New("is not an IP address")
	case addr.Zone() != "":
		return errors.New("has a zone")
	case !addr.IsGlobalUnicast():
		return errors.New(specialAddress)
	}

	return nil
}

// checkAddress checks an IP address. Addresses of the cluster take precedence over addresses that the machine reports.
func (c *checker) checkAddress(ip netip.Addr) {
	source := c.sourceOf(func(s ClusterSubjects) bool { return slices.ContainsFunc(s.APIServerIPs, equals(ip)) })

	switch {
	case !c.checkReserved(ip):
		return
	case source == apiServer && c.isWorker() && slices.ContainsFunc(c.ownAddresses(ip), isUncontested):
		// Talos keeps each address of a control-plane machine in the certificate until the machine reboots
		// (network.NodeAddressAccumulativeID in secrets/KubernetesCertSANsController). The worker may have it by now. And
		// operators list the addresses of all machines in certSANs.
		c.pending(CodeClusterAddress, "IP address %s is in the API server's certificate; remove it from cluster.apiServer.certSANs "+
			"(Talos 1.14: certExtraSANs of KubeAPIServerConfig), or reboot the control-plane machine that had it before", ip)
	case source != "" && !c.checkAPIServer(CodeClusterAddress, ip.String(), source):
		return
	case source == "" && slices.ContainsFunc(c.Policy.ExtraIPs, equals(ip)) && !c.Machine.Excludes(ip):
	default:
		c.checkOwnAddress(ip)
	}

	c.checkOwners(ip.String())
}

// checkReserved reports whether a machine may have a certificate for an address at all, and adds the reason if not.
func (c *checker) checkReserved(ip netip.Addr) bool {
	var cidr string

	source := c.sourceOf(func(s ClusterSubjects) bool {
		cidr = reservedCIDR(s, ip)

		return cidr != ""
	})

	switch {
	case !ip.IsGlobalUnicast():
		c.denied(CodeSpecialAddress, "IP address %s %s", ip, specialAddress)
	case source == apiServer:
		c.denied(CodeClusterAddress, "IP address %s belongs to a Service", ip)
	case source != "":
		c.pending(CodeClusterAddress, "IP address %s is in %s, a CIDR of pods or Services or a virtual IP according to %s", ip, cidr, source)
	}

	return source == "" && ip.IsGlobalUnicast()
}

// reservedCIDR returns the CIDR of Services or pods that contains ip, or the virtual address ip as a CIDR. It returns an
// empty string for other addresses. The address must be unmapped.
func reservedCIDR(s ClusterSubjects, ip netip.Addr) string {
	cidrs := slices.Concat(s.ServiceCIDRs, s.PodCIDRs)

	for _, vip := range s.VIPs {
		cidrs = append(cidrs, netip.PrefixFrom(vip.Unmap(), vip.Unmap().BitLen()))
	}

	for _, cidr := range cidrs {
		if cidr.Contains(ip) {
			return cidr.String()
		}
	}

	return ""
}

// checkOwnAddress checks an address that the machine must report. If the machine is not known, checkRequester has added
// the reason.
func (c *checker) checkOwnAddress(ip netip.Addr) {
	own := c.ownAddresses(ip)

	switch {
	case !c.machineKnown():
	case c.Machine.Excludes(ip):
		c.notOwned(CodeExcludedAddress, ip.String(), "IP address %s is in a subnet that the machine excludes from node IPs", ip)
	case len(own) == 0 && slices.ContainsFunc(c.Policy.PendingIPs, equals(ip)):
		c.pending(CodeUnknownAddress, "IP address %s is set by a rule, and Node %.80q does not have it yet", ip, c.nodename)
	case !slices.ContainsFunc(own, isUncontested):
		c.notOwned(CodeUnknownAddress, ip.String(), "IP address %s is not reported by the machine", ip)
	case !slices.ContainsFunc(own, isOnNetwork) && !slices.ContainsFunc(c.Machine.NodeIPs, equals(ip)):
		// A node IP may be on any link: machines that announce it by BGP have it on the loopback or a dummy link.
		c.notOwned(CodeVirtualAddress, ip.String(), "IP address %s is on a link for addresses that several machines share", ip)
	}
}

// ownAddresses returns the entries of the machine's addresses for ip, one for each link.
func (c *checker) ownAddresses(ip netip.Addr) (own []machine.Address) {
	for _, a := range c.Machine.Addresses {
		if a.Prefix.Addr().Unmap() == ip {
			own = append(own, a)
		}
	}

	return own
}

// equals returns a predicate for addresses equal to ip, which is unmapped.
func equals(ip netip.Addr) func(netip.Addr) bool {
	return func(other netip.Addr) bool { return other.Unmap() == ip }
}

// isUncontested reports whether the kernel knows of no other machine with the address on the same network.
func isUncontested(a machine.Address) bool {
	return nethelpers.AddressFlag(a.Flags)&(nethelpers.AddressDADFailed|nethelpers.AddressTentative) == 0
}

// isOnNetwork reports whether an address is on a link to a network. On other links several machines have the same
// address: kube-proxy in IPVS mode, kube-router and node-local DNS assign service addresses on every machine, and
// anycast addresses are assigned to dummy links.
func isOnNetwork(a machine.Address) bool {
	isPrefix := func(prefix string) bool { return strings.HasPrefix(a.Link, prefix) }

	return a.Link != "lo" && !slices.ContainsFunc([]string{"dummy", "kube-", "nodelocaldns"}, isPrefix)
}
