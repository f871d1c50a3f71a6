package nodespec

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"

	"github.com/siderolabs/talos/pkg/machinery/nethelpers"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/rules"
)

// reportsExternalIPs lists the platforms whose Talos driver publishes public addresses on the link "external". On
// other platforms, public addresses are discovered on the machine's links.
var reportsExternalIPs = map[string]bool{
	"akamai": true, "aws": true, "azure": true, "cloudstack": true, "digital-ocean": true, "equinixMetal": true,
	"exoscale": true, "gcp": true, "hcloud": true, "scaleway": true, "upcloud": true, "vultr": true,
}

// notPublic are ranges that netip counts as global unicast but that are not globally reachable
// (IANA special-purpose registries, RFC 6890).
var notPublic = []netip.Prefix{
	netip.MustParsePrefix("0.0.0.0/8"),
	netip.MustParsePrefix("100.64.0.0/10"), // carrier-grade NAT; Tailscale
	netip.MustParsePrefix("192.0.0.0/24"),
	netip.MustParsePrefix("198.18.0.0/15"),
	netip.MustParsePrefix("240.0.0.0/4"),
	netip.MustParsePrefix("64:ff9b::/96"),
	netip.MustParsePrefix("64:ff9b:1::/48"), // NAT64 of the local network, RFC 8215
	netip.MustParsePrefix("100::/64"),
	netip.MustParsePrefix("2001:2::/48"), // benchmarking, as 198.18.0.0/15
	netip.MustParsePrefix("5f00::/16"),   // segment routing, RFC 9602
	netip.MustParsePrefix("fec0::/10"),
}

// internalIPs returns the kubelet's node IPs that the machine has, one of each family; if the kubelet reports none,
// the node IPs of Talos. It omits virtual IPs: a machine may have one, but it can move to another machine.
func internalIPs(in Input) []netip.Addr {
	provided := in.ProvidedNodeIPs
	if len(provided) == 0 {
		provided = in.Machine.NodeIPs
	}

	var ips []netip.Addr

	for _, ip := range provided {
		ip = ip.Unmap()
		sameFamily := func(other netip.Addr) bool { return other.Is4() == ip.Is4() }

		if in.Machine.HasAddress(ip) && !in.Machine.Excludes(ip) && !slices.ContainsFunc(ips, sameFamily) {
			ips = append(ips, ip)
		}
	}

	slices.SortStableFunc(ips, byFamily(in.Options))

	return ips
}

func byFamily(options Options) func(a, b netip.Addr) int {
	return func(a, b netip.Addr) int {
		switch {
		case a.Is6() == b.Is6():
			return 0
		case a.Is6() == options.PreferIPv6:
			return -1
		default:
			return 1
		}
	}
}

func addresses(in Input, transformed rules.Result, nodeIPs []netip.Addr) ([]corev1.NodeAddress, []Problem) {
	var list []corev1.NodeAddress

	for _, ip := range nodeIPs {
		list = append(list, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: ip.String()})
	}

	for _, ip := range externalIPs(in, transformed.PublicIPDiscovery, nodeIPs) {
		list = append(list, corev1.NodeAddress{Type: corev1.NodeExternalIP, Address: ip.String()})
	}

	list = append(list, corev1.NodeAddress{Type: corev1.NodeHostName, Address: in.Machine.Nodename})

	names, problems := dnsNames(in.Machine)

	return append(list, names...), problems
}

// externalIPs returns the addresses that the platform reports and, if discovery is enabled, the public addresses on the
// links. The default is to discover addresses if the platform does not report any.
func externalIPs(in Input, discovery *bool, nodeIPs []netip.Addr) []netip.Addr {
	discover := !reportsExternalIPs[in.Machine.Platform.Platform]
	if discovery != nil {
		discover = *discovery
	}

	var found []machine.Address

	for _, a := range in.Machine.Addresses {
		ip := a.Prefix.Addr().Unmap()
		if slices.Contains(nodeIPs, ip) || slices.Contains(in.SharedAddresses, ip) {
			continue
		}

		isSpecial := slices.ContainsFunc(notPublic, func(p netip.Prefix) bool { return p.Contains(ip) })

		if a.Link == machine.LinkExternal || (discover && in.Machine.IsStable(a) && !isSpecial) {
			found = append(found, a)
		}
	}

	slices.SortStableFunc(found, func(a, b machine.Address) int {
		x, y := a.Prefix.Addr().Unmap(), b.Prefix.Addr().Unmap()

		permanence := cmp.Compare(nethelpers.AddressFlag(b.Flags)&nethelpers.AddressPermanent, nethelpers.AddressFlag(a.Flags)&nethelpers.AddressPermanent)

		return cmp.Or(byFamily(in.Options)(x, y), permanence, x.Compare(y))
	})

	var ips []netip.Addr

	for _, a := range found {
		if ip := a.Prefix.Addr().Unmap(); !slices.Contains(ips, ip) {
			ips = append(ips, ip)
		}
	}

	return ips
}

// dnsNames returns the DNS names that the platform reports. A host name with a domain is the internal name if the
// platform reports no other.
func dnsNames(m machine.Machine) ([]corev1.NodeAddress, []Problem) {
	internal := m.Platform.InternalDNS
	if internal == "" && strings.Contains(strings.TrimSuffix(m.Platform.Hostname, "."), ".") {
		internal = m.Platform.Hostname
	}

	var (
		list     []corev1.NodeAddress
		problems []Problem
	)

	for _, a := range []corev1.NodeAddress{
		{Type: corev1.NodeInternalDNS, Address: internal},
		{Type: corev1.NodeExternalDNS, Address: m.Platform.ExternalDNS},
	} {
		name := strings.ToLower(strings.TrimSuffix(a.Address, "."))
		if name == "" {
			continue
		}

		why := validation.IsDNS1123Subdomain(name)
		if _, err := netip.ParseAddr(name); err == nil {
			why = append(why, "is an IP address")
		}

		if len(why) > 0 {
			problems = append(problems, Problem{Key: string(a.Type), Value: a.Address, Why: strings.Join(why, "; ")})

			continue
		}

		list = append(list, corev1.NodeAddress{Type: a.Type, Address: name})
	}

	return list, problems
}
