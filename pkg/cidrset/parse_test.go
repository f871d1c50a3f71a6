package cidrset_test

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/talos-ccm/talos-ccm/pkg/cidrset"
)

func TestParsePrefix(t *testing.T) {
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
		got, err := cidrset.ParsePrefix(s)

		switch {
		case err == nil && got.String() != want:
			t.Errorf("%q: got %s, want %s", s, got, want)
		case err != nil && (!strings.Contains(err.Error(), want) || got.IsValid()):
			t.Errorf("%q: got %s, %q, want %q", s, got, err, want)
		}
	}
}

func TestParsePrefixes_MasksHostBits(t *testing.T) {
	got, err := cidrset.ParsePrefixes([]string{"10.244.0.1/16", " 2001:db8::1/48"})
	want := []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("2001:db8::/48")}

	if err != nil || !slices.Equal(got, want) {
		t.Errorf("got %v, %v, want %v", got, err, want)
	}
}

func TestParsePrefixes_RefusesAllIfOneIsInvalid(t *testing.T) {
	for _, invalid := range []string{"", "10.0.0.0", "::ffff:10.0.0.1/104"} {
		if got, err := cidrset.ParsePrefixes([]string{"10.244.0.0/16", invalid}); err == nil || got != nil {
			t.Errorf("%q: got %v, %v, want an error", invalid, got, err)
		}
	}
}
