package machine

import (
	"slices"
	"strings"

	"github.com/siderolabs/talos/pkg/machinery/constants"
	"github.com/siderolabs/talos/pkg/machinery/nethelpers"
)

var (
	// overlayLinks are beginnings of the names of links whose addresses are the machine's, but not of a network that it is in.
	overlayLinks = []string{LinkExternal, constants.KubeSpanLinkName, constants.SideroLinkName, "docker", "dummy", "tailscale", "virbr", "wg", "wireguard"}
	// cniLinks are those of links whose addresses a CNI or kube-proxy gives.
	cniLinks = []string{
		"antrea", "cali", "cilium", "cni", "flannel", "genev", "kube-", "kube_", "lxc", "nodelocaldns", "ovn", "tunl", "veth", "vxlan", "weave",
	}
)

// OnCNILink tells whether the address is on a link of a CNI or of kube-proxy.
func (a Address) OnCNILink() bool { return hasPrefix(a.Link, cniLinks) }

// IsLasting tells whether a is a global unicast address, not a private one, by which the machine itself is reached on a network that it is in, for
// good: not temporary, not a pod's or a Service's, and not shared with other machines.
func (m Machine) IsLasting(a Address) bool {
	const passing = nethelpers.AddressTemporary | nethelpers.AddressDeprecated | nethelpers.AddressDADFailed | nethelpers.AddressTentative

	ip := a.Prefix.Addr().Unmap()

	switch {
	case a.Scope != nethelpers.ScopeGlobal, nethelpers.AddressFlag(a.Flags)&passing != 0:
		return false
	case !ip.IsGlobalUnicast(), ip.IsPrivate(), m.Excludes(ip):
		return false
	}

	return a.Link != "lo" && !hasPrefix(a.Link, overlayLinks) && !a.OnCNILink()
}

func hasPrefix(link string, prefixes []string) bool {
	return slices.ContainsFunc(prefixes, func(prefix string) bool { return strings.HasPrefix(link, prefix) })
}
