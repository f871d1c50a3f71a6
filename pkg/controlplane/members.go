package controlplane

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/cosi-project/runtime/pkg/safe"
	"github.com/cosi-project/runtime/pkg/state"
	"github.com/siderolabs/talos/pkg/machinery/resources/cluster"
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

// readMembers returns the members that a machine sees.
func readMembers(ctx context.Context, st state.CoreState) (MemberList, error) {
	list, err := safe.StateListAll[*cluster.Member](ctx, state.WrapCore(st))
	if err != nil {
		return nil, fmt.Errorf("list members of the cluster: %w", err)
	}

	members := MemberList{}
	for member := range list.All() {
		members[member.Metadata().ID()] = member.TypedSpec().NodeID
	}

	return members, nil
}

func (r *Reader) mergeMembers() *Members {
	members := &Members{SeenBy: map[string]MemberList{}}

	for nodename, facts := range r.machines {
		if nodename != localMachine {
			members.ControlPlane++
		}

		if facts.members != nil {
			members.SeenBy[nodename] = facts.members
		}
	}

	return members
}
