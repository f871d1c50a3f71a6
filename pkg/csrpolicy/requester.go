package csrpolicy

import (
	"slices"
	"strings"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

// Codes of reasons to deny a request because of its requester.
const (
	CodeNoNode = "RequesterNotNode"
	CodeGroups = "InvalidGroups"
)

// Codes of reasons to keep a request pending while too little is known.
const (
	CodeNodeUnknown        = "NodeUnknown"
	CodeNodeDeleting       = "NodeBeingDeleted"
	CodeMachineUnknown     = "MachineUnknown"
	CodeMachineUnreachable = "MachineUnreachable"
	CodeMachineMismatch    = "IdentityMismatch"
	CodeClusterUnknown     = "ClusterIdentityIncomplete"
)

const (
	groupNodes         = "system:nodes"
	groupAuthenticated = "system:authenticated"
)

// Nodename returns the name of the requester's Node; false if the requester is not a kubelet.
func Nodename(csr *certificatesv1.CertificateSigningRequest) (string, bool) {
	name, ok := strings.CutPrefix(csr.Spec.Username, "system:node:")
	if !ok || name != machine.CanonicalName(name) || !machine.ValidName(name) {
		return "", false
	}

	return name, true
}

// checkRequester checks the user and the groups that the API server recorded, and that the user's Node, its machine and
// the cluster are known.
func (r *review) checkRequester() {
	spec := r.request.csr.Spec

	var ok bool
	if r.nodename, ok = Nodename(r.request.csr); !ok {
		r.denied(CodeNoNode, "User %.80q is not a kubelet", spec.Username)
	}

	for _, group := range []string{groupNodes, groupAuthenticated} {
		if !slices.Contains(spec.Groups, group) {
			r.denied(CodeGroups, "User %.80q is not in group %s", spec.Username, group)
		}
	}

	if r.nodename == "" {
		return
	}

	if r.Node == NodeDeleting {
		r.pending(CodeNodeDeleting, "Node %.80q is being deleted", r.nodename)
	} else if !r.Node.managed() {
		r.pending(CodeNodeUnknown, "Node %.80q does not exist yet", r.nodename)
	}

	switch {
	case r.MachineState == MachineUnreachable:
		r.pending(CodeMachineUnreachable, "Machine of Node %.80q is unreachable", r.nodename)
	case r.MachineState == MachineMismatch, r.MachineState == MachineCurrent && r.Machine.Nodename != r.nodename:
		r.pending(CodeMachineMismatch, "Machine at the address of Node %.80q reports another nodename", r.nodename)
	case r.MachineState != MachineCurrent:
		r.pending(CodeMachineUnknown, "Machine of Node %.80q has not responded yet", r.nodename)
	}

	if !r.Cluster.Known {
		r.pending(CodeClusterUnknown, "Cluster domains, service CIDRs and API server addresses are not all known yet")
	}
}

// machineKnown reports whether the machine's view is current and reports the requester's nodename.
func (r *review) machineKnown() bool {
	return r.nodename != "" && r.MachineState == MachineCurrent && r.Machine.Nodename == r.nodename
}
