package csrapproval

import (
	"net/netip"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/talos-ccm/talos-ccm/pkg/claims"
	"github.com/talos-ccm/talos-ccm/pkg/config"
	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/noderecord"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
)

// PolicyFor returns what the configuration allows a machine: the names and addresses that rules assign to it, which its
// kubelet requests because the Node lists them, and the names and addresses of csrApproval.allowedSANs. The input is that
// of the Node controller, which records the addresses that the Node has because of rules.
func PolicyFor(current *config.Compiled, node *corev1.Node, in nodespec.Input) csrpolicy.Policy {
	policy := csrpolicy.Policy{MaxExpiration: current.MaxExpiration, EnforceCredential: current.CredentialPinning == "enforce"}
	if current.CredentialPinning == "" {
		policy.EnforceCredential = nodespec.IsControlPlane(node)
	}

	if in.Machine.Type.IsControlPlane() && !nodespec.IsControlPlane(node) {
		return policy // a machine can report any role, and selectors may match it
	}

	names, ips := &policy.ExtraNames, &policy.ExtraIPs

	spec, _, pending := nodespec.Desired(in)
	if pending != "" {
		names, ips = &policy.PendingNames, &policy.PendingIPs
		spec, _ = nodespec.FromMetadata(in)
	}

	recorded, others := ruleAddresses(node, spec)
	policy.PendingIPs = others
	*ips = append(*ips, recorded...)

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

// ruleAddresses returns the addresses that rules set: those that a label of the Node records, so that no other Node has them,
// and the others. The rules may have changed since the label was written.
func ruleAddresses(node *corev1.Node, spec nodespec.Spec) (recorded, others []netip.Addr) {
	all := noderecord.RuleAddresses(node)

	for _, a := range spec.Transformed.Addresses {
		if slices.Contains(all, a.IP) {
			recorded = append(recorded, a.IP)
		} else {
			others = append(others, a.IP)
		}
	}

	return recorded, others
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

	by := claims.Requester{Nodename: nodename, ObservedAt: entry.ObservedAt}
	if entry.Condition == inventory.Current {
		by.Endpoint = entry.Machine.Endpoint
	}

	if node != nil {
		by.UID = node.UID
		evidence.Listed = claims.ListedBy(node)
		evidence.Policy = c.cfg.Policy(node, entry.Machine)
		evidence.Credentials = c.credentials(node)

		kept, recorded := noderecord.Kept(c.cfg.Inventory.Claims.Deleted(node), node), &evidence.Credentials.Record

		switch {
		case recorded.Credential == "" && kept != (noderecord.Record{}):
			*recorded = kept
		case recorded.Stated == "" && recorded.Has(kept.Stated):
			recorded.Stated = kept.Stated // the leader has written the rest of the record
		}
	}

	policies := map[string]csrpolicy.Policy{}
	for _, subject := range request.Subjects {
		if owners := c.ownersOf(subject, by, policies); len(owners) > 0 {
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

// ownersOf returns the owners of a name or an address, as in csrpolicy.Evidence. policies are those of other Nodes, as far
// as they were evaluated for the request.
func (c *Controller) ownersOf(subject string, by claims.Requester, policies map[string]csrpolicy.Policy) map[string]time.Time {
	owners, contradicted := c.cfg.Inventory.Claims.Of(subject, by)

	for _, node := range contradicted {
		if c.assigns(node, subject, policies) {
			owners[node.Name] = time.Time{}
		}
	}

	return owners
}

// assigns reports whether the configuration assigns a name or an address to a Node, or may have done so: the inventory
// may have forgotten the machine, of which that can depend.
func (c *Controller) assigns(node *corev1.Node, subject string, policies map[string]csrpolicy.Policy) bool {
	policy, evaluated := policies[node.Name]
	if !evaluated {
		last := c.cfg.Inventory.Get(node.Name).Last
		if last.Nodename == "" {
			return true
		}

		policy = c.cfg.Policy(node, last)
		policies[node.Name] = policy
	}

	return slices.Contains(machine.CanonicalNames(slices.Concat(policy.ExtraNames, policy.PendingNames)), subject) ||
		slices.ContainsFunc(policy.ExtraIPs, func(addr netip.Addr) bool { return machine.CanonicalAddress(addr) == subject })
}

// entryFor returns the inventory's entry for a Node, which is nil if it does not exist. The entry is empty if the Node has
// the label of the control plane and its machine was not dialed as a control-plane machine, such as before the Node got
// the label.
func (c *Controller) entryFor(nodename string, node *corev1.Node) inventory.Entry {
	entry := c.cfg.Inventory.Get(nodename)
	if node != nil && nodespec.IsControlPlane(node) && !entry.ObservedAt.IsZero() && entry.Machine.ControlPlane == nil {
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
