package machine_test

import (
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/cosi-project/runtime/pkg/resource"
	"github.com/siderolabs/talos/pkg/machinery/extensions"
	"github.com/siderolabs/talos/pkg/machinery/nethelpers"
	"github.com/siderolabs/talos/pkg/machinery/resources/cluster"
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

func TestView_ReadsFacts(t *testing.T) {
	local := with(addressStatus("eth0", "fe80::1/64"), func(s *network.AddressStatusSpec) { s.Scope = nethelpers.ScopeLink })
	policyRoute := with(route("180/10.9.0.1", "", "10.9.0.1"), func(s *network.RouteStatusSpec) { s.Table = 180 })

	addresses := []resource.Resource{
		addressStatus("eth0", "10.1.2.3/24"), addressStatus("eth1", "10.1.2.4/24"), addressStatus("bond0", "2001:db8::1/64"),
		addressStatus("cilium_host", "10.3.0.1/32"), addressStatus("eth0", "10.244.0.1/24"), addressStatus("eth0", "10.1.2.100/32"),
		addressStatus("external", "203.0.113.1/32"), flagged("2001:db8::2/64", nethelpers.AddressTemporary), local,
		nodeIPConfig("10.244.0.0/16", "10.1.2.100"),
	}

	tested := machine.Facts{}

	for _, test := range []struct {
		fact      string
		resources []resource.Resource
		want      machine.Facts
	}{
		{"addresses", addresses, machine.Facts{
			Addresses: []string{"10.1.2.3", "10.1.2.4", "2001:db8::1"}, Subnets: []string{"10.1.2.0/24", "2001:db8::/64"},
		}},
		{"links", []resource.Resource{
			network.NewLinkStatus(network.NamespaceName, "eno1"), network.NewLinkStatus(network.NamespaceName, "bond0"),
			network.NewLinkStatus(network.NamespaceName, "lxc_health"), network.NewLinkStatus(network.NamespaceName, "veth1"),
		}, machine.Facts{Links: []string{"bond0", "eno1"}}},
		{"gateways", []resource.Resource{
			route("1", "", "10.1.2.1"), route("2", "0.0.0.0/0", "10.1.2.1"), route("3", "::/0", "fe80::1"), route("4", "10.9.0.0/16", "10.1.2.9"),
			route("5", "", ""), policyRoute,
		}, machine.Facts{Gateways: []string{"10.1.2.1", "fe80::1"}}},
		{
			"processors",
			[]resource.Resource{processor("CPU-2", "a", 64), processor("CPU-1", "AMD EPYC 9354 32-Core Processor   ", 64), processor("CPU-0", "", 0)},
			machine.Facts{CPUModel: "AMD EPYC 9354 32-Core Processor", CPUs: "128"},
		},
		{
			"memory",
			[]resource.Resource{module("DIMM-0", 1<<31), module("DIMM-1", 1<<31), module("DIMM-2", 0)},
			machine.Facts{MemoryMiB: "4294967296"},
		},
		{"PCI devices", []resource.Resource{
			device("0000:01:00.0", "0x03", "0x02", "0x10de", "0x2236"), device("0000:02:00.0", "0x03", "0x02", "0x10de", "0x2236"),
			device("0000:00:1f.2", "0x01", "0x06", "0x8086", "0x2922"),
		}, machine.Facts{PCIDevices: []string{"0106:8086:2922", "0302:10de:2236"}}},
		{
			"secure boot",
			[]resource.Resource{withSpec(runtime.NewSecurityStateSpec(runtime.NamespaceName), runtime.SecurityStateSpec{SecureBoot: true})},
			machine.Facts{SecureBoot: true},
		},
		{
			"kernel arguments",
			[]resource.Resource{cmdline("talos.platform=metal console=tty0 quiet a=b=c console=ttyS0")},
			machine.Facts{KernelArgs: map[string]string{"talos.platform": "metal", "console": "tty0,ttyS0", "quiet": "", "a": "b=c"}},
		},
		{
			"Talos version",
			[]resource.Resource{withSpec(runtime.NewVersion(), runtime.VersionSpec{Version: "v1.13.5"})},
			machine.Facts{TalosVersion: "v1.13.5"},
		},
		{
			"extensions",
			[]resource.Resource{extension("000", "schematic", "37656"), extension("001", "nvidia", "570.1")},
			machine.Facts{Extensions: map[string]string{"schematic": "37656", "nvidia": "570.1"}, Schematic: "37656"},
		},
		{
			"META",
			[]resource.Resource{key("0x0c", "rack=7"), key("0x0d", "")},
			machine.Facts{Meta: map[string]string{"0x0c": "rack=7", "0x0d": ""}},
		},
	} {
		var kinds machine.FactKinds

		got, all := reflect.ValueOf(test.want), reflect.ValueOf(&tested).Elem()
		for i, field := range fields(got) {
			if !field.IsZero() {
				all.Field(i).Set(field)

				kinds |= machine.FactKindsOf(got.Type().Field(i).Name)
			}
		}

		t.Run(test.fact, func(t *testing.T) {
			assert.Equal(t, withEmpty(test.want), *factsOf(machine.AllFacts, test.resources...))

			only := factsOf(kinds, append(addresses, test.resources...)...)
			only.Addresses, only.Subnets = test.want.Addresses, test.want.Subnets // their kind is always read
			assert.Equal(t, test.want, *only, "with only the kinds that the facts depend on")
		})
	}

	for i, field := range fields(reflect.ValueOf(tested)) {
		name := reflect.TypeFor[machine.Facts]().Field(i).Name
		assert.False(t, field.IsZero(), "no test reads %s", name)
		assert.NotZero(t, machine.FactKindsOf(name), name)
	}
}

func fields(v reflect.Value) (fields []reflect.Value) {
	for _, field := range v.Fields() {
		fields = append(fields, field)
	}

	return fields
}

func cmdline(text string) *runtime.KernelCmdline {
	return withSpec(runtime.NewKernelCmdline(), runtime.KernelCmdlineSpec{Cmdline: text})
}

// withEmpty replaces the maps that are nil: all kinds were listed.
func withEmpty(f machine.Facts) machine.Facts {
	for _, m := range []*map[string]string{&f.KernelArgs, &f.Meta, &f.Extensions} {
		if *m == nil {
			*m = map[string]string{}
		}
	}

	return f
}

// factsOf returns the facts of a machine from which the kinds were listed.
func factsOf(kinds machine.FactKinds, resources ...resource.Resource) *machine.Facts {
	view := &machine.View{Facts: kinds}

	for _, kind := range machine.BaseKinds().WithFacts(kinds).All() {
		view.ReplaceKind(kind, slices.DeleteFunc(slices.Clone(resources), func(r resource.Resource) bool { return r.Metadata().Type() != kind.Type() }))
	}

	return view.Machine().Facts
}

func TestView_HasFactsOnlyIfTheyAreNeeded(t *testing.T) {
	view := viewOf(everything()...)
	assert.Nil(t, view.Machine().Facts)

	view.Facts = machine.FactKindsOf("Subnets")
	before := view.Machine()
	assert.NotNil(t, before.Facts)

	view.Put(addressStatus("eth2", "10.77.0.1/24"))
	assert.NotContains(t, before.Facts.Addresses, "10.77.0.1", "the facts of an earlier view have changed")
	assert.Contains(t, view.Machine().Facts.Addresses, "10.77.0.1")
}

// A text that is too long counts as not reported: a part of it could be equal to the text of another machine.
func TestView_OmitsTextsThatAreTooLong(t *testing.T) {
	longest, tooLong := strings.Repeat("x", 4<<10), strings.Repeat("x", 4<<10+1)

	for _, test := range []struct{ text, want string }{{longest, longest}, {tooLong, ""}} {
		metadata := runtime.PlatformMetadataSpec{Zone: test.text, InstanceID: test.text, Region: "r", Tags: map[string]string{"a": test.text, test.text: "b", "c": "d"}}
		view := viewOf(
			platformMetadata(metadata), hostname(test.text, test.text), nodename(test.text), volume("vda6", "EPHEMERAL", test.text),
			withSpec(hardware.NewSystemInformation(hardware.SystemInformationID), hardware.SystemInformationSpec{SerialNumber: test.text}),
			withSpec(cluster.NewInfo(), cluster.InfoSpec{ClusterName: test.text}),
		)
		m := view.Machine()

		for _, got := range []string{
			m.Platform.Zone, m.Platform.InstanceID, m.Platform.Tags["a"], m.Hostname, m.Domainname, m.Nodename, m.EphemeralID, m.System.SerialNumber, m.ClusterName,
		} {
			assert.Equal(t, test.want, got)
		}

		assert.Equal(t, "r", m.Platform.Region)
		assert.Equal(t, "d", m.Platform.Tags["c"])
		assert.Equal(t, test.want != "", m.Platform.Tags[test.text] == "b", "tag with a long name")
		assert.Equal(t, test.text, metadata.Tags["a"], "the resource has changed")

		facts := factsOf(machine.AllFacts,
			network.NewLinkStatus(network.NamespaceName, test.text), processor("CPU-0", test.text, 1), device("0", test.text, "", "", ""),
			extension("0", "schematic", test.text), withSpec(runtime.NewVersion(), runtime.VersionSpec{Version: test.text}),
			key("0x0c", test.text+test.text), key("0x0d", strings.Repeat("x", 64<<10+1)),
		)
		assert.Equal(t, []string{test.want, test.want, test.want}, []string{facts.CPUModel, facts.Schematic, facts.TalosVersion})
		assert.Equal(t, test.want != "", len(facts.Links) == 1)
		assert.Empty(t, facts.PCIDevices, "longer than its class")
		assert.Equal(t, map[string]string{"0x0c": test.text + test.text}, facts.Meta, "META values can be longer")
	}

	assert.Empty(t, factsOf(machine.AllFacts, cmdline("a="+longest)).KernelArgs)
}

// types returns the types of kinds.
func types(kinds []resource.Kind) (types []resource.Type) {
	for _, kind := range kinds {
		types = append(types, kind.Type())
	}

	return types
}

func TestKinds_AreListedOnce(t *testing.T) {
	base := machine.BaseKinds()
	assert.Equal(t, base.All(), base.WithFacts(machine.FactKindsOf("Addresses")).All(), "addresses are always read")

	links := base.WithFacts(machine.FactKindsOf("Links"))
	assert.Len(t, links.All(), len(base.All())+1)

	all := types(links.WithFacts(machine.AllFacts).All())
	assert.Len(t, all, len(base.All())+10)
	slices.Sort(all)
	assert.Equal(t, slices.Compact(slices.Clone(all)), all)
}
