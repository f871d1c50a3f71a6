package machine

import "fmt"

// Identity distinguishes a machine from all others, whatever its names and addresses. The zero value is unknown.
type Identity struct {
	// NodeID is the machine's Talos node ID, and UUID its SMBIOS UUID as returned by Machine.UUID. Each may be empty.
	NodeID, UUID string
}

// Identity returns the machine's identity.
func (m Machine) Identity() Identity { return Identity{NodeID: m.NodeID, UUID: m.UUID()} }

// IsZero reports whether nothing distinguishes the machine.
func (i Identity) IsZero() bool { return i == Identity{} }

// Match is the result of comparing two identities.
type Match int

const (
	// Undecided means that too little is known of the machines. The zero value.
	Undecided Match = iota
	// Same means that the machines are the same.
	Same
	// Different means that the machines are different.
	Different
)

// Compare compares two machines. The SMBIOS UUID decides if both have one: it belongs to the hardware, while a cloned
// disk has the node ID of the original, and a reinstalled machine has a new node ID. The node ID decides if neither has a
// UUID: every machine knows the node IDs of all others. Leave UUIDs that are not unique empty.
func (i Identity) Compare(other Identity) Match {
	a, b := i.UUID, other.UUID
	if a == "" && b == "" {
		a, b = i.NodeID, other.NodeID
	}

	switch {
	case a == "" || b == "":
		return Undecided
	case a == b:
		return Same
	default:
		return Different
	}
}

// String returns the identity for messages.
func (i Identity) String() string {
	switch {
	case i.UUID == "" && i.NodeID == "":
		return "unknown identity"
	case i.UUID == "":
		return fmt.Sprintf("node ID %.64q", i.NodeID)
	case i.NodeID == "":
		return "SMBIOS UUID " + i.UUID
	default:
		return fmt.Sprintf("SMBIOS UUID %s, node ID %.64q", i.UUID, i.NodeID)
	}
}
