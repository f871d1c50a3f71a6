package machine_test

import (
	"net/netip"
	"reflect"
	"slices"
	"testing"

	"github.com/cosi-project/runtime/pkg/resource"
	"github.com/siderolabs/talos/pkg/machinery/extensions"
	"github.com/siderolabs/talos/pkg/machinery/nethelpers"
	"github.com/siderolabs/talos/pkg/machinery/resources/hardware"
	"github.com/siderolabs/talos/pkg/machinery/resources/network"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

func withSpec[R interface {
	resource.Resource
	TypedSpec() *S
}, S any](r R, spec S) R {
	*r.TypedSpec() = spec

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
	r := addressStatus("eth0", prefix)
	r.TypedSpec().Flags |= nethelpers.AddressFlags(flag)

	return r
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

func TestView_OptionalFacts(t *testing.T) {
	local := addressStatus("eth0", "fe80::1/64")
	local.TypedSpec().Scope = nethelpers.ScopeLink

	policyRoute := route("180/10.9.0.1", "", "10.9.0.1")
	policyRoute.TypedSpec().Table = 180

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

			if facts := view.Machine().Facts; facts != nil {
				t.Errorf("got %v without a need", facts)
			}

			view.Facts = []string{test.fact}

			m := view.Machine()
			if got := m.Fact(test.fact); len(m.Facts) != 1 || !reflect.DeepEqual(got, test.want) {
				t.Errorf("got %v in %v, want %v", got, m.Facts, test.want)
			}

			if got := (machine.Machine{}).Fact(test.fact); reflect.TypeOf(got) != reflect.TypeOf(test.want) || !isEmpty(got) {
				t.Errorf("without resources: got %#v, want an empty %T", got, test.want)
			}
		})
	}

	if len(untested) > 0 {
		t.Errorf("no test reads %v", untested)
	}
}

func isEmpty(value any) bool {
	v := reflect.ValueOf(value)

	return v.IsZero() || v.Kind() == reflect.Map && v.Len() == 0
}

func TestKindsOf(t *testing.T) {
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

		for i, got := range [][]resource.Kind{kinds.Polled[len(always.Polled):], kinds.Constant[len(always.Constant):]} {
			var types []resource.Type
			for _, kind := range got {
				types = append(types, kind.Type())
			}

			if want := [][]resource.Type{test.polled, test.constant}[i]; !slices.Equal(types, want) {
				t.Errorf("%v: got %v, want %v", test.facts, types, want)
			}
		}
	}

	var types []resource.Type
	for _, kind := range machine.KindsOf(machine.OptionalFacts()).All() {
		types = append(types, kind.Type())
	}

	if slices.Sort(types); len(slices.Compact(types)) != len(types) {
		t.Errorf("a kind is listed twice: %v", types)
	}
}

func TestParsePrefix(t *testing.T) {
	for text, want := range map[string]netip.Prefix{
		"10.1.2.3": netip.MustParsePrefix("10.1.2.3/32"), "10.1.2.3/8": netip.MustParsePrefix("10.0.0.0/8"), "fd00::1": netip.MustParsePrefix("fd00::1/128"),
		"fe80::1%eth0": {}, "x": {},
	} {
		if got, valid := machine.ParsePrefix(text); valid != want.IsValid() || valid && got != want {
			t.Errorf("%s: got %v, %t", text, got, valid)
		}
	}
}
