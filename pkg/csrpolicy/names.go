package csrpolicy

import (
	"errors"
	"slices"
	"strings"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

// defaultDomain is the DNS domain of clusters that do not configure another one.
const defaultDomain = "cluster.local"

// CheckAllowedName returns an error if Review denies the DNS name to every machine of every cluster, or of a cluster with the default domain, so that
// Policy.ExtraNames cannot allow it. Case and a trailing dot do not matter. The error is a predicate such as "is a wildcard" that omits the name.
func CheckAllowedName(name string) error {
	if _, problem := checkName(machine.CanonicalName(name), []string{defaultDomain}); problem != "" {
		return errors.New(problem)
	}

	return nil
}

// checkName returns why no machine of a cluster with these DNS domains may have a canonical name: a code and a predicate, both empty if one may.
func checkName(name string, domains []string) (code, problem string) {
	switch {
	case strings.Contains(name, "*"):
		return CodeWildcard, "is a wildcard"
	case !validName(name):
		return CodeInvalidName, "is not a valid DNS name"
	case endsInNumber(name):
		return CodeAddressAsName, "can be parsed as an IP address"
	case isClusters(name, domains):
		return CodeClusterName, "is reserved for the cluster"
	}

	return "", ""
}

// validName tells whether a canonical name is a host's (RFC 1123): no wildcard, no empty label, letters, digits and hyphens.
func validName(name string) bool {
	const maxName, maxLabel = 253, 63

	if len(name) > maxName {
		return false
	}

	for label := range strings.SplitSeq(name, ".") {
		if label == "" || len(label) > maxLabel || strings.HasPrefix(label, "-") || strings.HasSuffix(label, "-") {
			return false
		}

		if strings.Trim(label, "abcdefghijklmnopqrstuvwxyz0123456789-") != "" {
			return false
		}
	}

	return true
}

// endsInNumber tells whether a resolver may read name as an IPv4 address: inet_aton takes 127.1, 0x7f000001 and 2130706433, all of them
// loopback, and so do browsers (WHATWG URL, "ends in a number").
func endsInNumber(name string) bool {
	last := name[strings.LastIndexByte(name, '.')+1:]
	digits := "0123456789"

	if hex, ok := strings.CutPrefix(last, "0x"); ok {
		last, digits = hex, "0123456789abcdef"
	}

	return strings.Trim(last, digits) == ""
}

// under tells whether name is domain or below it.
func under(name, domain string) bool { return name == domain || strings.HasSuffix(name, "."+domain) }

// isClusters tells whether name stands for the API server, a service or the local host, in a cluster whose DNS has these domains.
func isClusters(name string, domains []string) bool {
	switch {
	case name == "kubernetes", name == "kubernetes.default", strings.HasPrefix(name, "kubernetes.default."):
		return true
	case under(name, "localhost"), strings.HasPrefix(name, "localhost."), under(name, "svc"):
		return true
	}

	return slices.ContainsFunc(domains, func(domain string) bool { return under(name, machine.CanonicalName(domain)) })
}

// ownNames are the names that the machine, or its platform, gives it; in canonical form.
func ownNames(m machine.Machine) []string {
	return canonicalNames(append(platformNames(m), m.Nodename, m.Hostname, m.FQDN()))
}

// platformNames are those that controllers/node lists in the Node's addresses, from where the kubelet has them.
func platformNames(m machine.Machine) []string {
	names := []string{m.Platform.InternalDNS, m.Platform.ExternalDNS}
	if strings.Contains(strings.TrimSuffix(m.Platform.Hostname, "."), ".") {
		names = append(names, m.Platform.Hostname)
	}

	return names
}

func canonicalNames(list []string) []string {
	var names []string

	for _, name := range list {
		if name = machine.CanonicalName(name); name != "" {
			names = append(names, name)
		}
	}

	return names
}
