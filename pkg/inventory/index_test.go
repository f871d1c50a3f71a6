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
		return fmt.Sprint(f.Claims.ReportedBy("worker.example.org", "a"), f.Claims.ReportedBy("worker.example.org", "b"))
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
