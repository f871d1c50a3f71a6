package cidrset

import (
	"fmt"
	"net/netip"
	"strings"
)

// ParsePrefix parses a CIDR such as "10.244.0.0/16", ignoring surrounding space. It refuses host bits and IPv4-mapped IPv6 addresses. The error
// quotes s.
func ParsePrefix(s string) (netip.Prefix, error) {
	prefix, err := parsePrefix(s)

	switch {
	case err != nil:
		return netip.Prefix{}, err
	case prefix != prefix.Masked():
		return netip.Prefix{}, fmt.Errorf("%q has host bits set; did you mean %s?", s, prefix.Masked())
	}

	return prefix, nil
}

// ParsePrefixes parses a list of CIDRs that Kubernetes has accepted or would accept. It differs from ParsePrefix in that it masks host bits, as
// Kubernetes does.
func ParsePrefixes(list []string) ([]netip.Prefix, error) {
	var prefixes []netip.Prefix

	for _, s := range list {
		prefix, err := parsePrefix(s)
		if err != nil {
			return nil, err
		}

		prefixes = append(prefixes, prefix.Masked())
	}

	return prefixes, nil
}

func parsePrefix(s string) (netip.Prefix, error) {
	prefix, err := netip.ParsePrefix(strings.TrimSpace(s))

	switch {
	case err != nil:
		return netip.Prefix{}, fmt.Errorf("%q is not a CIDR such as 10.244.0.0/16", s)
	case prefix.Addr().Is4In6():
		return netip.Prefix{}, fmt.Errorf("%q is an IPv4-mapped IPv6 CIDR; write it as IPv4", s)
	}

	return prefix, nil
}
