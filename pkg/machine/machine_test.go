package machine_test

import (
	"net/netip"
	"testing"

	talosmachine "github.com/siderolabs/talos/pkg/machinery/config/machine"
	"github.com/siderolabs/talos/pkg/machinery/nethelpers"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

func TestHasAddress(t *testing.T) {
	m := machine.Machine{Addresses: []machine.Address{
		{Prefix: netip.MustParsePrefix("192.0.2.1/24"), Link: "eth0"},
		{Prefix: netip.MustParsePrefix("::ffff:192.0.2.7/120"), Link: "eth1"},
		{Prefix: netip.MustParsePrefix("2001:db8::1/64"), Link: "eth0"},
		{Prefix: netip.MustParsePrefix("203.0.113.5/32"), Link: "external"},
	}}

	for _, test := range []struct {
		rule, ip string
		want     bool
	}{
		{"IPv4 on a link", "192.0.2.1", true},
		{"IPv6 on a link", "2001:db8::1", true},
		{"IPv6 spelled out", "2001:0db8:0:0::0001", true},
		{"IPv4-mapped IPv6 is the IPv4 address", "::ffff:192.0.2.1", true},
		{"and the other way round", "192.0.2.7", true},
		{"one that only the platform knows", "203.0.113.5", true},
		{"a neighbor in the same subnet is another machine's", "192.0.2.2", false},
		{"the network's address is nobody's", "192.0.2.0", false},
		{"IPv4-compatible IPv6 is another address", "::192.0.2.1", false},
		{"the unspecified address is none", "0.0.0.0", false},
	} {
		t.Run(test.rule, func(t *testing.T) {
			if got := m.HasAddress(netip.MustParseAddr(test.ip)); got != test.want {
				t.Errorf("HasAddress(%s): got %v, want %v", test.ip, got, test.want)
			}
		})
	}

	if m.HasAddress(netip.Addr{}) {
		t.Error("has the zero address")
	}
}

func TestFQDN(t *testing.T) {
	for _, test := range []struct{ rule, host, domain, want string }{
		{"host and domain", "worker-1", "example.org", "worker-1.example.org"},
		{"host alone", "worker-1", "", "worker-1"},
		{"a domain without a host is no name", "", "example.org", ""},
		{"nothing", "", "", ""},
	} {
		t.Run(test.rule, func(t *testing.T) {
			if got := (machine.Machine{Hostname: test.host, Domainname: test.domain}).FQDN(); got != test.want {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}

func TestEqualNoticesEveryField(t *testing.T) {
	base := func() machine.Machine { return viewOf(everything()...).Machine() }

	if !base().Equal(base()) {
		t.Fatal("two machines made from the same resources differ")
	}

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
	} {
		t.Run(field, func(t *testing.T) {
			changed := base()
			change(&changed)

			if base().Equal(changed) {
				t.Error("the change went unnoticed")
			}
		})
	}
}
