package preview_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/cosi-project/runtime/pkg/resource"
	"github.com/cosi-project/runtime/pkg/safe"
	"github.com/cosi-project/runtime/pkg/state"
	"github.com/siderolabs/talos/pkg/machinery/client"
	talosmachine "github.com/siderolabs/talos/pkg/machinery/config/machine"
	"github.com/siderolabs/talos/pkg/machinery/nethelpers"
	"github.com/siderolabs/talos/pkg/machinery/resources/block"
	"github.com/siderolabs/talos/pkg/machinery/resources/cluster"
	"github.com/siderolabs/talos/pkg/machinery/resources/hardware"
	"github.com/siderolabs/talos/pkg/machinery/resources/network"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/siderolabs/talos/pkg/machinery/role"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v4"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
)

// site is a simulated cluster.
type site struct{ *talostest.Cluster }

func newSite(t testing.TB, specs ...talostest.MachineSpec) site {
	t.Helper()

	cluster, err := talostest.New(talostest.Options{Name: "prod"})
	require.NoError(t, err)
	t.Cleanup(cluster.Close)

	for _, spec := range specs {
		_, err := cluster.AddMachine(spec)
		require.NoError(t, err)
	}

	return site{cluster}
}

func worker(name string) talostest.MachineSpec {
	return talostest.MachineSpec{
		Nodename: name,
		Platform: runtime.PlatformMetadataSpec{
			Platform: "aws", Hostname: name + ".internal", Region: "eu-central-1", Zone: "eu-central-1a", InstanceType: "m7i.large",
			InstanceID: "i-" + name, ProviderID: "aws:///eu-central-1a/i-" + name, Spot: true, Tags: map[string]string{"team": "red: & <blue>", "yes": "no"},
		},
		Resources:         hardwareOf(),
		SystemInformation: &hardware.SystemInformationSpec{UUID: "30a0bdf7-4b1a-4f0e-9f86-2a3d64a3c5ee", SerialNumber: "0123"},
		Addresses: []talostest.Address{
			{Link: "eth0", Prefix: netip.MustParsePrefix("10.0.0.1/24")},
			{Link: "eth0", Prefix: netip.MustParsePrefix("2001:db8::1/64"), Flags: nethelpers.AddressFlags(nethelpers.AddressTemporary | nethelpers.AddressManagementTemp)},
			{Link: talostest.LinkExternal, Prefix: netip.MustParsePrefix("203.0.113.1/32")},
		},
	}
}

// hardwareOf returns resources of all kinds of optional facts.
func hardwareOf() []resource.Resource {
	link := network.NewLinkStatus(network.NamespaceName, "eth0")
	link.TypedSpec().HardwareAddr = nethelpers.HardwareAddr{2, 0, 0, 0, 0, 1}

	route := network.NewRouteStatus(network.NamespaceName, "inet4/10.0.0.254//1024")
	*route.TypedSpec() = network.RouteStatusSpec{Family: nethelpers.FamilyInet4, Table: nethelpers.TableMain, Gateway: netip.MustParseAddr("10.0.0.254"), OutLinkName: "eth0"}

	cpu := hardware.NewProcessorInfo("CPU-0")
	*cpu.TypedSpec() = hardware.ProcessorSpec{ProductName: "EPYC", ThreadCount: 8}

	memory := hardware.NewMemoryModuleInfo("DIMM-0")
	memory.TypedSpec().Size = 1024

	gpu := hardware.NewPCIDeviceInfo("0000:01:00.0")
	*gpu.TypedSpec() = hardware.PCIDeviceSpec{ClassID: "0x03", SubclassID: "0x02", VendorID: "0x10de", ProductID: "0x2236"}

	security := runtime.NewSecurityStateSpec(runtime.NamespaceName)
	security.TypedSpec().SecureBoot = true

	cmdline := runtime.NewKernelCmdline()
	cmdline.TypedSpec().Cmdline = "console=tty0 quiet"

	meta := runtime.NewMetaKey(runtime.NamespaceName, "0x0c")
	meta.TypedSpec().Value = "rack: 7"

	return []resource.Resource{link, route, cpu, memory, gpu, security, cmdline, meta}
}

// publishPlatformConfig publishes the PlatformConfig of a machine.
func publishPlatformConfig(t testing.TB, m *talostest.Machine) {
	t.Helper()

	metadata, err := safe.StateGetByID[*runtime.PlatformMetadata](t.Context(), m.State(), runtime.PlatformMetadataID)
	require.NoError(t, err)

	delivered := network.NewPlatformConfig(network.NamespaceName, network.PlatformConfigActiveID)
	spec := metadata.TypedSpec().DeepCopy()
	delivered.TypedSpec().Metadata = &spec
	delivered.TypedSpec().Addresses = []network.AddressSpecSpec{{Address: netip.MustParsePrefix("10.0.0.1/24"), LinkName: "eth0", Scope: nethelpers.ScopeGlobal}}

	require.NoError(t, m.State().Create(t.Context(), delivered))
}

// truth returns the view of a machine from its state, without talosctl.
func truth(t testing.TB, m *talostest.Machine) machine.Machine {
	t.Helper()

	view := machine.View{Facts: allKinds.Facts}

	for _, kind := range kinds() {
		list, err := m.State().List(t.Context(), kind)
		require.NoError(t, err)

		view.ReplaceKind(kind, list.Items)
	}

	return view.Machine()
}

var allKinds = machine.BaseKinds().WithFacts(machine.AllFacts)

func kinds() []resource.Kind {
	return slices.DeleteFunc(allKinds.All(), func(kind resource.Kind) bool {
		return kind.Type() == cluster.IdentityType || kind.Type() == block.DiscoveredVolumeType
	})
}

func (s site) client(t testing.TB, m *talostest.Machine) *client.Client {
	t.Helper()

	config, err := s.ClientTLS(string(role.Reader))
	require.NoError(t, err)

	c, err := client.New(t.Context(), client.WithTLSConfig(config), client.WithEndpoints(m.Address().String()))
	require.NoError(t, err)
	t.Cleanup(func() { c.Close() })

	return c
}

// write prints a resource in one of talosctl's formats (cmd/talosctl/cmd/talos/output).
type write func(t testing.TB, out *bytes.Buffer, node string, r resource.Resource)

// talosctl returns the output of one command `talosctl -n NODES get KIND` for all machines.
func (s site) talosctl(t testing.TB, output write, kind resource.Kind) []byte {
	t.Helper()

	var out bytes.Buffer

	for _, m := range s.Machines() {
		list, err := s.client(t, m).COSI.List(t.Context(), kind, state.WithListUnmarshalOptions(state.WithSkipProtobufUnmarshal()))
		require.NoError(t, err)

		for _, r := range list.Items {
			output(t, &out, m.Nodename(), r)
		}
	}

	return out.Bytes()
}

func asYAML(t testing.TB, out *bytes.Buffer, node string, r resource.Resource) {
	t.Helper()

	if out.Len() > 0 {
		fmt.Fprintln(out, "---")
	}

	marshaled, err := resource.MarshalYAML(r)
	require.NoError(t, err)

	fmt.Fprintf(out, "node: %s\n", node)
	require.NoError(t, yaml.NewEncoder(out).Encode(marshaled))
}

func asJSON(t testing.TB, out *bytes.Buffer, node string, r resource.Resource) {
	t.Helper()

	var printed bytes.Buffer

	asYAML(t, &printed, node, r)

	var data map[string]any
	require.NoError(t, yaml.Unmarshal(printed.Bytes(), &data))

	encoder := json.NewEncoder(out)
	encoder.SetIndent("", "    ")
	require.NoError(t, encoder.Encode(data))
}

// everything returns the output of preview.Command: the concatenated output for each kind.
func (s site) everything(t testing.TB, output write) (out []byte) {
	t.Helper()

	for _, kind := range kinds() {
		out = append(out, s.talosctl(t, output, kind)...)
	}

	return out
}

func controlPlane(name string) talostest.MachineSpec {
	spec := worker(name)
	spec.Type = talosmachine.TypeControlPlane

	return spec
}
