package machine

import (
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/cosi-project/runtime/pkg/resource"
	"github.com/siderolabs/talos/pkg/machinery/nethelpers"
	"github.com/siderolabs/talos/pkg/machinery/resources/hardware"
	"github.com/siderolabs/talos/pkg/machinery/resources/network"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
)

// optionalFact is a fact that a View reads only if the configuration uses it.
type optionalFact struct {
	kind resource.Kind
	// constant is true if the resources do not change before the machine reboots.
	constant bool
	// read returns a text, a bool, a sorted list of texts or a map of texts; without resources the zero value. Numbers
	// are texts: a machine must not determine how often the loop of a template runs.
	read func(m *Machine, resources []resource.Resource) any
}

// optionalFacts are the optional facts by the name of their template variable. The role os:reader suffices for all kinds.
var optionalFacts = map[string]optionalFact{
	"Addresses": {kind(network.NamespaceName, network.AddressStatusType), false, listOf((*Machine).address)},
	"Subnets":   {kind(network.NamespaceName, network.AddressStatusType), false, listOf((*Machine).subnet)},
	"Links": {kind(network.NamespaceName, network.LinkStatusType), false, listOf(func(_ *Machine, link *network.LinkStatus) string {
		return link.Metadata().ID()
	})},
	"Gateways": {kind(network.NamespaceName, network.RouteStatusType), false, listOf(func(_ *Machine, route *network.RouteStatus) string {
		return route.TypedSpec().Gateway.String() // View keeps default routes only
	})},
	"CPUModel":  {kind(hardware.NamespaceName, hardware.ProcessorType), true, cpuModel},
	"CPUs":      {kind(hardware.NamespaceName, hardware.ProcessorType), true, sumOf(func(p *hardware.Processor) uint32 { return p.TypedSpec().ThreadCount })},
	"MemoryMiB": {kind(hardware.NamespaceName, hardware.MemoryModuleType), true, sumOf(func(m *hardware.MemoryModule) uint32 { return m.TypedSpec().Size })},
	"PCIDevices": {kind(hardware.NamespaceName, hardware.PCIDeviceType), true, listOf(func(_ *Machine, d *hardware.PCIDevice) string {
		spec := d.TypedSpec()

		return hex(spec.ClassID) + hex(spec.SubclassID) + ":" + hex(spec.VendorID) + ":" + hex(spec.ProductID)
	})},
	"SecureBoot":   {kind(runtime.NamespaceName, runtime.SecurityStateType), true, secureBoot},
	"KernelArgs":   {kind(runtime.NamespaceName, runtime.KernelCmdlineType), true, kernelArgs},
	"Meta":         {kind(runtime.NamespaceName, runtime.MetaKeyType), false, metaKeys},
	"TalosVersion": {kind(runtime.NamespaceName, runtime.VersionType), true, talosVersion},
	"Extensions": {kind(runtime.NamespaceName, runtime.ExtensionStatusType), true, func(_ *Machine, resources []resource.Resource) any {
		return extensions(resources)
	}},
	// Image Factory adds an extension with this name to every image. Its version is the ID of the schematic.
	"Schematic": {kind(runtime.NamespaceName, runtime.ExtensionStatusType), true, func(_ *Machine, resources []resource.Resource) any {
		return extensions(resources)["schematic"]
	}},
}

// OptionalFacts returns the names of the facts that a View reads only if View.Facts names them, sorted.
func OptionalFacts() []string { return slices.Sorted(maps.Keys(optionalFacts)) }

// Fact returns an optional fact; the zero value of its type if it is not known.
func (m Machine) Fact(name string) any {
	if value, known := m.Facts[name]; known {
		return value
	}

	return optionalFacts[name].read(&Machine{}, nil)
}

// listOf returns a function that reads a list of different texts, none of them empty.
func listOf[R resource.Resource](text func(*Machine, R) string) func(*Machine, []resource.Resource) any {
	return func(m *Machine, resources []resource.Resource) any {
		var list []string

		for _, r := range resources {
			if r, ok := r.(R); ok {
				list = append(list, text(m, r))
			}
		}

		slices.Sort(list)

		return slices.DeleteFunc(slices.Compact(list), func(s string) bool { return s == "" })
	}
}

// sumOf returns a function that adds numbers up.
func sumOf[R resource.Resource](number func(R) uint32) func(*Machine, []resource.Resource) any {
	return func(_ *Machine, resources []resource.Resource) any {
		var sum uint64

		for _, r := range resources {
			if r, ok := r.(R); ok {
				sum += uint64(number(r))
			}
		}

		if sum == 0 {
			return ""
		}

		return strconv.FormatUint(sum, 10)
	}
}

// address returns an address on a network that the machine is attached to; empty for transient addresses: of pods,
// Services and virtual IPs, and temporary ones.
func (m *Machine) address(status *network.AddressStatus) string {
	if prefix := m.attached(status.TypedSpec()); prefix.IsValid() {
		return prefix.Addr().String()
	}

	return ""
}

func (m *Machine) subnet(status *network.AddressStatus) string {
	if prefix := m.attached(status.TypedSpec()); prefix.IsValid() {
		return prefix.Masked().String()
	}

	return ""
}

func (m *Machine) attached(spec *network.AddressStatusSpec) netip.Prefix {
	ip, link := spec.Address.Addr(), spec.LinkName

	switch {
	case spec.Scope != nethelpers.ScopeGlobal, nethelpers.AddressFlag(spec.Flags)&unstable != 0:
	case link == LinkExternal, hasPrefix(link, cniLinks):
	case slices.ContainsFunc(m.ExcludedSubnets, func(p netip.Prefix) bool { return p.Contains(ip) }):
	default:
		return spec.Address
	}

	return netip.Prefix{}
}

// cpuModel returns the model of the first socket with a processor.
func cpuModel(_ *Machine, resources []resource.Resource) any {
	for _, r := range resources {
		if p, ok := r.(*hardware.Processor); ok && p.TypedSpec().ProductName != "" {
			return strings.TrimSpace(p.TypedSpec().ProductName)
		}
	}

	return ""
}

func hex(id string) string { return strings.TrimPrefix(id, "0x") }

func secureBoot(_ *Machine, resources []resource.Resource) any {
	return slices.ContainsFunc(resources, func(r resource.Resource) bool {
		state, ok := r.(*runtime.SecurityState)

		return ok && state.TypedSpec().SecureBoot
	})
}

// kernelArgs returns the values by name. Those of a repeated argument are joined by commas.
func kernelArgs(_ *Machine, resources []resource.Resource) any {
	args := map[string]string{}

	for _, r := range resources {
		cmdline, ok := r.(*runtime.KernelCmdline)
		if !ok {
			continue
		}

		for arg := range strings.FieldsSeq(cmdline.TypedSpec().Cmdline) {
			name, value, _ := strings.Cut(arg, "=")
			if other, repeated := args[name]; repeated {
				value = other + "," + value
			}

			args[name] = value
		}
	}

	return args
}

func metaKeys(_ *Machine, resources []resource.Resource) any {
	values := map[string]string{}

	for _, r := range resources {
		if key, ok := r.(*runtime.MetaKey); ok {
			values[key.Metadata().ID()] = key.TypedSpec().Value
		}
	}

	return values
}

func talosVersion(_ *Machine, resources []resource.Resource) any {
	for _, r := range resources {
		if v, ok := r.(*runtime.Version); ok {
			return v.TypedSpec().Version
		}
	}

	return ""
}

// extensions returns the versions of the machine's system extensions by name.
func extensions(resources []resource.Resource) map[string]string {
	versions := map[string]string{}

	for _, r := range resources {
		if status, ok := r.(*runtime.ExtensionStatus); ok {
			versions[status.TypedSpec().Metadata.Name] = status.TypedSpec().Metadata.Version
		}
	}

	return versions
}
