package csrapproval

import (
	"net/netip"
	"slices"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/clusteridentity"
	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
)

// indexClaims finds Nodes by their names and addresses.
const indexClaims = "csrapproval/claims"

// claimsOf are a Node's name and addresses in canonical form. Those that its kubelet was started with count even if the status does not list them:
// the status is also written by us, after what a machine says that anybody may be who has taken its address.
func claimsOf(obj any) ([]string, error) {
	node, ok := obj.(*corev1.Node)
	if !ok {
		return nil, nil
	}

	list := []string{machine.CanonicalName(node.Name)}

	for _, addr := range nodespec.ProvidedNodeIPs(node) {
		list = append(list, machine.CanonicalAddress(addr))
	}

	for _, a := range node.Status.Addresses {
		claim := machine.CanonicalName(a.Address)
		if addr, err := netip.ParseAddr(a.Address); err == nil {
			claim = machine.CanonicalAddress(addr)
		}

		if claim != "" {
			list = append(list, claim)
		}
	}

	slices.Sort(list)

	return slices.Compact(list), nil
}

// evidence gathers what a request is judged by.
type evidence struct {
	nodes     cache.Indexer
	inventory Inventory
	identity  Identity
	clock     clock.Clock
	claims    func(*corev1.Node) bool
	policy    func(*corev1.Node, machine.Machine) csrpolicy.Policy
}

func newEvidence(cfg Config) evidence {
	return evidence{
		nodes:     cfg.Nodes.Informer().GetIndexer(),
		inventory: cfg.Inventory,
		identity:  cfg.Identity,
		clock:     cfg.Clock,
		claims:    cfg.Managed,
		policy:    cfg.Policy,
	}
}

// unheard are the Talos Nodes whose machines nobody has tried to reach yet.
func (e evidence) unheard() []string {
	var names []string

	for _, obj := range e.nodes.List() {
		node, ok := obj.(*corev1.Node)
		if ok && nodespec.IsTalos(node) && e.inventory.Get(node.Name).Condition == inventory.Unknown {
			names = append(names, node.Name)
		}
	}

	return names
}

// of returns the evidence for a request of the kubelet of the Node of that name; the Node is nil if there is none.
func (e evidence) of(csr *certificatesv1.CertificateSigningRequest, nodename string, node *corev1.Node) csrpolicy.Evidence {
	entry := e.inventory.Get(nodename)
	facts := csrpolicy.Evidence{
		Cluster:      e.identity.Current(),
		Now:          e.clock.Now(),
		Machine:      entry.Machine,
		MachineState: machineStanding(entry),
		Owners:       e.holders(csr, nodename),
		Node:         e.nodeStanding(node),
	}

	if node != nil {
		facts.Listed, _ = claimsOf(node)
		facts.Policy = e.policy(node, entry.Machine)
	}

	return facts
}

// node is the Node of that name as far as we have seen it; nil if we have not.
func (e evidence) node(nodename string) *corev1.Node {
	obj, exists, err := e.nodes.GetByKey(nodename)
	if err != nil || !exists {
		return nil
	}

	node, ok := obj.(*corev1.Node)
	if !ok {
		return nil
	}

	return node
}

func (e evidence) nodeStanding(node *corev1.Node) csrpolicy.NodeState {
	switch {
	case node == nil || node.DeletionTimestamp != nil:
		return csrpolicy.NodeUnknown
	case !nodespec.IsTalos(node) || !e.claims(node):
		return csrpolicy.NodeUnmanaged
	case clusteridentity.IsControlPlane(node):
		return csrpolicy.NodeControlPlane
	default:
		return csrpolicy.NodeWorker
	}
}

func machineStanding(entry inventory.Entry) csrpolicy.MachineState {
	switch entry.Condition {
	case inventory.Current:
		return csrpolicy.MachineCurrent
	case inventory.Mismatch:
		return csrpolicy.MachineMismatch
	case inventory.Unreachable:
		if !entry.ObservedAt.IsZero() {
			return csrpolicy.MachineUnreachable
		}
	case inventory.Unknown:
	}

	return csrpolicy.MachineUnknown
}

// holders are the other Nodes that claim what the request asks for, by what they claim.
func (e evidence) holders(csr *certificatesv1.CertificateSigningRequest, nodename string) map[string][]string {
	names, ips, err := csrpolicy.Subjects(csr)
	if err != nil {
		return nil // the policy says what is wrong with it
	}

	for _, ip := range ips {
		names = append(names, machine.CanonicalAddress(ip))
	}

	holders := map[string][]string{}

	for _, claim := range names {
		others := append(e.inventory.Owners(claim, nodename), e.nodesClaiming(claim, nodename)...)
		if len(others) > 0 {
			slices.Sort(others)
			holders[claim] = slices.Compact(others)
		}
	}

	return holders
}

// nodesClaiming are the other Nodes of that name or with that address, whatever their machines say: what answers at a machine's address, while the machine
// is down or cut off, may be the very one that asks, and would disclaim it.
func (e evidence) nodesClaiming(claim, nodename string) []string {
	objs, err := e.nodes.ByIndex(indexClaims, claim)
	if err != nil {
		return nil // there is such an index
	}

	var others []string

	for _, obj := range objs {
		if node, ok := obj.(*corev1.Node); ok && node.Name != nodename {
			others = append(others, node.Name)
		}
	}

	return others
}
