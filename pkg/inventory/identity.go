package inventory

import (
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/talos-ccm/talos-ccm/pkg/claims"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

type identifier struct{ kind, value string }

const (
	kindNodeID = "node ID"
	kindUUID   = "UUID"
)

func identifiers(identity machine.Identity) []identifier {
	var list []identifier

	if identity.NodeID != "" {
		list = append(list, identifier{kindNodeID, identity.NodeID})
	}

	if identity.UUID != "" {
		list = append(list, identifier{kindUUID, identity.UUID})
	}

	return list
}

// RenamedTo returns the nodename under which the machine of a Node responds now, or an empty string. It returns a name
// only if the machine has proven to be the Node's before, does not respond under the Node's name, and responds under
// exactly one other. A node ID or UUID that two machines had at the same time proves nothing. If only the UUID is
// equal, as after a reinstallation, the machine must have kept its address, too: some vendors use a UUID several times.
func (i *Inventory) RenamedTo(nodename string) string {
	i.mu.RLock()
	defer i.mu.RUnlock()

	return i.renamedTo(nodename)
}

func (i *Inventory) renamedTo(nodename string) string {
	entry := i.entries[nodename]
	if entry.Condition == Current {
		return ""
	}

	var found []string

	for _, other := range i.sameIdentity(nodename, entry.Last.Identity()) {
		e := i.entries[other]
		before, now := entry.Last.Identity(), e.Last.Identity()
		isSame := before.Compare(now) != machine.Different && i.unambiguous(before).Compare(i.unambiguous(now)) == machine.Same
		isReinstalled := before.NodeID == "" || before.NodeID != now.NodeID

		if e.Condition == Current && isSame && (!isReinstalled || entry.Responding == other) {
			found = append(found, other)
		}
	}

	if len(found) != 1 {
		return ""
	}

	return found[0]
}

// withoutRenamed removes the Nodes from which nodename's machine was renamed. The caller holds i.mu.
func (i *Inventory) withoutRenamed(nodenames []string, nodename string) []string {
	return slices.DeleteFunc(nodenames, func(other string) bool {
		return i.renamedTo(other) == nodename || atOneAddress(i.entries[other], i.entries[nodename])
	})
}

// atOneAddress reports whether two machines with one identity were reached at one address: they are the same machine. If
// it loses power and boots with another name, the connection under its old name stays open until the kernel's keepalive
// ends it.
func atOneAddress(a, b Entry) bool {
	return a.Last.Endpoint.IsValid() && a.Last.Endpoint == b.Last.Endpoint && a.Last.Identity() == b.Last.Identity()
}

// Rivals returns the addresses of two machines with the same nodename, or nil if only one machine has it. The first is the
// address of the machine that responds now. They alternate, because both kubelets write the addresses of the Node.
func (i *Inventory) Rivals(nodename string) []netip.Addr {
	i.mu.RLock()
	defer i.mu.RUnlock()

	entry := i.entries[nodename]
	if i.now().Sub(entry.rivalAt) >= claims.Retention {
		return nil
	}

	return []netip.Addr{entry.Last.Endpoint, entry.rival}
}

// sameIdentity returns the other nodenames whose last views have an identifier of the identity. The caller holds i.mu.
func (i *Inventory) sameIdentity(nodename string, identity machine.Identity) []string {
	var names []string

	for _, id := range identifiers(identity) {
		names = append(names, i.identities.others(id, nodename)...)
	}

	slices.Sort(names)

	return slices.Compact(names)
}

// unambiguous returns the identity without the identifiers of several machines. The caller holds i.mu.
func (i *Inventory) unambiguous(identity machine.Identity) machine.Identity {
	if _, found := i.ambiguous[identifier{kindNodeID, identity.NodeID}]; found {
		identity.NodeID = ""
	}

	if _, found := i.ambiguous[identifier{kindUUID, identity.UUID}]; found {
		identity.UUID = ""
	}

	return identity
}

// reidentify updates the identifiers of nodename's machine, and returns the other nodenames that have one of them. An
// identifier of several machines stays ambiguous for claims.Retention after the last one. The caller holds i.mu.
func (i *Inventory) reidentify(nodename string, before, after Entry) []string {
	now := i.now()
	maps.DeleteFunc(i.ambiguous, func(_ identifier, at time.Time) bool { return !at.IsZero() && now.Sub(at) >= claims.Retention })

	i.identities.replace(nodename, identifiers(before.Last.Identity()), identifiers(after.Last.Identity()))

	if after.Condition == Current {
		for _, id := range identifiers(after.Last.Identity()) {
			isOther := func(n string) bool { return i.entries[n].Condition == Current && !atOneAddress(i.entries[n], after) }
			if slices.ContainsFunc(i.identities.others(id, nodename), isOther) {
				i.ambiguous[id] = time.Time{}
			}
		}
	}

	for _, id := range append(identifiers(before.Last.Identity()), identifiers(after.Last.Identity())...) {
		if _, found := i.ambiguous[id]; found && len(i.identities[id]) > 0 {
			i.ambiguous[id] = time.Time{}
		} else if found {
			i.ambiguous[id] = now
		}
	}

	return append(i.sameIdentity(nodename, before.Last.Identity()), i.sameIdentity(nodename, after.Last.Identity())...)
}
