package inventory

import (
	"net/netip"
	"slices"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

// SharedAddresses are those that the platform's metadata gives not to nodename's machine alone: a load balancer's, as Azure's metadata
// lists it for every machine behind it.
func (i *Inventory) SharedAddresses(nodename string) []netip.Addr {
	i.mu.RLock()
	defer i.mu.RUnlock()

	return slices.DeleteFunc(platformAddresses(i.entries[nodename].Machine), func(addr netip.Addr) bool { return len(i.platforms[addr]) < 2 })
}

// platformAddresses are sorted, each once: a machine may say that there are thousands.
func platformAddresses(m machine.Machine) []netip.Addr {
	var list []netip.Addr

	for _, a := range m.Addresses {
		if a.Link == machine.LinkExternal {
			list = append(list, a.Prefix.Addr().Unmap())
		}
	}

	slices.SortFunc(list, netip.Addr.Compare)

	return slices.Compact(list)
}

// share makes after all that nodename's platform gives its machine, and returns the other nodenames for which an address has become a shared
// one, or ceased to be. i.mu is held.
func (i *Inventory) share(nodename string, before, after []netip.Addr) (concerned []string) {
	for _, addr := range before {
		if _, stays := slices.BinarySearchFunc(after, addr, netip.Addr.Compare); stays {
			continue
		}

		i.platforms[addr] = slices.DeleteFunc(i.platforms[addr], func(holder string) bool { return holder == nodename })

		switch len(i.platforms[addr]) {
		case 0:
			delete(i.platforms, addr)
		case 1:
			concerned = append(concerned, i.platforms[addr][0])
		}
	}

	for _, addr := range after {
		if _, had := slices.BinarySearchFunc(before, addr, netip.Addr.Compare); had {
			continue
		}

		if len(i.platforms[addr]) == 1 {
			concerned = append(concerned, i.platforms[addr][0])
		}

		i.platforms[addr] = append(i.platforms[addr], nodename)
	}

	return concerned
}
