// Package csrpolicy reviews requests for kubelet-serving certificates. Review approves a request if the machine reports
// all names and addresses, or the operator allows them, and no other Node owns one. Only a control-plane machine gets
// names and addresses of the API server. No machine gets addresses of Services or pods.
//
// It is part of the pure core: a CertificateSigningRequest and Evidence in, a Verdict with all reasons out. It performs
// no lookups, reads no clock and never writes a condition. It approves nothing without evidence.
//
// A denial is final. Review therefore denies a request only for these reasons:
//   - The request is malformed, or breaks the rules of the signer kubernetes.io/kubelet-serving or Policy.MaxExpiration.
//   - It contains a name or address that no kubelet may have, such as kubernetes.default.svc or the address of a Service.
//   - A worker requests a name or address that the API server states as its own, and does not have the address itself.
//   - NotOwned: the machine does not own the name or address, and the Node does not list it. Such a request could become
//     valid, but the kubelet sends a new request for its current names soon after a denial.
//
// Machines and flags can be wrong. If only they report a name or address as the cluster's, the request stays pending.
//
// The predicates of package machine decide here which names are approved, and in package nodespec which names a Node
// lists.
package csrpolicy

import (
	"net/netip"
	"time"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/noderecord"
)

// Decision is the result of a review or of one check. The zero value is Ignored.
type Decision int

// Decisions in ascending order of weight: of several reasons the one with the highest weight decides.
const (
	// Ignored means that the request does not concern us or is already decided. It must not be written.
	Ignored Decision = iota
	// Approved means that all names and addresses belong to the machine.
	Approved
	// Pending means that the request is not decided, because other evidence can change the decision.
	Pending
	// Denied means that the request is rejected permanently; the kubelet must send a new one.
	Denied
)

// String returns the decision as in metrics.
func (d Decision) String() string { return [...]string{"Ignore", "Approve", "Defer", "Deny"}[d] }

// Verdict is the result of a review.
type Verdict struct {
	Decision Decision
	// Reasons are all reasons in descending order of weight, at least one. Ignored and Approved have exactly one.
	Reasons []Reason
	// Unexpected is a sentence about the requester's credential if it is not the recorded one; empty if it is expected.
	// With Policy.EnforceCredential it is also a reason.
	Unexpected string
	// Record is to be written before the request is approved. The zero value means that there is none.
	Record noderecord.Record
}

// Reason is one reason for a verdict.
type Reason struct {
	// Code is a stable CamelCase identifier for conditions and metrics.
	Code string
	// Decision is the decision if there were no other reason.
	Decision Decision
	// Message is a sentence for people. It may quote the request, truncated and escaped.
	Message string
}

// deniedCodes are the codes of requests that are denied.
var deniedCodes = []string{
	CodeNoNode, CodeGroups, CodeUsages, CodeExpiration, CodeTooLarge, CodeMalformed, CodeSubject, CodeKey, CodeSignature,
	CodeExtension, CodeNoSANs, CodeTooManySANs, CodeForbiddenSAN, CodeWildcard, CodeInvalidName, CodeAddressAsName,
	CodeClusterName, CodeSpecialAddress, CodeClusterAddress, CodeNotOwned,
}

// Codes are the codes of the reasons for each decision but Ignored. A request that would be denied is pending while its
// Node is unknown.
var Codes = map[Decision][]string{
	Approved: {CodeVerified},
	Pending: append([]string{
		CodeNodeUnknown, CodeNodeDeleting, CodeMachineUnknown, CodeMachineUnreachable, CodeMachineMismatch, CodeClusterUnknown,
		CodeControlPlaneUnclear, CodeUnknownName, CodeUnknownAddress, CodeExcludedAddress, CodeVirtualAddress, CodeOwnedByOthers,
		CodeUnexpectedCredential,
	}, deniedCodes...),
	Denied: deniedCodes,
}

// Evidence describes the requesting machine and the cluster. The zero value approves nothing.
type Evidence struct {
	// Node is the state of the Node that the request's user names.
	Node NodeState
	// MachineState is the state of the connection to the machine.
	MachineState MachineState
	// Machine is the latest view of that Node's machine; the zero value if there is none.
	Machine machine.Machine
	// Owners maps Request.Subjects to the other Nodes that own them, by name. A deleted Node counts, even if it had the
	// requester's name: the value is the time when its reservation ends, for messages, and zero for a Node that exists.
	// An unreachable machine still owns the names and addresses that it last reported.
	Owners map[string]map[string]time.Time
	// Listed are the names and addresses in the Node's status, in the same form; empty if unknown. A kubelet requests only
	// what its Node lists. Review therefore denies a subject that the machine does not own and the Node does not list.
	// Listed never supports an approval, because kubelets write their Nodes.
	Listed  []string
	Cluster ClusterIdentity
	// Credentials are the client certificates of the Node's kubelet.
	Credentials Credentials
	Policy      Policy
	// Now is the current time. At the zero value no request is abandoned.
	Now time.Time
}

// NodeState is the state of a Node.
type NodeState int

const (
	// NodeUnknown means that the Node does not exist yet. It is the zero value.
	NodeUnknown NodeState = iota
	// NodeDeleting means that the Node is being deleted, which finalizers can delay for hours. Its kubelet gets no new
	// certificate, which would be valid for a year, and for addresses that another machine may have by then. To drain the
	// Node, the kubelet needs only its client certificate. It serves its present certificate until that expires.
	NodeDeleting
	// NodeUnmanaged means that the Node does not run Talos or is not selected by the configuration.
	NodeUnmanaged
	// NodeWorker means that the Node is managed and not known to be a control-plane Node.
	NodeWorker
	// NodeControlPlane means that the Node is managed and has the label node-role.kubernetes.io/control-plane. A
	// kubelet cannot set that label on its own Node (admission plugin NodeRestriction), while a machine can report any
	// role.
	NodeControlPlane
)

func (s NodeState) managed() bool { return s == NodeWorker || s == NodeControlPlane }

// MachineState is the state of the connection to a machine.
type MachineState int

const (
	// MachineUnknown means that the machine has not responded yet. It is the zero value.
	MachineUnknown MachineState = iota
	// MachineUnreachable means that the machine no longer responds. The view is its last one.
	MachineUnreachable
	// MachineMismatch means that a machine with a different nodename responds at the Node's address.
	MachineMismatch
	// MachineCurrent means that the machine is being watched.
	MachineCurrent
)

const (
	// MinExpiration is the shortest lifetime that may be requested. The API server accepts no shorter one
	// (certificates.k8s.io/v1, expirationSeconds).
	MinExpiration = 10 * time.Minute
	// DefaultMaxExpiration is a year, including leap years.
	DefaultMaxExpiration = 366 * 24 * time.Hour
)

// Policy is the operator's configuration. The zero value is the default.
type Policy struct {
	// MaxExpiration is the longest lifetime that may be requested; 0 means DefaultMaxExpiration. A request without a
	// lifetime gets the signer's default.
	MaxExpiration time.Duration
	// ExtraNames and ExtraIPs are allowed for this machine in addition to its own. They never allow names and addresses of
	// the cluster or of other machines.
	ExtraNames []string
	ExtraIPs   []netip.Addr
	// PendingNames are names that the rules produce from incomplete facts. Review does not allow them; they are reserved.
	PendingNames []string
	// PendingIPs are addresses that the rules set, and that the Node does not have yet. A request for one stays pending.
	PendingIPs []netip.Addr
	// PodCIDRs are ranges from which pod CIDRs are allocated. A request for an address in one stays pending.
	PodCIDRs []netip.Prefix
	// EnforceCredential keeps requests pending that were made with an unexpected client certificate.
	EnforceCredential bool
	// RequireStatement is for a control-plane Node whose machine can state its kubelet's certificate itself: no certificate of
	// unknown origin and no replacement is recorded for it because of a request.
	RequireStatement bool
}
