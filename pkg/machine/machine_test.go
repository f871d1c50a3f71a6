package machine_test

import (
	"net/netip"
	"slices"
	"testing"

	talosnet "github.com/siderolabs/net"
	talosmachine "github.com/siderolabs/talos/pkg/machinery/config/machine"
	"github.com/siderolabs/talos/pkg/machinery/nethelpers"
	"github.com/siderolabs/talos/pkg/machinery/resources/k8s"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

func TestMachine_HasAddressInAnySpelling(t *testing.T) {
	m := machine.Machine{Addresses: []machine.Address{
		{Prefix: netip.MustParsePrefix("192.0.2.1/24"), Link: "eth0"},
		{Prefix: netip.MustParsePrefix("::ffff:192.0.2.7/120"), Link: "eth1"},
		{Prefix: netip.MustParsePrefix("2001:db8::1/64"), Link: "eth0"},
		{Prefix: netip.MustParsePrefix("203.0.113.5/32"), Link: "external"},
	}}

	for _, test := range []struct {
		name, ip string
		want     bool
	}{
		{"IPv4 on a link", "192.0.2.1", true},
		{"IPv6 on a link", "2001:db8::1", true},
		{"IPv6 in long form", "2001:0db8:0:0::0001", true},
		{"IPv4-mapped IPv6 for an IPv4 address on a link", "::ffff:192.0.2.1", true},
		{"IPv4 for an IPv4-mapped IPv6 address on a link", "192.0.2.7", true},
		{"address known to the platform only", "203.0.113.5", true},
		{"another address in the same subnet", "192.0.2.2", false},
		{"network address", "192.0.2.0", false},
		{"IPv4-compatible IPv6 differs from IPv4", "::192.0.2.1", false},
		{"unspecified address", "0.0.0.0", false},
	} {
		assert.Equal(t, test.want, m.HasAddress(netip.MustParseAddr(test.ip)), test.name)
	}

	assert.False(t, m.HasAddress(netip.Addr{}), "zero address")
}

// Talos chooses node IPs with FilterIPs: it must choose each address that the subnets contain and that is not excluded.
func TestMachine_ExcludesLikeTalos(t *testing.T) {
	addresses := []netip.Addr{
		netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.1.0.1"), netip.MustParseAddr("10.1.1.1"), netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1"),
	}

	for _, subnets := range [][]string{
		{"0.0.0.0/0", "::/0"},
		{"0.0.0.0/0", "!10.0.0.0/8"},
		{"0.0.0.0/0", "::/0", "!10.1.0.1", "!2001:db8::/32"},
		{"0.0.0.0/0", "!10.0.0.0/8", "10.1.0.0/16"},
		{"0.0.0.0/0", "!10.0.0.0/8", "10.1.0.0/16", "!10.1.1.0/24", "10.1.1.1/32"},
		{"!0.0.0.0/0", "10.0.0.0/8"},
		{"10.0.0.0/8", "!10.1.7.7/16"},
	} {
		m := viewOf(nodeIPConfigOf(subnets)).Machine()

		chosen, err := talosnet.FilterIPs(addresses, subnets)
		require.NoError(t, err)

		for _, addr := range addresses {
			contains := func(s machine.ValidSubnet) bool { return s.Prefix.Contains(addr) }
			want := slices.ContainsFunc(m.ValidSubnets, contains) && !slices.Contains(chosen, addr)
			assert.Equal(t, want, m.Excludes(addr), "%s of %v", addr, subnets)
		}
	}

	m := viewOf(nodeIPConfigOf([]string{"0.0.0.0/0", "!10.0.0.0/8"})).Machine()
	assert.True(t, m.Excludes(netip.MustParseAddr("::ffff:10.0.0.1")))
}

func nodeIPConfigOf(validSubnets []string) *k8s.NodeIPConfig {
	return with(nodeIPConfig(), func(s *k8s.NodeIPConfigSpec) { s.ValidSubnets = validSubnets })
}

func TestMachine_FQDNNeedsHostname(t *testing.T) {
	for _, test := range []struct{ name, host, domain, want string }{
		{"host and domain", "worker-1", "example.org", "worker-1.example.org"},
		{"host only", "worker-1", "", "worker-1"},
		{"domain only", "", "example.org", ""},
		{"neither", "", "", ""},
	} {
		assert.Equal(t, test.want, machine.Machine{Hostname: test.host, Domainname: test.domain}.FQDN(), test.name)
	}
}

func TestMachine_EqualComparesEveryField(t *testing.T) {
	base := func() machine.Machine { return viewOf(everything()...).Machine() }
	assert.True(t, base().Equal(base()), "two machines built from the same resources differ")

	for field, change := range map[string]func(*machine.Machine){
		"Nodename":          func(m *machine.Machine) { m.Nodename = "worker-2" },
		"Hostname":          func(m *machine.Machine) { m.Hostname = "worker-2" },
		"Domainname":        func(m *machine.Machine) { m.Domainname = "example.net" },
		"ClusterName":       func(m *machine.Machine) { m.ClusterName = "test" },
		"Type":              func(m *machine.Machine) { m.Type = talosmachine.TypeControlPlane },
		"Stage":             func(m *machine.Machine) { m.Stage = runtime.MachineStageRebooting },
		"Platform.Zone":     func(m *machine.Machine) { m.Platform.Zone = "a" },
		"Platform.Spot":     func(m *machine.Machine) { m.Platform.Spot = true },
		"Platform.Tags":     func(m *machine.Machine) { m.Platform.Tags["team"] = "red" },
		"PlatformPublished": func(m *machine.Machine) { m.PlatformPublished = !m.PlatformPublished },
		"System":            func(m *machine.Machine) { m.System.UUID = "u-2" },
		"Addresses":         func(m *machine.Machine) { m.Addresses = m.Addresses[1:] },
		"Address.Prefix":    func(m *machine.Machine) { m.Addresses[0].Prefix = netip.MustParsePrefix("10.0.0.1/25") },
		"Address.Link":      func(m *machine.Machine) { m.Addresses[0].Link = "eth7" },
		"Address.Scope":     func(m *machine.Machine) { m.Addresses[0].Scope = nethelpers.ScopeHost },
		"Address.Flags":     func(m *machine.Machine) { m.Addresses[0].Flags = 0 },
		"NodeIPs":           func(m *machine.Machine) { m.NodeIPs = nil },
		"ExcludedSubnets":   func(m *machine.Machine) { m.ExcludedSubnets = m.ExcludedSubnets[:1] },
		"ValidSubnets":      func(m *machine.Machine) { m.ValidSubnets = m.ValidSubnets[1:] },
	} {
		changed := base()
		change(&changed)
		assert.False(t, base().Equal(changed), field)
	}
}

func TestCanonicalName_IsLowerCaseWithoutFinalDot(t *testing.T) {
	for name, want := range map[string]string{"": "", "A": "a", "Host.Example.": "host.example", "a..": "a.", ".": ""} {
		assert.Equal(t, want, machine.CanonicalName(name), name)
	}
}

func TestCanonicalAddress_HasOneFormForEachAddress(t *testing.T) {
	for addr, want := range map[string]string{"10.0.0.1": "10.0.0.1", "::ffff:10.0.0.1": "10.0.0.1", "FD00::1": "fd00::1", "fe80::1%eth0": "fe80::1"} {
		assert.Equal(t, want, machine.CanonicalAddress(netip.MustParseAddr(addr)), addr)
	}
}

func TestParsePrefix_AcceptsAddressesAndPrefixes(t *testing.T) {
	for text, want := range map[string]string{
		"10.1.2.3": "10.1.2.3/32", "10.1.2.3/8": "10.0.0.0/8", "fd00::1": "fd00::1/128", "fe80::1%eth0": "", "x": "",
	} {
		got, valid := machine.ParsePrefix(text)
		assert.Equal(t, want != "", valid, text)

		if valid {
			assert.Equal(t, want, got.String())
		}
	}
}

func TestMachine_IsStableForPublicAddressesOfLinks(t *testing.T) {
	m := machine.Machine{ExcludedSubnets: []netip.Prefix{netip.MustParsePrefix("203.0.113.128/25")}}

	for _, test := range []struct {
		name, prefix, link string
		scope              nethelpers.Scope
		flags              nethelpers.AddressFlag
		want               bool
	}{
		{"public address", "203.0.113.5/24", "eth0", nethelpers.ScopeGlobal, 0, true},
		{"public IPv6 address", "2001:db8::5/64", "eth0", nethelpers.ScopeGlobal, nethelpers.AddressPermanent, true},
		{"IPv4-mapped private address", "::ffff:10.0.0.5/120", "eth0", nethelpers.ScopeGlobal, 0, false},
		{"private address", "10.0.0.5/24", "eth0", nethelpers.ScopeGlobal, 0, false},
		{"link-local address", "fe80::5/64", "eth0", nethelpers.ScopeLink, 0, false},
		{"temporary address", "2001:db8::6/64", "eth0", nethelpers.ScopeGlobal, nethelpers.AddressTemporary, false},
		{"duplicate address", "2001:db8::7/64", "eth0", nethelpers.ScopeGlobal, nethelpers.AddressDADFailed, false},
		{"excluded address", "203.0.113.200/24", "eth0", nethelpers.ScopeGlobal, 0, false},
		{"loopback link", "203.0.113.5/32", "lo", nethelpers.ScopeGlobal, 0, false},
		{"address of the platform's metadata", "203.0.113.5/32", machine.LinkExternal, nethelpers.ScopeGlobal, 0, false},
		{"overlay link", "203.0.113.5/32", "wireguard.mine", nethelpers.ScopeGlobal, 0, false},
		{"CNI link", "203.0.113.5/32", "cilium_host", nethelpers.ScopeGlobal, 0, false},
	} {
		a := machine.Address{Prefix: netip.MustParsePrefix(test.prefix), Link: test.link, Scope: test.scope, Flags: nethelpers.AddressFlags(test.flags)}
		assert.Equal(t, test.want, m.IsStable(a), test.name)
	}
}
