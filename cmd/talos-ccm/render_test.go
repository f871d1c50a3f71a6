package main

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	talosmachine "github.com/siderolabs/talos/pkg/machinery/config/machine"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/siderolabs/talos/pkg/machinery/role"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/talos-ccm/talos-ccm/pkg/preview"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/pkg/version"
)

// recorded is the file of a worker with Talos v1.13.5 in a container, talos-wk.
const recorded = "testdata/machine.yaml"

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
nodename: worker-1
addresses: [{prefix: 10.0.0.1/24, link: eth0}]
nodeIPs: [10.0.0.1]
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

// reportOf runs the command, which must succeed, and returns the report.
func reportOf(t *testing.T, args ...string) preview.Report {
	t.Helper()

	stdout, _, err := rendered(t, "", append(args, "--output", "json")...)
	require.NoError(t, err)

	var report preview.Report
	require.NoError(t, json.Unmarshal([]byte(stdout), &report))

	return report
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

func TestRender_PrintsNodeAndRules(t *testing.T) {
	stdout, stderr, err := rendered(t, "", "--machine", recorded, "--config", file(t, someRules))
	require.NoError(t, err)
	assertContains(t, stdout, "Node talos-wk", "talos://container/10.77.0.3", "InternalIP", "example.org/size", "2CPU-2048RAM", "topology.kubernetes.io/zone", "rack-1", "rule zones")
	assert.Empty(t, stderr)
}

func TestRender_ReadsStandardInput(t *testing.T) {
	text, err := os.ReadFile(recorded)
	require.NoError(t, err)

	piped, _, err := rendered(t, string(text), "--machine", "-")
	require.NoError(t, err)

	fromFile, _, err := rendered(t, "", "--machine", recorded)
	require.NoError(t, err)
	assert.Equal(t, fromFile, piped)
}

func TestRender_UsesKubeletFlags(t *testing.T) {
	rules := file(t, "global: {clusterName: mine}\ntransformations:\n- labels: {arch: '{{ .Architecture }}'}\n")
	report := reportOf(t, "--machine", recorded, "--node-ip", "169.254.116.108", "--arch", "arm64", "--config", rules)

	assert.Subset(t, valuesOf(report), []string{"address InternalIP=169.254.116.108", "label arch=arm64", "label node.cloudprovider.kubernetes.io/clustername=mine"})
}

func TestRender_Fails(t *testing.T) {
	pending := file(t, pendingMachine)
	mistake := file(t, pendingMachine+"system: {serialNumber: a}\n")

	for _, test := range []struct {
		name, want string
		args       []string
	}{
		{"without a machine", "machine", nil},
		{"with --machine and --node", "none of the others can be", []string{"--machine", "-", "--node", "127.0.0.1"}},
		{"with a missing configuration file", "read configuration", []string{"--machine", recorded, "--config", "/nowhere"}},
		{"with an invalid configuration", "file.yaml:3:", []string{"--machine", recorded, "--config", file(t, "global: {}\n\nmistake: 1\n")}},
		{"with a missing machine file", "read machine: open /nowhere", []string{"--machine", "/nowhere"}},
		{"with an unknown key of a machine", "read machine from " + mistake + ": yaml: construct errors: line 5: field serialNumber not found", []string{"--machine", mistake}},
		{"with an empty file", "read machine from stdin: ", []string{"--machine", "-"}},
		{"without a nodename", ": no nodename", []string{"--machine", file(t, "platform: {platform: metal}\n")}},
		{"with a pending Node", "node not ready to initialize: worker-1", []string{"--machine", pending}},
		{"with an invalid node IP", "--node-ip", []string{"--machine", recorded, "--node-ip", "localhost"}},
		{"with an unknown output format", `invalid argument "wide"`, []string{"--machine", recorded, "-o", "wide"}},
		{"with an unknown fallback", "--provider-id-fallback", []string{"--machine", recorded, "--provider-id-fallback", "mac"}},
		{"with an unknown talosconfig context", `context "nowhere" not found`, []string{"--node", "127.0.0.1", "--talosconfig", file(t, "context: nowhere\n")}},
		{"with a missing talosconfig", "talosconfig", []string{"--node", "127.0.0.1", "--talosconfig", "/nowhere"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, _, err := rendered(t, "", test.args...)
			assert.ErrorContains(t, err, test.want)
		})
	}
}

func TestRender_WarnsOfFileOfOtherVersion(t *testing.T) {
	other := file(t, "version: v9.9.9\nunknown: 1\nplatformPublished: true\nplatform: {platform: container}\n"+pendingMachine)

	stdout, stderr, err := rendered(t, "", "--machine", other)
	require.NoError(t, err)
	assert.Contains(t, stdout, "Node worker-1\n")
	assert.Equal(t, "Warning: talos-ccm v9.9.9 wrote "+other+"; talos-ccm "+version.Version()+" ignores keys that it does not know\n", stderr)
}

func TestRender_AcceptsExtensionServiceConfig(t *testing.T) {
	report := reportOf(t, "--machine", recorded, "--config", "testdata/config/good-document.yaml")
	assert.Contains(t, report.Changes, preview.Change{Field: "label", Key: "team", After: new("web"), From: "rule web"})
}

// documentOf returns a document with variables of the extension service and a rule without effect.
func documentOf(variables ...string) string {
	return `
apiVersion: v1alpha1
kind: ExtensionServiceConfig
name: talos-ccm
configFiles:
  - mountPath: /usr/local/etc/talos-ccm/config.yaml
    content: |
      transformations:
        - name: nothing
environment: [` + strings.Join(variables, ", ") + "]\n"
}

func TestRender_UsesEnvironmentOfDocument(t *testing.T) {
	machine := file(t, pendingMachine+"platformPublished: true\nplatform: {platform: metal}\nsystem: {uuid: 30a0bdf7-4b1a-4f0e-9f86-2a3d64a3c5ee}\n")
	nodeIP := file(t, documentOf("TALOS_CCM_PROVIDER_ID_FALLBACK=node-ip"))

	assert.Contains(t, valuesOf(reportOf(t, "--machine", machine, "--config", nodeIP)), "providerID =talos://metal/10.0.0.1")
	assert.Contains(t, valuesOf(reportOf(t, "--machine", machine, "--config", nodeIP, "--provider-id-fallback", "uuid")),
		"providerID =talos://metal/30a0bdf7-4b1a-4f0e-9f86-2a3d64a3c5ee", "the flag does not take precedence")

	off := file(t, documentOf("TALOS_CCM_CONTROLLERS=node-csr-approval"))
	assert.True(t, reportOf(t, "--machine", machine, "--config", off).Unmanaged)
}

func TestRender_PrintsWarningsOfConfiguration(t *testing.T) {
	config := file(t, documentOf("TALOS_CCM_CONTROLLERS=node-csr-approval", "TALOS_CCM_LEADER_ELECT=false"))

	_, stderr, err := rendered(t, "", "--machine", recorded, "--config", config)
	require.NoError(t, err)
	assertContains(t, stderr, config+":9: warning: transformations[0] (rule \"nothing\"): the rule sets nothing\n", "warning: environment[1]: --leader-elect: false",
		"warning: cloud-node-controller is off: talos-ccm would write to no Node\n")
}

func TestRender_PrintsKeysThatTablesLack(t *testing.T) {
	config := file(t, "tables: {zones: {a: b}}\ntransformations: [{labels: {zone: '{{ lookup \"zones\" .Nodename }}'}}]\n")

	stdout, _, err := rendered(t, "", "--machine", recorded, "--config", config)
	require.NoError(t, err)
	assert.Regexp(t, `rule +#1 +applies; labels\[zone\]: table "zones" has no key "talos-wk"\n`, stdout)
}

func TestRender_PrintsWhyNodeIsPending(t *testing.T) {
	stdout, _, err := rendered(t, pendingMachine, "--machine", "-")
	assert.Error(t, err)
	assert.Regexp(t, "problem +MetadataPending +Node cannot be initialized yet: the machine has not published its platform yet\n", stdout)
}

func TestRender_UsesProviderIDFallback(t *testing.T) {
	machine := file(t, pendingMachine+"platformPublished: true\nplatform: {platform: container}\nsystem: {uuid: 30a0bdf7-4b1a-4f0e-9f86-2a3d64a3c5ee}\n")

	for _, test := range []struct {
		name, want string
		args       []string
	}{
		{"the UUID", "talos://container/30a0bdf7-4b1a-4f0e-9f86-2a3d64a3c5ee", nil},
		{"the flag", "talos://container/10.0.0.1", []string{"--provider-id-fallback", "node-ip"}},
		{"the configuration", "talos://container/10.0.0.1", []string{"--config", file(t, "global: {providerIDFallback: node-ip}\n")}},
		{
			"the configuration rather than the flag", "talos://container/30a0bdf7-4b1a-4f0e-9f86-2a3d64a3c5ee",
			[]string{"--provider-id-fallback", "node-ip", "--config", file(t, "global: {providerIDFallback: uuid}\n")},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			assert.Contains(t, valuesOf(reportOf(t, append(test.args, "--machine", machine)...)), "providerID ="+test.want)
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
	worker := site.Machine("worker-1")

	report := reportOf(t, "--node", worker.Address().String(), "--talosconfig", talosconfig)
	assert.Equal(t, "worker-1", report.Name)
	assert.Contains(t, valuesOf(report), "providerID =aws:///worker-1")

	t.Run("with facts", func(t *testing.T) {
		meta := runtime.NewMetaKey(runtime.NamespaceName, "0x0c")
		meta.TypedSpec().Value = "rack-7"
		require.NoError(t, worker.State().Create(t.Context(), meta))

		rule := file(t, "transformations: [{labels: {rack: '{{ index .Meta \"0x0c\" }}'}}]\n")
		report := reportOf(t, "--node", worker.Address().String(), "--talosconfig", talosconfig, "--config", rule)
		assert.Contains(t, valuesOf(report), "label rack=rack-7")

		// The file has the facts, too, although it was written without the rule.
		saved, _, err := rendered(t, "", "--node", worker.Address().String(), "--talosconfig", talosconfig, "-o", "machine")
		require.NoError(t, err)
		assert.Equal(t, report, reportOf(t, "--machine", file(t, saved), "--config", rule))
	})

	t.Run("with the talosconfig of the environment", func(t *testing.T) {
		t.Setenv("TALOSCONFIG", talosconfig)
		reportOf(t, "--node", worker.Address().String())
	})

	t.Run("with the talosconfig of the user", func(t *testing.T) {
		t.Setenv("TALOSCONFIG", "")
		t.Setenv("HOME", "/nowhere")

		_, _, err := rendered(t, "", "--node", worker.Address().String())
		assert.ErrorContains(t, err, "/nowhere/.talos/config")
	})

	t.Run("without endpoints", func(t *testing.T) {
		reportOf(t, "--node", worker.Address().String(), "--talosconfig", writeTalosconfig(t, site))
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

	reportOf(t, "--node", site.Machine("worker-1").Address().String(), "--talosconfig", path, "--context", name, "-e", site.Machine("cp-1").Address().String())
}

func TestRender_RejectsLiveMachineWithoutNodename(t *testing.T) {
	site, talosconfig := liveSite(t)
	cp := site.Machine("cp-1")
	require.NoError(t, cp.SetNodename(t.Context(), ""))

	stdout, _, err := rendered(t, "", "--node", cp.Address().String(), "--talosconfig", talosconfig)
	assert.ErrorContains(t, err, "read machine "+cp.Address().String()+": machine has not published its nodename", stdout)
	assert.Empty(t, stdout)
}

func TestRender_OnlyListsResourcesOfLiveMachine(t *testing.T) {
	site, talosconfig := liveSite(t)
	worker := site.Machine("worker-1")
	reportOf(t, "--node", worker.Address().String(), "--talosconfig", talosconfig)

	for _, call := range worker.Calls() {
		assert.Equal(t, "/cosi.resource.State/List", call.Method)
	}
}
