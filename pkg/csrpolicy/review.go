package csrpolicy

import (
	"cmp"
	"crypto/rsa"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	talosmachine "github.com/siderolabs/talos/pkg/machinery/config/machine"
	"github.com/siderolabs/talos/pkg/machinery/nethelpers"
	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

const (
	groupNodes         = "system:nodes"
	groupAuthenticated = "system:authenticated"

	// abandonedAfter is four times as long as a kubelet waits before it discards the key and sends another request
	// (certificateWaitTimeout in k8s.io/client-go/util/certificate). Approving a backlog of such requests is of no use.
	abandonedAfter = time.Hour
)

// Usages of a kubelet-serving certificate, sorted (DefaultKubeletServingGetUsages in
// k8s.io/client-go/util/certificate).
var (
	usagesOfAny = []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageServerAuth}
	usagesOfRSA = []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageKeyEncipherment, certificatesv1.UsageServerAuth}
)

// reasons collects the reasons not to approve a request.
type reasons []Reason

// deny adds a reason that no evidence can remove.
func (r *reasons) deny(code, format string, args ...any) {
	*r = append(*r, Reason{Code: code, Decision: Deny, Message: fmt.Sprintf(format, args...)})
}

// postpone adds a reason that other evidence can remove.
func (r *reasons) postpone(code, format string, args ...any) {
	*r = append(*r, Reason{Code: code, Decision: Defer, Message: fmt.Sprintf(format, args...)})
}

// review is the review of one request.
type review struct {
	reasons

	Evidence

	request *Request
	// nodename is empty if the requester is not a kubelet.
	nodename string

	// The results of checkCredential.
	unexpected string
	pin        Pin
}

// Review returns the decision on a request with all reasons. It is deterministic and does not modify its arguments.
func Review(request *Request, e Evidence) Verdict {
	if code, message := ignored(request.csr, e); code != "" {
		return Verdict{Decision: Ignore, Reasons: []Reason{{Code: code, Decision: Ignore, Message: message}}}
	}

	r := review{request: request, Evidence: e}
	r.checkRequester()
	r.reasons = append(r.reasons, request.reasons...)
	r.checkTerms()

	for _, name := range request.names {
		r.checkName(name)
	}

	for _, ip := range request.ips {
		r.checkAddress(ip)
	}

	r.checkCredential()

	if len(r.reasons) == 0 {
		message := fmt.Sprintf("All requested names and addresses belong to the machine of Node %q", r.nodename)

		return Verdict{
			Decision: Approve, Reasons: []Reason{{Code: CodeVerified, Decision: Approve, Message: message}},
			Unexpected: r.unexpected, Pin: r.pin,
		}
	}

	// An unknown Node may turn out to be unmanaged, so that none of its kubelet's requests is denied.
	if !r.Node.managed() && r.nodename != "" {
		for i := range r.reasons {
			r.reasons[i].Decision = Defer
		}
	}

	slices.SortStableFunc(r.reasons, func(a, b Reason) int { return cmp.Compare(b.Decision, a.Decision) })

	return Verdict{Decision: r.reasons[0].Decision, Reasons: r.reasons, Unexpected: r.unexpected}
}

// ignored returns why the request must not be touched; empty if it is pending and concerns us.
func ignored(csr *certificatesv1.CertificateSigningRequest, e Evidence) (code, message string) {
	created := csr.CreationTimestamp.Time

	switch {
	case csr.Spec.SignerName != certificatesv1.KubeletServingSignerName:
		return CodeOtherSigner, "Request is for another signer"
	case len(csr.Status.Conditions) > 0, len(csr.Status.Certificate) > 0:
		return CodeDecided, "Request is already decided"
	case e.Node == NodeUnmanaged:
		return CodeNodeUnmanaged, "Node does not run Talos or is not managed"
	case !created.IsZero() && e.Now.Sub(created) > abandonedAfter:
		return CodeExpired, fmt.Sprintf("Request is older than %s; its kubelet no longer waits for it", abandonedAfter)
	}

	return "", ""
}

// checkRequester checks the user and the groups that the API server recorded, and that the user's Node, its machine and
// the cluster are known.
func (r *review) checkRequester() {
	spec := r.request.csr.Spec

	var ok bool
	if r.nodename, ok = Nodename(r.request.csr); !ok {
		r.deny(CodeNoNode, "User %.80q is not a kubelet", spec.Username)
	}

	for _, group := range []string{groupNodes, groupAuthenticated} {
		if !slices.Contains(spec.Groups, group) {
			r.deny(CodeGroups, "User %.80q is not in group %s", spec.Username, group)
		}
	}

	if r.nodename == "" {
		return
	}

	if r.Node == NodeDeleting {
		r.postpone(CodeNodeDeleting, "Node %.80q is being deleted", r.nodename)
	} else if !r.Node.managed() {
		r.postpone(CodeNodeUnknown, "Node %.80q does not exist yet", r.nodename)
	}

	switch {
	case r.MachineState == MachineUnreachable:
		r.postpone(CodeMachineUnreachable, "Machine of Node %.80q is unreachable", r.nodename)
	case r.MachineState == MachineMismatch, r.MachineState == MachineCurrent && r.Machine.Nodename != r.nodename:
		r.postpone(CodeMachineMismatch, "Machine at the address of Node %.80q reports another nodename", r.nodename)
	case r.MachineState != MachineCurrent:
		r.postpone(CodeMachineUnknown, "Machine of Node %.80q has not responded yet", r.nodename)
	}

	if !r.Cluster.Known {
		r.postpone(CodeClusterUnknown, "Cluster domains, service CIDRs and API server addresses are not all known yet")
	}
}

// machineKnown reports whether the machine's view is current and reports the requester's nodename.
func (r *review) machineKnown() bool {
	return r.nodename != "" && r.MachineState == MachineCurrent && r.Machine.Nodename == r.nodename
}

// checkTerms checks the usages, the lifetime and the subject.
func (r *review) checkTerms() {
	request, spec := r.request, r.request.csr.Spec
	usages := slices.Sorted(slices.Values(spec.Usages))
	mayBeRSA := request.x509 == nil // one reason is enough for a malformed request

	if !mayBeRSA {
		_, mayBeRSA = request.x509.PublicKey.(*rsa.PublicKey)
	}

	if !slices.Equal(usages, usagesOfAny) && !(mayBeRSA && slices.Equal(usages, usagesOfRSA)) {
		r.deny(CodeUsages, "Usages must be digital signature and server auth; RSA keys may add key encipherment")
	}

	if spec.ExpirationSeconds != nil {
		lifetime, longest := time.Duration(*spec.ExpirationSeconds)*time.Second, cmp.Or(r.Policy.MaxExpiration, DefaultMaxExpiration)
		if lifetime < MinExpiration || lifetime > longest {
			r.deny(CodeExpiration, "Lifetime %s is not between %s and %s", lifetime, MinExpiration, longest)
		}
	}

	if s := request.subject; s != nil && s.commonName != spec.Username {
		r.deny(CodeSubject, "Common name %.80q is not the user %.80q", s.commonName, spec.Username)
	}

	if s := request.subject; s != nil && s.organization != groupNodes {
		r.deny(CodeSubject, "Organization %.80q is not %s", s.organization, groupNodes)
	}
}

// sourceOf returns the source of cluster subjects for which has returns true; empty if there is none. A pool comes first:
// the pool is wrong if it overlaps with a ServiceCIDR, and a wrong pool must not cause denials.
func (r *review) sourceOf(has func(ClusterSubjects) bool) string {
	configured := Report{"the configuration of talos-ccm", ClusterSubjects{PodCIDRs: r.Policy.PodCIDRs}}

	for _, report := range append([]Report{configured, {apiServer, r.Cluster.Stated}}, r.Cluster.Reported...) {
		if has(report.ClusterSubjects) {
			return report.Source
		}
	}

	return ""
}

// checkName checks a DNS name. Names of the cluster take precedence over names that the machine reports.
func (r *review) checkName(name string) {
	source := r.sourceOf(func(s ClusterSubjects) bool { return slices.Contains(machine.CanonicalNames(s.APIServerNames), name) })

	switch problem := machine.CheckName(name, r.nodename, r.Cluster.Domains); {
	case problem != "":
		r.deny(codesByProblem[problem], "DNS name %.80q %s", name, problem)
	case source != "":
		if r.mayBeAPIServer(CodeClusterName, name, source) {
			r.checkOwnName(name)
		}
	case slices.Contains(machine.CanonicalNames(r.Policy.ExtraNames), name):
		r.checkOwners(name)
	default:
		r.checkOwnName(name)
	}
}

// checkAddress checks an IP address. Addresses of the cluster take precedence over addresses that the machine reports.
func (r *review) checkAddress(ip netip.Addr) {
	source := r.sourceOf(func(s ClusterSubjects) bool { return slices.ContainsFunc(s.APIServerIPs, equals(ip)) })

	var cidr string

	owner := r.sourceOf(func(s ClusterSubjects) bool {
		cidr = s.reservedCIDR(ip)

		return cidr != ""
	})

	switch {
	case !ip.IsGlobalUnicast():
		r.deny(CodeSpecialAddress, "IP address %s %s", ip, specialAddress)
	case owner == apiServer:
		r.deny(CodeClusterAddress, "IP address %s belongs to a Service", ip)
	case owner != "":
		r.postpone(CodeClusterAddress, "IP address %s is in %s, a CIDR of pods or Services or a virtual IP according to %s", ip, cidr, owner)
	case source == apiServer && r.isWorker() && slices.ContainsFunc(r.ownAddresses(ip), isUncontested):
		// Talos keeps each address of a control-plane machine in the certificate until the machine reboots
		// (network.NodeAddressAccumulativeID in secrets/KubernetesCertSANsController). The worker may have it by now. And
		// operators list the addresses of all machines in certSANs.
		r.postpone(CodeClusterAddress, "IP address %s is in the API server's certificate; remove it from cluster.apiServer.certSANs, "+
			"or reboot the control-plane machine that had it before", ip)
		r.checkOwners(ip.String())
	case source != "":
		if r.mayBeAPIServer(CodeClusterAddress, ip.String(), source) {
			r.checkOwnAddress(ip)
		}
	case slices.ContainsFunc(r.Policy.ExtraIPs, equals(ip)) && !r.Machine.Excludes(ip):
		r.checkOwners(ip.String())
	default:
		r.checkOwnAddress(ip)
	}
}

// mayBeAPIServer reports whether the machine may have a name or an address of the API server if it owns the name or the
// address: only a control-plane machine may. Both the Node and the machine must have that role: a worker can report any
// role, and an operator can label a worker.
func (r *review) mayBeAPIServer(code, subject, source string) bool {
	switch {
	case r.Node == NodeControlPlane && r.machineKnown() && r.Machine.Type.IsControlPlane():
		return true
	case r.isWorker() && source == apiServer:
		r.deny(code, "%s belongs to the API server, and Node %.80q is a worker", describe(subject), r.nodename)
	case r.isWorker():
		r.postpone(code, "%s belongs to the API server according to %s, and Node %.80q is a worker", describe(subject), source, r.nodename)
	default:
		r.postpone(CodeControlPlaneUnclear, "%s belongs to the API server; Node %.80q and its machine do not both have the control-plane role",
			describe(subject), r.nodename)
	}

	return false
}

// isWorker reports whether both the Node and the machine have the role of a worker.
func (r *review) isWorker() bool {
	return r.Node == NodeWorker && r.machineKnown() && r.Machine.Type == talosmachine.TypeWorker
}

// checkOwnName checks a name that the machine must report. If the machine is not known, checkRequester has added
// the reason.
func (r *review) checkOwnName(name string) {
	if r.machineKnown() && !slices.Contains(r.Machine.OwnNames(), name) {
		r.unproven(CodeUnknownName, name, "DNS name %.80q is not reported by the machine", name)
	}

	r.checkOwners(name)
}

// checkOwnAddress checks an address that the machine must report.
func (r *review) checkOwnAddress(ip netip.Addr) {
	own := r.ownAddresses(ip)

	switch {
	case !r.machineKnown():
	case r.Machine.Excludes(ip):
		r.unproven(CodeExcludedAddress, ip.String(), "IP address %s is in a subnet that the machine excludes from node IPs", ip)
	case !slices.ContainsFunc(own, isUncontested):
		r.unproven(CodeUnknownAddress, ip.String(), "IP address %s is not reported by the machine", ip)
	case !slices.ContainsFunc(own, isOnNetwork) && !slices.ContainsFunc(r.Machine.NodeIPs, equals(ip)):
		// A node IP may be on any link: machines that announce it by BGP have it on the loopback or a dummy link.
		r.unproven(CodeVirtualAddress, ip.String(), "IP address %s is on a link for addresses that several machines share", ip)
	}

	r.checkOwners(ip.String())
}

// ownAddresses returns the entries of the machine's addresses for ip, one for each link.
func (r *review) ownAddresses(ip netip.Addr) (own []machine.Address) {
	for _, a := range r.Machine.Addresses {
		if a.Prefix.Addr().Unmap() == ip {
			own = append(own, a)
		}
	}

	return own
}

// unproven adds the reason for a name or an address that the machine does not own. The request is denied if the Node
// does not list the name or the address either: a kubelet waits a quarter of an hour for a pending request before it
// requests its current names, and less than a minute after a denial (certificateWaitTimeout and rotateCerts in
// k8s.io/client-go/util/certificate).
func (r *review) unproven(code, subject, format string, args ...any) {
	if len(r.Listed) > 0 && !slices.Contains(r.Listed, subject) {
		r.deny(CodeNotOwned, format+", and its Node does not list it", args...)
	} else {
		r.postpone(code, format, args...)
	}
}

// checkOwners checks that no other Node has the name or address. If two have it, the rightful owner is not known.
func (r *review) checkOwners(subject string) {
	others := slices.Sorted(maps.Keys(r.Owners[subject]))

	if len(others) == 0 || r.nodename == "" {
		return
	}

	owner, more := others[0], ""
	if until := r.Owners[subject][owner]; !until.IsZero() {
		more = fmt.Sprintf(", which was deleted, at least until %s,", until.UTC().Format(time.RFC3339))
	}

	switch count := len(others) - 1; count {
	case 0:
	case 1:
		more += " and 1 other Node"
	default:
		more += fmt.Sprintf(" and %d other Nodes", count)
	}

	r.postpone(CodeOwnedByOthers, "%s is owned by Node %.80q%s", describe(subject), owner, strings.TrimSuffix(more, ","))
}

// describe returns a DNS name or an IP address with its kind, for messages.
func describe(subject string) string {
	if _, err := netip.ParseAddr(subject); err == nil {
		return "IP address " + subject
	}

	return fmt.Sprintf("DNS name %.80q", subject)
}

// specialAddress is the predicate of addresses for which IsGlobalUnicast is false.
const specialAddress = "is a loopback, link-local, multicast, unspecified or broadcast address"

// CheckAllowedName returns an error if Review denies the DNS name to every machine of every cluster, or of a cluster
// with the default domain, so that Policy.ExtraNames cannot allow it. Case and a trailing dot do not matter. The error
// is a predicate such as "is a wildcard" that omits the name.
func CheckAllowedName(name string) error {
	if problem := machine.CheckName(machine.CanonicalName(name), "", []string{machine.DefaultDomain}); problem != "" {
		return errors.New(string(problem))
	}

	return nil
}

// CheckAllowedAddress returns an error if Review denies the address to every machine of every cluster, so that
// Policy.ExtraIPs cannot allow it. The error is a predicate that omits the address.
func CheckAllowedAddress(addr netip.Addr) error {
	switch addr = addr.Unmap(); {
	case !addr.IsValid():
		return errors.New("is not an IP address")
	case addr.Zone() != "":
		return errors.New("has a zone")
	case !addr.IsGlobalUnicast():
		return errors.New(specialAddress)
	}

	return nil
}

// codesByProblem are the codes of the names that machine.CheckName refuses.
var codesByProblem = map[machine.NameProblem]string{
	machine.NameWildcard: CodeWildcard,
	machine.NameInvalid:  CodeInvalidName,
	machine.NameNumeric:  CodeAddressAsName,
	machine.NameReserved: CodeClusterName,
}

// equals returns a predicate for addresses equal to ip, which is unmapped.
func equals(ip netip.Addr) func(netip.Addr) bool {
	return func(other netip.Addr) bool { return other.Unmap() == ip }
}

// isUncontested reports whether the kernel knows of no other machine with the address on the same network.
func isUncontested(a machine.Address) bool {
	return nethelpers.AddressFlag(a.Flags)&(nethelpers.AddressDADFailed|nethelpers.AddressTentative) == 0
}

// isOnNetwork reports whether an address is on a link to a network. On other links several machines have the same
// address: kube-proxy in IPVS mode, kube-router and node-local DNS assign service addresses on every machine, and
// anycast addresses are assigned to dummy links.
func isOnNetwork(a machine.Address) bool {
	isPrefix := func(prefix string) bool { return strings.HasPrefix(a.Link, prefix) }

	return a.Link != "lo" && !slices.ContainsFunc([]string{"dummy", "kube-", "nodelocaldns"}, isPrefix)
}
