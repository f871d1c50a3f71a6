package machine_test

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/cosi-project/runtime/pkg/resource"
	talosmachine "github.com/siderolabs/talos/pkg/machinery/config/machine"
	"github.com/siderolabs/talos/pkg/machinery/nethelpers"
	"github.com/siderolabs/talos/pkg/machinery/resources/block"
	"github.com/siderolabs/talos/pkg/machinery/resources/cluster"
	"github.com/siderolabs/talos/pkg/machinery/resources/config"
	"github.com/siderolabs/talos/pkg/machinery/resources/hardware"
	"github.com/siderolabs/talos/pkg/machinery/resources/k8s"
	"github.com/siderolabs/talos/pkg/machinery/resources/network"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

func platformMetadata(spec runtime.PlatformMetadataSpec) *runtime.PlatformMetadata {
	return withSpec(runtime.NewPlatformMetadataSpec(runtime.NamespaceName, runtime.PlatformMetadataID), spec)
}

func platformConfig(id resource.ID, metadata *runtime.PlatformMetadataSpec) *network.PlatformConfig {
	return withSpec(network.NewPlatformConfig(network.NamespaceName, id), network.PlatformConfigSpec{Metadata: metadata})
}

func addressStatus(link, prefix string) *network.AddressStatus {
	spec := network.AddressStatusSpec{LinkName: link, Scope: nethelpers.ScopeGlobal, Flags: nethelpers.AddressFlags(nethelpers.AddressPermanent)}
	spec.Address = netip.MustParsePrefix(prefix)

	return withSpec(network.NewAddressStatus(network.NamespaceName, network.AddressID(link, spec.Address)), spec)
}

func nodename(name string) *k8s.Nodename {
	return withSpec(k8s.NewNodename(k8s.NamespaceName, k8s.NodenameID), k8s.NodenameSpec{Nodename: name})
}

func hostname(host, domain string) *network.HostnameStatus {
	return withSpec(network.NewHostnameStatus(network.NamespaceName, network.HostnameID), network.HostnameStatusSpec{Hostname: host, Domainname: domain})
}

func nodeIPConfig(excluded ...string) *k8s.NodeIPConfig {
	spec := k8s.NodeIPConfigSpec{ExcludeSubnets: excluded, ValidSubnets: []string{"0.0.0.0/0", "!10.9.0.0/16"}}

	return withSpec(k8s.NewNodeIPConfig(k8s.NamespaceName, k8s.KubeletID), spec)
}

func machineType(typ talosmachine.Type) *config.MachineType {
	r := config.NewMachineType()
	r.SetMachineType(typ)

	return r
}

func nodeIPs(ips ...netip.Addr) *k8s.NodeIP {
	return withSpec(k8s.NewNodeIP(k8s.NamespaceName, k8s.KubeletID), k8s.NodeIPSpec{Addresses: ips})
}

// everything returns one resource of each relevant kind, and two addresses.
func everything() []resource.Resource {
	metadata := runtime.PlatformMetadataSpec{Platform: "aws", InstanceID: "i-1", Tags: map[string]string{"team": "blue"}}

	return []resource.Resource{
		platformMetadata(metadata),
		platformConfig(network.PlatformConfigActiveID, &metadata),
		addressStatus("eth0", "10.0.0.1/24"),
		addressStatus("eth1", "192.0.2.1/24"),
		hostname("worker-1", "example.org"),
		nodename("worker-1"),
		withSpec(runtime.NewMachineStatus(), runtime.MachineStatusSpec{Stage: runtime.MachineStageRunning}),
		withSpec(hardware.NewSystemInformation(hardware.SystemInformationID), hardware.SystemInformationSpec{UUID: "u-1", SerialNumber: "s-1"}),
		withSpec(cluster.NewInfo(), cluster.InfoSpec{ClusterName: "prod"}),
		machineType(talosmachine.TypeWorker),
		nodeIPs(netip.MustParseAddr("10.0.0.1")),
		nodeIPConfig("10.244.0.0/16", "10.0.0.100/32"),
		volume("vda6", "EPHEMERAL", "f-1"),
	}
}

func volume(id, label, uuid string) *block.DiscoveredVolume {
	return withSpec(block.NewDiscoveredVolume(block.NamespaceName, id), block.DiscoveredVolumeSpec{PartitionLabel: label, UUID: uuid})
}

func viewOf(resources ...resource.Resource) *machine.View {
	view := &machine.View{}
	for _, r := range resources {
		view.Put(r)
	}

	return view
}

func TestView_BuildsMachineFromResources(t *testing.T) {
	permanent := nethelpers.AddressFlags(nethelpers.AddressPermanent)
	want := machine.Machine{
		Nodename: "worker-1", EphemeralID: "f-1", Hostname: "worker-1", Domainname: "example.org", ClusterName: "prod",
		Type: talosmachine.TypeWorker, Stage: runtime.MachineStageRunning,
		Platform:          runtime.PlatformMetadataSpec{Platform: "aws", InstanceID: "i-1", Tags: map[string]string{"team": "blue"}},
		PlatformPublished: true,
		System:            hardware.SystemInformationSpec{UUID: "u-1", SerialNumber: "s-1"},
		Addresses: []machine.Address{
			{Prefix: netip.MustParsePrefix("10.0.0.1/24"), Link: "eth0", Scope: nethelpers.ScopeGlobal, Flags: permanent},
			{Prefix: netip.MustParsePrefix("192.0.2.1/24"), Link: "eth1", Scope: nethelpers.ScopeGlobal, Flags: permanent},
		},
		NodeIPs:         []netip.Addr{netip.MustParseAddr("10.0.0.1")},
		ExcludedSubnets: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("10.0.0.100/32")},
		ValidSubnets:    []machine.ValidSubnet{{Prefix: netip.MustParsePrefix("0.0.0.0/0")}, {Prefix: netip.MustParsePrefix("10.9.0.0/16"), Inverted: true}},
	}

	assert.Equal(t, want, viewOf(everything()...).Machine())
}

func TestView_EmptyViewIsZeroMachine(t *testing.T) {
	assert.Zero(t, (&machine.View{}).Machine())
}

func TestView_IgnoresOrderOfArrival(t *testing.T) {
	resources := append(everything(), addressStatus("eth0", "10.0.0.2/24"), addressStatus("eth0", "2001:db8::1/64"), addressStatus("bond0", "10.0.0.1/32"))
	want := viewOf(resources...).Machine()
	random := rand.New(rand.NewPCG(1, 2))

	for range 200 {
		random.Shuffle(len(resources), func(i, j int) { resources[i], resources[j] = resources[j], resources[i] })
		assert.Equal(t, want, viewOf(resources...).Machine())
	}
}

// Clients that list the addresses get them in this order, too.
func TestView_SortsAddressesAsTheirIDs(t *testing.T) {
	m := viewOf(addressStatus("eth1", "10.0.0.1/24"), addressStatus("eth0", "2001:db8::1/64"), addressStatus("eth0", "10.0.0.9/24"), addressStatus("eth0", "10.0.0.10/24"),
		addressStatus("eth0.7", "10.0.0.2/24"), addressStatus("bond0", "10.0.0.3/24")).Machine()

	assert.Equal(t, []string{
		"bond0 10.0.0.3/24", "eth0.7 10.0.0.2/24", "eth0 10.0.0.10/24", "eth0 10.0.0.9/24", "eth0 2001:db8::1/64", "eth1 10.0.0.1/24",
	}, addresses(m))
}

// addresses describes the addresses of a machine.
func addresses(m machine.Machine) (list []string) {
	for _, a := range m.Addresses {
		list = append(list, a.Link+" "+a.Prefix.String())
	}

	return list
}

// kube-proxy in IPVS mode puts the addresses of thousands of Services on every machine. Without a node IP, the Node could
// not be initialized.
func TestView_LimitsAddressesExceptThoseOfServices(t *testing.T) {
	var v machine.View

	subnets := append([]string{"10.96.0.0/12"}, slices.Repeat([]string{"192.0.2.0/24"}, 3000)...)

	v.Put(withSpec(k8s.NewNodeIPConfig(k8s.NamespaceName, k8s.KubeletID), k8s.NodeIPConfigSpec{ExcludeSubnets: subnets, ValidSubnets: subnets}))

	nodeIP := netip.MustParseAddr("10.2.0.1")

	v.Put(nodeIPs(append([]netip.Addr{nodeIP}, make([]netip.Addr, 3000)...)...))
	v.Put(addressStatus("eth9", "10.2.0.1/16"))

	for i := range 3000 {
		v.Put(addressStatus("eth0", fmt.Sprintf("10.0.%d.%d/16", i>>8, i&255)))
		v.Put(addressStatus("kube-ipvs0", fmt.Sprintf("10.96.%d.%d/32", i>>8, i&255)))
		v.Put(addressStatus("kube-ipvs0", fmt.Sprintf("10.1.%d.%d/32", i>>8, i&255)))
	}

	found := map[bool]int{}
	m := v.Machine()

	for _, a := range m.Addresses {
		found[m.IsService(a)]++
	}

	assert.Equal(t, map[bool]int{false: 1001, true: 3000}, found)
	assert.True(t, m.HasAddress(nodeIP))
	assert.Equal(t, []int{100, 100, 100}, []int{len(m.NodeIPs), len(m.ExcludedSubnets), len(m.ValidSubnets)})
}

func TestView_FollowsChanges(t *testing.T) {
	put := func(r resource.Resource) func(*machine.View) { return func(v *machine.View) { v.Put(r) } }
	drop := func(r resource.Resource) func(*machine.View) { return func(v *machine.View) { v.Drop(r.Metadata()) } }
	replace := func(typ resource.Type, resources ...resource.Resource) func(*machine.View) {
		kinds := machine.BaseKinds().All()
		i := slices.Index(types(kinds), typ)
		require.GreaterOrEqual(t, i, 0, "%s is neither watched nor polled", typ)

		return func(v *machine.View) { v.ReplaceKind(kinds[i], resources) }
	}

	unchanged := viewOf(everything()...).Machine()
	name := func(m machine.Machine) any { return m.Nodename + " " + m.ClusterName }
	domain := func(m machine.Machine) any { return m.Domainname }
	ephemeral := func(m machine.Machine) any { return m.EphemeralID }
	links := func(m machine.Machine) any { return addresses(m) }
	system := func(m machine.Machine) any { return m.System }
	whole := func(m machine.Machine) any { return m }
	excluded := func(m machine.Machine) any { return fmt.Sprint(m.ExcludedSubnets) }
	valid := func(m machine.Machine) any { return fmt.Sprint(m.ValidSubnets) }
	invalid := []string{"", "!", "10.1.2.3/8", "!10.0.0.3", "!!10.0.0.0/8", "fd00::/64"}

	for _, test := range []struct {
		name   string
		change func(*machine.View)
		get    func(machine.Machine) any
		want   any
	}{
		{"update replaces the resource", put(nodename("worker-2")), name, "worker-2 prod"},
		{"update clears a value", put(hostname("worker-1", "")), domain, ""},
		{"another ID adds an address", put(addressStatus("eth0", "10.0.0.2/24")), links, []string{"eth0 10.0.0.1/24", "eth0 10.0.0.2/24", "eth1 192.0.2.1/24"}},
		{"dropped address", drop(addressStatus("eth1", "192.0.2.1/24")), links, []string{"eth0 10.0.0.1/24"}},
		{"two partitions named EPHEMERAL", put(volume("vdb1", "EPHEMERAL", "f-2")), ephemeral, ""},
		{
			"other volumes are not kept",
			replace(block.DiscoveredVolumeType, volume("vdb1", "data", "f-2"), volume("vda6", "EPHEMERAL", "f-3")), ephemeral, "f-3",
		},
		{"dropped singleton leaves the zero value", drop(nodename("")), name, " prod"},
		{"dropping an unknown resource", drop(addressStatus("eth9", "192.0.2.9/24")), whole, unchanged},
		{"dropping a resource of an unknown kind", drop(network.NewLinkStatus(network.NamespaceName, "eth0")), whole, unchanged},
		{"replacing a kind", replace(network.AddressStatusType, addressStatus("eth2", "198.51.100.1/24")), links, []string{"eth2 198.51.100.1/24"}},
		{"replacing a kind with nothing", replace(hardware.SystemInformationType), system, hardware.SystemInformationSpec{}},
		{"replacing a kind keeps other kinds", replace(hardware.SystemInformationType), name, "worker-1 prod"},
		{"irrelevant kind", put(network.NewLinkStatus(network.NamespaceName, "eth0")), whole, unchanged},
		{
			"excluded subnets: virtual IPs without prefix length, invalid values",
			put(nodeIPConfig("", "!10.0.0.0/8", "10.1.2.3", "10.96.0.1/12", "fd00::/64")), excluded, "[10.1.2.3/32 10.96.0.0/12 fd00::/64]",
		},
		{
			"valid subnets: inverted matches, single addresses, invalid values",
			put(nodeIPConfigOf(invalid)), valid, "[{10.0.0.0/8 false} {10.0.0.3/32 true} {fd00::/64 false}]",
		},
	} {
		view := viewOf(everything()...)
		test.change(view)
		assert.Equal(t, test.want, test.get(view.Machine()), test.name)
	}
}

func TestView_PlatformIsPublishedOnceApplied(t *testing.T) {
	minimal := runtime.PlatformMetadataSpec{Platform: "nocloud"}
	full := runtime.PlatformMetadataSpec{Platform: "nocloud", InstanceID: "i-1", ProviderID: "cloud://i-1"}

	for _, test := range []struct {
		name      string
		resources []resource.Resource
		want      bool
	}{
		{"no resources", nil, false},
		{"minimal metadata only", []resource.Resource{platformMetadata(minimal)}, false},
		{"applied metadata", []resource.Resource{platformMetadata(full), platformConfig("active", &full)}, true},
		{"configuration without metadata", []resource.Resource{platformMetadata(minimal), platformConfig("active", nil)}, true},
		{"configuration without instance ID", []resource.Resource{platformMetadata(minimal), platformConfig("active", &minimal)}, true},
		{"configuration cached in an earlier boot", []resource.Resource{platformMetadata(full), platformConfig("cached", &full)}, true},
		// The two resources arrive on separate streams, in any order.
		{"instance ID not applied yet", []resource.Resource{platformMetadata(minimal), platformConfig("active", &full)}, false},
		{"provider ID not applied yet", []resource.Resource{
			platformMetadata(minimal), platformConfig("active", &runtime.PlatformMetadataSpec{Platform: "nocloud", ProviderID: "cloud://i-1"}),
		}, false},
		{"cached configuration applied, active one not yet", []resource.Resource{
			platformMetadata(full), platformConfig("cached", &full), platformConfig("active", &runtime.PlatformMetadataSpec{Platform: "nocloud", InstanceID: "i-2"}),
		}, true},
	} {
		assert.Equal(t, test.want, viewOf(test.resources...).Machine().PlatformPublished, test.name)
	}
}

func TestView_MachineIsIndependentOfResources(t *testing.T) {
	metadata := platformMetadata(runtime.PlatformMetadataSpec{Platform: "aws", Tags: map[string]string{"team": "blue"}})
	ips := nodeIPs(netip.MustParseAddr("10.0.0.1"))

	m := viewOf(metadata, ips).Machine()
	metadata.TypedSpec().Tags["team"] = "red"
	ips.TypedSpec().Addresses[0] = netip.MustParseAddr("10.0.0.2")

	assert.Equal(t, "blue", m.Platform.Tags["team"])
	assert.Equal(t, netip.MustParseAddr("10.0.0.1"), m.NodeIPs[0])
}

// Elements that are cut off must not stay in memory.
func TestView_KeepsOnlyWhatItReports(t *testing.T) {
	status := runtime.NewMachineStatus()
	status.TypedSpec().Status.UnmetConditions = make([]runtime.UnmetCondition, 60_000)

	ips := nodeIPs(make([]netip.Addr, 60_000)...)

	subnets := make([]string, 60_000)
	for i := range subnets {
		subnets[i] = "10.0.0.0/8"
	}

	m := viewOf(status, ips, withSpec(nodeIPConfig(), k8s.NodeIPConfigSpec{ExcludeSubnets: subnets, ValidSubnets: subnets})).Machine()
	assert.Equal(t, []int{100, 100, 100, 100}, []int{len(m.UnmetConditions), len(m.NodeIPs), len(m.ExcludedSubnets), len(m.ValidSubnets)})

	for name, kept := range map[string]int{
		"unmet conditions": cap(m.UnmetConditions), "node IPs": cap(m.NodeIPs),
		"excluded subnets": cap(m.ExcludedSubnets), "valid subnets": cap(m.ValidSubnets),
	} {
		assert.Less(t, kept, 200, name)
	}

	view := viewOf()
	for i := range 10_000 {
		view.Put(addressStatus("eth0", netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 0, byte(i / 256), byte(i)}), 32).String()))
	}

	assert.Less(t, cap(view.Machine().Addresses), 2000)
}

func TestView_OmitsLongTextsInLists(t *testing.T) {
	t.Parallel()

	long := strings.Repeat("x", 4<<10+1)
	status := runtime.NewMachineStatus()
	status.TypedSpec().Status.UnmetConditions = []runtime.UnmetCondition{{Name: "nodeReady", Reason: long}}

	address := network.NewAddressStatus(network.NamespaceName, "x")
	address.TypedSpec().Address, address.TypedSpec().LinkName = netip.MustParsePrefix("192.0.2.1/24"), long

	m := viewOf(status, address).Machine()
	assert.Equal(t, []runtime.UnmetCondition{{Name: "nodeReady"}}, m.UnmetConditions)
	require.Len(t, m.Addresses, 1)
	assert.Empty(t, m.Addresses[0].Link)
}

// An empty link takes 400 bytes.
func TestView_KeepsOnlyMetadataOfPlatformConfigs(t *testing.T) {
	t.Parallel()

	config := network.NewPlatformConfig(network.NamespaceName, network.PlatformConfigActiveID)
	config.TypedSpec().Links = make([]network.LinkSpecSpec, 10_000)
	config.TypedSpec().Metadata = &runtime.PlatformMetadataSpec{InstanceID: "i-1"}

	viewOf(config)
	assert.Equal(t, network.PlatformConfigSpec{Metadata: &runtime.PlatformMetadataSpec{InstanceID: "i-1"}}, *config.TypedSpec())
}

func TestView_IgnoresKindUntilItIsReplaced(t *testing.T) {
	links := resource.NewMetadata(network.NamespaceName, network.LinkStatusType, "", resource.VersionUndefined)
	view := viewOf()
	view.Facts = machine.AllFacts
	view.ReplaceKind(links, []resource.Resource{network.NewLinkStatus(network.NamespaceName, "eth0")})

	view.Ignore(links, "too many")
	kept := view.Machine()
	assert.True(t, view.DropFacts(links))

	dropped := view.Machine()
	view.ReplaceKind(links, nil)

	assert.Equal(t, []string{"eth0"}, kept.Facts.Links)
	assert.Empty(t, dropped.Facts.Links)
	assert.Equal(t, map[resource.Type]string{network.LinkStatusType: "too many"}, dropped.Ignored)
	assert.Empty(t, view.Machine().Ignored)
	assert.False(t, view.DropFacts(resource.NewMetadata(k8s.NamespaceName, k8s.NodeIPType, "", resource.VersionUndefined)))
}

func TestKinds_EachIsEitherWatchedOrPolled(t *testing.T) {
	kinds := machine.BaseKinds().All()

	for _, r := range everything() {
		matches := 0

		for _, kind := range kinds {
			if kind.Type() == r.Metadata().Type() && kind.Namespace() == r.Metadata().Namespace() {
				matches++
			}
		}

		assert.Equal(t, 1, matches, "%s/%s", r.Metadata().Namespace(), r.Metadata().Type())
	}
}
