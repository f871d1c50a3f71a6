package noderecord

import (
	"encoding/json"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/constants"
	corev1 "k8s.io/api/core/v1"
)

// Labels of the record. No kubelet can write them (NodeRestriction). Earlier versions do not know the last four and keep
// them. They read a record without a certificate as none, and keep its address.
const (
	// LabelCredential is the ID of the kubelet's client certificate: the first 32 hexadecimal digits of its SHA-256 hash.
	// An operator may set it. It is missing until the kubelet requests a serving certificate.
	LabelCredential = "talos-ccm.node-restriction.kubernetes.io/credential"
	// LabelPrevious is the ID of the certificate with which the kubelet requested its client certificate.
	LabelPrevious = "talos-ccm.node-restriction.kubernetes.io/credential-previous"
	// LabelContext has the first 8 digits of the ID, or `none`, hashes of the Talos node ID, the EPHEMERAL volume and
	// the CA, and the expiry time.
	LabelContext = "talos-ccm.node-restriction.kubernetes.io/credential-context"
	// LabelAddress is the address at which the machine last responded as the recorded one, with `-` for `:`.
	LabelAddress = "talos-ccm.node-restriction.kubernetes.io/credential-address"
	// LabelVolume is the ID of the EPHEMERAL volume.
	LabelVolume = "talos-ccm.node-restriction.kubernetes.io/credential-volume"
	// LabelStated is the ID of the client certificate that the machine itself stated.
	LabelStated = "talos-ccm.node-restriction.kubernetes.io/credential-stated"
	// LabelRole is `worker` if the record was made before the Node had the label of the control plane.
	LabelRole = "talos-ccm.node-restriction.kubernetes.io/credential-role"
	// LabelAddressOther is the node IP of the other IP family, as the machine reports it.
	LabelAddressOther = "talos-ccm.node-restriction.kubernetes.io/credential-address-other"
)

// Labels of an instance of the extension on its own Node, beside the record.
const (
	// LabelConfig is the hash of the instance's configuration.
	LabelConfig = "talos-ccm.node-restriction.kubernetes.io/config"
	// LabelVersion is the instance's version.
	LabelVersion = "talos-ccm.node-restriction.kubernetes.io/version"
)

// LabelRuleAddress is the prefix of labels that record which addresses of a Node rules set, with `-` for `:`. Their values
// are the types of the addresses. No two Nodes get the label of one address.
const LabelRuleAddress = "talos-ccm.node-restriction.kubernetes.io/address-"

// RuleAddressLabel returns the key of the label that records an address.
func RuleAddressLabel(addr netip.Addr) string { return LabelRuleAddress + addressLabel(addr) }

// RuleAddresses returns the addresses of a Node that rules set. Unlike its status, no kubelet can write them.
func RuleAddresses(node *corev1.Node) (list []netip.Addr) {
	for key := range node.Labels {
		if label, found := strings.CutPrefix(key, LabelRuleAddress); found {
			list = append(list, parseAddress(label))
		}
	}

	return list
}

// Instance is what the extension on a control-plane machine states about itself. The values are label values.
type Instance struct{ Config, Version string }

// InstanceOf returns what the instance on the machine of a Node has stated last; the machine may have been changed since.
func InstanceOf(node *corev1.Node) Instance {
	return Instance{Config: node.Labels[LabelConfig], Version: node.Labels[LabelVersion]}
}

// Labels returns the labels of the instance.
func (i Instance) Labels() Labels {
	labels := Labels{}
	labels.set(LabelConfig, i.Config)
	labels.set(LabelVersion, i.Version)

	return labels
}

// FieldManager owns the labels.
const FieldManager = "talos-ccm-csr-approval"

const (
	// unknown is an empty part of the context, and none the certificate of a record without one. It is no hexadecimal
	// number, so that no certificate's ID begins with it.
	unknown, none = "0", "none"
	// keyLength is the length of the start of the certificate's ID in the context.
	keyLength = 8

	roleWorker = "worker"
)

// Of reads the record of a Node:
//   - The context, the volume, the role and the previous certificate count only if the context belongs to the certificate: an
//     operator may have set another certificate.
//   - The ID of the volume counts only if the context has its fingerprint: an earlier version may have replaced the context.
//   - A stated certificate counts only if it is one of the recorded ones.
//   - On a Node with the label of the control plane, a record that was made for a worker is no record: before Talos has set
//     the label, any machine of the cluster may have responded for the Node. What the machine stated counts.
func Of(node *corev1.Node) Record {
	labels := node.Labels
	r := Record{Credential: labels[LabelCredential], Address: parseAddress(labels[LabelAddress]), OtherAddress: parseAddress(labels[LabelAddressOther])}

	r.readContext(labels)

	if stated := labels[LabelStated]; r.Has(stated) {
		r.Stated = stated
	}

	if !r.CountsFor(node) {
		return Record{}
	}

	return r
}

// CountsFor reports whether the record, which may be of a deleted Node, counts for a Node of that name.
func (r Record) CountsFor(node *corev1.Node) bool {
	_, isControlPlane := node.Labels[constants.LabelNodeRoleControlPlane]

	return !isControlPlane || !r.IsWorker || r.Stated != ""
}

// Kept returns the record that outlives deleted Nodes, the oldest first, for the next Node of that name: the last one, but
// one with a certificate before one without.
func Kept(deleted []*corev1.Node, node *corev1.Node) (kept Record) {
	for _, before := range deleted {
		if r := Of(before); r != (Record{}) && r.CountsFor(node) && (r.Credential != "" || kept.Credential == "") {
			kept = r
		}
	}

	return kept
}

// readContext reads the labels that count only with the context.
func (r *Record) readContext(labels map[string]string) {
	parts := strings.Split(labels[LabelContext], ".")
	if len(parts) != 5 || parts[0] != contextKey(r.Credential) {
		return
	}

	for i, value := range []*string{&r.NodeID, &r.Volume, &r.Issuer} {
		if part := parts[i+1]; part != unknown {
			*value = part
		}
	}

	if volume := labels[LabelVolume]; r.Volume != "" && strings.HasPrefix(volume, r.Volume) {
		r.Volume = volume
	}

	if seconds, err := strconv.ParseInt(parts[4], 10, 64); err == nil && seconds > 0 {
		r.Expires = time.Unix(seconds, 0).UTC()
	}

	r.Previous, r.IsWorker = labels[LabelPrevious], labels[LabelRole] == roleWorker
}

// Labels are values of labels by key; nil removes a label.
type Labels map[string]any

// ByLeader returns the labels that the leader writes.
func (r Record) ByLeader() Labels {
	labels := r.labels()
	labels.set(LabelAddress, addressLabel(r.Address))
	labels.set(LabelAddressOther, addressLabel(r.OtherAddress))

	return labels
}

// ByMachine returns the labels that the machine itself writes.
func (r Record) ByMachine() Labels {
	labels := r.labels()
	labels.set(LabelStated, r.Stated)

	return labels
}

func (r Record) labels() Labels {
	labels := Labels{LabelContext: r.context()}
	labels.set(LabelCredential, r.Credential)
	labels.set(LabelPrevious, r.Previous)

	var volume, role string
	if len(r.Volume) == IDLength {
		volume = r.Volume
	}

	if r.IsWorker {
		role = roleWorker
	}

	labels.set(LabelVolume, volume)
	labels.set(LabelRole, role)

	return labels
}

func (l Labels) set(key, value string) {
	if value == "" {
		l[key] = nil
	} else {
		l[key] = value
	}
}

// PatchOf returns the merge patch that writes the labels to a version of a Node. It conflicts with a newer version.
func (l Labels) PatchOf(node *corev1.Node) ([]byte, error) {
	return json.Marshal(map[string]any{"metadata": map[string]any{"uid": node.UID, "resourceVersion": node.ResourceVersion, "labels": l}})
}

// context returns the value of LabelContext: the start of the certificate's ID, the fingerprints of the node ID, the
// volume and the issuer, and the time of expiry in seconds since 1970.
func (r Record) context() string {
	parts := []string{contextKey(r.Credential)}

	for _, value := range []string{r.NodeID, shorten(r.Volume), r.Issuer} {
		if value == "" {
			value = unknown
		}

		parts = append(parts, value)
	}

	return strings.Join(append(parts, strconv.FormatInt(max(r.Expires.Unix(), 0), 10)), ".")
}

func contextKey(credential string) string {
	if credential == "" {
		return none
	}

	return credential[:min(keyLength, len(credential))]
}

// addressLabel returns the value of LabelAddress or LabelAddressOther: no label can contain a colon, or end with one.
func addressLabel(addr netip.Addr) string {
	if !addr.IsValid() {
		return ""
	}

	return strings.ReplaceAll(addr.StringExpanded(), ":", "-")
}

func parseAddress(label string) netip.Addr {
	addr, _ := netip.ParseAddr(strings.ReplaceAll(label, "-", ":")) // zero if invalid

	return addr.Unmap()
}
