package inventory_test

import (
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"

	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

// at is a machine with one address on eth0.
func at(prefix string) machine.Machine { return on("eth0", prefix) }

func on(link, prefix string) machine.Machine {
	return machine.Machine{Addresses: []machine.Address{{Link: link, Prefix: netip.MustParsePrefix(prefix)}}}
}

func TestHoldersOfAClaim(t *testing.T) {
	excluding := func(m machine.Machine, prefix string) machine.Machine {
		m.ExcludedSubnets = []netip.Prefix{netip.MustParsePrefix(prefix)}

		return m
	}

	for _, test := range []struct {
		rule   string
		claim  string
		change func(*bench)
		want   []string
	}{
		{"nobody", "10.0.0.1", func(*bench) {}, nil},
		{"the machine itself is not another", "10.0.0.1", func(b *bench) { b.Replace("a", at("10.0.0.1/24")) }, nil},
		{"another that has the address", "10.0.0.1", func(b *bench) { b.Replace("b", at("10.0.0.1/24")) }, []string{"b"}},
		{"all that have it", "10.0.0.1", func(b *bench) {
			b.Replace("a", at("10.0.0.1/24"))
			b.Replace("b", at("10.0.0.1/24"))
			b.Replace("c", at("10.0.0.1/32"))
		}, []string{"b", "c"}},
		{"an address on two links counts once", "10.0.0.1", func(b *bench) {
			m := at("10.0.0.1/24")
			m.Addresses = append(m.Addresses, on("eth1", "10.0.0.1/32").Addresses...)
			b.Replace("b", m)
			b.Replace("b", at("10.0.0.2/24"))
		}, nil},
		{"an IPv4 address within IPv6 is the IPv4 address", "10.0.0.1", func(b *bench) { b.Replace("b", at("::ffff:10.0.0.1/128")) }, []string{"b"}},
		{"an address that only the platform's metadata knows", "203.0.113.7", func(b *bench) { b.Replace("b", on("external", "203.0.113.7/32")) }, []string{"b"}},
		{"a node IP that is on no link", "10.0.0.1", func(b *bench) {
			b.Replace("b", machine.Machine{NodeIPs: []netip.Addr{netip.MustParseAddr("10.0.0.1")}})
		}, []string{"b"}},
		{"an address that the machine must not use as node IP", "10.9.0.1", func(b *bench) { b.Replace("b", excluding(at("10.9.0.1/24"), "10.9.0.0/16")) }, []string{"b"}},
		{"not the service addresses of kube-proxy", "10.96.0.1", func(b *bench) {
			b.Replace("b", excluding(on("kube-ipvs0", "10.96.0.1/32"), "10.96.0.0/12"))
		}, nil},
		{"but other addresses there", "203.0.113.9", func(b *bench) {
			b.Replace("b", excluding(on("kube-ipvs0", "203.0.113.9/32"), "10.96.0.0/12"))
		}, []string{"b"}},
		{"not loopback", "127.0.0.1", func(b *bench) { b.Replace("b", at("127.0.0.1/8")) }, nil},
		{"not link-local", "fe80::1", func(b *bench) { b.Replace("b", at("fe80::1/64")) }, nil},
		{"one that had it before has it no more", "10.0.0.1", func(b *bench) {
			b.Replace("b", at("10.0.0.1/24"))
			b.Replace("b", at("10.0.0.2/24"))
		}, nil},
		{"one that is unreachable keeps it", "10.0.0.1", func(b *bench) {
			b.Replace("b", at("10.0.0.1/24"))
			b.MarkUnreachable("b", "gone")
		}, []string{"b"}},
		{"one that turned out to be another machine does not", "10.0.0.1", func(b *bench) {
			b.Replace("b", at("10.0.0.1/24"))
			b.MarkMismatch("b", "no")
		}, nil},
		{"one that is forgotten does not", "10.0.0.1", func(b *bench) {
			b.Replace("b", at("10.0.0.1/24"))
			b.Forget("b")
		}, nil},
		{"one of two is forgotten", "10.0.0.1", func(b *bench) {
			b.Replace("b", at("10.0.0.1/24"))
			b.Replace("c", at("10.0.0.1/24"))
			b.Forget("b")
		}, []string{"c"}},
	} {
		t.Run(test.rule, func(t *testing.T) {
			b := newBench()
			test.change(b)

			if got := b.Owners(test.claim, "a"); !slices.Equal(got, test.want) {
				t.Errorf("got %v, want %v", got, test.want)
			}
		})
	}
}

func TestEveryNameOfAMachineIsAClaim(t *testing.T) {
	b := newBench()
	b.Replace("b", machine.Machine{
		Nodename: "node-b", Hostname: "Host-B", Domainname: "Example.org",
		Platform: runtime.PlatformMetadataSpec{Hostname: "meta-b.example.org", InternalDNS: "b.internal.", ExternalDNS: "B.example.com"},
	})

	for _, name := range []string{"node-b", "host-b", "host-b.example.org", "meta-b.example.org", "b.internal", "b.example.com"} {
		if got := b.Owners(name, "a"); !slices.Equal(got, []string{"b"}) {
			t.Errorf("%s is claimed by %v", name, got)
		}
	}

	if got := b.Owners("", "a"); len(got) != 0 {
		t.Errorf("the empty name is claimed by %v", got)
	}
}

// Run with -race. Whatever the order, nobody claims anything once all is forgotten, and nobody changes what another was told.
func TestClaimsMayBeReadWhileTheyChange(t *testing.T) {
	inv := inventory.New(time.Now)

	var group sync.WaitGroup

	for worker := range 4 {
		group.Go(func() {
			name := fmt.Sprintf("worker-%d", worker)

			for i := range 200 {
				inv.Replace(name, at(fmt.Sprintf("10.0.0.%d/24", 1+i%3)))

				holders := inv.Owners("10.0.0.1", name)
				slices.Reverse(holders)
			}

			inv.Forget(name)
		})
	}

	group.Wait()

	for i := range 3 {
		if got := inv.Owners(fmt.Sprintf("10.0.0.%d", 1+i), ""); len(got) != 0 {
			t.Errorf("still claimed by %v", got)
		}
	}
}

// A large cluster whose every machine reports a change of its addresses.
func BenchmarkReplaceAmongThousands(b *testing.B) {
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
