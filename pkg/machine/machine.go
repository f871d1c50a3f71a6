// Package machine holds what one Talos machine says of itself, as a plain value.
//
// It is part of the pure core: COSI resources in, a Machine out. It never dials, waits, logs or reads a clock.
package machine

import (
	"net/netip"
	"reflect"
	"slices"

	talosmachine "github.com/siderolabs/talos/pkg/machinery/config/machine"
	"github.com/siderolabs/talos/pkg/machinery/nethelpers"
	"github.com/siderolabs/talos/pkg/machinery/resources/hardware"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
)

// Machine is the view of one Talos machine. The zero value is a machine that has said nothing yet.
//
// A Machine shares its maps and slices with nobody who writes them: treat it as read-only.
type Machine struct {
	// Nodename is the name under which this machine's kubelet registers (k8s/Nodename). It is the machine's identity
	// for us: a Machine belongs to a Node only if the two names are equal.
	Nodename string
	// Hostname and Domainname are those in force on the machine (network/HostnameStatus); Domainname may be empty.
	Hostname   string
	Domainname string
	// ClusterName is the Talos cluster's name (cluster/Infos); empty when Talos does not say.
	ClusterName string
	// Type tells control-plane machines from workers.
	Type talosmachine.Type
	// Stage is the last polled stage of the machine (runtime/MachineStatus).
	Stage runtime.MachineStage
	// Platform is the platform's metadata. Until the metadata service answers Talos publishes it with only the
	// platform's name set (network/PlatformConfigApplyController).
	Platform runtime.PlatformMetadataSpec
	// PlatformPublished is true once the platform's driver has delivered its configuration, even if that was
	// empty: a network/PlatformConfig exists ("active" from this boot, or "cached" from an earlier one), and Platform is of
	// the instance that it names.
	PlatformPublished bool
	// PlatformFromCache is true while the platform's configuration is that of an earlier boot, which Talos keeps on disk and applies until
	// the metadata service answers (network/PlatformConfigLoadController, Talos 1.12 and later). The disk may have been another instance's then.
	PlatformFromCache bool
	// System is what SMBIOS says; the zero value where there is none.
	System hardware.SystemInformationSpec
	// TalosVersion is the running version, such as "v1.13.5" (runtime/Versions).
	TalosVersion string
	// Extensions are the versions of the machine's system extensions by name (runtime/ExtensionStatuses). An image that Image Factory made has
	// one called "schematic", whose version is the schematic's ID.
	Extensions map[string]string
	// Addresses are all addresses on the machine's links, ordered by link and prefix.
	Addresses []Address
	// NodeIPs are those Talos hands to the kubelet (k8s/NodeIPs), at most one of each family.
	NodeIPs []netip.Addr
	// ExcludedSubnets can hold no address of this node: pod and service CIDRs and virtual IPs (k8s/NodeIPConfigs).
	ExcludedSubnets []netip.Prefix
}

// LinkExternal is the link on which Talos publishes addresses that only the platform's metadata knows (network/PlatformConfigApplyController).
const LinkExternal = "external"

// Address is one address on one link of the machine (network/AddressStatus).
type Address struct {
	Prefix netip.Prefix
	// Link is the link's name, or LinkExternal.
	Link  string
	Scope nethelpers.Scope
	Flags nethelpers.AddressFlags
}

// Equal tells whether two views say the same.
func (m Machine) Equal(other Machine) bool { return reflect.DeepEqual(m, other) }

// HasAddress tells whether ip is on one of the machine's links.
func (m Machine) HasAddress(ip netip.Addr) bool {
	ip = ip.Unmap()

	for _, a := range m.Addresses {
		if a.Prefix.Addr().Unmap() == ip {
			return true
		}
	}

	return false
}

// Excludes tells whether ip can be no address of this node (ExcludedSubnets).
func (m Machine) Excludes(ip netip.Addr) bool {
	return slices.ContainsFunc(m.ExcludedSubnets, func(p netip.Prefix) bool { return p.Contains(ip) })
}

// FQDN is the host name with the domain name, if there is one.
func (m Machine) FQDN() string {
	if m.Hostname == "" || m.Domainname == "" {
		return m.Hostname
	}

	return m.Hostname + "." + m.Domainname
}
