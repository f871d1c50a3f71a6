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

// at returns a machine with one address on eth0.
func at(prefix string) machine.Machine { return on("eth0", prefix) }

func on(link, prefix string) machine.Machine {
	return machine.Machine{Addresses: []machine.Address{{Link: link, Prefix: netip.MustParsePrefix(prefix)}}}
}

func TestInventory_OwnersOfAddress(t *testing.T) {
	excluding := func(m machine.Machine, prefix string) machine.Machine {
		m.ExcludedSubnets = []netip.Prefix{netip.MustParsePrefix(prefix)}

		return m
	}

	for _, test := range []struct {
		name    string
		address string
		change  func(*fixture)
		want    []string
	}{
		{"no machine", "10.0.0.1", func(*fixture) {}, nil},
		{"this machine only", "10.0.0.1", func(f *fixture) { f.Replace("a", at("10.0.0.1/24")) }, nil},
		{"another machine", "10.0.0.1", func(f *fixture) { f.Replace("b", at("10.0.0.1/24")) }, []string{"b"}},
		{"several machines", "10.0.0.1", func(f *fixture) {
			f.Replace("a", at("10.0.0.1/24"))
			f.Replace("b", at("10.0.0.1/24"))
			f.Replace("c", at("10.0.0.1/32"))
		}, []string{"b", "c"}},
		{"address on two links, then changed", "10.0.0.1", func(f *fixture) {
			m := at("10.0.0.1/24")
			m.Addresses = append(m.Addresses, on("eth1", "10.0.0.1/32").Addresses...)
			f.Replace("b", m)
			f.Replace("b", at("10.0.0.2/24"))
		}, nil},
		{"IPv4-mapped IPv6", "10.0.0.1", func(f *fixture) { f.Replace("b", at("::ffff:10.0.0.1/128")) }, []string{"b"}},
		{"address known to the platform only", "203.0.113.7", func(f *fixture) { f.Replace("b", on("external", "203.0.113.7/32")) }, []string{"b"}},
		{"node IP on no link", "10.0.0.1", func(f *fixture) {
			f.Replace("b", machine.Machine{NodeIPs: []netip.Addr{netip.MustParseAddr("10.0.0.1")}})
		}, []string{"b"}},
		{"address in an excluded subnet", "10.9.0.1", func(f *fixture) { f.Replace("b", excluding(at("10.9.0.1/24"), "10.9.0.0/16")) }, []string{"b"}},
		{"Service address of kube-proxy", "10.96.0.1", func(f *fixture) {
			f.Replace("b", excluding(on("kube-ipvs0", "10.96.0.1/32"), "10.96.0.0/12"))
		}, nil},
		{"other address on the link of kube-proxy", "203.0.113.9", func(f *fixture) {
			f.Replace("b", excluding(on("kube-ipvs0", "203.0.113.9/32"), "10.96.0.0/12"))
		}, []string{"b"}},
		{"loopback", "127.0.0.1", func(f *fixture) { f.Replace("b", at("127.0.0.1/8")) }, nil},
		{"link-local", "fe80::1", func(f *fixture) { f.Replace("b", at("fe80::1/64")) }, nil},
		{"machine changed its address", "10.0.0.1", func(f *fixture) {
			f.Replace("b", at("10.0.0.1/24"))
			f.Replace("b", at("10.0.0.2/24"))
		}, nil},
		{"unreachable machine", "10.0.0.1", func(f *fixture) {
			f.Replace("b", at("10.0.0.1/24"))
			f.MarkUnreachable("b", "gone")
		}, []string{"b"}},
		{"mismatched machine", "10.0.0.1", func(f *fixture) {
			f.Replace("b", at("10.0.0.1/24"))
			f.MarkMismatch("b", "other", "no")
		}, []string{"b"}},
		{"changed address after a mismatch", "10.0.0.1", func(f *fixture) {
			f.Replace("b", at("10.0.0.1/24"))
			f.MarkMismatch("b", "other", "no")
			f.Replace("b", at("10.0.0.2/24"))
		}, nil},
		{"address at which the machine responds", "10.0.0.1", func(f *fixture) {
			f.Replace("b", machine.Machine{Endpoint: netip.MustParseAddr("::ffff:10.0.0.1")})
		}, []string{"b"}},
		{"forgotten machine", "10.0.0.1", func(f *fixture) {
			f.Replace("b", at("10.0.0.1/24"))
			f.Forget("b")
		}, nil},
		{"one of two forgotten", "10.0.0.1", func(f *fixture) {
			f.Replace("b", at("10.0.0.1/24"))
			f.Replace("c", at("10.0.0.1/24"))
			f.Forget("b")
		}, []string{"c"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			f := newFixture()
			test.change(f)

			if got := f.Owners(test.address, "a"); !slices.Equal(got, test.want) {
				t.Errorf("got %v, want %v", got, test.want)
			}
		})
	}
}

func TestInventory_Contradicts(t *testing.T) {
	named := at("10.0.0.1/24")
	named.Nodename = "a"

	for _, test := range []struct {
		name   string
		change func(*fixture)
		want   bool
	}{
		{"unknown machine", func(*fixture) {}, false},
		{"never responded", func(f *fixture) { f.MarkUnreachable("a", "no route") }, false},
		{"another machine responds", func(f *fixture) { f.MarkMismatch("a", "b", "other") }, false},
		{"reports it", func(f *fixture) { f.Replace("a", named) }, false},
		{"does not report it", func(f *fixture) { f.Replace("a", machine.Machine{Nodename: "a"}) }, true},
		{"did not report it before it went silent", func(f *fixture) {
			f.Replace("a", machine.Machine{Nodename: "a"})
			f.MarkUnreachable("a", "gone")
		}, true},
		{"did not report it before another machine responded", func(f *fixture) {
			f.Replace("a", machine.Machine{Nodename: "a"})
			f.MarkMismatch("a", "b", "other")
		}, true},
		{"reported it before it went silent", func(f *fixture) {
			f.Replace("a", named)
			f.MarkUnreachable("a", "gone")
		}, false},
		{"forgotten", func(f *fixture) {
			f.Replace("a", machine.Machine{Nodename: "a"})
			f.Forget("a")
		}, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			f := newFixture()
			f.Replace("b", named)
			test.change(f)

			if got := f.Contradicts("a", "10.0.0.1"); got != test.want {
				t.Errorf("got %v, want %v", got, test.want)
			}
		})
	}
}

func TestInventory_HandOver(t *testing.T) {
	view := at("10.0.0.1/24")
	view.Nodename, view.NodeID = "b", "node-b"
	other := at("10.0.0.2/24")
	other.Nodename = "b"

	for _, test := range []struct {
		name          string
		before, after func(f, former *fixture)
		want          machine.Machine
	}{
		{"current", func(f, _ *fixture) { f.Replace("b", view) }, func(_, _ *fixture) {}, view},
		{"another machine responded", func(f, _ *fixture) { f.Replace("b", view); f.MarkMismatch("b", "c", "no") }, func(_, _ *fixture) {}, view},
		{"never responded", func(f, _ *fixture) { f.MarkUnreachable("b", "gone") }, func(_, _ *fixture) {}, machine.Machine{}},
		{"watched before", func(f, former *fixture) { f.Replace("b", view); former.Replace("b", other) }, func(_, _ *fixture) {}, other},
		{"unreachable before", func(f, former *fixture) { f.Replace("b", view); former.MarkUnreachable("b", "gone") }, func(_, _ *fixture) {}, view},
		{"known before", func(f, former *fixture) {
			f.Replace("b", view)
			former.Replace("b", other)
			former.MarkUnreachable("b", "gone")
		}, func(_, _ *fixture) {}, other},
		{"mismatch after", func(f, _ *fixture) { f.Replace("b", view) }, func(_, former *fixture) { former.MarkMismatch("b", "c", "no") }, view},
		{"forgotten", func(f, _ *fixture) { f.Replace("b", view) }, func(_, former *fixture) { former.Forget("b") }, machine.Machine{}},
	} {
		t.Run(test.name, func(t *testing.T) {
			f, former := newFixture(), newFixture()
			f.HandOver(former.Inventory)
			test.before(f, former)
			f.Forget("b")
			test.after(f, former)

			if got := former.Get("b").Last; !got.Equal(test.want) {
				t.Errorf("got %+v, want %+v", got, test.want)
			}

			owns := func(addr string) bool { return len(former.Owners(addr, "a")) > 0 }
			if owns("10.0.0.1") != test.want.HasAddress(netip.MustParseAddr("10.0.0.1")) || owns("10.0.0.2") != test.want.HasAddress(netip.MustParseAddr("10.0.0.2")) {
				t.Error("ownership does not agree with the view")
			}

			if got := f.Owners("10.0.0.1", "a"); len(got) > 0 {
				t.Errorf("the former owner is still %v", got)
			}
		})
	}
}

func TestInventory_DroppedBy(t *testing.T) {
	const unchanged, lost = "10.0.0.1", "10.0.0.2"

	larger := at(unchanged + "/24")
	larger.Addresses = append(larger.Addresses, at(lost+"/24").Addresses...)
	larger.Nodename, larger.Hostname = "b", "host-b"

	smaller := at(unchanged + "/24")
	smaller.Nodename = "b"

	for _, test := range []struct {
		name    string
		change  func(*fixture)
		subject string
		want    []string
	}{
		{"address", func(f *fixture) { f.Replace("b", smaller) }, lost, []string{"b"}},
		{"name", func(f *fixture) { f.Replace("b", smaller) }, "host-b", []string{"b"}},
		{"still reported", func(f *fixture) { f.Replace("b", smaller) }, unchanged, nil},
		{"after another machine responded", func(f *fixture) { f.MarkMismatch("b", "c", "no"); f.Replace("b", smaller) }, lost, []string{"b"}},
		{"machine does not respond", func(f *fixture) { f.MarkUnreachable("b", "gone") }, lost, nil},
		{"shortly before the end", func(f *fixture) { f.Replace("b", smaller); f.now = f.now.Add(15*time.Minute - time.Second) }, lost, []string{"b"}},
		{"at the end", func(f *fixture) { f.Replace("b", smaller); f.now = f.now.Add(15 * time.Minute) }, lost, nil},
		{"other change before the end", func(f *fixture) {
			f.Replace("b", smaller)
			f.now = f.now.Add(time.Minute)
			f.Replace("b", at("10.0.0.3/24"))
		}, lost, []string{"b"}},
		{"forgotten", func(f *fixture) { f.Replace("b", smaller); f.Forget("b") }, lost, []string{"b"}},
		{"many addresses come and go", func(f *fixture) {
			f.Replace("b", smaller)

			for i := range 2000 {
				m := smaller
				m.Hostname = fmt.Sprintf("host-%d", i)
				f.Replace("b", m)
			}
		}, lost, []string{"b"}},
		{"too many names", func(f *fixture) {
			for i := range 2000 {
				m := smaller
				m.Hostname = fmt.Sprintf("host-%d", i)
				f.Replace("b", m)
			}
		}, "host-1998", nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			f := newFixture()
			f.Replace("b", larger)
			test.change(f)

			if got := f.DroppedBy(test.subject, "a"); !slices.Equal(got, test.want) {
				t.Errorf("got %v, want %v", got, test.want)
			}

			if got := f.DroppedBy(test.subject, "b"); len(got) > 0 {
				t.Errorf("its own subject is dropped by %v", got)
			}
		})
	}
}

func TestInventory_OwnersOfName(t *testing.T) {
	f := newFixture()
	f.Replace("b", machine.Machine{
		Nodename: "node-b", Hostname: "Host-B", Domainname: "Example.org",
		Platform: runtime.PlatformMetadataSpec{Hostname: "meta-b.example.org", InternalDNS: "b.internal.", ExternalDNS: "B.example.com"},
	})

	for _, name := range []string{"node-b", "host-b", "host-b.example.org", "meta-b.example.org", "b.internal", "b.example.com"} {
		if got := f.Owners(name, "a"); !slices.Equal(got, []string{"b"}) {
			t.Errorf("owners of %s: %v", name, got)
		}
	}

	if got := f.Owners("", "a"); len(got) != 0 {
		t.Errorf("owners of the empty name: %v", got)
	}
}

// Run with -race. Callers may change the returned list, and no owner remains once all machines are forgotten.
func TestInventory_OwnersConcurrentUse(t *testing.T) {
	inv := inventory.New(time.Now)

	var group sync.WaitGroup

	for worker := range 4 {
		group.Go(func() {
			name := fmt.Sprintf("worker-%d", worker)

			for i := range 200 {
				inv.Replace(name, at(fmt.Sprintf("10.0.0.%d/24", 1+i%3)))

				owners := inv.Owners("10.0.0.1", name)
				slices.Reverse(owners)
			}

			inv.Forget(name)
		})
	}

	group.Wait()

	for i := range 3 {
		if got := inv.Owners(fmt.Sprintf("10.0.0.%d", 1+i), ""); len(got) != 0 {
			t.Errorf("remaining owners: %v", got)
		}
	}
}

// behind returns a machine with addresses that only its platform's metadata knows.
func behind(addresses ...string) machine.Machine {
	m := machine.Machine{Addresses: []machine.Address{{Link: "eth0", Prefix: netip.MustParsePrefix("10.0.0.1/24")}}}

	for _, a := range addresses {
		addr := netip.MustParseAddr(a)
		m.Addresses = append(m.Addresses, machine.Address{Link: machine.LinkExternal, Prefix: netip.PrefixFrom(addr, addr.BitLen())})
	}

	return m
}

func TestInventory_SharedAddresses(t *testing.T) {
	const balancer = "203.0.113.1"

	inv := inventory.New(time.Now)

	var notified []string

	inv.Subscribe(func(nodename string) { notified = append(notified, nodename) })

	for _, step := range []struct {
		name     string
		change   func()
		notified []string
		shared   string // by a, b and c
	}{
		{"one machine", func() { inv.Replace("a", behind(balancer, "203.0.113.10")) }, []string{"a"}, "[] [] []"},
		{"second machine", func() { inv.Replace("b", behind(balancer)) }, []string{"a", "b"}, "[203.0.113.1] [203.0.113.1] []"},
		{"third machine does not affect the others", func() { inv.Replace("c", behind(balancer)) }, []string{"c"}, "[203.0.113.1] [203.0.113.1] [203.0.113.1]"},
		{"third machine loses it", func() { inv.Replace("c", behind()) }, []string{"c"}, "[203.0.113.1] [203.0.113.1] []"},
		{"unreachable machine keeps it", func() { inv.MarkUnreachable("b", "gone") }, []string{"b"}, "[203.0.113.1] [203.0.113.1] []"},
		{"one machine left", func() { inv.Forget("b") }, []string{"a", "b"}, "[] [] []"},
	} {
		notified = nil

		step.change()
		slices.Sort(notified)

		if !slices.Equal(notified, step.notified) {
			t.Errorf("%s: notified of %v, want %v", step.name, notified, step.notified)
		}

		if got := fmt.Sprint(inv.SharedAddresses("a"), inv.SharedAddresses("b"), inv.SharedAddresses("c")); got != step.shared {
			t.Errorf("%s: shared addresses %s, want %s", step.name, got, step.shared)
		}
	}
}

func TestInventory_NotifiesOfSharedNames(t *testing.T) {
	inv := inventory.New(time.Now)

	var notified []string

	inv.Subscribe(func(nodename string) { notified = append(notified, nodename) })

	named := func(hostname, internal string) machine.Machine {
		return machine.Machine{Platform: runtime.PlatformMetadataSpec{Hostname: hostname, InternalDNS: internal}}
	}

	for _, step := range []struct {
		name     string
		change   func()
		notified []string
		owners   string // other owners of worker.example.org, for a and b
	}{
		{"one machine", func() { inv.Replace("a", named("worker.example.org", "Worker.example.org.")) }, []string{"a"}, "[] [a]"},
		{"second machine", func() { inv.Replace("b", named("", "WORKER.example.org")) }, []string{"a", "b"}, "[b] [a]"},
		{"third machine does not affect the others", func() { inv.Replace("c", named("worker.example.org", "")) }, []string{"c"}, "[b c] [a c]"},
		{"third machine loses it", func() { inv.Replace("c", named("c.example.org", "")) }, []string{"c"}, "[b] [a]"},
		{"another name", func() { inv.Replace("b", named("b.example.org", "worker.example.org")) }, []string{"b"}, "[b] [a]"},
		{"unreachable machine keeps it", func() { inv.MarkUnreachable("b", "gone") }, []string{"b"}, "[b] [a]"},
		{"displaced machine keeps it", func() { inv.MarkMismatch("b", "other", "no") }, []string{"b"}, "[b] [a]"},
		{"one machine left", func() { inv.Forget("b") }, []string{"a", "b"}, "[] [a]"},
	} {
		notified = nil

		step.change()
		slices.Sort(notified)

		if !slices.Equal(notified, step.notified) {
			t.Errorf("%s: notified of %v, want %v", step.name, notified, step.notified)
		}

		if got := fmt.Sprint(inv.Owners("worker.example.org", "a"), inv.Owners("worker.example.org", "b")); got != step.owners {
			t.Errorf("%s: owners %s, want %s", step.name, got, step.owners)
		}
	}
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
