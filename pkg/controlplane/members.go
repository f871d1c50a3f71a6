package controlplane

import (
	"fmt"
	"maps"
	"slices"
)

// Members are the members of the cluster as its control-plane machines see them (Talos discovery). The zero value is
// known by no machine.
type Members struct {
	// ControlPlane is the number of control-plane Nodes.
	ControlPlane int
	// SeenBy are the members by the nodename of the control-plane machine that sees them. It has only machines that
	// responded in the last refresh.
	SeenBy map[string]MemberList
}

// MemberList maps the nodenames of members to their node IDs.
type MemberList map[string]string

// Absent explains who does not see the machine with a nodename and a node ID, which may be empty. It returns an empty
// string if the machine may be a member: if a control-plane machine sees its nodename or node ID, if most of them do
// not respond, or if those that respond do not see each other, as without discovery.
func (m *Members) Absent(nodename, nodeID string) string {
	if m == nil || 2*len(m.SeenBy) <= m.ControlPlane {
		return ""
	}

	for _, list := range m.SeenBy {
		for witness := range m.SeenBy {
			if _, seen := list[witness]; !seen {
				return ""
			}
		}

		_, seen := list[nodename]
		if seen || (nodeID != "" && slices.Contains(slices.Collect(maps.Values(list)), nodeID)) {
			return ""
		}
	}

	return fmt.Sprintf("%d of %d control-plane machines responded, and none sees it", len(m.SeenBy), m.ControlPlane)
}
