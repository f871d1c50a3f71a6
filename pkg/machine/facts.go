package machine

import (
	"cmp"
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

// Facts are optional data, read only if the configuration uses them. Each field is a template variable and zero if its
// kind was not read. Numbers are strings, so that a machine cannot control the loop of a template.
type Facts struct {
	// Addresses are on networks that the machine is attached to: no addresses of pods and Services, virtual IPs or
	// temporary addresses. Subnets are the subnets of Addresses.
	Addresses []string `yaml:"addresses,omitempty"`
	Subnets   []string `yaml:"subnets,omitempty"`
	// Links are the names of links, without those of pods.
	Links []string `yaml:"links,omitempty"`
	// Gateways are the default gateways of the main routing table.
	Gateways []string `yaml:"gateways,omitempty"`
	// CPUModel is the model of the first socket with a processor.
	CPUModel string `yaml:"cpuModel,omitempty"`
	// CPUs is the number of threads, and MemoryMiB the size of all memory modules; empty if unknown.
	CPUs      string `yaml:"cpus,omitempty"`
	MemoryMiB string `yaml:"memoryMiB,omitempty"`
	// PCIDevices have the form <class>:<vendor>:<product>, as in `lspci -n`.
	PCIDevices []string `yaml:"pciDevices,omitempty"`
	SecureBoot bool     `yaml:"secureBoot,omitempty"`
	// KernelArgs are the values of kernel arguments by name. The values of a repeated argument are joined by commas.
	KernelArgs map[string]string `yaml:"kernelArgs,omitempty"`
	// Meta are the values of META keys by ID, such as "0x0c".
	Meta         map[string]string `yaml:"meta,omitempty"`
	TalosVersion string            `yaml:"talosVersion,omitempty"`
	// Extensions are the versions of system extensions by name.
	Extensions map[string]string `yaml:"extensions,omitempty"`
	// Schematic is the version of the extension "schematic", which Image Factory adds to every image: the schematic's ID.
	Schematic string `yaml:"schematic,omitempty"`
}

// FactKinds is a set of the kinds that Facts depend on: the bit i is set if factKinds[i] is in the set.
type FactKinds uint16

// AllFacts is the set of all kinds.
const AllFacts = ^FactKinds(0)

// factKinds are the kinds that Facts depend on, with the fields of Facts. The role os:reader suffices for all of them.
var factKinds = []struct {
	kind     resource.Kind
	constant bool // the resources do not change before the machine reboots
	fields   []string
}{
	{kind(network.NamespaceName, network.AddressStatusType), false, []string{"Addresses", "Subnets"}}, // watched for every View
	{kind(network.NamespaceName, network.LinkStatusType), false, []string{"Links"}},
	{kind(network.NamespaceName, network.RouteStatusType), false, []string{"Gateways"}},
	{kind(runtime.NamespaceName, runtime.MetaKeyType), false, []string{"Meta"}},
	{kind(hardware.NamespaceName, hardware.ProcessorType), true, []string{"CPUModel", "CPUs"}},
	{kind(hardware.NamespaceName, hardware.MemoryModuleType), true, []string{"MemoryMiB"}},
	{kind(hardware.NamespaceName, hardware.PCIDeviceType), true, []string{"PCIDevices"}},
	{kind(runtime.NamespaceName, runtime.SecurityStateType), true, []string{"SecureBoot"}},
	{kind(runtime.NamespaceName, runtime.KernelCmdlineType), true, []string{"KernelArgs"}},
	{kind(runtime.NamespaceName, runtime.VersionType), true, []string{"TalosVersion"}},
	{kind(runtime.NamespaceName, runtime.ExtensionStatusType), true, []string{"Extensions", "Schematic"}},
}

// FactKindsOf returns the kinds that a template variable depends on; none if the variable is not one of Facts.
func FactKindsOf(variable string) (kinds FactKinds) {
	for i, f := range factKinds {
		if slices.Contains(f.fields, variable) {
			kinds |= 1 << i
		}
	}

	return kinds
}

// replace replaces the facts of a kind. It returns false if a View keeps the resources of the kind instead.
func (f *Facts) replace(typ resource.Type, items []resource.Resource) bool {
	items = slices.SortedFunc(slices.Values(items), func(a, b resource.Resource) int { return cmp.Compare(a.Metadata().ID(), b.Metadata().ID()) })

	switch typ {
	case network.LinkStatusType:
		f.Links = listOf(items, linkName)
	case network.RouteStatusType:
		f.Gateways = listOf(items, defaultGateway)
	case runtime.MetaKeyType:
		f.Meta = mapOf(items, maxMeta, func(k *runtime.MetaKey) (id, value string) { return k.Metadata().ID(), k.TypedSpec().Value })
	case hardware.ProcessorType:
		f.CPUModel = firstOf(items, func(p *hardware.Processor) string { return strings.TrimSpace(p.TypedSpec().ProductName) })
		f.CPUs = sumOf(items, func(p *hardware.Processor) uint32 { return p.TypedSpec().ThreadCount })
	case hardware.MemoryModuleType:
		f.MemoryMiB = sumOf(items, func(m *hardware.MemoryModule) uint32 { return m.TypedSpec().Size })
	case hardware.PCIDeviceType:
		f.PCIDevices = listOf(items, pciDevice)
	case runtime.SecurityStateType:
		f.SecureBoot = false
		each(items, func(s *runtime.SecurityState) { f.SecureBoot = s.TypedSpec().SecureBoot })
	case runtime.KernelCmdlineType:
		f.KernelArgs = kernelArgs(firstOf(items, func(c *runtime.KernelCmdline) string { return c.TypedSpec().Cmdline }))
	case runtime.VersionType:
		f.TalosVersion = firstOf(items, func(v *runtime.Version) string { return v.TypedSpec().Version })
	case runtime.ExtensionStatusType:
		f.Extensions = mapOf(items, maxString, func(e *runtime.ExtensionStatus) (name, version string) {
			return e.TypedSpec().Metadata.Name, e.TypedSpec().Metadata.Version
		})
		f.Schematic = f.Extensions["schematic"]
	default:
		return false
	}

	return true
}

func (f *Facts) setAddresses(m *Machine) {
	f.Addresses, f.Subnets = nil, nil

	for _, a := range m.Addresses {
		isExcluded := slices.ContainsFunc(m.ExcludedSubnets, func(p netip.Prefix) bool { return p.Contains(a.Prefix.Addr()) })
		isTransient := a.Scope != nethelpers.ScopeGlobal || nethelpers.AddressFlag(a.Flags)&unstable != 0

		if !isExcluded && !isTransient && a.Link != LinkExternal && !a.OnCNILink() {
			f.Addresses = append(f.Addresses, a.Prefix.Addr().String())
			f.Subnets = append(f.Subnets, a.Prefix.Masked().String())
		}
	}

	f.Addresses, f.Subnets = sorted(f.Addresses), sorted(f.Subnets)
}

// sorted sorts texts and removes duplicates and texts that are empty.
func sorted(list []string) []string {
	slices.Sort(list)

	return slices.DeleteFunc(slices.Compact(list), func(s string) bool { return s == "" })
}

func each[R resource.Resource](items []resource.Resource, do func(R)) {
	for _, item := range items {
		if r, ok := item.(R); ok {
			do(r)
		}
	}
}

func listOf[R resource.Resource](items []resource.Resource, text func(R) string) (list []string) {
	each(items, func(r R) { list = append(list, bounded(text(r))) })

	return sorted(list)
}

func firstOf[R resource.Resource](items []resource.Resource, text func(R) string) (first string) {
	each(items, func(r R) { first = cmp.Or(first, bounded(text(r))) })

	return first
}

// sumOf returns the sum of numbers as a text; empty if the sum is zero.
func sumOf[R resource.Resource](items []resource.Resource, number func(R) uint32) string {
	var sum uint64

	each(items, func(r R) { sum += uint64(number(r)) })

	if sum == 0 {
		return ""
	}

	return strconv.FormatUint(sum, 10)
}

// mapOf returns the values of resources. It omits values with a key or a value that is longer than limit.
func mapOf[R resource.Resource](items []resource.Resource, limit int, entry func(R) (key, value string)) map[string]string {
	values := map[string]string{}

	each(items, func(r R) {
		if key, value := entry(r); max(len(key), len(value)) <= limit {
			values[key] = value
		}
	})

	return values
}

// linkName returns the name of a link; empty for links of pods.
func linkName(link *network.LinkStatus) string {
	if hasPrefix(link.Metadata().ID(), cniLinks) {
		return ""
	}

	return link.Metadata().ID()
}

// defaultGateway returns the gateway of a default route in the main table; empty for other routes.
func defaultGateway(route *network.RouteStatus) string {
	spec := route.TypedSpec()
	if spec.Table != nethelpers.TableMain || spec.Destination.Bits() > 0 || !spec.Gateway.IsValid() {
		return ""
	}

	return spec.Gateway.String()
}

func pciDevice(device *hardware.PCIDevice) string {
	spec := device.TypedSpec()
	hex := func(id string) string { return strings.TrimPrefix(id, "0x") }

	return hex(spec.ClassID) + hex(spec.SubclassID) + ":" + hex(spec.VendorID) + ":" + hex(spec.ProductID)
}

func kernelArgs(cmdline string) map[string]string {
	args := map[string]string{}

	for arg := range strings.FieldsSeq(cmdline) {
		name, value, _ := strings.Cut(arg, "=")
		if earlier, repeated := args[name]; repeated {
			value = earlier + "," + value
		}

		args[name] = value
	}

	return args
}
