package inventory

import (
	"net/netip"
	"slices"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

// index maps keys, such as addresses, to the nodenames of the machines that have them. Most keys have one.
type index[K comparable] struct {
	compare   func(a, b K) int
	nodenames map[K][]string
}

func newIndex[K comparable](compare func(a, b K) int) index[K] {
	return index[K]{compare: compare, nodenames: map[K][]string{}}
}

// others returns the nodenames of the other machines that have the key.
func (x index[K]) others(key K, nodename string) []string {
	return slices.DeleteFunc(slices.Clone(x.nodenames[key]), func(n string) bool { return n == nodename })
}

// replace replaces the keys of nodename's machine. Both lists must be sorted and without duplicates. It returns each
// other nodename that has become, or is no longer, one of several with a key.
func (x index[K]) replace(nodename string, before, after []K) (affected []string) {
	for _, key := range x.missing(before, after) {
		remaining := slices.DeleteFunc(x.nodenames[key], func(n string) bool { return n == nodename })

		switch x.nodenames[key] = remaining; len(remaining) {
		case 0:
			delete(x.nodenames, key)
		case 1:
			affected = append(affected, remaining[0])
		}
	}

	for _, key := range x.missing(after, before) {
		if len(x.nodenames[key]) == 1 {
			affected = append(affected, x.nodenames[key][0])
		}

		x.nodenames[key] = append(x.nodenames[key], nodename)
	}

	return affected
}

// missing returns the keys of list that the other list lacks.
func (x index[K]) missing(list, other []K) []K {
	return slices.DeleteFunc(slices.Clone(list), func(key K) bool {
		_, found := slices.BinarySearchFunc(other, key, x.compare)

		return found
	})
}

func uuids(m machine.Machine) []string {
	if uuid := m.UUID(); uuid != "" {
		return []string{uuid}
	}

	return nil
}

// linkServices is the link on which kube-proxy in IPVS mode keeps the addresses of Services.
const linkServices = "kube-ipvs0"

// owned returns the names and addresses that m reports as its own, in canonical form. It omits the addresses of
// Services, of which kube-proxy puts thousands on every machine. It includes addresses that the machine must not use
// as node IP.
func owned(m machine.Machine) []string {
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
		addr := a.Prefix.Addr()
		isService := a.Link == linkServices && m.Excludes(addr)

		if addr.Unmap().IsGlobalUnicast() && !isService {
			list = append(list, machine.CanonicalAddress(addr))
		}
	}

	slices.Sort(list)

	return slices.Compact(list)
}

// platformAddresses returns the addresses that only the platform's metadata knows.
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
