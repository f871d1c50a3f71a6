package cidrset_test

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/talos-ccm/talos-ccm/pkg/cidrset"
)

func TestAPoolIsACIDRThatItsBlocksDivide(t *testing.T) {
	for _, test := range []struct {
		rule    string
		cidr    netip.Prefix
		bits    int
		want    string
		size    uint64
		refusal string
	}{
		{rule: "IPv4", cidr: netip.MustParsePrefix("10.0.0.0/12"), bits: 24, want: "10.0.0.0/12", size: 1 << 12},
		{rule: "IPv6", cidr: netip.MustParsePrefix("2001:db8::/44"), bits: 64, want: "2001:db8::/44", size: 1 << 20},
		{rule: "a machine's own prefix", cidr: netip.MustParsePrefix("2001:db8::/64"), bits: 80, want: "2001:db8::/64", size: 1 << 16},
		{rule: "one block", cidr: netip.MustParsePrefix("10.0.0.0/24"), bits: 24, want: "10.0.0.0/24", size: 1},
		{rule: "as many as can be counted", cidr: netip.MustParsePrefix("8000::/1"), bits: 64, want: "8000::/1", size: 1 << 63},
		{rule: "it is masked", cidr: netip.MustParsePrefix("10.1.2.3/8"), bits: 24, want: "10.0.0.0/8", size: 1 << 16},
		{rule: "IPv4-mapped is IPv4", cidr: netip.MustParsePrefix("::ffff:10.0.0.0/104"), bits: 24, want: "10.0.0.0/8", size: 1 << 16},

		{rule: "no CIDR", bits: 24, refusal: "not a CIDR"},
		{rule: "an impossible length", cidr: netip.PrefixFrom(netip.MustParseAddr("10.0.0.0"), 33), bits: 33, refusal: "not a CIDR"},
		{rule: "a block is larger", cidr: netip.MustParsePrefix("10.0.0.0/25"), bits: 24, refusal: "cut 10.0.0.0/25 into blocks of /24: a block would be larger"},
		{rule: "a negative length", cidr: netip.MustParsePrefix("0.0.0.0/0"), bits: -1, refusal: "larger"},
		{rule: "a block is smaller than an IPv4 address", cidr: netip.MustParsePrefix("10.0.0.0/8"), bits: 33, refusal: "its addresses have 32 bits"},
		{rule: "IPv4-mapped is IPv4 also then", cidr: netip.MustParsePrefix("::ffff:10.0.0.0/104"), bits: 120, refusal: "its addresses have 32 bits"},
		{rule: "a block is smaller than an IPv6 address", cidr: netip.MustParsePrefix("2001:db8::/64"), bits: 129, refusal: "its addresses have 128 bits"},
		{rule: "more than can be counted", cidr: netip.MustParsePrefix("2001:db8::/32"), bits: 96, refusal: "more than 2^63 blocks"},
		{rule: "an IPv6 network of which some is IPv4-mapped", cidr: netip.MustParsePrefix("::/64"), bits: 96, refusal: "cut ::/64 into blocks of /96: some of it is IPv4-mapped"},
	} {
		t.Run(test.rule, func(t *testing.T) {
			p, err := cidrset.NewPool(test.cidr, test.bits)

			if test.refusal != "" {
				if err == nil || !strings.Contains(err.Error(), test.refusal) || p != (cidrset.Pool{}) {
					t.Errorf("got %v, %v, want an error with %q", p, err, test.refusal)
				}

				return
			}

			if err != nil {
				t.Fatal(err)
			}

			if p.CIDR().String() != test.want || p.Bits() != test.bits || p.Size() != test.size {
				t.Errorf("got %s in %d of /%d, want %s in %d of /%d", p.CIDR(), p.Size(), p.Bits(), test.want, test.size, test.bits)
			}

			if got, want := next(&cidrset.Set{}, p), netip.PrefixFrom(p.CIDR().Addr(), test.bits).String(); got != want {
				t.Errorf("its first block is %s, want %s", got, want)
			}
		})
	}
}
