package csrpolicy

import (
	"cmp"
	"crypto/rsa"
	"fmt"
	"net/netip"
	"slices"
	"time"

	talosmachine "github.com/siderolabs/talos/pkg/machinery/config/machine"
	certificatesv1 "k8s.io/api/certificates/v1"
)

const (
	groupNodes         = "system:nodes"
	groupAuthenticated = "system:authenticated"

	// minExpiration is the shortest that the API server takes; maxExpiration is that of a kubelet that asks for a year, and leap years.
	minExpiration = 10 * time.Minute
	maxExpiration = 366 * 24 * time.Hour

	// abandonedAfter is four times what a kubelet waits before it throws the key away and asks again
	// (certificateWaitTimeout in k8s.io/client-go/util/certificate). To approve what has piled up meanwhile would be of use to nobody.
	abandonedAfter = time.Hour
)

// Usages of a kubelet-serving certificate, sorted (DefaultKubeletServingGetUsages in k8s.io/client-go/util/certificate).
var (
	usagesOfAny = []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageServerAuth}
	usagesOfRSA = []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageKeyEncipherment, certificatesv1.UsageServerAuth}
)

func deny(code, format string, args ...any) Reason {
	return Reason{Code: code, Decision: Deny, Message: fmt.Sprintf(format, args...)}
}

// review gathers the reasons against one request.
type review struct {
	csr      *certificatesv1.CertificateSigningRequest
	evidence Evidence
	nodename string
	reasons  []Reason
}

func (r *review) deny(code, format string, args ...any) {
	r.reasons = append(r.reasons, deny(code, format, args...))
}

func (r *review) wait(code, format string, args ...any) {
	r.reasons = append(r.reasons, Reason{Code: code, Decision: Defer, Message: fmt.Sprintf(format, args...)})
}

// notOurs says why the request must be left alone, if so.
func notOurs(csr *certificatesv1.CertificateSigningRequest, e Evidence) *Reason {
	ignore := func(code, message string) *Reason { return &Reason{Code: code, Decision: Ignore, Message: message} }

	created := csr.CreationTimestamp.Time

	switch {
	case csr.Spec.SignerName != certificatesv1.KubeletServingSignerName:
		return ignore(CodeOtherSigner, "The request is for another signer")
	case len(csr.Status.Conditions) > 0, len(csr.Status.Certificate) > 0:
		return ignore(CodeDecided, "The request is settled")
	case e.Node == NodeUnmanaged:
		return ignore(CodeNodeUnmanaged, "The Node does not run Talos, or is not ours")
	case !created.IsZero() && e.Now.Sub(created) > abandonedAfter:
		return ignore(CodeExpired, fmt.Sprintf("The request is older than %s: its kubelet has made another", abandonedAfter))
	}

	return nil
}

// requester checks what the API server says of who made the request.
func (r *review) requester() {
	name, ok := Nodename(r.csr)
	if !ok {
		r.deny(CodeNoNode, "%.80q is not the user of a kubelet", r.csr.Spec.Username)
	}

	r.nodename = name // empty if no kubelet made the request

	for _, group := range []string{groupNodes, groupAuthenticated} {
		if !slices.Contains(r.csr.Spec.Groups, group) {
			r.deny(CodeGroups, "%.80q is not in group %s", r.csr.Spec.Username, group)
		}
	}
}

func (s NodeState) ours() bool { return s == NodeWorker || s == NodeControlPlane }

// standing checks what is known of the requester's Node and machine and of the cluster.
func (r *review) standing() {
	if r.nodename == "" {
		return
	}

	e := r.evidence

	if !e.Node.ours() {
		r.wait(CodeNodeUnknown, "There is no Node %.80q yet", r.nodename)
	}

	switch {
	case e.MachineState == MachineUnreachable:
		r.wait(CodeMachineUnreachable, "The machine of Node %.80q does not answer", r.nodename)
	case e.MachineState == MachineMismatch, e.MachineState == MachineCurrent && e.Machine.Nodename != r.nodename:
		r.wait(CodeMachineMismatch, "What answers at the address of Node %.80q is another machine", r.nodename)
	case e.MachineState != MachineCurrent:
		r.wait(CodeMachineUnknown, "The machine of Node %.80q is not known yet", r.nodename)
	}

	if !e.Cluster.complete() {
		r.wait(CodeClusterUnknown, "What stands for the cluster itself is not known in full yet")
	}
}

// complete tells whether there is something of all that every cluster has.
func (c ClusterIdentity) complete() bool {
	return c.Known && len(c.Domains) > 0 && len(c.ServiceCIDRs) > 0 && len(c.APIServerNames)+len(c.APIServerIPs) > 0
}

// machineKnown tells whether what the machine has is known, so that it can be said what it has not.
func (r *review) machineKnown() bool {
	e := r.evidence

	return r.nodename != "" && e.MachineState == MachineCurrent && e.Machine.Nodename == r.nodename
}

// content checks what is asked for.
func (r *review) content() {
	request, unreadable := read(r.csr.Spec.Request)
	r.reasons = append(r.reasons, unreadable...)
	r.terms(request)

	if request.subject != nil {
		r.subject(*request.subject)
	}

	for _, name := range request.names {
		r.name(name)
	}

	for _, ip := range request.ips {
		r.address(ip)
	}
}

func (r *review) subject(s subject) {
	if s.commonName != r.csr.Spec.Username {
		r.deny(CodeSubject, "The common name %.80q is not that of the user, %.80q", s.commonName, r.csr.Spec.Username)
	}

	if s.organization != groupNodes {
		r.deny(CodeSubject, "The organization %.80q is not %s", s.organization, groupNodes)
	}
}

// terms checks for what, and for how long, the certificate is to be used.
func (r *review) terms(request request) {
	usages := slices.Sorted(slices.Values(r.csr.Spec.Usages))

	if !slices.Equal(usages, usagesOfAny) && !(request.mayUseRSA() && slices.Equal(usages, usagesOfRSA)) {
		r.deny(CodeUsages, "The usages are not a kubelet's: digital signature and server auth, and for RSA key encipherment")
	}

	if r.csr.Spec.ExpirationSeconds == nil {
		return
	}

	asked, most := time.Duration(*r.csr.Spec.ExpirationSeconds)*time.Second, cmp.Or(r.evidence.Policy.MaxExpiration, maxExpiration)
	if asked < minExpiration || asked > most {
		r.deny(CodeExpiration, "The lifetime %s is not between %s and %s", asked, minExpiration, most)
	}
}

// mayUseRSA is true, too, for a request that cannot be read: one finding is enough.
func (r request) mayUseRSA() bool {
	if r.x509 == nil {
		return true
	}

	_, isRSA := r.x509.PublicKey.(*rsa.PublicKey)

	return isRSA
}

// name checks one DNS name. What stands for the cluster comes before what the machine says of itself.
func (r *review) name(name string) {
	e := r.evidence

	switch code, problem := checkName(name, e.Cluster.Domains); {
	case problem != "":
		r.deny(code, "DNS name %.80q %s", name, problem)
	case slices.Contains(canonicalNames(e.Cluster.APIServerNames), name):
		if r.mayBeAPIServer(CodeClusterName, name) {
			r.called(name)
		}
	case slices.Contains(canonicalNames(e.Policy.ExtraNames), name):
		r.uncontested(name)
	default:
		r.called(name)
	}
}

// address checks one IP address.
func (r *review) address(ip netip.Addr) {
	e := r.evidence

	switch {
	case isSpecial(ip):
		r.deny(CodeSpecialAddress, "Address %s %s", ip, specialAddress)
	case e.Cluster.hasAddress(ip):
		r.deny(CodeClusterAddress, "Address %s is a service's, a pod's or a virtual one", ip)
	case slices.ContainsFunc(e.Cluster.APIServerIPs, is(ip)):
		if r.mayBeAPIServer(CodeClusterAddress, ip.String()) {
			r.has(ip)
		}
	case slices.ContainsFunc(e.Policy.ExtraIPs, is(ip)) && !within(e.Machine.ExcludedSubnets, ip):
		r.uncontested(ip.String())
	default:
		r.has(ip)
	}
}

// mayBeAPIServer tells whether the machine can have what the API server is known by: a control-plane machine can, if it is its own. The Node and
// the machine must both say that it is one: a worker can say anything of itself, and an operator can label a worker.
func (r *review) mayBeAPIServer(code, subject string) bool {
	e := r.evidence

	switch {
	case e.Node == NodeControlPlane && r.machineKnown() && e.Machine.Type.IsControlPlane():
		return true
	case e.Node == NodeWorker && r.machineKnown() && e.Machine.Type == talosmachine.TypeWorker:
		r.deny(code, "%.80q is the API server's, and Node %.80q is a worker", subject, r.nodename)
	default:
		r.wait(CodeControlPlaneUnclear, "%.80q is the API server's, and Node %.80q and its machine do not both say that they are of the control plane", subject, r.nodename)
	}

	return false
}

// called checks a name that the machine must have. Of a machine that is not known nothing is said: standing does.
func (r *review) called(name string) {
	if r.machineKnown() && !slices.Contains(ownNames(r.evidence.Machine), name) {
		r.unproven(CodeUnknownName, name, "DNS name %.80q is not known to be the machine's", name)
	}

	r.uncontested(name)
}

// has checks an address that the machine must have.
func (r *review) has(ip netip.Addr) {
	m := r.evidence.Machine

	switch {
	case !r.machineKnown():
	case within(m.ExcludedSubnets, ip):
		r.unproven(CodeExcludedAddress, ip.String(), "Address %s can be no node's, says the machine", ip)
	case !hasAddress(m, ip):
		r.unproven(CodeUnknownAddress, ip.String(), "Address %s is not known to be the machine's", ip)
	case !onNetwork(m, ip):
		r.unproven(CodeVirtualAddress, ip.String(), "Address %s is on a link for addresses that several machines can have", ip)
	}

	r.uncontested(ip.String())
}

// unproven is for what is not the machine's own. A kubelet that its Node has overtaken would wait for its request for a quarter of an hour, and not make the
// one that it needs; denied, it asks again soon (certificateWaitTimeout and rotateCerts in k8s.io/client-go/util/certificate).
func (r *review) unproven(code, subject, format string, args ...any) {
	if listed := r.evidence.Listed; len(listed) > 0 && !slices.Contains(listed, subject) {
		r.deny(CodeOutdated, "%.80q is neither the machine's nor its Node's (%s)", subject, code)

		return
	}

	r.wait(code, format, args...)
}

// uncontested checks that nobody else claims a subject. If two do, neither can be told to be right.
func (r *review) uncontested(subject string) {
	if r.nodename == "" {
		return
	}

	others := slices.DeleteFunc(slices.Clone(r.evidence.Owners[subject]), func(holder string) bool { return holder == r.nodename })
	if len(others) > 0 {
		r.wait(CodeOwnedByOthers, "%.80q is claimed by %d others, such as %.80q", subject, len(others), slices.Min(others))
	}
}
