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
func (c *checker) checkRequester() {
	spec := c.request.csr.Spec

	var ok bool
	if c.nodename, ok = Nodename(c.request.csr); !ok {
		c.denied(CodeNoNode, "User %.80q is not a kubelet", spec.Username)
	}

	for _, group := range []string{groupNodes, groupAuthenticated} {
		if !slices.Contains(spec.Groups, group) {
			c.denied(CodeGroups, "User %.80q is not in group %s", spec.Username, group)
		}
	}

	if c.nodename == "" {
		return
	}

	if c.Node == NodeDeleting {
		c.pending(CodeNodeDeleting, "Node %.80q is being deleted", c.nodename)
	} else if !c.Node.managed() {
		c.pending(CodeNodeUnknown, "Node %.80q does not exist yet", c.nodename)
	}

	switch {
	case c.MachineState == MachineUnreachable:
		c.pending(CodeMachineUnreachable, "Machine of Node %.80q is unreachable", c.nodename)
	case c.MachineState == MachineMismatch, c.MachineState == MachineCurrent && c.Machine.Nodename != c.nodename:
		c.pending(CodeMachineMismatch, "Machine at the address of Node %.80q reports another nodename", c.nodename)
	case c.MachineState != MachineCurrent:
		c.pending(CodeMachineUnknown, "Machine of Node %.80q has not responded yet", c.nodename)
	}

	if !c.Cluster.Known {
		c.pending(CodeClusterUnknown, "Cluster domains, service CIDRs and API server addresses are not all known yet")
	}
}

// machineKnown reports whether the machine's view is current and reports the requester's nodename.
func (c *checker) machineKnown() bool {
	return c.nodename != "" && c.MachineState == MachineCurrent && c.Machine.Nodename == c.nodename
}
