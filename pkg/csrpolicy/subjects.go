package csrpolicy

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	talosmachine "github.com/siderolabs/talos/pkg/machinery/config/machine"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

// Codes of both names and addresses. All are reasons to keep a request pending, except NotOwned, which is a reason to
// deny it.
const (
	CodeControlPlaneUnclear = "ControlPlaneUnconfirmed" // the API server's, and Node and machine do not both have the control-plane role
	CodeNotOwned            = "NotOwned"                // the machine does not own it and the Node does not list it, so the request is outdated or hostile
	CodeOwnedByOthers       = "OwnedByOtherMachine"
)

// ClusterIdentity holds the names and addresses of the cluster. No worker may get a certificate for them.
type ClusterIdentity struct {
	// Known is true once enough sources have been read to know the domains, the API server and a ServiceCIDR. Nothing is
	// approved before.
	Known bool
	// Domains are the domains of cluster DNS, such as "cluster.local".
	Domains []string
	// APIServerPorts are the TCP ports at which the API servers listen.
	APIServerPorts []int32
	// Stated are the subjects that the API server states: in its serving certificate, its Service, its endpoints and the
	// ServiceCIDRs. Review denies a request of any machine for an address of a Service. It denies a worker's request for
	// a name or address of the API server, unless the worker reports the address: then the request stays pending.
	Stated ClusterSubjects
	// Reported are the subjects that other sources report. A request of any machine for an address of a Service or pod
	// stays pending, as does a worker's request for a name or address of the API server. Review does not deny them,
	// because the source can be wrong.
	Reported []Report
}

// ClusterSubjects are names and addresses of the cluster.
type ClusterSubjects = machine.ClusterSubjects

// Report contains the subjects that one source reports.
type Report struct {
	// Source is a noun for messages, such as `machine "cp-1"`.
	Source string
	ClusterSubjects
}

// apiServer is the source of ClusterIdentity.Stated.
const apiServer = "the API server"

// sourceOf returns the source of cluster subjects for which has returns true; empty if there is none. A pool comes first:
// the pool is wrong if it overlaps with a ServiceCIDR, and a wrong pool must not cause denials.
func (c *checker) sourceOf(has func(ClusterSubjects) bool) string {
	configured := Report{"the configuration of talos-ccm", ClusterSubjects{PodCIDRs: c.Policy.PodCIDRs}}

	for _, report := range append([]Report{configured, {apiServer, c.Cluster.Stated}}, c.Cluster.Reported...) {
		if has(report.ClusterSubjects) {
			return report.Source
		}
	}

	return ""
}

// SourceOf returns the source according to which an address is of the cluster itself or in podCIDRs; empty if there is none.
func (i ClusterIdentity) SourceOf(ip netip.Addr, podCIDRs []netip.Prefix) string {
	c := checker{Evidence: Evidence{Cluster: i, Policy: Policy{PodCIDRs: podCIDRs}}}

	return c.sourceOf(func(s ClusterSubjects) bool {
		return reservedCIDR(s, ip) != "" || slices.ContainsFunc(s.APIServerIPs, equals(ip))
	})
}

// checkAPIServer reports whether the machine may have a name or an address of the API server, and adds the reason if not.
// Only a control-plane machine may. Both the Node and the machine must have that role: a worker can report any role, and
// an operator can label a worker.
func (c *checker) checkAPIServer(code, subject, source string) bool {
	switch {
	case c.Node == NodeControlPlane && c.machineKnown() && c.Machine.Type.IsControlPlane():
		return true
	case c.isWorker() && source == apiServer:
		c.denied(code, "%s belongs to the API server, and Node %.80q is a worker", describe(subject), c.nodename)
	case c.isWorker():
		c.pending(code, "%s belongs to the API server according to %s, and Node %.80q is a worker", describe(subject), source, c.nodename)
	default:
		c.pending(CodeControlPlaneUnclear, "%s belongs to the API server; Node %.80q and its machine do not both have the control-plane role",
			describe(subject), c.nodename)
	}

	return false
}

// isWorker reports whether both the Node and the machine have the role of a worker.
func (c *checker) isWorker() bool {
	return c.Node == NodeWorker && c.machineKnown() && c.Machine.Type == talosmachine.TypeWorker
}

// notOwned adds the reason for a name or an address that the machine does not own. The request is denied if the Node
// does not list the name or the address either: a kubelet waits a quarter of an hour for a pending request before it
// requests its current names, and less than a minute after a denial (certificateWaitTimeout and rotateCerts in
// k8s.io/client-go/util/certificate).
func (c *checker) notOwned(code, subject, format string, args ...any) {
	if len(c.Listed) > 0 && !slices.Contains(c.Listed, subject) {
		c.denied(CodeNotOwned, format+", and its Node does not list it", args...)
	} else {
		c.pending(code, format, args...)
	}
}

// checkOwners checks that no other Node has the name or address. If two have it, the rightful owner is not known.
func (c *checker) checkOwners(subject string) {
	others := slices.Sorted(maps.Keys(c.Owners[subject]))

	if len(others) == 0 || c.nodename == "" {
		return
	}

	owner, more := others[0], ""
	if until := c.Owners[subject][owner]; !until.IsZero() {
		more = fmt.Sprintf(", which was deleted, at least until %s,", until.UTC().Format(time.RFC3339))
	}

	switch count := len(others) - 1; count {
	case 0:
	case 1:
		more += " and 1 other Node"
	default:
		more += fmt.Sprintf(" and %d other Nodes", count)
	}

	c.pending(CodeOwnedByOthers, "%s is owned by Node %.80q%s", describe(subject), owner, strings.TrimSuffix(more, ","))
}

// describe returns a DNS name or an IP address with its kind, for messages.
func describe(subject string) string {
	if _, err := netip.ParseAddr(subject); err == nil {
		return "IP address " + subject
	}

	return fmt.Sprintf("DNS name %.80q", subject)
}
