package csrpolicy

import (
	"errors"
	"net/netip"
	"slices"
	"strings"

	"github.com/siderolabs/talos/pkg/machinery/nethelpers"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

// defaultDomain is the DNS domain of clusters that do not configure another one.
const defaultDomain = "cluster.local"

// specialAddress is the predicate of addresses that isSpecial reports.
const specialAddress = "is a loopback, link-local, multicast, unspecified or broadcast address"

// CheckAllowedName returns an error if Review denies the DNS name to every machine of every cluster, or of a cluster
// with the default domain, so that Policy.ExtraNames cannot allow it. Case and a trailing dot do not matter. The error
// is a predicate such as "is a wildcard" that omits the name.
func CheckAllowedName(name string) error {
	if _, problem := nameProblem(machine.CanonicalName(name), []string{defaultDomain}); problem != "" {
		return errors.New(problem)
	}

	return nil
}

// CheckAllowedAddress returns an error if Review denies the address to every machine of every cluster, so that
// Policy.ExtraIPs cannot allow it. The error is a predicate that omits the address.
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

// nameProblem returns why no machine of a cluster with these DNS domains may have a canonical name: a code and a
// predicate, both empty if one may.
func nameProblem(name string, domains []string) (code, problem string) {
	switch {
	case strings.Contains(name, "*"):
		return CodeWildcard, "is a wildcard"
	case !validName(name):
		return CodeInvalidName, "is not a valid DNS name"
	case endsInNumber(name):
		return CodeAddressAsName, "can be parsed as an IP address"
	case isClusterName(name, domains):
		return CodeClusterName, "is reserved for the cluster"
	}

	return "", ""
}

// validName reports whether a canonical name is a host name (RFC 1123).
func validName(name string) bool {
	valid := len(name) <= validation.DNS1123SubdomainMaxLength

	for label := range strings.SplitSeq(name, ".") {
		valid = valid && len(validation.IsDNS1123Label(label)) == 0
	}

	return valid
}

// endsInNumber reports whether a resolver may parse name as an IPv4 address: inet_aton accepts 127.1, 0x7f000001 and
// 2130706433, all of them loopback, and so do browsers (WHATWG URL, "ends in a number").
func endsInNumber(name string) bool {
	last := name[strings.LastIndexByte(name, '.')+1:]
	digits := "0123456789"

	if hex, ok := strings.CutPrefix(last, "0x"); ok {
		last, digits = hex, "0123456789abcdef"
	}

	return strings.Trim(last, digits) == ""
}

// isClusterName reports whether name belongs to the API server, a service or the local host in a cluster with these DNS
// domains.
func isClusterName(name string, domains []string) bool {
	isUnder := func(domain string) bool { return strings.HasSuffix("."+name, "."+machine.CanonicalName(domain)) }

	return name == "kubernetes" || name == "kubernetes.default" || strings.HasPrefix(name, "kubernetes.default.") || strings.HasPrefix(name, "localhost.") ||
		isUnder("localhost") || isUnder("svc") || slices.ContainsFunc(domains, isUnder)
}

// ownNames returns the names that the machine or its platform reports, in canonical form.
func ownNames(m machine.Machine) []string {
	names := []string{m.Nodename, m.Hostname, m.FQDN(), m.Platform.InternalDNS, m.Platform.ExternalDNS}

	// The node controller lists the platform's host name only with a domain.
	if strings.Contains(strings.TrimSuffix(m.Platform.Hostname, "."), ".") {
		names = append(names, m.Platform.Hostname)
	}

	return canonicalNames(names)
}

// canonicalNames omits empty names.
func canonicalNames(list []string) []string {
	var names []string

	for _, name := range list {
		if name = machine.CanonicalName(name); name != "" {
			names = append(names, name)
		}
	}

	return names
}

// isSpecial reports whether an unmapped address is not unicast, or only valid on its link.
func isSpecial(ip netip.Addr) bool { return !ip.IsGlobalUnicast() }

// equals returns a predicate for addresses equal to ip, which is unmapped.
func equals(ip netip.Addr) func(netip.Addr) bool {
	return func(other netip.Addr) bool { return other.Unmap() == ip }
}

// reserves reports whether no machine can own ip.
func (c ClusterIdentity) reserves(ip netip.Addr) bool {
	contains := func(p netip.Prefix) bool { return p.Contains(ip) }

	return slices.ContainsFunc(slices.Concat(c.ServiceIPs, c.VIPs), equals(ip)) || slices.ContainsFunc(slices.Concat(c.ServiceCIDRs, c.PodCIDRs), contains)
}

// hasAddress reports whether the machine has ip and the kernel knows of no other machine with ip on the same network.
func hasAddress(m machine.Machine, ip netip.Addr) bool {
	const contested = nethelpers.AddressDADFailed | nethelpers.AddressTentative

	return slices.ContainsFunc(m.Addresses, func(a machine.Address) bool {
		return a.Prefix.Addr().Unmap() == ip && nethelpers.AddressFlag(a.Flags)&contested == 0
	})
}

// virtualLinks are prefixes of links whose addresses several machines share: kube-proxy in IPVS mode, kube-router and
// node-local DNS assign service addresses on every machine, and anycast addresses are assigned to dummy links.
var virtualLinks = []string{"dummy", "kube-", "nodelocaldns"}

// onNetwork reports whether an address of the machine is on a link to a network, or is a node IP, which may be on any
// link: machines that announce their address by BGP have it on the loopback or a dummy link.
func onNetwork(m machine.Machine, ip netip.Addr) bool {
	return slices.ContainsFunc(m.NodeIPs, equals(ip)) || slices.ContainsFunc(m.Addresses, func(a machine.Address) bool {
		isVirtual := a.Link == "lo" || slices.ContainsFunc(virtualLinks, func(prefix string) bool { return strings.HasPrefix(a.Link, prefix) })

		return a.Prefix.Addr().Unmap() == ip && !isVirtual
	})
}
