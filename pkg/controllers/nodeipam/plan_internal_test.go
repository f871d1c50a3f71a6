package nodeipam

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/siderolabs/talos/pkg/machinery/nethelpers"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	cloudproviderapi "k8s.io/cloud-provider/api"

	"github.com/talos-ccm/talos-ccm/pkg/controlplane"
	"github.com/talos-ccm/talos-ccm/pkg/internal/events"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/rules"
)

func prefixes(texts ...string) []netip.Prefix {
	var list []netip.Prefix
	for _, text := range texts {
		list = append(list, netip.MustParsePrefix(text))
	}

	return list
}

// region selects machines by the platform's region.
func region(name string) *rules.Selector { return where("region", name) }

// where selects machines by the value of a key.
func where(key, value string) *rules.Selector {
	selector, mistakes := rules.CompileNodeSelector([]rules.SelectorTerm{{
		MatchExpressions: []rules.Expression{{Key: key, Operator: rules.In, Values: []string{value}}},
	}}, nil)
	if len(mistakes) > 0 {
		panic(mistakes)
	}

	return selector
}

func current(addresses ...machine.Address) inventory.Entry {
	m := machine.Machine{Nodename: "a", Addresses: addresses}
	m.Platform.Region = "here"

	return inventory.Entry{Machine: m, Condition: inventory.Current}
}

func on(link, prefix string) machine.Address {
	return machine.Address{
		Prefix: netip.MustParsePrefix(prefix), Link: link,
		Scope: nethelpers.ScopeGlobal, Flags: nethelpers.AddressFlags(nethelpers.AddressPermanent),
	}
}

func running(pods string) *corev1.Node {
	node := &corev1.Node{}
	if pods != "" {
		node.Status.Allocatable = corev1.ResourceList{corev1.ResourcePods: resource.MustParse(pods)}
	}

	return node
}

func tainted(node *corev1.Node) *corev1.Node {
	node.Spec.Taints = append(node.Spec.Taints, corev1.Taint{Key: cloudproviderapi.TaintExternalCloudProvider, Effect: corev1.TaintEffectNoSchedule})

	return node
}

// summary formats requests, such as "cluster 10.0.0.0/16→24, machine 2001:db8::/64→80".
func summary(requests []request) string {
	var parts []string

	for _, r := range requests {
		text := r.pool
		for _, pool := range r.pools {
			text += " " + strings.NewReplacer(" (/", "→", " blocks)", "").Replace(pool.String())
		}

		parts = append(parts, text)
	}

	return strings.Join(parts, ", ")
}

func TestRequests(t *testing.T) {
	t.Parallel()

	dual := prefixes("10.0.0.0/16", "fd00::/48")
	site := on("eth0", "2001:db8:1:2::5/64")
	cloud := Options{Allocator: CloudAllocator}

	for _, test := range []struct {
		name         string
		clusterCIDRs []netip.Prefix
		plan
		want   string
		reason string
	}{
		{
			name:         "each family of the cluster CIDRs, in their order",
			clusterCIDRs: prefixes("fd00::/48", "10.0.0.0/16"),
			want:         "cluster fd00::/48→80, cluster 10.0.0.0/16→24",
		},
		{
			name:         "a second CIDR of a family continues the first",
			clusterCIDRs: prefixes("10.0.0.0/16", "10.9.0.0/16"),
			want:         "cluster 10.0.0.0/16→24 10.9.0.0/16→24",
		},
		{
			name:         "the mask sizes of the options apply",
			clusterCIDRs: dual, plan: plan{options: Options{MaskSizeIPv4: 25, MaskSizeIPv6: 64}},
			want: "cluster 10.0.0.0/16→25, cluster fd00::/48→64",
		},
		{name: "a Node without cluster CIDRs is pending", reason: ReasonClusterCIDRMissing},
		{
			name:         "a mask size larger than the cluster CIDR is reported",
			clusterCIDRs: prefixes("10.0.0.0/26"),
			reason:       ReasonPrefixTooSmall,
		},
		{
			name:         "the range allocator needs no machine",
			clusterCIDRs: dual, plan: plan{entry: inventory.Entry{Condition: inventory.Unreachable}},
			want: "cluster 10.0.0.0/16→24, cluster fd00::/48→80",
		},
		{
			name:         "the cloud allocator uses the IPv6 prefix of the machine",
			clusterCIDRs: dual, plan: plan{options: cloud, entry: current(site)},
			want: "cluster 10.0.0.0/16→24, machine 2001:db8:1:2::/64→80",
		},
		{
			name:         "the cloud allocator assigns no IPv6 in an IPv4 cluster",
			clusterCIDRs: prefixes("10.0.0.0/16"), plan: plan{options: cloud, entry: inventory.Entry{}},
			want: "cluster 10.0.0.0/16→24",
		},
		{
			name:         "the cloud allocator waits for a machine that does not respond",
			clusterCIDRs: dual, plan: plan{options: cloud, entry: inventory.Entry{Machine: current(site).Machine, Condition: inventory.Unreachable}},
			reason: ReasonMachineUnknown,
		},
		{
			name:         "the cloud allocator waits for a machine without a prefix, and does not fall back to the cluster's",
			clusterCIDRs: dual, plan: plan{options: cloud, entry: current(on("eth0", "10.1.1.1/24"))},
			reason: ReasonPrefixMissing,
		},
		{
			name:         "the first pool that selects the machine counts",
			clusterCIDRs: dual, plan: plan{entry: current(), pools: []Pool{
				{Name: "elsewhere", Selector: region("elsewhere"), CIDRs: prefixes("10.1.0.0/16")},
				{Name: "here", Selector: region("here"), CIDRs: prefixes("10.2.0.0/16")},
				{Name: "late", Selector: region("here"), CIDRs: prefixes("10.3.0.0/16")},
			}},
			want: "here 10.2.0.0/16→24, cluster fd00::/48→80",
		},
		{
			name:         "a pool's IPv6 comes before the machine's, and its sizes before the options'",
			clusterCIDRs: dual, plan: plan{options: cloud, entry: inventory.Entry{}, pools: []Pool{
				{Name: "all", CIDRs: prefixes("2001:db8:f::/48"), MaskSizeIPv6: 64, MaskSizeIPv4: 26},
			}},
			want: "cluster 10.0.0.0/16→26, all 2001:db8:f::/48→64",
		},
		{
			name:         "a pool can add a family",
			clusterCIDRs: prefixes("10.0.0.0/16"), plan: plan{pools: []Pool{
				{Name: "all", CIDRs: prefixes("2001:db8:f::/48")},
			}},
			want: "cluster 10.0.0.0/16→24, all 2001:db8:f::/48→80",
		},
		{
			name:         "selectors need the machine",
			clusterCIDRs: dual, plan: plan{entry: inventory.Entry{Condition: inventory.Unknown}, pools: []Pool{
				{Name: "here", Selector: region("here"), CIDRs: prefixes("10.2.0.0/16")},
			}},
			reason: ReasonMachineUnknown,
		},
		{
			name:         "selectors of labels need an initialized Node",
			clusterCIDRs: dual, plan: plan{node: tainted(running("")), entry: current(), pools: []Pool{
				{Name: "here", Selector: where("labels.site", "here"), CIDRs: prefixes("10.2.0.0/16")},
			}},
			reason: ReasonNotInitialized,
		},
		{
			name:         "selectors of other facts need no initialized Node",
			clusterCIDRs: dual, plan: plan{node: tainted(running("")), entry: current(), pools: []Pool{
				{Name: "here", Selector: region("here"), CIDRs: prefixes("10.2.0.0/16")},
			}},
			want: "here 10.2.0.0/16→24, cluster fd00::/48→80",
		},
		{
			name:         "a pool without selector needs neither machine nor initialized Node",
			clusterCIDRs: dual, plan: plan{node: tainted(running("")), pools: []Pool{
				{Name: "all", CIDRs: prefixes("10.2.0.0/16")},
			}},
			want: "all 10.2.0.0/16→24, cluster fd00::/48→80",
		},
		{
			name:         "an automatic block size applies to IPv4 only",
			clusterCIDRs: dual, plan: plan{node: running("250"), pools: []Pool{
				{Name: "all", CIDRs: prefixes("10.2.0.0/16"), BlockSizeAuto: true},
			}},
			want: "all 10.2.0.0/16→23, cluster fd00::/48→80",
		},
		{
			name:         "an automatic block size applies to cluster CIDRs",
			clusterCIDRs: dual, plan: plan{node: running("30"), pools: []Pool{{Name: "all", BlockSizeAuto: true}}},
			want: "cluster 10.0.0.0/16→26, cluster fd00::/48→80",
		},
		{
			name:         "an automatic block size needs the pod capacity",
			clusterCIDRs: dual, plan: plan{pools: []Pool{{Name: "all", BlockSizeAuto: true}}},
			reason: ReasonMaxPodsUnknown,
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()

			if test.node == nil {
				test.node = running("")
			}

			test.options.ClusterCIDRs = test.clusterCIDRs

			requests, condition := test.requests()
			if got := summary(requests); got != test.want {
				t.Errorf("requests %q, want %q", got, test.want)
			}

			if reason := reasonOf(condition); reason != test.reason {
				t.Errorf("reason %q, want %q", reason, test.reason)
			}
		})
	}
}

// TestPlan_TooLarge: blocks of the configuration, of any Node, and small parts of a pool are not too large.
func TestPlan_TooLarge(t *testing.T) {
	t.Parallel()

	cluster := prefixes("10.0.0.0/16", "fd00::/56")

	for _, test := range []struct {
		name    string
		podCIDR string
		pools   []Pool
		want    bool
	}{
		{name: "block of the default size", podCIDR: "10.0.3.0/24"},
		{name: "all of the cluster CIDR", podCIDR: "10.0.0.0/16", want: true},
		{name: "more than the cluster CIDR", podCIDR: "10.0.0.0/8", want: true},
		{name: "an eighth", podCIDR: "10.0.32.0/19", want: true},
		{name: "a sixteenth", podCIDR: "10.0.32.0/20"},
		{name: "outside of all pools", podCIDR: "192.168.0.0/16"},
		{name: "IPv6 block of kube-controller-manager", podCIDR: "fd00:0:0:7::/64"},
		{name: "half of the IPv6 cluster CIDR", podCIDR: "fd00::/57", want: true},
		{name: "the only block of a pool", podCIDR: "10.1.0.0/24", pools: []Pool{{CIDRs: prefixes("10.1.0.0/24")}}},
		{name: "all of a pool with small blocks", podCIDR: "10.1.0.0/24", pools: []Pool{{CIDRs: prefixes("10.1.0.0/24"), MaskSizeIPv4: 26}}, want: true},
		{name: "block of another pool's size", podCIDR: "10.0.0.0/18", pools: []Pool{{MaskSizeIPv4: 18}}},
		{
			name: "block of the larger of two sizes in one CIDR", podCIDR: "10.1.4.0/22",
			pools: []Pool{{CIDRs: prefixes("10.1.0.0/20"), MaskSizeIPv4: 25}, {CIDRs: prefixes("10.1.0.0/20"), MaskSizeIPv4: 22}},
		},
		{
			name: "block of a pool within the cluster CIDR", podCIDR: "10.0.64.0/18",
			pools: []Pool{{CIDRs: prefixes("10.0.0.0/16"), MaskSizeIPv4: 18}},
		},
		{name: "automatic size", podCIDR: "10.0.32.0/19", pools: []Pool{{BlockSizeAuto: true}}},
		{name: "larger than any automatic size", podCIDR: "10.0.64.0/18", pools: []Pool{{BlockSizeAuto: true}}, want: true},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()

			p := plan{pools: test.pools, options: Options{ClusterCIDRs: cluster}}
			if got := p.tooLarge(prefixes(test.podCIDR), newAllocations(nil)); len(got) > 0 != test.want {
				t.Errorf("too large: %v, want %t", got, test.want)
			}
		})
	}
}

// TestOptions_SetKCMMaskSizes: what one of the machines reports must not determine the size of blocks.
func TestOptions_SetKCMMaskSizes(t *testing.T) {
	t.Parallel()

	sized := func(ipv4Size, ipv6Size int) controlplane.KCMConfig {
		return controlplane.KCMConfig{MaskSizes: map[corev1.IPFamily]int{ipv4: ipv4Size, ipv6: ipv6Size}}
	}

	for _, test := range []struct {
		name      string
		options   Options
		machines  int
		configs   []controlplane.KCMConfig
		wantIPv4  int
		wantIPv6  int
		uncertain string // part of the message; empty if certain
	}{
		{name: "sizes of all machines", machines: 1, configs: []controlplane.KCMConfig{sized(20, 64)}, wantIPv4: 20, wantIPv6: 64},
		{name: "fewer than 16 blocks", machines: 1, configs: []controlplane.KCMConfig{sized(19, 59)}, wantIPv4: 24, wantIPv6: 80},
		{name: "16 blocks", machines: 1, configs: []controlplane.KCMConfig{sized(20, 60)}, wantIPv4: 20, wantIPv6: 60},
		{name: "a machine without a size", machines: 2, configs: []controlplane.KCMConfig{sized(20, 64), {}}, wantIPv4: 24, wantIPv6: 80, uncertain: "different"},
		{name: "a machine with the default size", machines: 2, configs: []controlplane.KCMConfig{{}, sized(24, 80)}, wantIPv4: 24, wantIPv6: 80},
		{name: "half of the machines", machines: 2, configs: []controlplane.KCMConfig{sized(20, 64)}, wantIPv4: 20, wantIPv6: 64, uncertain: "1 of 2"},
		{
			name: "half of the machines, with flags", machines: 2, configs: []controlplane.KCMConfig{sized(20, 64)},
			options: Options{MaskSizeIPv4: 25, MaskSizeIPv6: 96}, wantIPv4: 25, wantIPv6: 96,
		},
		{
			name: "half of the machines, with a flag for one family", machines: 2, configs: []controlplane.KCMConfig{sized(20, 64)},
			options: Options{MaskSizeIPv4: 25}, wantIPv4: 25, wantIPv6: 64, uncertain: "1 of 2",
		},
		{name: "most of the machines", machines: 3, configs: []controlplane.KCMConfig{sized(20, 64), sized(20, 64)}, wantIPv4: 20, wantIPv6: 64},
		{name: "hosted control plane", wantIPv4: 24, wantIPv6: 80},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()

			o := test.options
			o.ClusterCIDRs = prefixes("10.244.0.0/16", "fd00::/56")

			uncertain := o.setKCMMaskSizes(&controlplane.Network{Machines: test.machines, KCMConfigs: test.configs})
			if (uncertain == nil) != (test.uncertain == "") || uncertain != nil && !strings.Contains(uncertain.Message, test.uncertain) {
				t.Errorf("got %v, want %q", uncertain, test.uncertain)
			}

			if gotIPv4, gotIPv6 := o.maskSize(Pool{}, ipv4), o.maskSize(Pool{}, ipv6); gotIPv4 != test.wantIPv4 || gotIPv6 != test.wantIPv6 {
				t.Errorf("got /%d and /%d, want /%d and /%d", gotIPv4, gotIPv6, test.wantIPv4, test.wantIPv6)
			}
		})
	}
}

func reasonOf(c *events.Condition) string {
	if c == nil {
		return ""
	}

	return c.Reason
}

func TestMaskSizeFor(t *testing.T) {
	t.Parallel()

	for pods, want := range map[string]int{
		"1": 31, "8": 28, "9": 27, "16": 27, "17": 26, "32": 26, "64": 25, "110": 24, "128": 24, "129": 23, "250": 23, "512": 22,
	} {
		size, known := maskSizeFor(running(pods))
		if !known || size != want {
			t.Errorf("%s pods: /%d, %t; want /%d", pods, size, known, want)
		}
	}

	for _, pods := range []string{"", "0", "-1", "4097", "9e18"} {
		if size, known := maskSizeFor(running(pods)); known {
			t.Errorf("%q pods: /%d, want none", pods, size)
		}
	}
}

func TestMachinePrefix(t *testing.T) {
	t.Parallel()

	flagged := func(a machine.Address, flag nethelpers.AddressFlag) machine.Address {
		a.Flags = nethelpers.AddressFlags(flag)

		return a
	}
	local := func(a machine.Address) machine.Address {
		a.Scope = nethelpers.ScopeLink

		return a
	}

	for _, test := range []struct {
		name      string
		addresses []machine.Address
		nodeIPs   []string
		excluded  []netip.Prefix
		want      string
	}{
		{name: "prefix of the machine's address", addresses: []machine.Address{on("eth0", "2001:db8:1:2::5/64")}, want: "2001:db8:1:2::/64"},
		{name: "machine's subnet of a larger prefix", addresses: []machine.Address{on("eth0", "2001:db8:1:2::5/48")}, want: "2001:db8:1:2::/64"},
		{name: "smaller prefix unchanged", addresses: []machine.Address{on("eth0", "2001:db8::1:a005/112")}, want: "2001:db8::1:0/112"},
		{
			name:      "prefix of the node IP before a lower one",
			addresses: []machine.Address{on("eth0", "2001:db8:1::5/64"), on("eth1", "2001:db8:2::5/64")},
			nodeIPs:   []string{"10.0.0.1", "2001:db8:2::5"}, want: "2001:db8:2::/64",
		},
		{
			name:      "prefix of another address in the subnet of the node IP",
			addresses: []machine.Address{on("eth0", "2001:db8:1::5/64"), on("eth1", "2001:db8:2::5/64"), on("eth1", "2001:db8:2::6/128")},
			nodeIPs:   []string{"2001:db8:2::6"}, want: "2001:db8:2::/64",
		},
		{name: "the lowest without a node IP", addresses: []machine.Address{on("eth1", "2001:db8:2::5/64"), on("eth0", "2001:db8:1::5/64")}, want: "2001:db8:1::/64"},
		{name: "none of a machine with single addresses", addresses: []machine.Address{on("eth0", "2001:db8:1:2::5/128")}},
		{name: "none of IPv4", addresses: []machine.Address{on("eth0", "203.0.113.5/24")}},
		{name: "none of unique local addresses", addresses: []machine.Address{on("eth0", "fd12::5/64")}},
		{name: "none of link-local addresses", addresses: []machine.Address{on("eth0", "fe80::5/64")}},
		{name: "none of another scope", addresses: []machine.Address{local(on("eth0", "2001:db8:1:2::5/64"))}},
		{name: "none of a temporary address", addresses: []machine.Address{flagged(on("eth0", "2001:db8:1:2::5/64"), nethelpers.AddressTemporary)}},
		{name: "none of a deprecated address", addresses: []machine.Address{flagged(on("eth0", "2001:db8:1:2::5/64"), nethelpers.AddressDeprecated)}},
		{name: "none of a tentative address", addresses: []machine.Address{flagged(on("eth0", "2001:db8:1:2::5/64"), nethelpers.AddressTentative)}},
		{name: "none of a CNI bridge, which is in the block of the Node", addresses: []machine.Address{on("cni0", "2001:db8:1:2:3::1/80")}},
		{name: "none of an overlay", addresses: []machine.Address{on("kubespan", "2001:db8:1:2::5/64"), on("wg0", "2001:db8:1:2::5/64")}},
		{name: "none of the pods' and services' CIDRs", addresses: []machine.Address{on("eth0", "2001:db8:1:2::5/64")}, excluded: prefixes("2001:db8:1::/48")},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()

			m := machine.Machine{Addresses: test.addresses, ExcludedSubnets: test.excluded}
			for _, ip := range test.nodeIPs {
				m.NodeIPs = append(m.NodeIPs, netip.MustParseAddr(ip))
			}

			prefix, condition := machinePrefix(m)

			if test.want == "" {
				if reasonOf(condition) != ReasonPrefixMissing {
					t.Errorf("prefix %s, reason %q; want %s", prefix, reasonOf(condition), ReasonPrefixMissing)
				}

				return
			}

			if condition != nil || prefix.String() != test.want {
				t.Errorf("prefix %s, %v; want %s", prefix, condition, test.want)
			}

			slices.Reverse(m.Addresses)

			if again, _ := machinePrefix(m); again != prefix {
				t.Errorf("prefix %s in another order, want %s", again, prefix)
			}
		})
	}
}

// TestFromMachine_SmallPrefixes: the sizes match the upstream Talos CCM, except that it assigns the whole of a
// /120 to /123, which contains the machine's own address.
func TestFromMachine_SmallPrefixes(t *testing.T) {
	t.Parallel()

	for own, want := range map[int]int{
		64: 80, 65: 81, 72: 88, 99: 115, 100: 108, 105: 113, 106: 110, 111: 115, 112: 114, 116: 118, 118: 120, 119: 120, 120: 0, 123: 0, 127: 0,
	} {
		p := plan{entry: current(on("eth0", fmt.Sprintf("2001:db8:1:2::5/%d", own))), options: Options{}}

		r, condition := p.fromMachine(DefaultMaskSizeIPv6)

		switch {
		case want == 0 && reasonOf(condition) != ReasonPrefixTooSmall:
			t.Errorf("/%d: %s, %v; want %s", own, summary([]request{r}), condition, ReasonPrefixTooSmall)
		case want != 0 && (condition != nil || !strings.HasSuffix(summary([]request{r}), fmt.Sprintf("→%d", want))):
			t.Errorf("/%d: %s, %v; want blocks of /%d", own, summary([]request{r}), condition, want)
		}
	}
}
