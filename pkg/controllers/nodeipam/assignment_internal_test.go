package nodeipam

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/siderolabs/talos/pkg/machinery/nethelpers"
	"github.com/stretchr/testify/assert"
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

// summary formats sources, such as "cluster 10.0.0.0/16→24, machine 2001:db8::/64→80".
func summary(sources []familySources) string {
	var parts []string

	for _, r := range sources {
		text := r.sources[0].name
		for _, s := range r.sources {
			text += " " + strings.NewReplacer(" (/", "→", " blocks)", "").Replace(s.String())
		}

		parts = append(parts, text)
	}

	return strings.Join(parts, ", ")
}

func TestAssignment_RequestsBlocksOfEachFamily(t *testing.T) {
	t.Parallel()

	ipv4Only, dual := prefixes("10.0.0.0/16"), prefixes("10.0.0.0/16", "fd00::/48")
	site := on("eth0", "2001:db8:1:2::5/64")
	unreachable := inventory.Entry{Machine: current(site).Machine, Condition: inventory.Unreachable}
	sized, cloud := Options{MaskSizeIPv4: 25, MaskSizeIPv6: 64}, Options{Allocator: CloudAllocator}
	uninitialized := tainted(running(""))
	here := []Pool{{Name: "here", Selector: region("here"), CIDRs: prefixes("10.2.0.0/16")}}
	labeled := []Pool{{Name: "here", Selector: where("labels.site", "here"), CIDRs: prefixes("10.2.0.0/16")}}
	secure := []Pool{{Name: "secure", Selector: where("secureBoot", "true"), CIDRs: prefixes("10.2.0.0/16")}}
	read := current()
	read.Machine.Facts = &machine.Facts{SecureBoot: true}
	several := []Pool{
		{Name: "elsewhere", Selector: region("elsewhere"), CIDRs: prefixes("10.1.0.0/16")},
		here[0],
		{Name: "late", Selector: region("here"), CIDRs: prefixes("10.3.0.0/16")},
	}
	all := []Pool{{Name: "all", CIDRs: prefixes("10.2.0.0/16")}}
	allIPv6 := []Pool{{Name: "all", CIDRs: prefixes("2001:db8:f::/48")}}
	allSized := []Pool{{Name: "all", CIDRs: prefixes("2001:db8:f::/48"), MaskSizeIPv6: 64, MaskSizeIPv4: 26}}
	auto := []Pool{{Name: "all", BlockSizeAuto: true}}
	autoIPv4 := []Pool{{Name: "all", CIDRs: prefixes("10.2.0.0/16"), BlockSizeAuto: true}}

	for _, test := range []struct {
		name         string
		clusterCIDRs []netip.Prefix
		assignment   assignment
		want         string // sources, or a reason
	}{
		{"each family of the cluster CIDRs, in their order", prefixes("fd00::/48", "10.0.0.0/16"), assignment{}, "cluster fd00::/48→80, cluster 10.0.0.0/16→24"},
		{"a second CIDR of a family continues the first", prefixes("10.0.0.0/16", "10.9.0.0/16"), assignment{}, "cluster 10.0.0.0/16→24 10.9.0.0/16→24"},
		{"the mask sizes of the options apply", dual, assignment{options: sized}, "cluster 10.0.0.0/16→25, cluster fd00::/48→64"},
		{"a Node without cluster CIDRs is pending", nil, assignment{}, ReasonClusterCIDRMissing},
		{"a mask size larger than the cluster CIDR is reported", prefixes("10.0.0.0/26"), assignment{}, ReasonPrefixTooSmall},
		{"the range allocator needs no machine", dual, assignment{entry: inventory.Entry{Condition: inventory.Unreachable}}, "cluster 10.0.0.0/16→24, cluster fd00::/48→80"},
		{"the cloud allocator uses the IPv6 prefix of the machine", dual, assignment{options: cloud, entry: current(site)}, "cluster 10.0.0.0/16→24, machine 2001:db8:1:2::/64→80"},
		{"the cloud allocator assigns no IPv6 in an IPv4 cluster", ipv4Only, assignment{options: cloud}, "cluster 10.0.0.0/16→24"},
		{"the cloud allocator waits for a machine that does not respond", dual, assignment{options: cloud, entry: unreachable}, ReasonMachineUnknown},
		{"the cloud allocator waits for a machine without a prefix, and does not fall back", dual, assignment{options: cloud, entry: current(on("eth0", "10.1.1.1/24"))}, ReasonPrefixMissing},
		{"the first pool that selects the machine counts", dual, assignment{entry: current(), pools: several}, "here 10.2.0.0/16→24, cluster fd00::/48→80"},
		{"a pool's IPv6 comes before the machine's, and its sizes before the options'", dual, assignment{options: cloud, pools: allSized}, "cluster 10.0.0.0/16→26, all 2001:db8:f::/48→64"},
		{"a pool can add a family", ipv4Only, assignment{pools: allIPv6}, "cluster 10.0.0.0/16→24, all 2001:db8:f::/48→80"},
		{"selectors need the machine", dual, assignment{entry: inventory.Entry{Condition: inventory.Unknown}, pools: here}, ReasonMachineUnknown},
		{"selectors of labels need an initialized Node", dual, assignment{node: uninitialized, entry: current(), pools: labeled}, ReasonNotInitialized},
		{"selectors of other facts need no initialized Node", dual, assignment{node: uninitialized, entry: current(), pools: here}, "here 10.2.0.0/16→24, cluster fd00::/48→80"},
		{"selectors of facts apply", dual, assignment{entry: read, pools: secure}, "secure 10.2.0.0/16→24, cluster fd00::/48→80"},
		{"a pool without selector needs neither machine nor initialized Node", dual, assignment{node: uninitialized, pools: all}, "all 10.2.0.0/16→24, cluster fd00::/48→80"},
		{"an automatic block size applies to IPv4 only", dual, assignment{node: running("250"), pools: autoIPv4}, "all 10.2.0.0/16→23, cluster fd00::/48→80"},
		{"an automatic block size applies to cluster CIDRs", dual, assignment{node: running("30"), pools: auto}, "cluster 10.0.0.0/16→26, cluster fd00::/48→80"},
		{"an automatic block size needs the pod capacity", dual, assignment{pools: auto}, ReasonMaxPodsUnknown},
	} {
		a := test.assignment
		a.options.ClusterCIDRs = test.clusterCIDRs

		if a.node == nil {
			a.node = running("")
		}

		sources, problem := a.sourcesByFamily()
		assert.Equal(t, test.want, summary(sources)+reasonOf(problem), test.name)
	}
}

// TestAssignment_ReportsLargePartsOfPools: blocks of the configuration, of any Node, and a quarter of a pool are not too large.
func TestAssignment_ReportsLargePartsOfPools(t *testing.T) {
	t.Parallel()

	cluster := prefixes("10.0.0.0/16", "fd00::/56")
	pool := func(cidr string, size int) Pool { return Pool{CIDRs: prefixes(cidr), MaskSizeIPv4: size} }

	for _, test := range []struct {
		name, podCIDR string
		pools         []Pool
		want          bool
	}{
		{"block of the default size", "10.0.3.0/24", nil, false},
		{"all of the cluster CIDR", "10.0.0.0/16", nil, true},
		{"more than the cluster CIDR", "10.0.0.0/8", nil, true},
		{"half of the cluster CIDR", "10.0.128.0/17", nil, true},
		{"a quarter", "10.0.64.0/18", nil, false},
		{"outside of all pools", "192.168.0.0/16", nil, false},
		{"IPv6 block of kube-controller-manager", "fd00:0:0:7::/64", nil, false},
		{"half of the IPv6 cluster CIDR", "fd00::/57", nil, true},
		{"the only block of a pool", "10.1.0.0/24", []Pool{pool("10.1.0.0/24", 0)}, false},
		{"all of a pool with small blocks", "10.1.0.0/24", []Pool{pool("10.1.0.0/24", 26)}, true},
		{"block of another pool's size", "10.0.0.0/17", []Pool{{MaskSizeIPv4: 17}}, false},
		{"block of the larger of two sizes in one CIDR", "10.1.4.0/22", []Pool{pool("10.1.0.0/21", 25), pool("10.1.0.0/21", 22)}, false},
		{"block of a pool within the cluster CIDR", "10.0.0.0/17", []Pool{pool("10.0.0.0/16", 17)}, false},
		{"automatic size", "10.1.32.0/19", []Pool{{CIDRs: prefixes("10.1.0.0/18"), BlockSizeAuto: true}}, false},
		{"larger than any automatic size", "10.1.0.0/18", []Pool{{CIDRs: prefixes("10.1.0.0/18"), BlockSizeAuto: true}}, true},
	} {
		a := assignment{node: version("a", "1", 1, test.podCIDR), pools: test.pools, options: Options{ClusterCIDRs: cluster}}
		assert.Equal(t, test.want, reasonOf(a.unusable()) == ReasonTooLarge, test.name)
	}
}

// TestAssignment_ReportsLargePartsOfTheMachinesPrefix: podCIDRs of all pools' sizes are not too large.
func TestAssignment_ReportsLargePartsOfTheMachinesPrefix(t *testing.T) {
	t.Parallel()

	halves := []Pool{{MaskSizeIPv6: 65}}

	for _, test := range []struct {
		podCIDR string
		pools   []Pool
		want    bool
	}{
		{"2001:db8:1:2::/64", nil, true},
		{"2001:db8:1:2::/65", nil, true},
		{"2001:db8:1:2::/66", nil, false},
		{"2001:db8:1:2::/65", halves, false},
		{"2001:db8:1:2::/64", halves, true},
		{"2001:db8:1:3::/64", nil, false},
	} {
		a := assignment{
			node: version("a", "1", 1, test.podCIDR), entry: current(on("eth0", "2001:db8:1:2::5/64")), pools: test.pools,
			options: Options{Allocator: CloudAllocator, ClusterCIDRs: prefixes("10.0.0.0/16", "fd00::/48")},
		}
		assert.Equal(t, test.want, reasonOf(a.unusable()) == ReasonTooLarge, test.podCIDR)
	}
}

// TestOptions_UseMaskSizesThatMostMachinesReport: a single machine must not determine the size of blocks.
func TestOptions_UseMaskSizesThatMostMachinesReport(t *testing.T) {
	t.Parallel()

	sized := func(ipv4Size, ipv6Size int) controlplane.KCMConfig {
		return controlplane.KCMConfig{KCMConfig: machine.KCMConfig{MaskSizes: map[corev1.IPFamily]int{ipv4: ipv4Size, ipv6: ipv6Size}}}
	}

	common, flag, flags := sized(20, 64), Options{MaskSizeIPv4: 25}, Options{MaskSizeIPv4: 25, MaskSizeIPv6: 96}

	for _, test := range []struct {
		name      string
		options   Options
		machines  int
		configs   []controlplane.KCMConfig
		want      [2]int // of IPv4 and IPv6
		uncertain string // part of the message; empty if certain
	}{
		{"sizes of all machines", Options{}, 1, []controlplane.KCMConfig{common}, [2]int{20, 64}, ""},
		{"fewer than 16 blocks", Options{}, 1, []controlplane.KCMConfig{sized(19, 59)}, [2]int{24, 80}, ""},
		{"16 blocks", Options{}, 1, []controlplane.KCMConfig{sized(20, 60)}, [2]int{20, 60}, ""},
		{"a machine without a size", Options{}, 2, []controlplane.KCMConfig{common, {}}, [2]int{24, 80}, "different"},
		{"a machine with the default size", Options{}, 2, []controlplane.KCMConfig{{}, sized(24, 80)}, [2]int{24, 80}, ""},
		{"half of the machines", Options{}, 2, []controlplane.KCMConfig{common}, [2]int{20, 64}, "1 of 2"},
		{"half of the machines, with flags", flags, 2, []controlplane.KCMConfig{common}, [2]int{25, 96}, ""},
		{"half of the machines, with a flag for one family", flag, 2, []controlplane.KCMConfig{common}, [2]int{25, 64}, "1 of 2"},
		{"most of the machines", Options{}, 3, []controlplane.KCMConfig{common, common}, [2]int{20, 64}, ""},
		{"hosted control plane", Options{}, 0, nil, [2]int{24, 80}, ""},
	} {
		o := test.options
		o.ClusterCIDRs = prefixes("10.244.0.0/16", "fd00::/56")
		uncertain := o.setKCMMaskSizes(&controlplane.Network{Machines: test.machines, KCMConfigs: test.configs})

		if test.uncertain == "" {
			assert.Nil(t, uncertain, test.name)
		} else if assert.NotNil(t, uncertain, test.name) {
			assert.Contains(t, uncertain.Message, test.uncertain, test.name)
		}

		assert.Equal(t, test.want, [2]int{o.maskSize(Pool{}, ipv4), o.maskSize(Pool{}, ipv6)}, test.name)
	}
}

func reasonOf(c *events.Problem) string {
	if c == nil {
		return ""
	}

	return c.Reason
}

func TestMaskSizeFor_IsTwiceTheNumberOfPods(t *testing.T) {
	t.Parallel()

	for pods, want := range map[string]int{
		"1": 31, "8": 28, "9": 27, "16": 27, "17": 26, "32": 26, "64": 25, "110": 24, "128": 24, "129": 23, "250": 23, "512": 22,
	} {
		size, known := maskSizeFor(running(pods))
		assert.True(t, known, pods)
		assert.Equal(t, want, size, pods)
	}

	for _, pods := range []string{"", "0", "-1", "4097", "9e18"} {
		_, known := maskSizeFor(running(pods))
		assert.False(t, known, pods)
	}
}

func TestMachinePrefix_IsOfStableGlobalAddresses(t *testing.T) {
	t.Parallel()

	site := on("eth0", "2001:db8:1:2::5/64")
	flagged := func(flag nethelpers.AddressFlag) []machine.Address {
		a := site
		a.Flags = nethelpers.AddressFlags(flag)

		return []machine.Address{a}
	}
	local := site
	local.Scope = nethelpers.ScopeLink

	first, second, alias := on("eth0", "2001:db8:1::5/64"), on("eth1", "2001:db8:2::5/64"), on("eth1", "2001:db8:2::6/128")
	overlays := []machine.Address{on("kubespan", "2001:db8:1:2::5/64"), on("wg0", "2001:db8:1:2::5/64")}

	for _, test := range []struct {
		name      string
		addresses []machine.Address
		nodeIPs   []string
		excluded  []netip.Prefix
		want      string
	}{
		{"prefix of the machine's address", []machine.Address{site}, nil, nil, "2001:db8:1:2::/64"},
		{"machine's subnet of a larger prefix", []machine.Address{on("eth0", "2001:db8:1:2::5/48")}, nil, nil, "2001:db8:1:2::/64"},
		{"smaller prefix unchanged", []machine.Address{on("eth0", "2001:db8::1:a005/112")}, nil, nil, "2001:db8::1:0/112"},
		{"prefix of the node IP before a lower one", []machine.Address{first, second}, []string{"10.0.0.1", "2001:db8:2::5"}, nil, "2001:db8:2::/64"},
		{"another address in the subnet of the node IP", []machine.Address{first, second, alias}, []string{"2001:db8:2::6"}, nil, "2001:db8:2::/64"},
		{"the lowest without a node IP", []machine.Address{second, first}, nil, nil, "2001:db8:1::/64"},
		{"none of a machine with single addresses", []machine.Address{on("eth0", "2001:db8:1:2::5/128")}, nil, nil, ""},
		{"none of IPv4", []machine.Address{on("eth0", "203.0.113.5/24")}, nil, nil, ""},
		{"none of unique local addresses", []machine.Address{on("eth0", "fd12::5/64")}, nil, nil, ""},
		{"none of link-local addresses", []machine.Address{on("eth0", "fe80::5/64")}, nil, nil, ""},
		{"none of another scope", []machine.Address{local}, nil, nil, ""},
		{"none of a temporary address", flagged(nethelpers.AddressTemporary), nil, nil, ""},
		{"none of a deprecated address", flagged(nethelpers.AddressDeprecated), nil, nil, ""},
		{"none of a tentative address", flagged(nethelpers.AddressTentative), nil, nil, ""},
		{"none of a CNI bridge, which is in the block of the Node", []machine.Address{on("cni0", "2001:db8:1:2:3::1/80")}, nil, nil, ""},
		{"none of an overlay", overlays, nil, nil, ""},
		{"none of the pods' and services' CIDRs", []machine.Address{site}, nil, prefixes("2001:db8:1::/48"), ""},
	} {
		m := machine.Machine{Addresses: test.addresses, ExcludedSubnets: test.excluded}
		for _, ip := range test.nodeIPs {
			m.NodeIPs = append(m.NodeIPs, netip.MustParseAddr(ip))
		}

		prefix, found := machinePrefix(m)
		assert.Equal(t, test.want != "", found, test.name)

		if found {
			assert.Equal(t, test.want, prefix.String(), test.name)
		}

		slices.Reverse(m.Addresses)

		again, _ := machinePrefix(m)
		assert.Equal(t, prefix, again, "%s, in another order", test.name)
	}
}

// TestAssignment_DividesSmallPrefixesOfMachines: the sizes match the upstream Talos CCM, except that it assigns the whole of a
// /120 to /123, which contains the machine's own address.
func TestAssignment_DividesSmallPrefixesOfMachines(t *testing.T) {
	t.Parallel()

	for own, want := range map[int]int{
		64: 80, 65: 81, 72: 88, 99: 115, 100: 108, 105: 113, 106: 110, 111: 115, 112: 114, 116: 118, 118: 120, 119: 120, 120: 0, 123: 0, 127: 0,
	} {
		a := assignment{entry: current(on("eth0", fmt.Sprintf("2001:db8:1:2::5/%d", own))), options: Options{}}

		s, problem := a.machineSource(Pool{})

		if want == 0 {
			assert.Equal(t, ReasonPrefixTooSmall, reasonOf(problem), own)
		} else {
			assert.Nil(t, problem, own)
			assert.Contains(t, s.String(), fmt.Sprintf("(/%d blocks)", want), own)
		}
	}
}
