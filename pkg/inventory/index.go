package inventory

import (
	"net/netip"
	"slices"

	"k8s.io/apimachinery/pkg/util/sets"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

// index maps keys, such as addresses, to the nodenames of the machines that have them. Most keys have one.
type index[K comparable] map[K][]string

func (x index[K]) others(key K, nodename string) []string {
	return slices.DeleteFunc(slices.Clone(x[key]), func(n string) bool { return n == nodename })
}

// replace replaces the keys of nodename's machine. It returns the other nodenames with a key that has become shared, or
// is no longer shared.
func (x index[K]) replace(nodename string, before, after []K) (affected []string) {
	old, current := sets.New(before...), sets.New(after...)

	for key := range old.Difference(current) {
		remaining := x.others(key, nodename)

		switch x[key] = remaining; len(remaining) {
		case 0:
			delete(x, key)
		case 1:
			affected = append(affected, remaining[0])
		}
	}

	for key := range current.Difference(old) {
		if len(x[key]) == 1 {
			affected = append(affected, x[key][0])
		}

		x[key] = append(x[key], nodename)
	}

	return affected
}

func uuids(m machine.Machine) []string {
	if uuid := m.UUID(); uuid != "" {
		return []string{uuid}
	}

	return nil
}

// platformAddresses returns the addresses that only the platform's metadata knows.
func platformAddresses(m machine.Machine) []netip.Addr {
	var list []netip.Addr

	for _, a := range m.Addresses {
		if a.Link == machine.LinkExternal {
			list = append(list, a.Prefix.Addr().Unmap())
		}
	}

	return list
}
