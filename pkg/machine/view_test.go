package machine_test

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
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

	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

func platformMetadata(spec runtime.PlatformMetadataSpec) *runtime.PlatformMetadata {
	r := runtime.NewPlatformMetadataSpec(runtime.NamespaceName, runtime.PlatformMetadataID)
	*r.TypedSpec() = spec

	return r
}

func platformConfig(id resource.ID, metadata *runtime.PlatformMetadataSpec) *network.PlatformConfig {
	r := network.NewPlatformConfig(network.NamespaceName, id)
	r.TypedSpec().Metadata = metadata

	return r
}

func addressStatus(link, prefix string) *network.AddressStatus {
	p := netip.MustParsePrefix(prefix)
	r := network.NewAddressStatus(network.NamespaceName, network.AddressID(link, p))
	*r.TypedSpec() = network.AddressStatusSpec{Address: p, LinkName: link, Scope: nethelpers.ScopeGlobal, Flags: nethelpers.AddressFlags(nethelpers.AddressPermanent)}

	return r
}

func nodename(name string) *k8s.Nodename {
	r := k8s.NewNodename(k8s.NamespaceName, k8s.NodenameID)
	r.TypedSpec().Nodename = name

	return r
}

func hostname(host, domain string) *network.HostnameStatus {
	r := network.NewHostnameStatus(network.NamespaceName, network.HostnameID)
	r.TypedSpec().Hostname, r.TypedSpec().Domainname = host, domain

	return r
}

func machineStatus(stage runtime.MachineStage) *runtime.MachineStatus {
	r := runtime.NewMachineStatus()
	r.TypedSpec().Stage = stage

	return r
}

func nodeIPConfig(excluded ...string) *k8s.NodeIPConfig {
	r := k8s.NewNodeIPConfig(k8s.NamespaceName, k8s.KubeletID)
	r.TypedSpec().ExcludeSubnets = excluded
	r.TypedSpec().ValidSubnets = []string{"0.0.0.0/0", "!10.9.0.0/16"}

	return r
}

func machineType(typ talosmachine.Type) *config.MachineType {
	r := config.NewMachineType()
	r.SetMachineType(typ)

	return r
}

func systemInformation(spec hardware.SystemInformationSpec) *hardware.SystemInformation {
	r := hardware.NewSystemInformation(hardware.SystemInformationID)
	*r.TypedSpec() = spec

	return r
}

func clusterInfo(name string) *cluster.Info {
	r := cluster.NewInfo()
	r.TypedSpec().ClusterName = name

	return r
}

func nodeIPs(ips ...netip.Addr) *k8s.NodeIP {
	r := k8s.NewNodeIP(k8s.NamespaceName, k8s.KubeletID)
	r.TypedSpec().Addresses = ips

	return r
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
		machineStatus(runtime.MachineStageRunning),
		systemInformation(hardware.SystemInformationSpec{UUID: "u-1", SerialNumber: "s-1"}),
		clusterInfo("prod"),
		machineType(talosmachine.TypeWorker),
		nodeIPs(netip.MustParseAddr("10.0.0.1")),
		nodeIPConfig("10.244.0.0/16", "10.0.0.100/32"),
		volume("vda6", "EPHEMERAL", "f-1"),
	}
}

func volume(id, label, uuid string) *block.DiscoveredVolume {
	r := block.NewDiscoveredVolume(block.NamespaceName, id)
	r.TypedSpec().PartitionLabel, r.TypedSpec().UUID = label, uuid

	return r
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

	if got := viewOf(everything()...).Machine(); !got.Equal(want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
}

func TestView_EmptyViewIsZeroMachine(t *testing.T) {
	if got := (&machine.View{}).Machine(); !got.Equal(machine.Machine{}) {
		t.Errorf("got %+v", got)
	}
}

func TestView_IgnoresOrderOfArrival(t *testing.T) {
	resources := append(everything(), addressStatus("eth0", "10.0.0.2/24"), addressStatus("eth0", "2001:db8::1/64"), addressStatus("bond0", "10.0.0.1/32"))
	want := viewOf(resources...).Machine()
	random := rand.New(rand.NewPCG(1, 2))

	for range 200 {
		random.Shuffle(len(resources), func(i, j int) { resources[i], resources[j] = resources[j], resources[i] })

		if got := viewOf(resources...).Machine(); !got.Equal(want) {
			t.Fatalf("got  %+v\nwant %+v", got, want)
		}
	}
}

// Clients that list the addresses get them in this order, too.
func TestView_SortsAddressesAsTheirIDs(t *testing.T) {
	m := viewOf(addressStatus("eth1", "10.0.0.1/24"), addressStatus("eth0", "2001:db8::1/64"), addressStatus("eth0", "10.0.0.9/24"), addressStatus("eth0", "10.0.0.10/24"),
		addressStatus("eth0.7", "10.0.0.2/24"), addressStatus("bond0", "10.0.0.3/24")).Machine()

	var got []string
	for _, a := range m.Addresses {
		got = append(got, a.Link+" "+a.Prefix.String())
	}

	want := []string{"bond0 10.0.0.3/24", "eth0.7 10.0.0.2/24", "eth0 10.0.0.10/24", "eth0 10.0.0.9/24", "eth0 2001:db8::1/64", "eth1 10.0.0.1/24"}
	if !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestView_Changes(t *testing.T) {
	addresses := func(m machine.Machine) []string {
		var list []string
		for _, a := range m.Addresses {
			list = append(list, a.Prefix.String())
		}

		return list
	}

	kindOf := func(typ resource.Type) resource.Kind {
		for _, kind := range machine.KindsOf(nil).All() {
			if kind.Type() == typ {
				return kind
			}
		}

		t.Fatalf("%s is neither watched nor polled", typ)

		return nil
	}

	for _, test := range []struct {
		name   string
		change func(*machine.View)
		get    func(machine.Machine) any
		want   any
	}{
		{
			"update replaces the resource",
			func(v *machine.View) { v.Put(nodename("worker-2")) },
			func(m machine.Machine) any { return m.Nodename }, "worker-2",
		},
		{
			"update clears a value",
			func(v *machine.View) { v.Put(hostname("worker-1", "")) },
			func(m machine.Machine) any { return m.Domainname }, "",
		},
		{
			"another ID adds an address",
			func(v *machine.View) { v.Put(addressStatus("eth0", "10.0.0.2/24")) },
			func(m machine.Machine) any { return addresses(m) },
			[]string{"10.0.0.1/24", "10.0.0.2/24", "192.0.2.1/24"},
		},
		{
			"dropped address",
			func(v *machine.View) { v.Drop(addressStatus("eth1", "192.0.2.1/24").Metadata()) },
			func(m machine.Machine) any { return addresses(m) },
			[]string{"10.0.0.1/24"},
		},
		{
			"two partitions named EPHEMERAL",
			func(v *machine.View) { v.Put(volume("vdb1", "EPHEMERAL", "f-2")) },
			func(m machine.Machine) any { return m.EphemeralID }, "",
		},
		{
			"other volumes are not kept",
			func(v *machine.View) {
				v.ReplaceKind(kindOf(block.DiscoveredVolumeType), []resource.Resource{volume("vdb1", "data", "f-2"), volume("vda6", "EPHEMERAL", "f-3")})
			},
			func(m machine.Machine) any { return m.EphemeralID }, "f-3",
		},
		{
			"dropped singleton leaves the zero value",
			func(v *machine.View) { v.Drop(nodename("").Metadata()) },
			func(m machine.Machine) any { return m.Nodename }, "",
		},
		{
			"dropping an unknown resource",
			func(v *machine.View) { v.Drop(addressStatus("eth9", "192.0.2.9/24").Metadata()) },
			func(m machine.Machine) any { return len(m.Addresses) }, 2,
		},
		{
			"dropping a resource of an unknown kind",
			func(v *machine.View) { v.Drop(network.NewLinkStatus(network.NamespaceName, "eth0").Metadata()) },
			func(m machine.Machine) any { return len(m.Addresses) }, 2,
		},
		{
			"replacing a kind",
			func(v *machine.View) {
				v.ReplaceKind(kindOf(network.AddressStatusType), []resource.Resource{addressStatus("eth2", "198.51.100.1/24")})
			},
			func(m machine.Machine) any { return addresses(m) },
			[]string{"198.51.100.1/24"},
		},
		{
			"replacing a kind with nothing",
			func(v *machine.View) { v.ReplaceKind(kindOf(hardware.SystemInformationType), nil) },
			func(m machine.Machine) any { return m.System },
			hardware.SystemInformationSpec{},
		},
		{
			"replacing a kind keeps other kinds",
			func(v *machine.View) { v.ReplaceKind(kindOf(hardware.SystemInformationType), nil) },
			func(m machine.Machine) any { return m.Nodename + " " + m.ClusterName }, "worker-1 prod",
		},
		{
			"irrelevant kind",
			func(v *machine.View) { v.Put(network.NewLinkStatus(network.NamespaceName, "eth0")) },
			func(m machine.Machine) any { return m.Equal(viewOf(everything()...).Machine()) }, true,
		},
		{
			"excluded subnets: virtual IPs without prefix length, invalid values",
			func(v *machine.View) { v.Put(nodeIPConfig("", "!10.0.0.0/8", "10.1.2.3", "10.96.0.1/12", "fd00::/64")) },
			func(m machine.Machine) any { return fmt.Sprint(m.ExcludedSubnets) }, "[10.1.2.3/32 10.96.0.0/12 fd00::/64]",
		},
		{
			"valid subnets: inverted matches, single addresses, invalid values",
			func(v *machine.View) {
				v.Put(nodeIPConfigOf([]string{"", "!", "10.1.2.3/8", "!10.0.0.3", "!!10.0.0.0/8", "fd00::/64"}))
			},
			func(m machine.Machine) any { return fmt.Sprint(m.ValidSubnets) }, "[{10.0.0.0/8 false} {10.0.0.3/32 true} {fd00::/64 false}]",
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			view := viewOf(everything()...)
			test.change(view)

			if got := test.get(view.Machine()); !reflect.DeepEqual(got, test.want) {
				t.Errorf("got %v, want %v", got, test.want)
			}
		})
	}
}

func TestView_PlatformPublished(t *testing.T) {
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
		t.Run(test.name, func(t *testing.T) {
			if got := viewOf(test.resources...).Machine().PlatformPublished; got != test.want {
				t.Errorf("got %v, want %v", got, test.want)
			}
		})
	}
}

func TestView_MachineIsIndependentOfResources(t *testing.T) {
	metadata := platformMetadata(runtime.PlatformMetadataSpec{Platform: "aws", Tags: map[string]string{"team": "blue"}})
	ips := nodeIPs(netip.MustParseAddr("10.0.0.1"))

	m := viewOf(metadata, ips).Machine()
	metadata.TypedSpec().Tags["team"] = "red"
	ips.TypedSpec().Addresses[0] = netip.MustParseAddr("10.0.0.2")

	if m.Platform.Tags["team"] != "blue" || m.NodeIPs[0] != netip.MustParseAddr("10.0.0.1") {
		t.Errorf("got %v and %v", m.Platform.Tags, m.NodeIPs)
	}
}

func TestKinds_EachIsEitherWatchedOrPolled(t *testing.T) {
	kinds := machine.KindsOf(nil).All()

	for _, r := range everything() {
		matches := 0

		for _, kind := range kinds {
			if kind.Type() == r.Metadata().Type() && kind.Namespace() == r.Metadata().Namespace() {
				matches++
			}
		}

		if matches != 1 {
			t.Errorf("%s/%s is listed %d times", r.Metadata().Namespace(), r.Metadata().Type(), matches)
		}
	}
}
