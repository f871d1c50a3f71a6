package machine

import (
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"
	netutils "k8s.io/utils/net"
)

// NameProblem is why a name cannot be in a kubelet's certificate, as a predicate that omits the name; empty if it can.
type NameProblem string

// Problems of names.
const (
	NameWildcard NameProblem = "is a wildcard"
	NameInvalid  NameProblem = "is not a valid DNS name"
	NameNumeric  NameProblem = "can be parsed as an IP address"
	NameReserved NameProblem = "is reserved for the cluster"
)

// DefaultDomain is the DNS domain of clusters that do not configure another one. It is reserved in all clusters.
const DefaultDomain = "cluster.local"

// CheckName returns why the Node with the given nodename must not have a certificate for a canonical name in a cluster
// with these DNS domains. Names that pass may still belong to another machine.
//
// A nodename may look like a number: Kubernetes and Talos allow 10023 and node.42, and kubelets request their nodename.
// No other Node has the name. Browsers and curl, which take it for an IPv4 address, compare that with the IP addresses of
// a certificate and not with its DNS names; a client that compares it as a name reaches the address of another machine
// only if it is configured with that address in such a form. A complete IPv4 address, even with leading zeros, is
// refused: kubelets request it as IP address, which the machine must have (addressesToHostnamesAndIPs in
// k8s.io/kubernetes/pkg/kubelet/certificate).
func CheckName(name, nodename string, domains []string) NameProblem {
	switch {
	case strings.Contains(name, "*"):
		return NameWildcard
	case !ValidName(name):
		return NameInvalid
	case endsInNumber(name) && (name != nodename || netutils.ParseIPSloppy(name) != nil):
		return NameNumeric
	case isClusterName(name, domains):
		return NameReserved
	}

	return ""
}

// ValidName reports whether a canonical name is a host name (RFC 1123).
func ValidName(name string) bool {
	valid := len(name) <= validation.DNS1123SubdomainMaxLength

	for label := range strings.SplitSeq(name, ".") {
		valid = valid && len(validation.IsDNS1123Label(label)) == 0
	}

	return valid
}

// endsInNumber reports whether a resolver may parse name as an IPv4 address: inet_aton accepts 127.1, 0x7f000001 and
// 2130706433, all of them loopback, and so do browsers (WHATWG URL, "ends in a number").
func endsInNumber(name string) bool {
	last := name[strings.LastIndexByte(name, '.')+1:]
	digits := "0123456789"

	if hex, ok := strings.CutPrefix(last, "0x"); ok {
		last, digits = hex, "0123456789abcdef"
	}

	return strings.Trim(last, digits) == ""
}

// isClusterName reports whether name belongs to the API server, a service or the local host in a cluster with these DNS
// domains.
func isClusterName(name string, domains []string) bool {
	isUnder := func(domain string) bool { return strings.HasSuffix("."+name, "."+CanonicalName(domain)) }

	return name == "kubernetes" || name == "kubernetes.default" || strings.HasPrefix(name, "kubernetes.default.") || strings.HasPrefix(name, "localhost.") ||
		isUnder("localhost") || isUnder("svc") || slices.ContainsFunc(domains, isUnder)
}

// minPlatformLabels is the number of labels of a platform's name below which it could be a service, as other services
// of the cluster address it: vault, vault.vault.
const minPlatformLabels = 3

// OwnNames returns the names for which the machine may have a certificate, in canonical form, if CheckName allows them
// and no other machine has them.
//
// A machine can report any host name. Host name and FQDN count only if Talos derives the nodename from one of them.
// Platform names count only if they cannot be taken for those of services.
func (m Machine) OwnNames() []string {
	names := []string{m.Nodename}

	if m.Nodename != "" && (nodenameOf(m.Hostname) == m.Nodename || nodenameOf(m.FQDN()) == m.Nodename) {
		names = append(names, m.Hostname, m.FQDN())
	}

	for _, name := range m.platformNames() {
		if strings.Count(CanonicalName(name), ".")+1 >= minPlatformLabels {
			names = append(names, name)
		}
	}

	return CanonicalNames(names)
}

// ReportedNames returns all names that the machine reports, in canonical form. They are not verified: use them to
// refuse a name to other machines, never to grant one.
func (m Machine) ReportedNames() []string {
	return CanonicalNames(append([]string{m.Nodename, m.Hostname, m.FQDN()}, m.platformNames()...))
}

func (m Machine) platformNames() []string {
	return []string{m.Platform.Hostname, m.Platform.InternalDNS, m.Platform.ExternalDNS}
}

// nodenameOf returns the nodename that Talos derives from a host name or an FQDN; empty if it derives none.
//
// Talos takes the FQDN if machine.kubelet.registerWithFQDN is set, else the host name; changes it to lower case and
// underscores to hyphens; drops all other characters that a nodename cannot have, and hyphens and dots at both ends
// (k8s/NodenameController and FromHostname in internal/app/machined/pkg/controllers/k8s/internal/nodename). The
// kubelet's extra argument hostname-override does not change k8s/Nodename: such a Node does not match its machine.
func nodenameOf(hostname string) string {
	allowed := strings.Map(func(r rune) rune {
		switch {
		case 'a' <= r && r <= 'z', '0' <= r && r <= '9', r == '-', r == '.':
			return r
		case r == '_':
			return '-'
		default:
			return -1
		}
	}, CanonicalName(hostname))

	return strings.Trim(allowed, "-.")
}

// CanonicalName returns name in lower case without one trailing dot, the form in which names are compared. It folds
// ASCII letters only: no other letter may become an ASCII letter.
func CanonicalName(name string) string {
	lower := []byte(strings.TrimSuffix(name, "."))

	for i, c := range lower {
		if 'A' <= c && c <= 'Z' {
			lower[i] = c + 'a' - 'A'
		}
	}

	return string(lower)
}

// CanonicalNames returns names in canonical form, without empty ones.
func CanonicalNames(names []string) []string {
	list := make([]string, 0, len(names))

	for _, name := range names {
		if name = CanonicalName(name); name != "" {
			list = append(list, name)
		}
	}

	return list
}
