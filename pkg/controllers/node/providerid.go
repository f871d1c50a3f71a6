package node

import (
	"net/netip"
	"strings"
)

// differentInstances reports whether two providerIDs certainly name two instances. It compares only providerIDs of one
// form: the upstream Talos CCM and the other fallback name the same machine in another way, such as
// talos://metal/10.0.0.1 and talos://metal/<UUID>. Addresses do not identify instances.
func differentInstances(a, b string) bool {
	prefixA, idA := splitProviderID(a)
	prefixB, idB := splitProviderID(b)

	if strings.Count(prefixA, "/") != strings.Count(prefixB, "/") || scheme(prefixA) != scheme(prefixB) || strings.EqualFold(idA, idB) {
		return false
	}

	return !isAddress(idA) && !isAddress(idB) && isUUID(idA) == isUUID(idB)
}

// splitProviderID returns the providerID up to its last slash, and the rest, which identifies the instance.
func splitProviderID(providerID string) (prefix, id string) {
	i := strings.LastIndex(providerID, "/") + 1

	return providerID[:i], providerID[i:]
}

// scheme returns the scheme, with the platform of a providerID of this program.
func scheme(prefix string) string {
	if strings.HasPrefix(prefix, "talos://") {
		return prefix
	}

	name, _, _ := strings.Cut(prefix, "://")

	return name
}

func isAddress(id string) bool {
	_, err := netip.ParseAddr(id)

	return err == nil
}

func isUUID(id string) bool {
	const length = 36

	return len(id) == length && strings.Count(id, "-") == 4
}
