package machine

import (
	"net/netip"
	"strings"
)

// CanonicalName returns name in lower case and without one trailing dot, the form in which names are compared. Only ASCII letters are folded:
// no other letter may become one of them.
func CanonicalName(name string) string {
	lower := []byte(strings.TrimSuffix(name, "."))

	for i, c := range lower {
		if 'A' <= c && c <= 'Z' {
			lower[i] = c + 'a' - 'A'
		}
	}

	return string(lower)
}

// CanonicalAddress returns the form in which addresses are compared: without zone, and an IPv4-mapped IPv6 address as IPv4.
func CanonicalAddress(addr netip.Addr) string { return addr.Unmap().WithZone("").String() }
