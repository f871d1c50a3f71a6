package inventory_test

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

// behind is a machine to which its platform gives addresses.
func behind(addresses ...string) machine.Machine {
	m := machine.Machine{Addresses: []machine.Address{{Link: "eth0", Prefix: netip.MustParsePrefix("10.0.0.1/24")}}}

	for _, a := range addresses {
		addr := netip.MustParseAddr(a)
		m.Addresses = append(m.Addresses, machine.Address{Link: machine.LinkExternal, Prefix: netip.PrefixFrom(addr, addr.BitLen())})
	}

	return m
}

func TestAnAddressThatSeveralPlatformsGiveIsShared(t *testing.T) {
	const balancer = "203.0.113.1"

	inv := inventory.New(time.Now)

	var heard []string

	inv.Subscribe(func(nodename string) { heard = append(heard, nodename) })

	for _, step := range []struct {
		what   string
		do     func()
		heard  []string
		shared string // of a, b and c
	}{
		{"one machine has it", func() { inv.Replace("a", behind(balancer, "203.0.113.10")) }, []string{"a"}, "[] [] []"},
		{"a second has it too", func() { inv.Replace("b", behind(balancer)) }, []string{"a", "b"}, "[203.0.113.1] [203.0.113.1] []"},
		{"a third changes nothing for the others", func() { inv.Replace("c", behind(balancer)) }, []string{"c"}, "[203.0.113.1] [203.0.113.1] [203.0.113.1]"},
		{"it is the same on two", func() { inv.Replace("c", behind()) }, []string{"c"}, "[203.0.113.1] [203.0.113.1] []"},
		{"an unreachable machine still has it", func() { inv.MarkUnreachable("b", "gone") }, []string{"b"}, "[203.0.113.1] [203.0.113.1] []"},
		{"the last but one is gone", func() { inv.Forget("b") }, []string{"a", "b"}, "[] [] []"},
	} {
		heard = nil

		step.do()
		slices.Sort(heard)

		if !slices.Equal(heard, step.heard) {
			t.Errorf("%s: heard of %v, want %v", step.what, heard, step.heard)
		}

		if got := fmt.Sprint(inv.SharedAddresses("a"), inv.SharedAddresses("b"), inv.SharedAddresses("c")); got != step.shared {
			t.Errorf("%s: shared are %s, want %s", step.what, got, step.shared)
		}
	}
}
