package cidrset_test

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go4.org/netipx"

	"github.com/talos-ccm/talos-ccm/pkg/cidrset"
)

func pool(t testing.TB, cidr string, bits int) cidrset.Pool {
	t.Helper()

	p, err := cidrset.NewPool(netip.MustParsePrefix(cidr), bits)
	require.NoError(t, err)

	return p
}

func holding(used ...string) *cidrset.Set {
	set := &cidrset.Set{}
	for _, prefix := range used {
		set.Insert(netip.MustParsePrefix(prefix))
	}

	return set
}

// next returns the next block as text, or "exhausted".
func next(set *cidrset.Set, pool cidrset.Pool) string {
	block, ok := set.Next(pool)
	if !ok {
		return "exhausted"
	}

	return block.String()
}

func TestSet_NextReturnsTheLowestFreeBlock(t *testing.T) {
	for _, test := range []struct {
		name string
		cidr string
		bits int
		used []string
		want string
	}{
		{"first block of an empty set", "10.244.0.0/16", 24, nil, "10.244.0.0/24"},
		{"first IPv6 block of an empty set", "2001:db8::/48", 64, nil, "2001:db8::/64"},
		{"second block", "10.244.0.0/16", 24, []string{"10.244.0.0/24"}, "10.244.1.0/24"},
		{"gap", "10.244.0.0/16", 24, []string{"10.244.0.0/24", "10.244.2.0/24"}, "10.244.1.0/24"},
		{"last block", "10.244.0.0/22", 24, []string{"10.244.0.0/23", "10.244.2.0/24"}, "10.244.3.0/24"},
		{"exhausted", "10.244.0.0/23", 24, []string{"10.244.0.0/24", "10.244.1.0/24"}, "exhausted"},
		{"exhausted at the last IPv4 address", "255.255.254.0/23", 24, []string{"255.255.254.0/24", "255.255.255.0/24"}, "exhausted"},
		{"last IPv6 block of all", "ffff:ffff:ffff:fffe::/63", 64, []string{"ffff:ffff:ffff:fffe::/64"}, "ffff:ffff:ffff:ffff::/64"},

		{"a larger prefix uses all of its blocks", "10.244.0.0/16", 24, []string{"10.244.0.0/20"}, "10.244.16.0/24"},
		{"a smaller prefix uses a whole block", "10.244.0.0/16", 24, []string{"10.244.0.128/25"}, "10.244.1.0/24"},
		{"a single address uses a whole block", "2001:db8::/64", 80, []string{"2001:db8::1/128"}, "2001:db8:0:0:1::/80"},
		{"the last address of a block uses it", "10.244.0.0/16", 24, []string{"10.244.0.255/32"}, "10.244.1.0/24"},
		{"an address in each block uses all", "10.0.0.0/30", 31, []string{"10.0.0.1/32", "10.0.0.2/32"}, "exhausted"},
		{"a prefix that covers the pool uses all", "10.244.0.0/16", 24, []string{"10.0.0.0/8"}, "exhausted"},
		{"the CIDR of the pool uses all", "10.244.0.0/16", 24, []string{"10.244.0.0/16"}, "exhausted"},
		{"::/0 uses all", "2001:db8::/48", 64, []string{"::/0"}, "exhausted"},
		{"prefixes outside the pool are irrelevant", "10.244.0.0/16", 24, []string{"10.243.255.0/24", "10.245.0.0/24"}, "10.244.0.0/24"},
		{"prefixes of the other family are irrelevant", "10.244.0.0/16", 24, []string{"::/0"}, "10.244.0.0/24"},
		{"the same bits in the other family are irrelevant", "a00::/8", 16, []string{"10.0.0.0/8"}, "a00::/16"},
		{"nested prefixes", "10.244.0.0/16", 24, []string{"10.244.0.0/24", "10.244.0.0/23", "10.244.0.7/32"}, "10.244.2.0/24"},

		{"a single block", "10.244.0.0/16", 16, nil, "10.244.0.0/16"},
		{"a single block in use", "10.244.0.0/16", 16, []string{"10.244.9.0/24"}, "exhausted"},
		{"blocks of one address", "10.0.0.0/30", 32, []string{"10.0.0.0/32"}, "10.0.0.1/32"},
		{"blocks of one IPv6 address", "2001:db8::/126", 128, []string{"2001:db8::/127"}, "2001:db8::2/128"},
		{"a pool of one address", "2001:db8::7/128", 128, nil, "2001:db8::7/128"},

		{"a large block skips small gaps", "10.244.0.0/16", 20, []string{"10.244.1.0/24"}, "10.244.16.0/20"},
		{"a small block fills a gap", "10.244.0.0/16", 26, []string{"10.244.0.0/24", "10.244.1.0/25"}, "10.244.1.128/26"},

		{"inserted prefixes are masked", "10.244.0.0/16", 24, []string{"10.244.0.77/24"}, "10.244.1.0/24"},
		{"inserted IPv4-mapped prefixes become IPv4", "10.244.0.0/16", 24, []string{"::ffff:10.244.0.0/120"}, "10.244.1.0/24"},
		{"prefixes that contain all IPv4-mapped addresses are IPv6", "0.0.0.0/0", 24, []string{"::/8", "::ffff:0.0.0.0/95"}, "0.0.0.0/24"},
		{"all IPv4-mapped addresses are all of IPv4", "0.0.0.0/0", 24, []string{"::ffff:0.0.0.0/96"}, "exhausted"},
	} {
		assert.Equal(t, test.want, next(holding(test.used...), pool(t, test.cidr, test.bits)), test.name)
	}
}

func TestSet_ZeroPoolHasNoBlocks(t *testing.T) {
	set := holding("10.0.0.0/8")

	assert.Equal(t, "exhausted", next(set, cidrset.Pool{}))
	assert.Zero(t, set.Stats(cidrset.Pool{}))
}

func TestSet_CountsInsertions(t *testing.T) {
	set, prefix := holding("10.0.0.0/24", "10.0.0.9/24"), netip.MustParsePrefix("10.0.0.0/24")

	for _, want := range []struct{ removed, left bool }{{true, true}, {true, false}, {false, false}} {
		assert.Equal(t, want.removed, set.Remove(prefix))
		assert.Equal(t, want.left, set.Overlaps(prefix))
	}
}

func TestSet_RemoveNeedsTheExactPrefix(t *testing.T) {
	used := []string{"10.0.0.0/24", "10.0.1.0/24", "10.0.2.0/23", "10.0.2.0/24"}

	for _, other := range []string{
		"10.0.0.0/23" /* an inner node */, "10.0.0.0/22", "10.0.0.0/25", "10.0.3.0/24", "10.0.0.0/0", "10.9.0.0/24", "::/0", "::10.0.0.0/120",
	} {
		set := holding(used...)
		assert.False(t, set.Remove(netip.MustParsePrefix(other)), other)

		for _, prefix := range used {
			assert.True(t, set.Remove(netip.MustParsePrefix(prefix)), "%s was removed with %s", prefix, other)
		}
	}
}

func TestSet_NextReusesARemovedBlock(t *testing.T) {
	set, p := holding("10.0.0.0/24", "10.0.1.0/24", "10.0.2.0/24"), pool(t, "10.0.0.0/16", 24)

	set.Remove(netip.MustParsePrefix("10.0.1.0/24"))

	assert.Equal(t, "10.0.1.0/24", next(set, p))
}

func TestSet_OverlapsInAndAroundPrefixes(t *testing.T) {
	set := holding("10.0.0.0/16", "10.0.7.0/24", "2001:db8::1/128")

	for prefix, want := range map[string]bool{
		"10.0.0.0/16": true, "10.0.0.0/8": true, "0.0.0.0/0": true, "10.0.3.0/24": true, "10.0.7.7/32": true, "::ffff:10.0.0.0/112": true,
		"10.1.0.0/16": false, "11.0.0.0/8": false,
		"2001:db8::/64": true, "2001:db8::1/128": true, "::/0": true, "2001:db8::2/127": false, "2001:db8:1::/48": false, "a00::/8": false,
	} {
		assert.Equal(t, want, set.Overlaps(netip.MustParsePrefix(prefix)), prefix)
	}
}

func TestSet_IgnoresInvalidPrefixes(t *testing.T) {
	set, everything := &cidrset.Set{}, netip.MustParsePrefix("::/0")

	for _, invalid := range []netip.Prefix{{}, netip.PrefixFrom(netip.IPv4Unspecified(), 33), netip.PrefixFrom(netip.IPv6Unspecified(), -1)} {
		set.Insert(invalid)

		assert.False(t, set.Remove(invalid) || set.Overlaps(invalid) || set.Overlaps(everything), invalid)
	}
}

func TestSet_StatsCountsPartlyUsedBlocks(t *testing.T) {
	for _, test := range []struct {
		name string
		cidr string
		bits int
		used []string
		want uint64
	}{
		{"empty set", "10.0.0.0/16", 24, nil, 0},
		{"two blocks", "10.0.0.0/16", 24, []string{"10.0.0.0/24", "10.0.3.0/24"}, 2},
		{"several prefixes in one block", "10.0.0.0/16", 24, []string{"10.0.0.1/32", "10.0.0.2/32", "10.0.0.128/25", "10.0.0.0/24"}, 1},
		{"a prefix of 16 blocks", "10.0.0.0/16", 24, []string{"10.0.0.0/20"}, 16},
		{"nested prefixes", "10.0.0.0/16", 24, []string{"10.0.0.0/20", "10.0.0.0/22", "10.0.0.1/32"}, 16},
		{"a prefix that covers the pool", "10.0.0.0/16", 24, []string{"10.0.0.0/8"}, 256},
		{"the CIDR of the pool", "10.0.0.0/16", 24, []string{"10.0.0.0/16"}, 256},
		{"prefixes outside the pool", "10.0.0.0/16", 24, []string{"10.1.0.0/16", "2001:db8::/32"}, 0},
		{"2^63 blocks", "8000::/1", 64, []string{"8000::/1"}, 1 << 63},
		{"2^62+1 blocks", "8000::/1", 64, []string{"8000::/2", "c000::/128"}, 1<<62 + 1},
	} {
		p := pool(t, test.cidr, test.bits)
		assert.Equal(t, cidrset.Stats{Size: p.Size(), Used: test.want, Free: p.Size() - test.want}, holding(test.used...).Stats(p), test.name)
	}
}

func TestSet_NextAllocatesAPoolInOrder(t *testing.T) {
	for _, p := range []cidrset.Pool{pool(t, "10.16.0.0/12", 24), pool(t, "2001:db8::/64", 80), pool(t, "2001:db8::/48", 64)} {
		set, want := &cidrset.Set{}, p.CIDR().Addr()

		for range p.Size() {
			block, _ := set.Next(p)
			require.Equal(t, netip.PrefixFrom(want, p.Bits()), block)
			set.Insert(block)

			want = netipx.PrefixLastIP(block).Next()
		}

		assert.Equal(t, "exhausted", next(set, p))
		assert.False(t, p.CIDR().Contains(want), "%s follows the last block", want)
	}
}

func TestSet_NextFindsTheLastBlockOfALargePool(t *testing.T) {
	set, p := &cidrset.Set{}, pool(t, "2001:db8::/44", 64)
	last := netip.MustParsePrefix("2001:db8:f:ffff::/64")

	// The lower half, the lower half of the rest, and so on.
	rest := netip.MustParsePrefix("2001:db8::/44")
	for rest != last {
		lower := netip.PrefixFrom(rest.Addr(), rest.Bits()+1)
		set.Insert(lower)

		rest = netip.PrefixFrom(netipx.PrefixLastIP(lower).Next(), lower.Bits())
	}

	assert.Equal(t, last.String(), next(set, p))
	assert.Equal(t, cidrset.Stats{Size: 1 << 20, Used: 1<<20 - 1, Free: 1}, set.Stats(p))
}

func TestSet_NextServesPoolsOfDifferentBlockSizes(t *testing.T) {
	set, large, small := &cidrset.Set{}, pool(t, "10.0.0.0/16", 23), pool(t, "10.0.0.0/16", 26)

	for _, want := range []struct {
		pool  cidrset.Pool
		block string
	}{{small, "10.0.0.0/26"}, {large, "10.0.2.0/23"}, {small, "10.0.0.64/26"}, {large, "10.0.4.0/23"}} {
		assert.Equal(t, want.block, next(set, want.pool))
		set.Insert(netip.MustParsePrefix(want.block))
	}
}

func TestNewPool_DividesCIDRs(t *testing.T) {
	for _, test := range []struct {
		name, cidr string
		bits       int
		want       string
		size       uint64
	}{
		{"IPv4", "10.0.0.0/12", 24, "10.0.0.0/12", 1 << 12},
		{"IPv6", "2001:db8::/44", 64, "2001:db8::/44", 1 << 20},
		{"prefix of a machine", "2001:db8::/64", 80, "2001:db8::/64", 1 << 16},
		{"a single block", "10.0.0.0/24", 24, "10.0.0.0/24", 1},
		{"largest number of blocks", "8000::/1", 64, "8000::/1", 1 << 63},
		{"host bits are masked", "10.1.2.3/8", 24, "10.0.0.0/8", 1 << 16},
		{"IPv4-mapped becomes IPv4", "::ffff:10.0.0.0/104", 24, "10.0.0.0/8", 1 << 16},
	} {
		p := pool(t, test.cidr, test.bits)
		assert.Equal(t, fmt.Sprintf("%s (/%d blocks)", test.want, test.bits), p.String(), test.name)
		assert.Equal(t, test.want, p.CIDR().String(), test.name)
		assert.Equal(t, test.bits, p.Bits(), test.name)
		assert.Equal(t, test.size, p.Size(), test.name)
		assert.Equal(t, netip.PrefixFrom(p.CIDR().Addr(), test.bits).String(), next(&cidrset.Set{}, p), test.name)
	}
}

func TestNewPool_RefusesInvalidDivisions(t *testing.T) {
	for _, test := range []struct {
		name string
		cidr netip.Prefix
		bits int
		want string
	}{
		{"zero CIDR", netip.Prefix{}, 24, "not a CIDR"},
		{"invalid prefix length", netip.PrefixFrom(netip.MustParseAddr("10.0.0.0"), 33), 33, "not a CIDR"},
		{"large block", netip.MustParsePrefix("10.0.0.0/25"), 24, "divide 10.0.0.0/25 into /24 blocks: a block would be larger than the CIDR; set a larger mask size"},
		{"negative block length", netip.MustParsePrefix("0.0.0.0/0"), -1, "larger"},
		{"block smaller than an IPv4 address", netip.MustParsePrefix("10.0.0.0/8"), 33, "at most 32 bits"},
		{"IPv4-mapped with an IPv6 block length", netip.MustParsePrefix("::ffff:10.0.0.0/104"), 120, "at most 32 bits"},
		{"block smaller than an IPv6 address", netip.MustParsePrefix("2001:db8::/64"), 129, "at most 128 bits"},
		{"too many blocks", netip.MustParsePrefix("2001:db8::/32"), 96, "more than 2^63 blocks; set a smaller mask size"},
		{"IPv4-mapped addresses", netip.MustParsePrefix("::/64"), 96, "divide ::/64 into /96 blocks: overlaps the IPv4-mapped IPv6 addresses ::ffff:0.0.0.0/96"},
	} {
		p, err := cidrset.NewPool(test.cidr, test.bits)
		assert.ErrorContains(t, err, test.want, test.name)
		assert.Zero(t, p, test.name)
	}
}

func TestParsePrefix_AcceptsCIDRsWithoutHostBits(t *testing.T) {
	for s, want := range map[string]string{
		"10.244.0.0/16":       "10.244.0.0/16",
		" 2001:db8::/48\t":    "2001:db8::/48",
		"0.0.0.0/0":           "0.0.0.0/0",
		"10.0.0.1/32":         "10.0.0.1/32",
		"2001:DB8:0::/48":     "2001:db8::/48",
		"10.244.0.1/16":       `"10.244.0.1/16" has host bits set; did you mean 10.244.0.0/16?`,
		"::ffff:10.0.0.0/104": `"::ffff:10.0.0.0/104" is an IPv4-mapped IPv6 CIDR; write it as IPv4`,
		"10.244.0.0":          `"10.244.0.0" is not a CIDR such as 10.244.0.0/16`,
		"10.244.0.0/33":       "is not a CIDR",
		"010.244.0.0/16":      "is not a CIDR",
		"fe80::%eth0/64":      "is not a CIDR",
		"10.0.0.0/8, ::/0":    "is not a CIDR",
		"":                    `"" is not a CIDR`,
	} {
		if got, err := cidrset.ParsePrefix(s); err != nil {
			assert.ErrorContains(t, err, want)
			assert.Zero(t, got)
		} else {
			assert.Equal(t, want, got.String())
		}
	}
}

func TestParsePrefixes_MasksHostBits(t *testing.T) {
	got, err := cidrset.ParsePrefixes([]string{"10.244.0.1/16", " 2001:db8::1/48"})
	assert.NoError(t, err)
	assert.Equal(t, []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("2001:db8::/48")}, got)
}

func TestParsePrefixes_RefusesAllIfOneIsInvalid(t *testing.T) {
	for _, invalid := range []string{"", "10.0.0.0", "::ffff:10.0.0.1/104"} {
		got, err := cidrset.ParsePrefixes([]string{"10.244.0.0/16", invalid})
		assert.Error(t, err, invalid)
		assert.Nil(t, got)
	}
}
