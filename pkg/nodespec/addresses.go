package nodespec

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/siderolabs/talos/pkg/machinery/nethelpers"
	corev1 "k8s.io/api/core/v1"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/noderecord"
	"github.com/talos-ccm/talos-ccm/pkg/rules"
)

// reportsExternalIPs lists the platforms whose Talos driver publishes public addresses on the link "external". On
// other platforms, public addresses are discovered on the machine's links.
var reportsExternalIPs = map[string]bool{
	"akamai": true, "alibabacloud": true, "aws": true, "azure": true, "cloudstack": true, "digital-ocean": true, "equinixMetal": true,
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

// providedIPs returns the kubelet's node IPs, by family; if the kubelet reports none, the node IPs of Talos. It omits
// virtual IPs: a machine may have one, but it can move to another machine.
func providedIPs(in Input) []netip.Addr {
	provided := in.ProvidedNodeIPs
	if len(provided) == 0 {
		provided = in.Machine.NodeIPs
	}

	var ips []netip.Addr

	for _, ip := range provided {
		if !in.Machine.Excludes(ip) {
			ips = append(ips, ip.Unmap())
		}
	}

	slices.SortStableFunc(ips, byFamily(in.Options))

	return ips
}

// internalIPs returns the provided IPs that the machine has, one of each family.
func internalIPs(in Input, provided []netip.Addr) []netip.Addr {
	var ips []netip.Addr

	for _, ip := range provided {
		sameFamily := func(other netip.Addr) bool { return other.Is4() == ip.Is4() }

		if in.Machine.HasAddress(ip) && !slices.ContainsFunc(ips, sameFamily) {
			ips = append(ips, ip)
		}
	}

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
	// The first InternalIP has the family of the kubelet's first node IP. A providerID does not depend on that.
	if kubelet := in.ProvidedNodeIPs; len(kubelet) > 0 && kubelet[0].Unmap().Is6() {
		slices.SortStableFunc(nodeIPs, byFamily(Options{PreferIPv6: true}))
	}

	var list []corev1.NodeAddress

	for _, ip := range nodeIPs {
		list = append(list, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: ip.String()})
	}

	names, problems := dnsNames(in, transformed)
	names = slices.Insert(names, 0, corev1.NodeAddress{Type: corev1.NodeHostName, Address: in.Machine.Nodename})

	external := externalIPs(in, transformed.PublicIPDiscovery, nodeIPs)
	listed := external[:min(len(external), machine.MaxSubjects-len(nodeIPs)-len(names))]

	for _, ip := range listed {
		list = append(list, corev1.NodeAddress{Type: corev1.NodeExternalIP, Address: ip.String()})
	}

	if omitted := external[len(listed):]; len(omitted) > 0 {
		problems = append(problems, Problem{Key: "ExternalIPs", Value: omitted[0].String(), Why: fmt.Sprintf(
			"%d addresses exceed the limit of %d names and addresses in the certificate of a kubelet; set addresses.externalIPs: first-per-family, "+
				"or remove addresses from the machine", len(omitted), machine.MaxSubjects)})
	}

	for _, ip := range slices.SortedFunc(maps.Keys(in.SharedAddresses), netip.Addr.Compare) {
		if in.Machine.Platform.Platform != platformAzure {
			problems = append(problems, Problem{
				Key: string(corev1.NodeExternalIP), Value: ip.String(), Kept: keepsShared(in, ip),
				Why: fmt.Sprintf("the machine of node %q reports the same address", slices.Min(in.SharedAddresses[ip])),
			})
		}
	}

	return append(list, names...), problems
}

// platformAzure lists a load balancer's addresses in the metadata of every machine behind it.
const platformAzure = "azure"

// keepsShared reports whether the Node keeps an address that another machine began to report: otherwise every machine
// could remove the addresses of others from their Nodes.
func keepsShared(in Input, ip netip.Addr) bool {
	return in.SharedAddresses[ip] == nil || (in.Machine.Platform.Platform != platformAzure && slices.Contains(in.ExternalIPs, ip))
}

// externalIPs returns the addresses that the platform reports and, if discovery is enabled, the public addresses on the
// links. The default is to discover addresses if the platform does not report any.
//
// The order is that of the upstream Talos CCM, which lists the first address of each family: reported addresses, then
// those on links in the order of their IDs. Of the latter, permanent IPv6 addresses come first.
func externalIPs(in Input, discovery *bool, nodeIPs []netip.Addr) []netip.Addr {
	reports := reportsExternalIPs[in.Machine.Platform.Platform]
	discover := !reports

	if discovery != nil {
		discover = *discovery
	}

	var reported, found []netip.Addr

	for _, a := range in.Machine.Addresses {
		ip := a.Prefix.Addr().Unmap()
		isExternal := a.Link == machine.LinkExternal

		switch {
		case slices.Contains(nodeIPs, ip), !keepsShared(in, ip), in.Machine.Excludes(ip):
		case isExternal && reports:
			reported = append(reported, ip)
		case !isExternal && !(discover && isPublic(in.Machine, a)):
		case ip.Is6() && nethelpers.AddressFlag(a.Flags)&nethelpers.AddressPermanent != 0:
			found = slices.Insert(found, 0, ip)
		default:
			found = append(found, ip)
		}
	}

	return arrange(in.Options, append(reported, found...))
}

// isPublic reports whether the address on a link belongs to this machine permanently and is globally reachable.
func isPublic(m machine.Machine, a machine.Address) bool {
	isSpecial := func(p netip.Prefix) bool { return p.Contains(a.Prefix.Addr().Unmap()) }

	return m.IsStable(a) && !slices.ContainsFunc(notPublic, isSpecial)
}

// arrange returns the ExternalIPs without duplicates, by family.
func arrange(options Options, all []netip.Addr) []netip.Addr {
	var ips []netip.Addr

	for _, ip := range all {
		isListed := func(other netip.Addr) bool {
			return other == ip || (options.OneExternalIPPerFamily && other.Is4() == ip.Is4())
		}

		if !slices.ContainsFunc(ips, isListed) {
			ips = append(ips, ip)
		}
	}

	slices.SortStableFunc(ips, byFamily(options))

	return ips
}

// addRuleAddresses appends the addresses from rules to those of the machine, and adds the labels that record them.
func (s *Spec) addRuleAddresses(in Input) (problems []Problem) {
	for _, set := range s.Transformed.Addresses {
		address, label := corev1.NodeAddress{Type: set.Type, Address: set.IP.String()}, noderecord.RuleAddressLabel(set.IP)

		if slices.ContainsFunc(s.Addresses, func(a corev1.NodeAddress) bool { return a.Address == address.Address }) {
			continue
		}

		why, isListed := fmt.Sprintf("the Node has %d names and addresses", len(s.Addresses)), false
		if len(s.Addresses) < machine.MaxSubjects {
			why, isListed = whyNotAdded(in, set.IP)
		}

		if why != "" {
			problems = append(problems, Problem{Rule: set.Rule, Key: fmt.Sprintf("addresses[%s]", set.Type), Value: address.Address, Why: why, Kept: isListed})
		}

		if !isListed {
			s.AwaitsAddress = true

			continue
		}

		next := slices.IndexFunc(s.Addresses, func(a corev1.NodeAddress) bool { return a.Type != corev1.NodeInternalIP && a.Type != set.Type })
		s.Addresses = slices.Insert(s.Addresses, next, address) // every Node has a host name
		s.Labels[label], s.Transformed.Labels[label] = string(set.Type), rules.Value{Value: string(set.Type), Rule: set.Rule}
	}

	return problems
}

// whyNotAdded returns why a Node should not list an address that a rule sets: what the rule read may be forged. isListed
// reports whether the Node lists the address nevertheless. A Node keeps a recorded address if another owner appears later.
// Until the cluster identity is complete, it gets no new address, without a problem.
func whyNotAdded(in Input, ip netip.Addr) (why string, isListed bool) {
	source, isKnown, isRecorded := "", true, slices.Contains(in.RuleAddresses, ip)
	if in.Options.ClusterAddress != nil {
		source, isKnown = in.Options.ClusterAddress(ip)
	}

	switch {
	case in.Machine.Excludes(ip):
		return "is in a subnet that the machine excludes from node IPs", false
	case source != "":
		return "is an address of the cluster according to " + source, false
	case !isKnown && !isRecorded:
		return "", false
	case in.ReserveAddress == nil:
		return "", true
	}

	if owner := in.ReserveAddress(ip); owner != "" {
		return fmt.Sprintf("node %q has the address", owner), isRecorded
	}

	return "", true
}

// dnsNames returns the DNS names that the platform reports or rules set. If there is no internal name, it is the host
// name if that has a domain, or such a nodename if the platform reports no host name. The kubelet requests a certificate
// for all names of its Node. Therefore dnsNames omits names for which the kubelet could not get one.
func dnsNames(in Input, transformed rules.Result) (list []corev1.NodeAddress, problems []Problem) {
	platform, own := transformed.Platform, in.Machine.OwnNames()

	for field, name := range map[string]string{"InternalDNS": platform.InternalDNS, "ExternalDNS": platform.ExternalDNS} {
		if _, replaced := transformed.Replaced[field]; replaced {
			own = append(own, machine.CanonicalName(name)) // the operator's choice
		}
	}

	internal, hostname := platform.InternalDNS, cmp.Or(platform.Hostname, in.Machine.Nodename)
	if internal == "" && strings.Contains(strings.TrimSuffix(hostname, "."), ".") {
		internal = hostname
	}

	for _, a := range []corev1.NodeAddress{
		{Type: corev1.NodeInternalDNS, Address: internal},
		{Type: corev1.NodeExternalDNS, Address: platform.ExternalDNS},
	} {
		name, field := machine.CanonicalName(a.Address), string(a.Type)
		if a.Type == corev1.NodeInternalDNS && platform.InternalDNS == "" {
			field = "" // the host name
		}

		switch why := whyNotListed(in, name, own); {
		case name == "":
		case why != "":
			problems = append(problems, invalidMetadata(transformed, field, string(a.Type), a.Address, why))
		default:
			list = append(list, corev1.NodeAddress{Type: a.Type, Address: name})
		}
	}

	return list, problems
}

// deniedSubjects returns the nodename and the node IPs for which no kubelet gets a certificate. The Node lists them
// nevertheless, because Kubernetes requires them.
func deniedSubjects(in Input, nodeIPs []netip.Addr) (problems []Problem) {
	const consequence = "; its kubelet gets no certificate"

	if why := checkName(in, machine.CanonicalName(in.Machine.Nodename)); why != "" {
		problems = append(problems, Problem{Key: string(corev1.NodeHostName), Value: in.Machine.Nodename, Why: string(why) + consequence, Kept: true})
	}

	for _, ip := range nodeIPs {
		if ip.IsLinkLocalUnicast() {
			problems = append(problems, Problem{
				Key: string(corev1.NodeInternalIP), Value: ip.String(), Why: "is a link-local address" + consequence, Kept: true,
			})
		}
	}

	return problems
}

func checkName(in Input, name string) machine.NameProblem {
	return machine.CheckName(name, in.Machine.Nodename, append([]string{machine.DefaultDomain}, in.Options.Domains...))
}

// whyNotListed returns why the machine's kubelet could not get a certificate for a canonical name; empty if it could.
// own are the names that the machine may have.
func whyNotListed(in Input, name string, own []string) string {
	if problem := checkName(in, name); problem != "" {
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
