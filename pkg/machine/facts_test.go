package machine_test

import (
	"slices"
	"testing"

	"github.com/cosi-project/runtime/pkg/resource"
	"github.com/siderolabs/talos/pkg/machinery/extensions"
	"github.com/siderolabs/talos/pkg/machinery/nethelpers"
	"github.com/siderolabs/talos/pkg/machinery/resources/hardware"
	"github.com/siderolabs/talos/pkg/machinery/resources/network"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/assert"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

func withSpec[R interface {
	resource.Resource
	TypedSpec() *S
}, S any](r R, spec S) R {
	*r.TypedSpec() = spec

	return r
}

func with[R interface {
	resource.Resource
	TypedSpec() *S
}, S any](r R, change func(*S)) R {
	change(r.TypedSpec())

	return r
}

// route returns a route of the main table. The destination of a default route is invalid, as Talos publishes it.
func route(id, destination, gateway string) *network.RouteStatus {
	spec := network.RouteStatusSpec{Table: nethelpers.TableMain}
	_ = spec.Destination.UnmarshalText([]byte(destination))
	_ = spec.Gateway.UnmarshalText([]byte(gateway))

	return withSpec(network.NewRouteStatus(network.NamespaceName, id), spec)
}

func flagged(prefix string, flag nethelpers.AddressFlag) *network.AddressStatus {
	return with(addressStatus("eth0", prefix), func(s *network.AddressStatusSpec) { s.Flags |= nethelpers.AddressFlags(flag) })
}

func processor(id, model string, threads uint32) *hardware.Processor {
	return withSpec(hardware.NewProcessorInfo(id), hardware.ProcessorSpec{ProductName: model, ThreadCount: threads})
}

func module(id string, size uint32) *hardware.MemoryModule {
	return withSpec(hardware.NewMemoryModuleInfo(id), hardware.MemoryModuleSpec{Size: size})
}

func device(id, class, subclass, vendor, product string) *hardware.PCIDevice {
	return withSpec(hardware.NewPCIDeviceInfo(id), hardware.PCIDeviceSpec{ClassID: class, SubclassID: subclass, VendorID: vendor, ProductID: product})
}

func key(id, value string) *runtime.MetaKey {
	return withSpec(runtime.NewMetaKey(runtime.NamespaceName, id), runtime.MetaKeySpec{Value: value})
}

func extension(id, name, version string) *runtime.ExtensionStatus {
	return withSpec(runtime.NewExtensionStatus(runtime.NamespaceName, id), extensions.Layer{Metadata: extensions.Metadata{Name: name, Version: version}})
}

func TestView_ReadsOptionalFactsOnDemand(t *testing.T) {
	local := with(addressStatus("eth0", "fe80::1/64"), func(s *network.AddressStatusSpec) { s.Scope = nethelpers.ScopeLink })
	policyRoute := with(route("180/10.9.0.1", "", "10.9.0.1"), func(s *network.RouteStatusSpec) { s.Table = 180 })

	addresses := []resource.Resource{
		addressStatus("eth0", "10.1.2.3/24"), addressStatus("eth1", "10.1.2.4/24"), addressStatus("bond0", "2001:db8::1/64"),
		addressStatus("cilium_host", "10.3.0.1/32"), addressStatus("eth0", "10.244.0.1/24"), addressStatus("eth0", "10.1.2.100/32"),
		addressStatus("external", "203.0.113.1/32"), flagged("2001:db8::2/64", nethelpers.AddressTemporary), local,
		nodeIPConfig("10.244.0.0/16", "10.1.2.100"),
	}

	untested := machine.OptionalFacts()

	for _, test := range []struct {
		fact      string
		resources []resource.Resource
		want      any
	}{
		{"Addresses", addresses, []string{"10.1.2.3", "10.1.2.4", "2001:db8::1"}},
		{"Subnets", addresses, []string{"10.1.2.0/24", "2001:db8::/64"}},
		{"Links", []resource.Resource{
			network.NewLinkStatus(network.NamespaceName, "eno1"), network.NewLinkStatus(network.NamespaceName, "bond0"),
			network.NewLinkStatus(network.NamespaceName, "lxc_health"), network.NewLinkStatus(network.NamespaceName, "veth1"),
		}, []string{"bond0", "eno1"}},
		{"Gateways", []resource.Resource{
			route("1", "", "10.1.2.1"), route("2", "0.0.0.0/0", "10.1.2.1"), route("3", "::/0", "fe80::1"), route("4", "10.9.0.0/16", "10.1.2.9"),
			route("5", "", ""), policyRoute,
		}, []string{"10.1.2.1", "fe80::1"}},
		{"CPUModel", []resource.Resource{processor("CPU-0", "", 0), processor("CPU-1", "AMD EPYC 9354 32-Core Processor   ", 64)}, "AMD EPYC 9354 32-Core Processor"},
		{"CPUs", []resource.Resource{processor("CPU-0", "a", 64), processor("CPU-1", "a", 64), processor("CPU-2", "", 0)}, "128"},
		{"MemoryMiB", []resource.Resource{module("DIMM-0", 1<<31), module("DIMM-1", 1<<31), module("DIMM-2", 0)}, "4294967296"},
		{"PCIDevices", []resource.Resource{
			device("0000:01:00.0", "0x03", "0x02", "0x10de", "0x2236"), device("0000:02:00.0", "0x03", "0x02", "0x10de", "0x2236"),
			device("0000:00:1f.2", "0x01", "0x06", "0x8086", "0x2922"),
		}, []string{"0106:8086:2922", "0302:10de:2236"}},
		{"SecureBoot", []resource.Resource{withSpec(runtime.NewSecurityStateSpec(runtime.NamespaceName), runtime.SecurityStateSpec{SecureBoot: true})}, true},
		{
			"KernelArgs",
			[]resource.Resource{withSpec(runtime.NewKernelCmdline(), runtime.KernelCmdlineSpec{Cmdline: "talos.platform=metal console=tty0 quiet a=b=c console=ttyS0"})},
			map[string]string{"talos.platform": "metal", "console": "tty0,ttyS0", "quiet": "", "a": "b=c"},
		},
		{"TalosVersion", []resource.Resource{withSpec(runtime.NewVersion(), runtime.VersionSpec{Version: "v1.13.5"})}, "v1.13.5"},
		{"Extensions", []resource.Resource{extension("000", "schematic", "37656"), extension("001", "nvidia", "570.1")}, map[string]string{"schematic": "37656", "nvidia": "570.1"}},
		{"Schematic", []resource.Resource{extension("000", "schematic", "37656"), extension("001", "nvidia", "570.1")}, "37656"},
		{"Meta", []resource.Resource{key("0x0c", "rack=7"), key("0x0d", "")}, map[string]string{"0x0c": "rack=7", "0x0d": ""}},
	} {
		untested = slices.DeleteFunc(untested, func(name string) bool { return name == test.fact })

		t.Run(test.fact, func(t *testing.T) {
			view := viewOf(test.resources...)
			assert.Nil(t, view.Machine().Facts, "facts without a need")

			view.Facts = []string{test.fact}

			m := view.Machine()
			assert.Equal(t, test.want, m.Fact(test.fact))
			assert.Len(t, m.Facts, 1)

			without := machine.Machine{}.Fact(test.fact)
			assert.IsType(t, test.want, without)
			assert.Empty(t, without)
		})
	}

	assert.Empty(t, untested, "no test reads them")
}

// types returns the types of kinds.
func types(kinds []resource.Kind) (types []resource.Type) {
	for _, kind := range kinds {
		types = append(types, kind.Type())
	}

	return types
}

func TestKindsOf_ListsKindsOfFactsOnce(t *testing.T) {
	always := machine.KindsOf(nil)

	for _, test := range []struct {
		facts            []string
		polled, constant []resource.Type
	}{
		{nil, nil, nil},
		{[]string{"Addresses", "Subnets"}, nil, nil}, // of watched kinds
		{[]string{"CPUModel", "CPUs", "Links"}, []resource.Type{network.LinkStatusType}, []resource.Type{hardware.ProcessorType}},
		{[]string{"Extensions", "Schematic"}, nil, []resource.Type{runtime.ExtensionStatusType}},
	} {
		kinds := machine.KindsOf(test.facts)
		assert.Equal(t, test.polled, types(kinds.Polled[len(always.Polled):]), test.facts)
		assert.Equal(t, test.constant, types(kinds.Constant[len(always.Constant):]), test.facts)
	}

	all := types(machine.KindsOf(machine.OptionalFacts()).All())
	slices.Sort(all)
	assert.Equal(t, slices.Compact(slices.Clone(all)), all, "each is listed once")
}
