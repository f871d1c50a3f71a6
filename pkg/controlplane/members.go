package controlplane

import (
	"fmt"
	"net/netip"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

// Members are the members of the cluster as its control-plane machines see them (Talos discovery). The zero value is
// known by no machine.
type Members struct {
	// ControlPlane is the number of control-plane Nodes.
	ControlPlane int
	// SeenBy are the members by the nodename of the control-plane machine that sees them. It has only machines that
	// respond and were read within the last poll.
	SeenBy map[string]MemberList
}

// MemberList are members by their nodenames.
type MemberList = map[string]machine.Member

// Addresses returns the address of each member that most control-plane machines see, by nodename. The caller owns the map.
func (m *Members) Addresses() map[string]netip.Addr {
	addrs, seen := map[string]netip.Addr{}, map[string]int{}

	for _, list := range m.SeenBy {
		for nodename, member := range list {
			if seen[nodename]++; 2*seen[nodename] > m.ControlPlane && member.Address.IsValid() {
				addrs[nodename] = member.Address
			}
		}
	}

	return addrs
}

// Absent explains who does not see the machine with a nodename and a node ID, which may be empty. It returns an empty
// string if the machine may be a member: if a control-plane machine sees its nodename or node ID, if most of them do
// not respond, or if those that respond do not see each other, as without discovery.
func (m *Members) Absent(nodename, nodeID string) string {
	if 2*len(m.SeenBy) <= m.ControlPlane {
		return ""
	}

	for _, list := range m.SeenBy {
		for witness := range m.SeenBy {
			if _, seen := list[witness]; !seen {
				return ""
			}
		}

		for name, member := range list {
			if name == nodename || nodeID != "" && member.NodeID == nodeID {
				return ""
			}
		}
	}

	return fmt.Sprintf("%d of %d control-plane machines responded, and none sees it", len(m.SeenBy), m.ControlPlane)
}
