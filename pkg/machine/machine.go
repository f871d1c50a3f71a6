// Package machine builds a plain value from the COSI resources that one Talos machine publishes.
//
// It is part of the pure core: COSI resources in, a Machine out. It never dials, waits, logs or reads a clock.
package machine

import (
	"net/netip"
	"reflect"
	"slices"

	"github.com/cosi-project/runtime/pkg/resource"
	talosmachine "github.com/siderolabs/talos/pkg/machinery/config/machine"
	"github.com/siderolabs/talos/pkg/machinery/resources/hardware"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
)

// Machine is the view of one Talos machine. The zero value is a machine that has published nothing yet.
//
// Copies of a Machine share maps and slices: treat it as read-only.
//
// The tags are the keys in the files of package preview. A netip type has no omitempty, which would always omit it.
type Machine struct {
	// Nodename is the name under which the machine's kubelet registers (k8s/Nodename). It is the machine's identity:
	// a Machine belongs to a Node only if the two names are equal.
	Nodename string `yaml:"nodename,omitempty"`
	// NodeID is random and kept in the STATE partition (cluster/Identity): it survives reboots and upgrades, but not a
	// reset or a reinstallation that wipes STATE. A clone of the disk has the same one.
	NodeID string `yaml:"nodeID,omitempty"`
	// Endpoint is the address at which the machine responds, whatever it reports. On the local machine, whose API is a
	// socket, it is an address of the Node that the machine has. The zero value is unknown.
	Endpoint netip.Addr `yaml:"endpoint"`
	// ControlPlane is nil unless the machine is verified to be a control-plane machine: it is the local machine, or
	// responds at an address that no kubelet can write.
	ControlPlane *ControlPlane `yaml:"-"`
	// EphemeralID is the UUID of the file system or the encrypted volume on the partition EPHEMERAL, on which the
	// kubelet keeps its certificates. Talos chooses another one whenever it formats the partition. It is empty if there
	// is no such partition, as in a container, or more than one (block/DiscoveredVolumes).
	EphemeralID string `yaml:"ephemeralID,omitempty"`
	// Hostname and Domainname are in use on the machine (network/HostnameStatus); Domainname may be empty.
	Hostname   string `yaml:"hostname,omitempty"`
	Domainname string `yaml:"domainname,omitempty"`
	// ClusterName is the name of the Talos cluster (cluster/Infos); empty if not published.
	ClusterName string `yaml:"clusterName,omitempty"`
	// Type is control plane or worker.
	Type talosmachine.Type `yaml:"type,omitempty"`
	// Stage is what the machine is doing, such as running or resetting (runtime/MachineStatus).
	Stage runtime.MachineStage `yaml:"stage,omitempty"`
	// UnmetConditions are why the machine is not ready in its stage (runtime/MachineStatus); none if it is ready.
	UnmetConditions []runtime.UnmetCondition `yaml:"unmetConditions,omitempty"`
	// Platform is the platform's metadata. Until the metadata service responds, Talos publishes it with only the
	// platform name set (network/PlatformConfigApplyController).
	Platform runtime.PlatformMetadataSpec `yaml:"platform,omitempty"`
	// PlatformPublished is true once the platform driver has delivered its configuration, even an empty one: a
	// network/PlatformConfig exists ("active" from this boot, or "cached" from an earlier one) and names the same
	// instance as Platform.
	PlatformPublished bool `yaml:"platformPublished,omitempty"`
	// PlatformFromCache is true while the platform configuration is from an earlier boot. Talos keeps it on disk and
	// applies it until the metadata service responds (network/PlatformConfigLoadController, Talos 1.12 and later). The
	// disk may have belonged to another instance.
	PlatformFromCache bool `yaml:"platformFromCache,omitempty"`
	// System is the SMBIOS system information; the zero value if there is none.
	System hardware.SystemInformationSpec `yaml:"system,omitempty"`
	// Addresses are all addresses on the machine's links, sorted by resource ID, such as "eth0/10.0.0.1/24".
	Addresses []Address `yaml:"addresses,omitempty"`
	// NodeIPs are the addresses that Talos passes to the kubelet (k8s/NodeIPs), at most one of each IP family.
	NodeIPs []netip.Addr `yaml:"nodeIPs,omitempty"`
	// ExcludedSubnets never contain a node IP of this machine: pod and service CIDRs and virtual IPs
	// (k8s/NodeIPConfigs).
	ExcludedSubnets []netip.Prefix `yaml:"excludedSubnets,omitempty"`
	// ValidSubnets are the subnets of machine.kubelet.nodeIP, in the operator's order (k8s/NodeIPConfigs).
	ValidSubnets []ValidSubnet `yaml:"validSubnets,omitempty"`
	// Facts are nil if none were read. Files have all of them.
	Facts *Facts `yaml:"facts,omitempty"`
	// Ignored are the kinds of resources that exceed a limit, with the reason. Their facts are not reported, or are the
	// last ones that did not exceed it.
	Ignored map[resource.Type]string `yaml:"ignored,omitempty"`
}

// ValidSubnet is a subnet that has node IPs or, if inverted, that has none.
type ValidSubnet struct {
	Prefix   netip.Prefix `yaml:"prefix"`
	Inverted bool         `yaml:"inverted,omitempty"`
}

// Equal reports whether two views are the same.
func (m Machine) Equal(other Machine) bool { return reflect.DeepEqual(m, other) }

// HasAddress reports whether ip is on one of the machine's links, LinkExternal included.
func (m Machine) HasAddress(ip netip.Addr) bool {
	ip = ip.Unmap()

	return slices.ContainsFunc(m.Addresses, func(a Address) bool { return a.Prefix.Addr().Unmap() == ip })
}

// Excludes reports whether ip is in one of ExcludedSubnets, or the operator excludes it: the last of ValidSubnets that
// contains it is inverted. Talos evaluates them in order, and each adds or removes addresses (k8s/NodeIPController and
// FilterIPs of github.com/siderolabs/net). An address that none of ValidSubnets contains is no node IP, but not
// excluded.
func (m Machine) Excludes(ip netip.Addr) bool {
	ip = ip.Unmap()

	if slices.ContainsFunc(m.ExcludedSubnets, func(p netip.Prefix) bool { return p.Contains(ip) }) {
		return true
	}

	excluded := false

	for _, s := range m.ValidSubnets {
		if s.Prefix.Contains(ip) {
			excluded = s.Inverted
		}
	}

	return excluded
}

// FQDN returns the host name with the domain name, if both are set; else the host name.
func (m Machine) FQDN() string {
	if m.Hostname == "" || m.Domainname == "" {
		return m.Hostname
	}

	return m.Hostname + "." + m.Domainname
}
