package csrapproval

import (
	"cmp"
	"net/netip"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/talos-ccm/talos-ccm/pkg/config"
	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
)

// indexSubjects is the index of Nodes by their names and addresses.
const indexSubjects = "csrapproval/subjects"

// PolicyFor returns what the configuration allows a machine: the names that rules assign to it, which its kubelet
// requests because the Node lists them, and the names and addresses of csrApproval.allowedSANs. The input is that of
// the Node controller.
func PolicyFor(current *config.Compiled, node *corev1.Node, in nodespec.Input) csrpolicy.Policy {
	policy := csrpolicy.Policy{MaxExpiration: current.MaxExpiration, EnforceCredential: current.CredentialPinning == "enforce"}
	if current.CredentialPinning == "" {
		policy.EnforceCredential = nodespec.IsControlPlane(node)
	}

	if in.Machine.Type.IsControlPlane() && !nodespec.IsControlPlane(node) {
		return policy // a machine can report any role, and selectors may match it
	}

	names := &policy.ExtraNames

	spec, _, pending := nodespec.Desired(in)
	if pending != "" {
		names = &policy.PendingNames
		spec, _ = nodespec.FromMetadata(in)
	}

	platform := spec.Transformed.Platform
	for field, name := range map[string]string{"InternalDNS": platform.InternalDNS, "ExternalDNS": platform.ExternalDNS} {
		if _, replaced := spec.Transformed.Replaced[field]; replaced && name != "" {
			*names = append(*names, name)
		}
	}

	facts := in.Facts()

	for _, allowed := range current.AllowedSANs {
		if allowed.Selector.Matches(facts) {
			policy.ExtraNames = append(policy.ExtraNames, allowed.DNSNames...)
			policy.ExtraIPs = append(policy.ExtraIPs, allowed.IPAddresses...)
		}
	}

	return policy
}

// reviewFor reviews a request of the kubelet on a Node, which is nil if it does not exist.
func (c *Controller) reviewFor(request *csrpolicy.Request, nodename string, node *corev1.Node) review {
	entry := c.entryFor(nodename, node)
	evidence := csrpolicy.Evidence{
		Cluster:      c.cfg.Identity.Current(),
		Now:          c.cfg.Clock.Now(),
		Machine:      entry.Machine,
		MachineState: machineState(entry),
		Owners:       map[string]map[string]time.Time{},
		Node:         nodeState(node, entry, func() bool { return c.cfg.Managed(node, entry.Machine) }),
	}

	if node != nil {
		evidence.Listed, _ = subjectsOf(node)
		evidence.Policy = c.cfg.Policy(node, entry.Machine)
		evidence.Credentials = c.credentials(node)
		evidence.Credentials.Record = cmp.Or(evidence.Credentials.Record, c.owners.pin(nodename))
	}

	by := newRequester(nodename, node, entry)
	for _, subject := range request.Subjects {
		if owners := c.owners.of(subject, by); len(owners) > 0 {
			evidence.Owners[subject] = owners
		}
	}

	verdict := csrpolicy.Review(request, evidence)

	// Whether the Node is managed can depend on its machine, and a different approver may be responsible for it.
	if state := evidence.MachineState; verdict.Decision == csrpolicy.Denied && state != csrpolicy.MachineCurrent && state != csrpolicy.MachineUnreachable {
		verdict.Decision = csrpolicy.Pending
	}

	return review{node, evidence, verdict}
}

// entryFor returns the inventory's entry for a Node, which is nil if it does not exist. The entry is empty if the Node has
// the label of the control plane and its machine was not dialed as a control-plane machine, such as before the Node got
// the label.
func (c *Controller) entryFor(nodename string, node *corev1.Node) inventory.Entry {
	entry := c.cfg.Inventory.Get(nodename)
	if node != nil && nodespec.IsControlPlane(node) && !entry.ObservedAt.IsZero() && !entry.Machine.ControlPlane {
		return inventory.Entry{}
	}

	return entry
}

// nodeState calls managed only for Nodes that run Talos. A Node whose machine responds runs Talos, even if its kubelet
// reports another operating system.
func nodeState(node *corev1.Node, entry inventory.Entry, managed func() bool) csrpolicy.NodeState {
	switch {
	case node == nil:
		return csrpolicy.NodeUnknown
	case node.DeletionTimestamp != nil:
		return csrpolicy.NodeDeleting
	case !nodespec.IsTalos(node) && entry.Condition != inventory.Current, !managed():
		return csrpolicy.NodeUnmanaged
	case nodespec.IsControlPlane(node):
		return csrpolicy.NodeControlPlane
	default:
		return csrpolicy.NodeWorker
	}
}

func machineState(entry inventory.Entry) csrpolicy.MachineState {
	switch {
	case entry.Condition == inventory.Current:
		return csrpolicy.MachineCurrent
	case entry.Condition == inventory.Mismatch:
		return csrpolicy.MachineMismatch
	case entry.Condition == inventory.Unreachable && !entry.ObservedAt.IsZero():
		return csrpolicy.MachineUnreachable
	default:
		return csrpolicy.MachineUnknown
	}
}

// subjectsOf returns a Node's name and addresses in canonical form. It includes the node IPs that its kubelet was
// started with even if the status does not list them. The node controller also writes the status, and a different
// machine may respond at the Node's address.
func subjectsOf(obj any) ([]string, error) {
	node, ok := obj.(*corev1.Node)
	if !ok {
		return nil, nil
	}

	list := []string{machine.CanonicalName(node.Name)}

	for _, addr := range nodespec.ProvidedNodeIPs(node) {
		list = append(list, machine.CanonicalAddress(addr))
	}

	for _, a := range node.Status.Addresses {
		if addr, err := netip.ParseAddr(a.Address); err == nil {
			list = append(list, machine.CanonicalAddress(addr))
		} else if name := machine.CanonicalName(a.Address); name != "" {
			list = append(list, name)
		}
	}

	slices.Sort(list)

	return slices.Compact(list), nil
}
