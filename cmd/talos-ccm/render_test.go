package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	talosmachine "github.com/siderolabs/talos/pkg/machinery/config/machine"
	"github.com/siderolabs/talos/pkg/machinery/resources/cluster"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/siderolabs/talos/pkg/machinery/role"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/preview"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
)

// printed is recorded output of talosctl for two machines, talos-cp and talos-wk.
const printed = "../../pkg/preview/testdata/talos-v1.13.5.yaml"

const someRules = `
transformations:
  - name: zones
    nodeSelector:
      - matchExpressions:
          - {key: hostname, operator: In, values: [talos-wk]}
    labels:
      example.org/size: "{{ .InstanceType }}"
    platformMetadata:
      Zone: rack-1
`

// pendingMachine is a machine that has not published its platform.
const pendingMachine = `
node: n
metadata: {type: Nodenames.kubernetes.talos.dev, id: nodename}
spec: {nodename: worker-1}
---
node: n
metadata: {type: AddressStatuses.net.talos.dev, id: eth0/10.0.0.1/24}
spec: {address: 10.0.0.1/24, linkName: eth0, scope: global}
---
node: n
metadata: {type: NodeIPs.kubernetes.talos.dev, id: kubelet}
spec: {addresses: [10.0.0.1]}
`

// file writes content to a temporary file and returns its path.
func file(t *testing.T, content string) string {
	t.Helper()

	path := filepath.Join(t.TempDir(), "file.yaml")
	require.NoError(t, os.WriteFile(path, []byte(content), 0o600))

	return path
}

// rendered runs the command and returns its output.
func rendered(t *testing.T, stdin string, args ...string) (stdout, stderr string, err error) {
	t.Helper()

	return execute(t, newRenderCommand(), stdin, args...)
}

// reportsOf runs the command, which must succeed, and returns the reports.
func reportsOf(t *testing.T, args ...string) []preview.Report {
	t.Helper()

	stdout, _, err := rendered(t, "", append(args, "--output", "json")...)
	require.NoError(t, err)

	var reports []preview.Report
	require.NoError(t, json.Unmarshal([]byte(stdout), &reports))

	return reports
}

// valuesOf returns the values of a report with their fields and keys.
func valuesOf(report preview.Report) (values []string) {
	for _, c := range report.Changes {
		values = append(values, c.Field+" "+c.Key+"="+*c.After)
	}

	return values
}

func TestRender_HelpShowsUsage(t *testing.T) {
	stdout, _, err := rendered(t, "", "--help")
	require.NoError(t, err)

	assertContains(t, stdout,
		"render (--machine FILE|- | --node NAME|ADDRESS) [--config FILE] [flags]\n",
		"are printed as problems",
		"providerID source for platforms that publish no providerID, unless the configuration has global.providerIDFallback: uuid, node-ip.")
}

func TestRender_PrintsNodesAndRules(t *testing.T) {
	stdout, stderr, err := rendered(t, "", "--machine", printed, "--config", file(t, someRules))
	require.NoError(t, err)

	controlPlane, worker, _ := strings.Cut(stdout, "Node talos-wk")

	assertContains(t, controlPlane, "Node talos-cp", "talos://container/10.77.0.2", "InternalIP")
	assertContains(t, worker, "example.org/size", "2CPU-2048RAM", "topology.kubernetes.io/zone", "rack-1", "rule zones")
	assert.NotContains(t, controlPlane, "rule zones")
	assertContains(t, stderr, "no systeminformations of machine 10.77.0.3", preview.Command(machine.BaseKinds()))
}

func TestRender_ReadsStandardInput(t *testing.T) {
	text, err := os.ReadFile(printed)
	require.NoError(t, err)

	piped, _, err := rendered(t, string(text), "--machine", "-")
	require.NoError(t, err)

	fromFile, _, err := rendered(t, "", "--machine", printed)
	require.NoError(t, err)
	assert.Equal(t, fromFile, piped)
}

func TestRender_UsesKubeletFlags(t *testing.T) {
	text, err := os.ReadFile(printed)
	require.NoError(t, err)

	_, _, err = rendered(t, "", "--machine", printed, "--node-ip", "10.77.0.3")
	assert.ErrorContains(t, err, "--node-ip cannot be used with more than one machine")

	rules := file(t, "global: {clusterName: mine}\ntransformations:\n- labels: {arch: '{{ .Architecture }}'}\n")
	_, tail, _ := bytes.Cut(text, []byte("node: 10.77.0.3\n"))
	worker := file(t, "node: 10.77.0.3\n"+string(tail))
	report := reportsOf(t, "--machine", worker, "--node-ip", "10.77.0.3", "--arch", "arm64", "--config", rules)[0]

	assert.Subset(t, valuesOf(report), []string{"label arch=arm64", "label node.cloudprovider.kubernetes.io/clustername=mine"})
}

func TestRender_Fails(t *testing.T) {
	pending := file(t, pendingMachine)
	table := file(t, "NODE       NAMESPACE   TYPE               ID                 VERSION\n10.0.0.2   runtime     PlatformMetadata   platformmetadata   1\n")
	anonymous := file(t, "node:\nmetadata: {type: Nodenames.kubernetes.talos.dev, id: nodename}\nspec: {nodename: worker-1}\n")
	unnamed := file(t, pendingMachine+"---\nnode: m\nmetadata: {type: Nodenames.kubernetes.talos.dev, id: nodename}\nspec: {nodename: \"\"}\n")

	for _, test := range []struct {
		name, want string
		args       []string
	}{
		{"without a machine", "machine", nil},
		{"with --machine and --node", "none of the others can be", []string{"--machine", "-", "--node", "127.0.0.1"}},
		{"with a missing configuration file", "read configuration", []string{"--machine", printed, "--config", "/nowhere"}},
		{"with an invalid configuration", "file.yaml:3:", []string{"--machine", printed, "--config", file(t, "global: {}\n\nmistake: 1\n")}},
		{"with a missing machine file", "read machine: open /nowhere", []string{"--machine", "/nowhere"}},
		{"with another kind of document", "document 1, from line 1", []string{"--machine", file(t, "kind: Node\n")}},
		{"with a pending Node", "nodes not ready to initialize: worker-1", []string{"--machine", pending}},
		{"with no addresses of a machine without --nodes", "read machine from " + anonymous + ": no platformmetadatas, addressstatuses, machinestatuses, ", []string{"--machine", anonymous}},
		{"with a table", "read machine from " + table + ": the input is a table, which omits most values: add -o yaml", []string{"--machine", table}},
		{"with an empty nodename", "read machine from " + unnamed + ": no platformmetadatas, addressstatuses, machinestatuses, nodenames, ", []string{"--machine", unnamed}},
		{"with an invalid node IP", "--node-ip", []string{"--machine", printed, "--node-ip", "localhost"}},
		{"with an unknown output format", `invalid argument "wide"`, []string{"--machine", printed, "-o", "wide"}},
		{"with an unknown fallback", "--provider-id-fallback", []string{"--machine", printed, "--provider-id-fallback", "mac"}},
		{"with an unknown talosconfig context", `context "nowhere" not found`, []string{"--node", "127.0.0.1", "--talosconfig", file(t, "context: nowhere\n")}},
		{"with a missing talosconfig", "talosconfig", []string{"--node", "127.0.0.1", "--talosconfig", "/nowhere"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, _, err := rendered(t, "", test.args...)
			assert.ErrorContains(t, err, test.want)
		})
	}
}

func TestRender_ShowsRulesForMetadataOnly(t *testing.T) {
	const spec = "{platform: openstack, hostname: talos-wk, instanceType: large}\n"

	for name, machine := range map[string]string{
		"with its node":    "node: 10.0.0.2\nmetadata: {type: PlatformMetadatas.talos.dev, id: platformmetadata}\nspec: " + spec,
		"without its node": "metadata: {type: PlatformMetadatas.talos.dev, id: platformmetadata}\nspec: " + spec,
	} {
		t.Run(name, func(t *testing.T) {
			stdout, stderr, err := rendered(t, machine, "--machine", "-", "--config", file(t, someRules))
			require.NoError(t, err)

			for _, want := range []string{
				`Node talos-wk\n`, `unknown +addresses +missing resources of the machine\n`, `unknown +name `, `unknown +providerID `,
				`label +example.org/size +large +rule zones\n`, `label +topology.kubernetes.io/zone +rack-1 +rule zones\n`,
			} {
				assert.Regexp(t, want, stdout)
			}

			assert.Contains(t, stderr, "Warning: stdin: no addressstatuses, machinestatuses, nodenames, ")
		})
	}
}

func TestRender_WarnsOfMissingFactsOnlyIfTheyAreUsed(t *testing.T) {
	const metadata = "metadata: {type: PlatformMetadatas.talos.dev, id: platformmetadata}\nspec: {platform: metal, hostname: web}\n"

	rule := "transformations: [{labels: {a: '{{ first .Gateways }}-{{ .CPUs }}'}}]\n"
	_, stderr, err := rendered(t, metadata, "--machine", "-", "--config", file(t, rule))
	require.NoError(t, err)
	assert.Contains(t, stderr, "routestatuses")
	assert.Contains(t, stderr, "processors")

	for _, other := range []string{"pcidevices", "linkstatuses", "metakeys", "memorymodules"} {
		assert.NotContains(t, stderr, other)
	}
}

func TestRender_AcceptsExtensionServiceConfig(t *testing.T) {
	reports := reportsOf(t, "--machine", printed, "--config", "testdata/config/good-document.yaml")
	assert.Contains(t, reports[0].Changes, preview.Change{Field: "label", Key: "team", After: new("web"), From: "rule web"})
}

func TestRender_PrintsWhyNodeIsPending(t *testing.T) {
	stdout, stderr, err := rendered(t, pendingMachine, "--machine", "-")
	assert.Error(t, err)
	assert.Regexp(t, "problem +MetadataPending +Node cannot be initialized yet: the machine has not published its platform yet\n", stdout)
	assertContains(t, stderr, "Warning: stdin: no platformmetadatas, machinestatuses, ", " of machine n\n")
}

func TestRender_UsesProviderIDFallback(t *testing.T) {
	smbios := "---\nnode: 10.77.0.3\nmetadata: {type: SystemInformations.hardware.talos.dev, id: systeminformation}\nspec: {uuid: 30a0bdf7-4b1a-4f0e-9f86-2a3d64a3c5ee}\n"

	text, err := os.ReadFile(printed)
	require.NoError(t, err)

	machines := file(t, string(text)+smbios)

	for _, test := range []struct {
		name, want string
		args       []string
	}{
		{"the UUID", "talos://container/30a0bdf7-4b1a-4f0e-9f86-2a3d64a3c5ee", nil},
		{"the flag", "talos://container/10.77.0.3", []string{"--provider-id-fallback", "node-ip"}},
		{"the configuration", "talos://container/10.77.0.3", []string{"--config", file(t, "global: {providerIDFallback: node-ip}\n")}},
		{
			"the configuration rather than the flag", "talos://container/30a0bdf7-4b1a-4f0e-9f86-2a3d64a3c5ee",
			[]string{"--provider-id-fallback", "node-ip", "--config", file(t, "global: {providerIDFallback: uuid}\n")},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			assert.Contains(t, valuesOf(reportsOf(t, append(test.args, "--machine", machines)...)[1]), "providerID ="+test.want)
		})
	}
}

// liveSite returns a cluster of a control-plane machine and a worker, and the path of a talosconfig for it.
func liveSite(t *testing.T) (site *talostest.Cluster, talosconfig string) {
	t.Helper()

	site, err := talostest.New(talostest.Options{})
	require.NoError(t, err)
	t.Cleanup(site.Close)

	for name, typ := range map[string]talosmachine.Type{"cp-1": talosmachine.TypeControlPlane, "worker-1": talosmachine.TypeWorker} {
		_, err := site.AddMachine(talostest.MachineSpec{
			Nodename: name, Type: typ, Platform: runtime.PlatformMetadataSpec{Platform: "aws", InstanceID: name, ProviderID: "aws:///" + name},
			// Older Talos versions lack some kinds.
			UnsupportedTypes: []string{runtime.ExtensionStatusType},
		})
		require.NoError(t, err)
	}

	return site, writeTalosconfig(t, site, site.Machine("cp-1").Address().String())
}

// writeTalosconfig writes a talosconfig with the given endpoints to a file and returns its path.
func writeTalosconfig(t *testing.T, site *talostest.Cluster, endpoints ...string) string {
	t.Helper()

	config, err := site.Talosconfig(string(role.Reader))
	require.NoError(t, err)

	config.Contexts[config.Context].Endpoints = endpoints

	path := filepath.Join(t.TempDir(), "talosconfig")
	require.NoError(t, config.Save(path))

	return path
}

// nameService replaces the connections to name servers until the test ends, so that tests do not depend on the network.
func nameService(t *testing.T, dial func() (net.Conn, error)) {
	t.Helper()

	before := net.DefaultResolver
	net.DefaultResolver = &net.Resolver{PreferGo: true, Dial: func(context.Context, string, string) (net.Conn, error) { return dial() }}

	t.Cleanup(func() { net.DefaultResolver = before })
}

func noNameService() (net.Conn, error) { return nil, errors.New("no name server") }

func TestRender_ReadsLiveMachine(t *testing.T) {
	nameService(t, noNameService)

	site, talosconfig := liveSite(t)
	worker := addMember(t, site)

	for _, node := range []string{worker.Address().String(), "worker-1.example.invalid"} {
		t.Run(node, func(t *testing.T) {
			report := reportsOf(t, "--node", node, "--talosconfig", talosconfig)[0]
			assert.Equal(t, node, report.Node)
			assert.Equal(t, "worker-1", report.Name)
			assert.Contains(t, valuesOf(report), "providerID =aws:///worker-1")
		})
	}

	t.Run("with facts", func(t *testing.T) {
		meta := runtime.NewMetaKey(runtime.NamespaceName, "0x0c")
		meta.TypedSpec().Value = "rack-7"
		require.NoError(t, worker.State().Create(t.Context(), meta))

		rule := file(t, "transformations: [{labels: {rack: '{{ index .Meta \"0x0c\" }}'}}]\n")
		report := reportsOf(t, "--node", worker.Address().String(), "--talosconfig", talosconfig, "--config", rule)[0]
		assert.Contains(t, valuesOf(report), "label rack=rack-7")
	})

	t.Run("with the talosconfig of the environment", func(t *testing.T) {
		t.Setenv("TALOSCONFIG", talosconfig)
		reportsOf(t, "--node", worker.Address().String())
	})

	t.Run("with the talosconfig of the user", func(t *testing.T) {
		t.Setenv("TALOSCONFIG", "")
		t.Setenv("HOME", "/nowhere")

		_, _, err := rendered(t, "", "--node", worker.Address().String())
		assert.ErrorContains(t, err, "/nowhere/.talos/config")
	})

	t.Run("without endpoints", func(t *testing.T) {
		reportsOf(t, "--node", worker.Address().String(), "--talosconfig", writeTalosconfig(t, site))
	})

	t.Run("with an endpoint that does not forward", func(t *testing.T) {
		path := writeTalosconfig(t, site, worker.Address().String())

		_, _, err := rendered(t, "", "--node", site.Machine("cp-1").Address().String(), "--talosconfig", path)
		assert.ErrorContains(t, err, "no request forwarding")
	})

	t.Run("with an unknown name", func(t *testing.T) {
		_, _, err := rendered(t, "", "--node", "worker-2.invalid", "--talosconfig", talosconfig)
		assert.ErrorContains(t, err, "read machine worker-2.invalid: ")
	})
}

func TestRender_UsesContextAndEndpoints(t *testing.T) {
	site, _ := liveSite(t)

	config, err := site.Talosconfig(string(role.Reader))
	require.NoError(t, err)

	name := config.Context
	config.Context, config.Contexts[name].Endpoints = "nowhere", []string{"192.0.2.1"}

	path := filepath.Join(t.TempDir(), "talosconfig")
	require.NoError(t, config.Save(path))

	reportsOf(t, "--node", site.Machine("worker-1").Address().String(), "--talosconfig", path, "--context", name, "-e", site.Machine("cp-1").Address().String())
}

func TestRender_RejectsLiveMachineWithoutNodename(t *testing.T) {
	site, talosconfig := liveSite(t)
	cp := site.Machine("cp-1")
	require.NoError(t, cp.SetNodename(t.Context(), ""))

	stdout, _, err := rendered(t, "", "--node", cp.Address().String(), "--talosconfig", talosconfig)
	assert.ErrorContains(t, err, "read machine "+cp.Address().String()+": machine has not published its nodename", stdout)
	assert.Empty(t, stdout)
}

// addMember adds worker-1 to the members known to the control plane, under a name that no name server knows.
func addMember(t *testing.T, site *talostest.Cluster) *talostest.Machine {
	t.Helper()

	worker := site.Machine("worker-1")

	member := cluster.NewMember(cluster.NamespaceName, "worker-1")
	member.TypedSpec().Hostname = "worker-1.example.invalid"
	member.TypedSpec().Addresses = []netip.Addr{worker.Address()}

	require.NoError(t, site.Machine("cp-1").State().Create(t.Context(), member))

	return worker
}

func TestRender_FindsMemberIfNameServerDoesNotRespond(t *testing.T) {
	nameService(t, func() (net.Conn, error) {
		conn, other := net.Pipe()
		t.Cleanup(func() { _ = other.Close() })

		go func() { _, _ = io.Copy(io.Discard, other) }()

		return conn, nil
	})

	site, talosconfig := liveSite(t)
	addMember(t, site)
	assert.Equal(t, "worker-1", reportsOf(t, "--node", "worker-1.example.invalid", "--talosconfig", talosconfig)[0].Name)
}

func TestRender_OnlyListsResourcesOfLiveMachine(t *testing.T) {
	site, talosconfig := liveSite(t)
	worker := site.Machine("worker-1")
	reportsOf(t, "--node", worker.Address().String(), "--talosconfig", talosconfig)

	for _, call := range worker.Calls() {
		assert.Equal(t, "/cosi.resource.State/List", call.Method)
	}
}
