// Package noderecord reads and writes the record of a Node: which machine, and which client certificate of its kubelet, the
// Node belongs to. Labels of the Node have the record, which no kubelet can write (admission plugin NodeRestriction).
// docs/explanation/node-records.md explains it.
//
// It is part of the pure core. Of is the only function that reads the labels. The leader writes what ByLeader returns, and
// a control-plane machine what ByMachine returns about itself.
package noderecord

import (
	"cmp"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

const (
	// IDLength is the length of an ID: 128 bits of a SHA-256 hash in hexadecimal digits, which fit into a label.
	IDLength = 32
	// fingerprintLength is the length of the start of an ID that is only compared with an earlier ID of the same value.
	fingerprintLength = 12
)

// ID returns the ID of a certificate in DER encoding, or of another value; empty for an empty value.
func ID(value []byte) string {
	if len(value) == 0 {
		return ""
	}

	sum := sha256.Sum256(value)

	return hex.EncodeToString(sum[:])[:IDLength]
}

// Fingerprint returns the start of the ID of a value; empty for an empty value.
func Fingerprint(value string) string { return shorten(ID([]byte(value))) }

func shorten(id string) string { return id[:min(fingerprintLength, len(id))] }

// Record is the record of a Node. The zero value means that there is none.
type Record struct {
	// Credential is the ID of the kubelet's client certificate; empty if only the machine is recorded. Previous is the ID of the certificate with which the kubelet
	// requested it: a request that it made before the rotation can be reviewed after it, and a kubelet that fails to store a
	// certificate continues with the previous one.
	Credential, Previous string
	// Stated is Credential or Previous if the machine itself stated that certificate; empty otherwise.
	Stated string
	// NodeID and Issuer are fingerprints of the machine's Talos node ID and of the CA's key ID. Volume is the ID of the file
	// system on which the kubelet stores the certificate, or only its fingerprint. Each may be empty if unknown.
	NodeID, Volume, Issuer string
	// Address is the address at which the machine responded; the zero value if unknown. Unless the machine states it, a
	// recorded certificate is replaced only while the machine responds there. OtherAddress is the machine's node IP of the
	// other IP family; the zero value if it has none, or if another machine has it.
	Address, OtherAddress netip.Addr
	// Expires is when the certificate expires; zero if unknown.
	Expires time.Time
	// IsWorker is true if the record was made while the Node did not have the label of the control plane.
	IsWorker bool
}

// Has reports whether the record has a client certificate with this ID.
func (r Record) Has(credential string) bool {
	return credential != "" && (credential == r.Credential || credential == r.Previous)
}

// IsAt reports whether the machine responds at the recorded address.
func (r Record) IsAt(m machine.Machine) bool { return r.Address.IsValid() && r.Address == m.Endpoint }

// Identifies reports whether m is the recorded machine. The node ID and a fingerprint are not enough: everyone who may list
// Nodes can read them, and another machine can report them.
func (r Record) Identifies(m machine.Machine) bool {
	return len(r.Volume) == IDLength && r.Volume == ID([]byte(m.EphemeralID))
}

// Contradicts reports whether the machine has another volume than the recorded one. If a volume is unknown, the node ID
// decides: it changes without the volume if only the partition STATE is wiped.
func (r Record) Contradicts(m machine.Machine) bool {
	nodeID, volume := Fingerprint(m.NodeID), ID([]byte(m.EphemeralID))
	if r.Volume == "" || volume == "" {
		return r.NodeID != "" && nodeID != "" && r.NodeID != nodeID
	}

	return !strings.HasPrefix(volume, r.Volume)
}

// Matches reports whether nothing contradicts that m is the recorded machine: it has the recorded volume, or responds at
// the recorded address and has no other volume or node ID.
func (r Record) Matches(m machine.Machine) bool {
	return r.Identifies(m) || r.IsAt(m) && !r.Contradicts(m)
}

// AddressOf returns the address to record for a machine; the zero value if there is none. The endpoint of the local machine
// is the first of its addresses that the kubelet wrote into the Node, such as a virtual IP.
func AddressOf(m machine.Machine) netip.Addr {
	if m.ControlPlane == nil || !m.ControlPlane.Local || slices.Contains(m.NodeIPs, m.Endpoint) {
		return m.Endpoint
	}

	return cmp.Or(m.NodeIPs...)
}

// Locate returns the record with the identity and the address of a machine whose kubelet has the recorded certificate. The
// record does not change if the machine has another volume, or if it responds at another address and has another node ID. A
// machine that stated its certificate has stated its identity, too.
func (r Record) Locate(m machine.Machine) Record {
	nodeID, volume := Fingerprint(m.NodeID), ID([]byte(m.EphemeralID))
	isSame := r.Volume != "" && strings.HasPrefix(volume, r.Volume) || r.Volume == "" && (r.NodeID == "" || r.NodeID == nodeID)

	if !isSame && !r.Matches(m) {
		return r
	}

	if address := AddressOf(m); address.IsValid() && address != r.Address {
		r.Address, r.OtherAddress = address, netip.Addr{}
	}

	if r.Stated == "" {
		r.NodeID, r.Volume = cmp.Or(nodeID, r.NodeID), cmp.Or(volume, r.Volume)
	}

	return r
}

// State returns the record after its machine m has stated the client certificate of its own kubelet. During a rotation, the
// file may still have the previous certificate, or the kubelet may have failed to store the next one: so a recorded
// certificate stays. A certificate that the machine did not state is no longer accepted once the machine has another one.
func (r Record) State(certificate *x509.Certificate, m machine.Machine) Record {
	id := ID(certificate.Raw)
	if !r.Has(id) {
		next := Record{Credential: id, Address: r.Address, OtherAddress: r.OtherAddress}
		if r.Stated == r.Credential {
			next.Previous = r.Stated
		}

		r = next
	}

	if r.Credential == id {
		r.Issuer, r.Expires = Fingerprint(string(certificate.AuthorityKeyId)), certificate.NotAfter.UTC()
	}

	r.Stated, r.IsWorker = id, false
	r.NodeID, r.Volume = cmp.Or(Fingerprint(m.NodeID), r.NodeID), cmp.Or(ID([]byte(m.EphemeralID)), r.Volume)

	return r
}
