package cidrset_test

import (
	"fmt"
	"net/netip"
	"testing"

	"go4.org/netipx"

	"github.com/talos-ccm/talos-ccm/pkg/cidrset"
)

// ipv4 and ipv6 return the i-th block of a network: a /24 of 10.0.0.0/8, and a /64 of 2001:db8::/32.
func ipv4(i int) netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i)}), 24)
}

func ipv6(i int) netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom16([16]byte{0x20, 0x01, 0x0d, 0xb8, byte(i >> 24), byte(i >> 16), byte(i >> 8), byte(i)}), 64)
}

// inUse are patterns of prefixes in use, by index.
var inUse = []struct {
	name   string
	cidr   string
	bits   int
	prefix func(i int) netip.Prefix
}{
	{"IPv4 the lowest blocks", "10.0.0.0/8", 24, ipv4},
	{"the lowest blocks", "2001:db8::/44", 64, ipv6},
	{"every other block", "2001:db8::/44", 64, func(i int) netip.Prefix { return ipv6(2 * i) }},
	{"an address in each block", "2001:db8::/44", 64, func(i int) netip.Prefix { return netip.PrefixFrom(netipx.PrefixLastIP(ipv6(i)), 128) }},
	{"odd sizes that overlap", "2001:db8::/44", 64, func(i int) netip.Prefix { return netip.PrefixFrom(ipv6(i).Addr(), 60+i%31).Masked() }},
	{"outside the pool", "2001:db8::/44", 64, func(i int) netip.Prefix { return ipv6(1<<20 + i) }},
	{"all of the pool", "2001:db8::/44", 64, func(i int) netip.Prefix { return netip.PrefixFrom(ipv6(i).Addr(), 44+i%30).Masked() }},
}

// compare runs a benchmark with growing numbers of prefixes in use, and reports the time relative to the first.
func compare(b *testing.B, run func(b *testing.B, set *cidrset.Set, pool cidrset.Pool)) {
	for _, used := range inUse {
		b.Run(used.name, func(b *testing.B) {
			var first float64

			for _, count := range []int{10, 1000, 50_000} {
				b.Run(fmt.Sprint(count), func(b *testing.B) {
					set, p := &cidrset.Set{}, pool(b, used.cidr, used.bits)
					for i := range count {
						set.Insert(used.prefix(i))
					}

					b.ResetTimer()
					run(b, set, p)

					perOp := b.Elapsed().Seconds() / float64(b.N)
					if count == 10 {
						first = perOp
					}

					b.ReportMetric(perOp/first, "x10")
				})
			}
		})
	}
}

// BenchmarkAllocate allocates and releases a block; in an exhausted pool it finds none.
func BenchmarkAllocate(b *testing.B) {
	compare(b, func(b *testing.B, set *cidrset.Set, pool cidrset.Pool) {
		for b.Loop() {
			if block, ok := set.Next(pool); ok {
				set.Insert(block)
				set.Remove(block)
			}
		}
	})
}

func BenchmarkStats(b *testing.B) {
	compare(b, func(b *testing.B, set *cidrset.Set, pool cidrset.Pool) {
		for b.Loop() {
			set.Stats(pool)
		}
	})
}
