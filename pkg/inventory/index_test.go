package inventory_test

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/assert"

	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

// at returns a machine with one address on eth0.
func at(prefix string) machine.Machine { return on("eth0", prefix) }

func on(link, prefix string) machine.Machine {
	return machine.Machine{Addresses: []machine.Address{{Link: link, Prefix: netip.MustParsePrefix(prefix)}}}
}

func excluding(m machine.Machine, prefix string) machine.Machine {
	m.ExcludedSubnets = []netip.Prefix{netip.MustParsePrefix(prefix)}

	return m
}

func TestInventory_OwnersOfAddress(t *testing.T) {
	m, moved := at("10.0.0.1/24"), at("10.0.0.2/24")
	twice := machine.Machine{Addresses: append(m.Addresses[:1:1], on("eth1", "10.0.0.1/32").Addresses...)}
	nodeIP := machine.Machine{NodeIPs: []netip.Addr{netip.MustParseAddr("10.0.0.1")}}
	endpoint := machine.Machine{Endpoint: netip.MustParseAddr("::ffff:10.0.0.1")}

	for _, test := range []struct {
		name    string
		address string
		changes steps
		want    []string
	}{
		{"no machine", "10.0.0.1", nil, nil},
		{"this machine only", "10.0.0.1", steps{view("a", m)}, nil},
		{"another machine", "10.0.0.1", steps{view("b", m)}, []string{"b"}},
		{"several machines", "10.0.0.1", steps{view("a", m), view("b", m), view("c", at("10.0.0.1/32"))}, []string{"b", "c"}},
		{"address on two links, then changed", "10.0.0.1", steps{view("b", twice), view("b", moved)}, nil},
		{"IPv4-mapped IPv6", "10.0.0.1", steps{view("b", at("::ffff:10.0.0.1/128"))}, []string{"b"}},
		{"address known to the platform only", "203.0.113.7", steps{view("b", on("external", "203.0.113.7/32"))}, []string{"b"}},
		{"node IP on no link", "10.0.0.1", steps{view("b", nodeIP)}, []string{"b"}},
		{"address in an excluded subnet", "10.9.0.1", steps{view("b", excluding(at("10.9.0.1/24"), "10.9.0.0/16"))}, []string{"b"}},
		{"Service address of kube-proxy", "10.96.0.1", steps{view("b", excluding(on("kube-ipvs0", "10.96.0.1/32"), "10.96.0.0/12"))}, nil},
		{"other address on the link of kube-proxy", "203.0.113.9", steps{
			view("b", excluding(on("kube-ipvs0", "203.0.113.9/32"), "10.96.0.0/12")),
		}, []string{"b"}},
		{"loopback", "127.0.0.1", steps{view("b", at("127.0.0.1/8"))}, nil},
		{"link-local", "fe80::1", steps{view("b", at("fe80::1/64"))}, nil},
		{"machine changed its address", "10.0.0.1", steps{view("b", m), view("b", moved)}, nil},
		{"unreachable machine", "10.0.0.1", steps{view("b", m), unreachable("b")}, []string{"b"}},
		{"mismatched machine", "10.0.0.1", steps{view("b", m), mismatch("b", "other")}, []string{"b"}},
		{"changed address after a mismatch", "10.0.0.1", steps{view("b", m), mismatch("b", "other"), view("b", moved)}, nil},
		{"address at which the machine responds", "10.0.0.1", steps{view("b", endpoint)}, []string{"b"}},
		{"forgotten machine", "10.0.0.1", steps{view("b", m), forgotten("b")}, nil},
		{"one of two forgotten", "10.0.0.1", steps{view("b", m), view("c", m), forgotten("b")}, []string{"c"}},
	} {
		assert.Equal(t, test.want, newFixture(test.changes...).Owners(test.address, "a"), test.name)
	}
}

func TestInventory_ContradictsIfMachineDoesNotReportAddress(t *testing.T) {
	with, without := at("10.0.0.1/24"), machine.Machine{Nodename: "a"}
	with.Nodename = "a"

	for _, test := range []struct {
		name    string
		changes steps
		want    bool
	}{
		{"unknown machine", nil, false},
		{"never responded", steps{unreachable("a")}, false},
		{"another machine responds", steps{mismatch("a", "b")}, false},
		{"reports it", steps{view("a", with)}, false},
		{"does not report it", steps{view("a", without)}, true},
		{"did not report it before it went silent", steps{view("a", without), unreachable("a")}, true},
		{"did not report it before another machine responded", steps{view("a", without), mismatch("a", "b")}, true},
		{"reported it before it went silent", steps{view("a", with), unreachable("a")}, false},
		{"forgotten", steps{view("a", without), forgotten("a")}, false},
	} {
		f := newFixture(view("b", with))
		f.do(test.changes...)
		assert.Equal(t, test.want, f.Contradicts("a", "10.0.0.1"), test.name)
	}
}

func TestInventory_KnowsWhatForgottenMachineReported(t *testing.T) {
	last, other := at("10.0.0.1/24"), at("10.0.0.2/24")
	last.Nodename, last.Endpoint, other.Nodename = "b", netip.MustParseAddr("10.0.0.3"), "b"
	reported := []string{"b", "10.0.0.1", "10.0.0.3"}

	for _, test := range []struct {
		name    string
		changes steps
		want    []string // reported by b
		owned   bool     // 10.0.0.1 by b
		dropped bool     // 10.0.0.1 by b
	}{
		{"current", steps{view("b", last)}, reported, true, false},
		{"unreachable", steps{view("b", last), unreachable("b")}, reported, true, false},
		{"a different machine responded", steps{view("b", last), mismatch("b", "c")}, reported, true, false},
		{"never responded", steps{unreachable("b")}, nil, false, false},
		{"changed", steps{view("b", last), view("b", other)}, []string{"b", "10.0.0.2"}, false, true},
		{"forgotten", steps{view("b", last), forgotten("b")}, reported, false, true},
		{"forgotten after a mismatch", steps{view("b", last), mismatch("b", "c"), forgotten("b")}, reported, false, true},
		{"never responded, then forgotten", steps{unreachable("b"), forgotten("b")}, nil, false, false},
		{"forgotten, then a different view", steps{view("b", last), forgotten("b"), view("b", other)}, []string{"b", "10.0.0.2"}, false, true},
		{"forgotten, then unreachable", steps{view("b", last), forgotten("b"), unreachable("b")}, reported, false, true},
		{"forgotten long ago", steps{
			view("b", last), forgotten("b"), after(inventory.Retention), view("c", at("10.0.0.4/24")), forgotten("c"),
		}, nil, false, false},
	} {
		f := newFixture(test.changes...)
		assert.ElementsMatch(t, test.want, f.Reported("b"), test.name)
		assert.Equal(t, test.owned, slices.Contains(f.Owners("10.0.0.1", "a"), "b"), test.name)
		assert.Equal(t, test.dropped, slices.Contains(f.DroppedBy("10.0.0.1", "a"), "b"), test.name)
		assert.Empty(t, f.DroppedBy("10.0.0.1", "b"), test.name)
	}
}

func TestInventory_DroppedByMachineForAWhile(t *testing.T) {
	const unchanged, lost = "10.0.0.1", "10.0.0.2"

	larger := at(unchanged + "/24")
	larger.Addresses = append(larger.Addresses, at(lost+"/24").Addresses...)
	larger.Nodename, larger.Hostname = "b", "host-b"

	smaller := at(unchanged + "/24")
	smaller.Nodename = "b"

	drop := view("b", smaller)
	rename := func(f *fixture) {
		for i := range 2000 {
			m := smaller
			m.Hostname = fmt.Sprintf("host-%d", i)
			f.Replace("b", m)
		}
	}

	for _, test := range []struct {
		name    string
		changes steps
		subject string
		want    []string
	}{
		{"address", steps{drop}, lost, []string{"b"}},
		{"name", steps{drop}, "host-b", []string{"b"}},
		{"still reported", steps{drop}, unchanged, nil},
		{"after another machine responded", steps{mismatch("b", "c"), drop}, lost, []string{"b"}},
		{"machine does not respond", steps{unreachable("b")}, lost, nil},
		{"shortly before the end", steps{drop, after(15*time.Minute - time.Second)}, lost, []string{"b"}},
		{"at the end", steps{drop, after(15 * time.Minute)}, lost, nil},
		{"other change before the end", steps{drop, after(time.Minute), view("b", at("10.0.0.3/24"))}, lost, []string{"b"}},
		{"forgotten", steps{drop, forgotten("b")}, lost, []string{"b"}},
		{"many addresses come and go", steps{drop, rename}, lost, []string{"b"}},
		{"too many names", steps{rename}, "host-1998", nil},
	} {
		f := newFixture(view("b", larger))
		f.do(test.changes...)
		assert.Equal(t, test.want, f.DroppedBy(test.subject, "a"), test.name)
		assert.Empty(t, f.DroppedBy(test.subject, "b"), "%s: its own subject", test.name)
	}
}

func TestInventory_OwnersOfName(t *testing.T) {
	f := newFixture(view("b", machine.Machine{
		Nodename: "node-b", Hostname: "Host-B", Domainname: "Example.org",
		Platform: runtime.PlatformMetadataSpec{Hostname: "meta-b.example.org", InternalDNS: "b.internal.", ExternalDNS: "B.example.com"},
	}))

	for _, name := range []string{"node-b", "host-b", "host-b.example.org", "meta-b.example.org", "b.internal", "b.example.com"} {
		assert.Equal(t, []string{"b"}, f.Owners(name, "a"), name)
	}

	assert.Empty(t, f.Owners("", "a"))
}

// notification is a change, the nodenames it notifies of, and the state after it.
type notification struct {
	name     string
	change   step
	notified []string
	want     string
}

func checkNotifications(t *testing.T, f *fixture, state func() string, list []notification) {
	t.Helper()

	for _, test := range list {
		f.takeNotified()
		f.do(test.change)

		notified := f.takeNotified()
		slices.Sort(notified)
		assert.Equal(t, test.notified, notified, test.name)
		assert.Equal(t, test.want, state(), test.name)
	}
}

func TestInventory_NotifiesOfSharedAddresses(t *testing.T) {
	// behind returns a machine with addresses that only its platform metadata contains.
	behind := func(prefixes ...string) machine.Machine {
		m := at("10.0.0.1/24")
		for _, p := range prefixes {
			m.Addresses = append(m.Addresses, on(machine.LinkExternal, p).Addresses...)
		}

		return m
	}

	const balancer = "203.0.113.1/32"

	f := newFixture()
	shared := func() string {
		return fmt.Sprint(f.SharedAddresses("a"), f.SharedAddresses("b"), f.SharedAddresses("c"))
	}

	checkNotifications(t, f, shared, []notification{
		{"one machine", view("a", behind(balancer, "203.0.113.10/32")), []string{"a"}, "map[] map[] map[]"},
		{"second machine", view("b", behind(balancer)), []string{"a", "b"}, "map[203.0.113.1:[b]] map[203.0.113.1:[a]] map[]"},
		{"third machine does not affect the others", view("c", behind(balancer)), []string{"c"}, "map[203.0.113.1:[b c]] map[203.0.113.1:[a c]] map[203.0.113.1:[a b]]"},
		{"third machine loses it", view("c", behind()), []string{"c"}, "map[203.0.113.1:[b]] map[203.0.113.1:[a]] map[]"},
		{"unreachable machine keeps it", unreachable("b"), []string{"b"}, "map[203.0.113.1:[b]] map[203.0.113.1:[a]] map[]"},
		{"one machine left", forgotten("b"), []string{"a", "b"}, "map[] map[] map[]"},
	})
}

func TestInventory_NotifiesOfSharedNames(t *testing.T) {
	named := func(hostname, internal string) machine.Machine {
		return machine.Machine{Platform: runtime.PlatformMetadataSpec{Hostname: hostname, InternalDNS: internal}}
	}

	f := newFixture()
	owners := func() string {
		return fmt.Sprint(f.Owners("worker.example.org", "a"), f.Owners("worker.example.org", "b"))
	}

	checkNotifications(t, f, owners, []notification{
		{"one machine", view("a", named("worker.example.org", "Worker.example.org.")), []string{"a"}, "[] [a]"},
		{"second machine", view("b", named("", "WORKER.example.org")), []string{"a", "b"}, "[b] [a]"},
		{"third machine does not affect the others", view("c", named("worker.example.org", "")), []string{"c"}, "[b c] [a c]"},
		{"third machine loses it", view("c", named("c.example.org", "")), []string{"c"}, "[b] [a]"},
		{"another name", view("b", named("b.example.org", "worker.example.org")), []string{"b"}, "[b] [a]"},
		{"unreachable machine keeps it", unreachable("b"), []string{"b"}, "[b] [a]"},
		{"displaced machine keeps it", mismatch("b", "other"), []string{"b"}, "[b] [a]"},
		{"one machine left", forgotten("b"), []string{"a", "b"}, "[] [a]"},
	})
}

// A large cluster in which every machine changes its addresses.
func BenchmarkInventory_Replace(b *testing.B) {
	const machines = 5000

	inv := inventory.New(time.Now)
	views := make([][2]machine.Machine, machines)

	for i := range views {
		for v := range views[i] {
			m := machine.Machine{Nodename: fmt.Sprintf("worker-%d", i), Hostname: fmt.Sprintf("worker-%d", i)}
			for n := range 8 {
				addr := netip.AddrFrom4([4]byte{10, byte(v*8 + n), byte(i >> 8), byte(i)})
				m.Addresses = append(m.Addresses, machine.Address{Link: "eth0", Prefix: netip.PrefixFrom(addr, 24)})
			}

			views[i][v] = m
		}

		inv.Replace(views[i][0].Nodename, views[i][0])
	}

	for n := 0; b.Loop(); n++ {
		m := views[n%machines][1-(n/machines)%2]
		inv.Replace(m.Nodename, m)
	}
}
