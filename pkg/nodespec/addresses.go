package nodespec

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/siderolabs/talos/pkg/machinery/nethelpers"
	corev1 "k8s.io/api/core/v1"

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

	names, problems := dnsNames(in, transformed)

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
		if slices.Contains(nodeIPs, ip) || slices.Contains(in.SharedAddresses, ip) || in.Machine.Excludes(ip) {
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

// dnsNames returns the DNS names that the platform reports or rules set. A host name with a domain is the internal name
// if there is no other. The kubelet requests a certificate for all names of its Node, so dnsNames omits those for which
// it could not get one.
func dnsNames(in Input, transformed rules.Result) ([]corev1.NodeAddress, []Problem) {
	platform, own := transformed.Platform, in.Machine.OwnNames()

	for field, name := range map[string]string{"InternalDNS": platform.InternalDNS, "ExternalDNS": platform.ExternalDNS} {
		if _, replaced := transformed.Replaced[field]; replaced {
			own = append(own, machine.CanonicalName(name)) // the operator's choice
		}
	}

	internal := platform.InternalDNS
	if internal == "" && strings.Contains(strings.TrimSuffix(platform.Hostname, "."), ".") {
		internal = platform.Hostname
	}

	var (
		list     []corev1.NodeAddress
		problems []Problem
	)

	for _, a := range []corev1.NodeAddress{
		{Type: corev1.NodeInternalDNS, Address: internal},
		{Type: corev1.NodeExternalDNS, Address: platform.ExternalDNS},
	} {
		name := machine.CanonicalName(a.Address)

		switch why := whyNotListed(in, name, own); {
		case name == "":
		case why != "":
			problems = append(problems, Problem{Key: string(a.Type), Value: a.Address, Why: why})
		default:
			list = append(list, corev1.NodeAddress{Type: a.Type, Address: name})
		}
	}

	return list, problems
}

// whyNotListed returns why the machine's kubelet could not get a certificate for a canonical name; empty if it could.
// own are the names that the machine may have.
func whyNotListed(in Input, name string, own []string) string {
	domains := append([]string{machine.DefaultDomain}, in.Options.Domains...)

	if problem := machine.CheckName(name, in.Machine.Nodename, domains); problem != "" {
		return string(problem)
	}

	if !slices.Contains(own, name) {
		return "has fewer than three labels and is not the machine's FQDN"
	}

	if in.OwnersOf != nil {
		if owners := in.OwnersOf(name); len(owners) > 0 {
			return fmt.Sprintf("the machine of node %q has the same name", slices.Min(owners))
		}
	}

	return ""
}
