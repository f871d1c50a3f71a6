package csrpolicy

import (
	"errors"
	"slices"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

// Codes of DNS names. All are reasons to deny a request, except UnknownDNSName. ClusterDNSName can also be a reason to
// keep a request pending.
const (
	CodeClusterName   = "ClusterDNSName"
	CodeWildcard      = "Wildcard"
	CodeInvalidName   = "InvalidDNSName"
	CodeAddressAsName = "IPAddressAsDNSName"
	CodeUnknownName   = "UnknownDNSName" // not reported by the machine
)

// codesByProblem are the codes of the names that machine.CheckName refuses.
var codesByProblem = map[machine.NameProblem]string{
	machine.NameWildcard: CodeWildcard,
	machine.NameInvalid:  CodeInvalidName,
	machine.NameNumeric:  CodeAddressAsName,
	machine.NameReserved: CodeClusterName,
}

// CheckAllowedName returns an error if Review denies the DNS name to every machine of every cluster, or of a cluster
// with the default domain, so that Policy.ExtraNames cannot allow it. Case and a trailing dot do not matter. The error
// is a predicate such as "is a wildcard" that omits the name.
func CheckAllowedName(name string) error {
	if problem := machine.CheckName(machine.CanonicalName(name), "", []string{machine.DefaultDomain}); problem != "" {
		return errors.New(string(problem))
	}

	return nil
}

// checkName checks a DNS name. Names of the cluster take precedence over names that the machine reports. If the machine
// is not known, checkRequester has added the reason.
func (c *checker) checkName(name string) {
	source := c.sourceOf(func(s ClusterSubjects) bool { return slices.Contains(machine.CanonicalNames(s.APIServerNames), name) })

	switch problem := machine.CheckName(name, c.nodename, c.Cluster.Domains); {
	case problem != "":
		c.denied(codesByProblem[problem], "DNS name %.80q %s", name, problem)

		return
	case source != "" && !c.checkAPIServer(CodeClusterName, name, source):
		return
	case source == "" && slices.Contains(machine.CanonicalNames(c.Policy.ExtraNames), name):
	case c.machineKnown() && !slices.Contains(c.Machine.OwnNames(), name):
		c.notOwned(CodeUnknownName, name, "DNS name %.80q is not reported by the machine", name)
	}

	c.checkOwners(name)
}
