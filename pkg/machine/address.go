package machine

import (
	"net/netip"
	"slices"
	"strings"

	"github.com/siderolabs/talos/pkg/machinery/constants"
	"github.com/siderolabs/talos/pkg/machinery/nethelpers"
)

// LinkExternal is the link on which Talos publishes addresses that only the platform's metadata knows
// (network/PlatformConfigApplyController).
const LinkExternal = "external"

// LinkIPVS is the link to which kube-proxy in mode IPVS assigns the addresses of all Services
// (k8s.io/kubernetes/pkg/proxy/ipvs, defaultDummyDevice).
const LinkIPVS = "kube-ipvs0"

var (
	// overlayLinks are prefixes of link names whose addresses belong to the machine, but not to a network it is
	// attached to.
	overlayLinks = []string{LinkExternal, constants.KubeSpanLinkName, constants.SideroLinkName, "docker", "dummy", "tailscale", "virbr", "wg", "wireguard"}
	// cniLinks are prefixes of link names whose addresses are assigned by a CNI or kube-proxy.
	cniLinks = []string{
		"antrea", "cali", "cilium", "cni", "flannel", "genev", "kube-", "kube_", "lxc", "nodelocaldns", "ovn", "tunl", "veth", "vxlan", "weave",
	}
)

// MaxSubjects is the largest number of names and addresses in the certificate of a kubelet. A Node lists no more, because
// its kubelet requests all that it lists. A request for 1,000 takes about 10 ms to review in a cluster of 1,000 Nodes.
const MaxSubjects = 1000

// Address is one address on one link of the machine (network/AddressStatus).
type Address struct {
	Prefix netip.Prefix `yaml:"prefix"`
	// Link is the name of the link, or LinkExternal.
	Link  string                  `yaml:"link,omitempty"`
	Scope nethelpers.Scope        `yaml:"scope,omitempty"`
	Flags nethelpers.AddressFlags `yaml:"flags,omitempty"`
}

// unstable are the flags of addresses that a machine does not keep or cannot use yet.
const unstable = nethelpers.AddressTemporary | nethelpers.AddressDeprecated | nethelpers.AddressDADFailed | nethelpers.AddressTentative

// OnCNILink reports whether the address is on a link of a CNI or of kube-proxy.
func (a Address) OnCNILink() bool { return hasPrefix(a.Link, cniLinks) }

// IsStable reports whether a is a global unicast address outside the private ranges that belongs to this machine
// permanently: on a network the machine is attached to, not temporary, not a pod's or a Service's, and not shared with
// other machines.
func (m Machine) IsStable(a Address) bool {
	ip := a.Prefix.Addr().Unmap()

	switch {
	case a.Scope != nethelpers.ScopeGlobal, nethelpers.AddressFlag(a.Flags)&unstable != 0:
		return false
	case !ip.IsGlobalUnicast(), ip.IsPrivate(), m.Excludes(ip):
		return false
	}

	return a.Link != "lo" && !hasPrefix(a.Link, overlayLinks) && !a.OnCNILink()
}

// IsService reports whether a is the address of a Service, on the link where kube-proxy in IPVS mode keeps them.
func (m Machine) IsService(a Address) bool {
	return a.Link == LinkIPVS && m.Excludes(a.Prefix.Addr())
}

func hasPrefix(link string, prefixes []string) bool {
	return slices.ContainsFunc(prefixes, func(prefix string) bool { return strings.HasPrefix(link, prefix) })
}

// CanonicalAddress returns the form in which addresses are compared: without zone, and an IPv4-mapped IPv6 address as
// IPv4.
func CanonicalAddress(addr netip.Addr) string { return addr.Unmap().WithZone("").String() }
