// Package csrpolicy says whether a request for a kubelet-serving certificate asks for what its machine itself proves, and nothing else.
//
// It is part of the pure core: a CertificateSigningRequest and Evidence in, a Verdict with every reason out. It never looks anything up,
// reads no clock, and never writes a condition. In doubt it does not approve.
package csrpolicy

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

// Decision is what to do with a request. The zero value does nothing.
type Decision int

// Ordered by weight: of several reasons the heaviest decides.
const (
	// Ignore: the request is not for us, or is settled. It must not be written.
	Ignore Decision = iota
	// Approve: everything that is asked for is the machine's own.
	Approve
	// Defer: not now; other evidence can change that.
	Defer
	// Deny: no evidence can ever make this request right.
	Deny
)

// String is the decision's name as events and metrics show it.
func (d Decision) String() string {
	switch d {
	case Approve:
		return "Approve"
	case Defer:
		return "Defer"
	case Deny:
		return "Deny"
	default:
		return "Ignore"
	}
}

// Verdict is the outcome of a review.
type Verdict struct {
	Decision Decision
	// Reasons are all there are, the heaviest first, and never none. Those of an Ignore and an Approve are one.
	Reasons []Reason
}

// Reason is one finding.
type Reason struct {
	// Code is stable and PascalCase, for conditions and metrics.
	Code string
	// Decision is what this finding alone leads to.
	Decision Decision
	// Message is a sentence for people. It may quote the request, shortened and escaped.
	Message string
}

// Evidence is all that is known about the machine and the cluster when a request is reviewed. The zero value approves nothing.
type Evidence struct {
	// Node is what is known of the Node that the request's user names.
	Node NodeState
	// MachineState says how far Machine can be relied on.
	MachineState MachineState
	// Machine is the last view of that Node's machine; the zero value where there is none.
	Machine machine.Machine
	// Owners are the names of the other Nodes that claim a name or an address, by that name or address in the form in which Subjects gives
	// it (for an address, its String). Only those of the request count. A machine that does not answer claims what it last had.
	Owners map[string][]string
	// Listed are the names and addresses of the Node, in the same form. A kubelet asks for what its Node lists, so that what neither the Node nor the
	// machine has is an outdated request. Empty: not known. It never speaks for a request: kubelets write their Nodes.
	Listed  []string
	Cluster ClusterIdentity
	Policy  Policy
	// Now tells which requests nobody waits for any longer. At its zero value every one is waited for.
	Now time.Time
}

// NodeState is what is known of a Node.
type NodeState int

const (
	// NodeUnknown: there is no such Node yet. The zero value.
	NodeUnknown NodeState = iota
	// NodeUnmanaged: it does not run Talos, or is not claimed by us.
	NodeUnmanaged
	// NodeWorker: it is ours and not known to be of the control plane.
	NodeWorker
	// NodeControlPlane: it is ours and has the control plane's label (node-role.kubernetes.io/control-plane). A kubelet cannot give itself
	// that label (admission plugin NodeRestriction), while a machine can say of itself whatever it likes.
	NodeControlPlane
)

// MachineState says how far what is known of a machine can be relied on.
type MachineState int

const (
	// MachineUnknown: the machine has not been seen yet. The zero value.
	MachineUnknown MachineState = iota
	// MachineUnreachable: the machine does not answer; what is known is its last view.
	MachineUnreachable
	// MachineMismatch: what answers at the Node's address is another machine.
	MachineMismatch
	// MachineCurrent: the machine is being watched.
	MachineCurrent
)

// ClusterIdentity is what stands for the cluster and not for one machine: no kubelet may have a certificate for it. Prefixes of IPv4 are in
// IPv4.
type ClusterIdentity struct {
	// Known is true once all of this has been read. Until then, and while Domains, ServiceCIDRs or the API server are empty, nothing
	// is approved.
	Known bool
	// Domains are those of cluster DNS, such as "cluster.local".
	Domains []string
	// APIServerNames and APIServerIPs are where clients expect the API server: the endpoint's host, and all subjects of its serving
	// certificates. Talos puts a control-plane machine's own names and addresses there too; that machine may still have them.
	APIServerNames []string
	APIServerIPs   []netip.Addr
	// ServiceIPs are those of the service default/kubernetes.
	ServiceIPs   []netip.Addr
	ServiceCIDRs []netip.Prefix
	// PodCIDRs are the cluster's own, not the blocks cut from a machine's subnet.
	PodCIDRs []netip.Prefix
	// VIPs are addresses that move from machine to machine.
	VIPs []netip.Addr
}

// Policy is what the operator allows. The zero value is the default.
type Policy struct {
	// MaxExpiration bounds the lifetime that is asked for; 0: 366 days. A request that asks for none gets the signer's.
	MaxExpiration time.Duration
	// ExtraNames and ExtraIPs are subjects that the operator's rules vouch for on this one machine, in addition to its own. They never open what
	// is the cluster's or another machine's.
	ExtraNames []string
	ExtraIPs   []netip.Addr
}

const userPrefix = "system:node:"

// Nodename is the name of the Node whose kubelet made the request, by its user; false if no kubelet made it.
func Nodename(csr *certificatesv1.CertificateSigningRequest) (string, bool) {
	name, ok := strings.CutPrefix(csr.Spec.Username, userPrefix)
	if !ok || name != machine.CanonicalName(name) || !validName(name) {
		return "", false
	}

	return name, true
}

// Subjects are the DNS names and addresses that the request asks for, sorted, each once: names in lower case without a trailing dot, IPv4 addresses in
// IPv6 as IPv4. It is an error if the request cannot be read; Review says more.
func Subjects(csr *certificatesv1.CertificateSigningRequest) (dnsNames []string, ips []netip.Addr, err error) {
	request, wrong := read(csr.Spec.Request)
	if len(wrong) > 0 {
		return nil, nil, fmt.Errorf("read the request of %s: %s", csr.Name, wrong[0].Message)
	}

	return request.names, request.ips, nil
}

// Review says what to do with a request. It returns the same for the same input, and changes neither.
func Review(csr *certificatesv1.CertificateSigningRequest, e Evidence) Verdict {
	if ignored := notOurs(csr, e); ignored != nil {
		return Verdict{Decision: Ignore, Reasons: []Reason{*ignored}}
	}

	r := review{csr: csr, evidence: e}
	r.requester()
	r.standing()
	r.content()

	return r.verdict()
}

// verdict weighs the reasons. While the Node is unknown it may turn out not to be ours: nothing is denied to a kubelet before.
func (r *review) verdict() Verdict {
	if len(r.reasons) == 0 {
		proven := Reason{Code: CodeVerified, Decision: Approve, Message: fmt.Sprintf("All that is asked for is proven by the machine of Node %s", r.nodename)}

		return Verdict{Decision: Approve, Reasons: []Reason{proven}}
	}

	if !r.evidence.Node.ours() && r.nodename != "" {
		for i := range r.reasons {
			r.reasons[i].Decision = Defer
		}
	}

	slices.SortStableFunc(r.reasons, func(a, b Reason) int { return cmp.Compare(b.Decision, a.Decision) })

	return Verdict{Decision: r.reasons[0].Decision, Reasons: r.reasons}
}
