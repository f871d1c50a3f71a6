package inventory

import (
	"net/netip"
	"slices"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

// linkServices is the link on which kube-proxy in IPVS mode keeps the addresses of Services.
const linkServices = "kube-ipvs0"

// Owners are the other Nodes' machines that claim a name or an address, in canonical form. A machine claims what it says is its own; one that
// is unreachable claims what it last said. Nothing of it is proved, so a claim can speak against somebody else's and never for anything.
func (i *Inventory) Owners(claim, nodename string) []string {
	i.mu.RLock()
	defer i.mu.RUnlock()

	return slices.DeleteFunc(slices.Clone(i.claimants[claim]), func(holder string) bool { return holder == nodename })
}

// claims are the names and addresses that m claims, each once, in canonical form.
func claims(m machine.Machine) []string {
	names := []string{m.Nodename, m.Hostname, m.FQDN(), m.Platform.Hostname, m.Platform.InternalDNS, m.Platform.ExternalDNS}
	list := make([]string, 0, len(names)+len(m.Addresses)+len(m.NodeIPs))

	for _, name := range names {
		if name = machine.CanonicalName(name); name != "" {
			list = append(list, name)
		}
	}

	for _, addr := range m.NodeIPs {
		list = append(list, machine.CanonicalAddress(addr))
	}

	for _, a := range m.Addresses {
		if addr := a.Prefix.Addr().Unmap(); addr.IsGlobalUnicast() && !service(m, a) {
			list = append(list, machine.CanonicalAddress(addr))
		}
	}

	slices.Sort(list)

	return slices.Compact(list)
}

// service tells whether an address is one of those of Services that kube-proxy puts on every machine, thousands of them in a large cluster.
// All else counts, even what a machine was told not to use as its node IP: it is the machine's all the same.
func service(m machine.Machine, a machine.Address) bool {
	return a.Link == linkServices && slices.ContainsFunc(m.ExcludedSubnets, func(p netip.Prefix) bool { return p.Contains(a.Prefix.Addr()) })
}

// reclaim makes after all that nodename claims. i.mu is held.
func (i *Inventory) reclaim(nodename string, before, after []string) {
	for _, claim := range before {
		if _, stays := slices.BinarySearch(after, claim); stays {
			continue
		}

		i.claimants[claim] = slices.DeleteFunc(i.claimants[claim], func(holder string) bool { return holder == nodename })

		if len(i.claimants[claim]) == 0 {
			delete(i.claimants, claim)
		}
	}

	for _, claim := range after {
		if _, had := slices.BinarySearch(before, claim); !had {
			i.claimants[claim] = append(i.claimants[claim], nodename)
		}
	}
}
