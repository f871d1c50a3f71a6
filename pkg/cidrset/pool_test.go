package cidrset_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/talos-ccm/talos-ccm/pkg/cidrset"
)

func TestNewPool(t *testing.T) {
	for _, test := range []struct {
		name    string
		cidr    netip.Prefix
		bits    int
		want    string
		size    uint64
		wantErr string
	}{
		{name: "IPv4", cidr: netip.MustParsePrefix("10.0.0.0/12"), bits: 24, want: "10.0.0.0/12", size: 1 << 12},
		{name: "IPv6", cidr: netip.MustParsePrefix("2001:db8::/44"), bits: 64, want: "2001:db8::/44", size: 1 << 20},
		{name: "prefix of a machine", cidr: netip.MustParsePrefix("2001:db8::/64"), bits: 80, want: "2001:db8::/64", size: 1 << 16},
		{name: "a single block", cidr: netip.MustParsePrefix("10.0.0.0/24"), bits: 24, want: "10.0.0.0/24", size: 1},
		{name: "largest number of blocks", cidr: netip.MustParsePrefix("8000::/1"), bits: 64, want: "8000::/1", size: 1 << 63},
		{name: "host bits are masked", cidr: netip.MustParsePrefix("10.1.2.3/8"), bits: 24, want: "10.0.0.0/8", size: 1 << 16},
		{name: "IPv4-mapped becomes IPv4", cidr: netip.MustParsePrefix("::ffff:10.0.0.0/104"), bits: 24, want: "10.0.0.0/8", size: 1 << 16},

		{name: "zero CIDR", bits: 24, wantErr: "not a CIDR"},
		{name: "invalid prefix length", cidr: netip.PrefixFrom(netip.MustParseAddr("10.0.0.0"), 33), bits: 33, wantErr: "not a CIDR"},
		{
			name: "block larger than the CIDR", cidr: netip.MustParsePrefix("10.0.0.0/25"), bits: 24,
			wantErr: "divide 10.0.0.0/25 into /24 blocks: a block would be larger than the CIDR",
		},
		{name: "negative block length", cidr: netip.MustParsePrefix("0.0.0.0/0"), bits: -1, wantErr: "larger"},
		{name: "block smaller than an IPv4 address", cidr: netip.MustParsePrefix("10.0.0.0/8"), bits: 33, wantErr: "at most 32 bits"},
		{name: "IPv4-mapped with an IPv6 block length", cidr: netip.MustParsePrefix("::ffff:10.0.0.0/104"), bits: 120, wantErr: "at most 32 bits"},
		{name: "block smaller than an IPv6 address", cidr: netip.MustParsePrefix("2001:db8::/64"), bits: 129, wantErr: "at most 128 bits"},
		{name: "too many blocks", cidr: netip.MustParsePrefix("2001:db8::/32"), bits: 96, wantErr: "more than 2^63 blocks"},
		{
			name: "IPv6 network that contains IPv4-mapped addresses", cidr: netip.MustParsePrefix("::/64"), bits: 96,
			wantErr: "divide ::/64 into /96 blocks: overlaps the IPv4-mapped IPv6 addresses ::ffff:0.0.0.0/96",
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			p, err := cidrset.NewPool(test.cidr, test.bits)

			if test.wantErr != "" {
				if err == nil || !strings.Contains(err.Error(), test.wantErr) || p != (cidrset.Pool{}) {
					t.Errorf("got %v, %v, want an error with %q", p, err, test.wantErr)
				}

				return
			}

			if err != nil {
				t.Fatal(err)
			}

			if text := fmt.Sprintf("%s (/%d blocks)", test.want, test.bits); p.String() != text {
				t.Errorf("got %s, want %s", p, text)
			}

			if p.CIDR().String() != test.want || p.Bits() != test.bits || p.Size() != test.size {
				t.Errorf("got %s with %d blocks of /%d, want %s with %d of /%d", p.CIDR(), p.Size(), p.Bits(), test.want, test.size, test.bits)
			}

			if got, want := next(&cidrset.Set{}, p), netip.PrefixFrom(p.CIDR().Addr(), test.bits).String(); got != want {
				t.Errorf("first block is %s, want %s", got, want)
			}
		})
	}
}
