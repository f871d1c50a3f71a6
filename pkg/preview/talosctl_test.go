package preview_test

import (
	"bytes"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	talosmachine "github.com/siderolabs/talos/pkg/machinery/config/machine"
	"github.com/siderolabs/talos/pkg/machinery/nethelpers"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/pkg/preview"
	"github.com/talos-ccm/talos-ccm/pkg/rules"
)

func TestParse_RoundTripsTalosctlOutput(t *testing.T) {
	site := newSite(t, controlPlane("cp-1"), worker("worker-1"))
	publishPlatformConfig(t, site.Machine("worker-1"))

	for name, output := range map[string]write{"yaml": asYAML, "json": asJSON} {
		t.Run(name, func(t *testing.T) {
			machines, err := preview.Parse(site.everything(t, output), allKinds)
			require.NoError(t, err)
			require.Len(t, machines, 2)

			for i, m := range site.Machines() {
				assert.Equal(t, m.Nodename(), machines[i].Node, "machine %d", i)

				assert.Len(t, machines[i].Machine.Facts.Gateways, 1)
				assert.Equal(t, truth(t, m), machines[i].Machine)
			}
		})
	}
}

func TestCommand_UsesTalosKindNames(t *testing.T) {
	site := newSite(t, worker("worker-1"))
	c := site.client(t, site.Machine("worker-1"))

	_, list, _ := strings.Cut(preview.Command(allKinds), "for kind in ")
	list, _, _ = strings.Cut(list, ";")

	for i, name := range strings.Fields(list) {
		var namespace string

		definition, err := c.ResolveResourceKind(t.Context(), &namespace, name)
		require.NoError(t, err)

		want := kinds()[i]
		assert.Equal(t, want.Type(), definition.TypedSpec().Type)
		assert.Equal(t, want.Namespace(), namespace)
	}
}

func TestParse_ListsMissingKinds(t *testing.T) {
	printed := "node: 10.0.0.1\nmetadata:\n    type: Nodenames.kubernetes.talos.dev\nspec:\n    nodename: worker-1\n"

	machines, err := preview.Parse([]byte(printed), allKinds)
	require.NoError(t, err)

	got := machines[0].Missing
	require.Len(t, got, len(kinds())-1)
	assert.Equal(t, []string{"platformmetadatas", "addressstatuses"}, got[:2])
}

// The files contain the output of Command for a control-plane machine and a worker of Talos v1.13.5 in containers.
func TestParse_ReadsRecordedTalosctlOutput(t *testing.T) {
	for _, format := range []string{"yaml", "json"} {
		t.Run(format, func(t *testing.T) {
			output, err := os.ReadFile("testdata/talos-v1.13.5." + format)
			require.NoError(t, err)

			machines, err := preview.Parse(output, machine.BaseKinds())
			require.NoError(t, err)

			assert.Equal(t, []preview.Machine{
				inTestdata("10.77.0.2", "talos-cp", talosmachine.TypeControlPlane, "fe80::f055:7bff:fe47:cc23/64", "systeminformations"),
				inTestdata("10.77.0.3", "talos-wk", talosmachine.TypeWorker, "fe80::383e:d9ff:fe9b:60ad/64", "systeminformations"),
			}, machines)
		})
	}
}

// inTestdata returns a machine of the recorded output.
func inTestdata(ip, name string, typ talosmachine.Type, linkLocal string, missing ...string) preview.Machine {
	address := func(link, prefix string, scope nethelpers.Scope) machine.Address {
		return machine.Address{Prefix: netip.MustParsePrefix(prefix), Link: link, Scope: scope, Flags: nethelpers.AddressFlags(nethelpers.AddressPermanent)}
	}

	return preview.Machine{Node: ip, Missing: missing, Machine: machine.Machine{
		Nodename:          name,
		Hostname:          name,
		ClusterName:       "talos-ccm-bed",
		Type:              typ,
		Stage:             runtime.MachineStageRunning,
		UnmetConditions:   []runtime.UnmetCondition{{Name: "nodeReady", Reason: fmt.Sprintf("node %q is not ready", name)}},
		Platform:          runtime.PlatformMetadataSpec{Platform: "container", Hostname: name, InstanceType: "2CPU-2048RAM"},
		PlatformPublished: true,
		Addresses: []machine.Address{
			address("eth0", ip+"/24", nethelpers.ScopeGlobal), address("eth0", linkLocal, nethelpers.ScopeLink),
			address("lo", "127.0.0.1/8", nethelpers.ScopeHost), address("lo", "169.254.116.108/32", nethelpers.ScopeHost), address("lo", "::1/128", nethelpers.ScopeHost),
		},
		NodeIPs:         []netip.Addr{netip.MustParseAddr(ip)},
		ExcludedSubnets: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("10.96.0.0/12")},
		ValidSubnets:    []machine.ValidSubnet{{Prefix: netip.MustParsePrefix("0.0.0.0/0")}},
	}}
}

const nodename = "node: n\nmetadata:\n    type: Nodenames.kubernetes.talos.dev\n    id: nodename\nspec:\n    nodename: worker-1\n"

func TestParse_AcceptsVariations(t *testing.T) {
	for _, test := range []struct{ name, input string }{
		{"only the resource", nodename},
		{"repeated separators", "---\n---\n" + nodename + "---\n\n---\n"},
		{"comments", "# made with talosctl\n---\n" + nodename + "# end\n"},
		{"CRLF line endings", strings.ReplaceAll(nodename, "\n", "\r\n")},
		{"the same resource twice", nodename + nodename},
		{"kinds that are not needed", nodename + "---\n" + strings.ReplaceAll(strings.ReplaceAll(nodename, "Nodenames.kubernetes", "LinkStatuses.net"), "worker-1", "[1, 2]")},
		{"unknown fields", nodename + "    more: {of: it}\n"},
		{"empty node", strings.Replace(nodename, "node: n", "node: ", 1)},
		{"compact JSON", `{"node":"n","metadata":{"type":"Nodenames.kubernetes.talos.dev","id":"nodename"},"spec":{"nodename":"worker-1"}}`},
	} {
		t.Run(test.name, func(t *testing.T) {
			machines, err := preview.Parse([]byte(test.input), machine.BaseKinds())
			require.NoError(t, err)
			require.Len(t, machines, 1)
			assert.Equal(t, machine.Machine{Nodename: "worker-1"}, machines[0].Machine)
		})
	}
}

func TestParse_RejectsInvalidInput(t *testing.T) {
	for _, test := range []struct{ name, input, want string }{
		{"empty input", "", "no resource of a machine"},
		{"only kinds that are not needed", strings.ReplaceAll(nodename, "Nodenames.kubernetes", "LinkStatuses.net"), "no resource of a machine"},
		{"table output", "NODE       NAMESPACE   TYPE       ID         VERSION\n10.0.0.1   k8s         Nodename   nodename   1\n", "the input is a table, which omits most values: add -o yaml"},
		{"table output of a watch", "*   NODE       NAMESPACE   TYPE       ID         VERSION\n+   10.0.0.1   k8s         Nodename   nodename   1\n", "is a table"},
		{"another kind of document", nodename + "---\napiVersion: v1\nkind: Node\n", "document 2, from line 8: not a resource"},
		{"no type", "platformmetadata: {platform: metal}\n", "document 1, from line 1: not a resource in talosctl's format: metadata.type is missing"},
		{"broken YAML", nodename + "---\nnode: n\nmetadata: [\n", "document 2, from line 8: yaml: "},
		{"wrong type of a value", nodename + "---\n" + strings.Replace(nodename, "worker-1", "[a]", 1), "line 13"},
		{"scalar spec", strings.Replace(nodename, "\n    nodename: worker-1", " 1", 1), "document 1, from line 1: spec of Nodenames"},
		{"no spec", strings.Replace(nodename, "spec:\n    nodename: worker-1\n", "", 1), "document 1, from line 1"},
		{"unknown machine type", "metadata: {type: MachineTypes.config.talos.dev}\nspec: king\n", `"king"`},
		{"two machines with the same node", nodename + strings.Replace(nodename, "worker-1", "worker-2", 1), `document 2, from line 7: node "n" has nodenames "worker-1" and "worker-2"`},
		{"two machines without node", strings.ReplaceAll(nodename+"---\n"+nodename, "node: n\n", ""), "occurs twice without a node"},
		{"duplicate keys", nodename + "spec: {}\n", "document 1, from line 1"},
	} {
		t.Run(test.name, func(t *testing.T) {
			machines, err := preview.Parse([]byte(test.input), machine.BaseKinds())
			assert.ErrorContains(t, err, test.want, machines)
		})
	}
}

func TestRender_ShowsWhatFollowsFromMetadata(t *testing.T) {
	machines, err := preview.Parse([]byte("node: 10.0.0.2\nmetadata: {type: PlatformMetadatas.talos.dev, id: platformmetadata}\n"+
		"spec: {platform: openstack, hostname: web-7, region: eu, instanceId: 9a1fd9ee}\n"), machine.BaseKinds())
	require.NoError(t, err)

	report := preview.Render(machines, preview.Kubelet{}, nodespec.Options{Rules: compile(t, everyKind())})[0]

	want := preview.Report{
		Node: "10.0.0.2", Name: "web-7",
		Unknown: []string{"addresses", "name"},
		Rules:   []rules.Match{{Rule: "web"}},
		Changes: []preview.Change{
			{Field: "providerID", After: new("talos://openstack/9a1fd9ee"), From: "machine"},
			{Field: "taint", Key: "dedicated:NoSchedule", After: new("web"), From: "rule web, at initialization"},
		},
	}
	got := report
	got.Problems = nil
	got.Changes = slices.DeleteFunc(slices.Clone(got.Changes), func(c preview.Change) bool { return c.Field == "label" || c.Field == "annotation" })
	assert.Equal(t, want, got)

	assert.Subset(t, flat(report).Labels, map[string]string{"example.org/role": "web", "topology.kubernetes.io/region": "eu", "topology.kubernetes.io/zone": "a"})
}

func FuzzParse(f *testing.F) {
	site := newSite(f, worker("worker-1"))
	publishPlatformConfig(f, site.Machine("worker-1"))

	// Seeds are small because the fuzzer spends its time on minimizing large ones.
	for _, kind := range kinds() {
		f.Add(site.talosctl(f, asYAML, kind))
		f.Add(site.talosctl(f, asJSON, kind))
	}

	f.Add([]byte(nodename))
	f.Add([]byte("metadata: &a {type: MachineTypes.config.talos.dev, id: *a}\nspec: *a\n"))

	f.Fuzz(func(t *testing.T, input []byte) {
		machines, err := preview.Parse(input, machine.BaseKinds())
		assert.Equal(t, err == nil, len(machines) > 0, err)

		// Separators between documents have no effect.
		again, errAgain := preview.Parse(append([]byte("---\n"), bytes.TrimRight(input, "\n")...), machine.BaseKinds())
		require.Equal(t, err == nil, errAgain == nil, errAgain)

		if err == nil {
			assert.Equal(t, machines, again)
		}
	})
}
