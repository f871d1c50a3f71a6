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
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	talosmachine "github.com/siderolabs/talos/pkg/machinery/config/machine"
	"github.com/siderolabs/talos/pkg/machinery/resources/cluster"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/siderolabs/talos/pkg/machinery/role"

	"github.com/talos-ccm/talos-ccm/pkg/preview"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
)

// printed is what talosctl printed of two real machines, talos-cp and talos-wk.
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

// file writes a file for the test.
func file(t *testing.T, content string) string {
	t.Helper()

	path := filepath.Join(t.TempDir(), "file.yaml")
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}

	return path
}

// rendered runs the command.
func rendered(t *testing.T, stdin string, args ...string) (stdout, stderr string, err error) {
	t.Helper()

	var out, errOut bytes.Buffer

	cmd := newRenderCommand()
	cmd.SilenceErrors, cmd.SilenceUsage = true, true // as the root command does
	cmd.SetArgs(args)
	cmd.SetIn(strings.NewReader(stdin))
	cmd.SetOut(&out)
	cmd.SetErr(&errOut)

	err = cmd.ExecuteContext(t.Context())

	return out.String(), errOut.String(), err
}

// reportsOf runs the command and fails the test unless it succeeds.
func reportsOf(t *testing.T, args ...string) []preview.Report {
	t.Helper()

	stdout, _, err := rendered(t, "", append(args, "--output", "json")...)
	if err != nil {
		t.Fatal(err)
	}

	var reports []preview.Report
	if err := json.Unmarshal([]byte(stdout), &reports); err != nil {
		t.Fatal(err)
	}

	return reports
}

func TestRenderShowsWhatTheNodesGet(t *testing.T) {
	stdout, stderr, err := rendered(t, "", "--machine", printed, "--config", file(t, someRules))
	if err != nil {
		t.Fatal(err)
	}

	controlPlane, worker, _ := strings.Cut(stdout, "Node talos-wk")

	for _, want := range []string{"Node talos-cp", "talos://container/10.77.0.2", "InternalIP"} {
		if !strings.Contains(controlPlane, want) {
			t.Errorf("%q is not in %s", want, controlPlane)
		}
	}

	for _, want := range []string{"example.org/size", "2CPU-2048RAM", "topology.kubernetes.io/zone", "rack-1", "rule zones"} {
		if !strings.Contains(worker, want) || strings.Contains(controlPlane, "rule zones") {
			t.Errorf("%q is not in %s", want, worker)
		}
	}

	if !strings.Contains(stderr, "of machine 10.77.0.3 there is no resource of systeminformations, extensionstatuses") || !strings.Contains(stderr, preview.Command()) {
		t.Errorf("what is missing is not named: %s", stderr)
	}
}

func TestRenderReadsStandardInput(t *testing.T) {
	text, err := os.ReadFile(printed)
	if err != nil {
		t.Fatal(err)
	}

	piped, _, err := rendered(t, string(text), "--machine", "-")
	if err != nil {
		t.Fatal(err)
	}

	fromFile, _, err := rendered(t, "", "--machine", printed)
	if err != nil {
		t.Fatal(err)
	}

	if diff := cmp.Diff(fromFile, piped); diff != "" {
		t.Error(diff)
	}
}

func TestRenderIsToldOfTheKubelet(t *testing.T) {
	text, err := os.ReadFile(printed)
	if err != nil {
		t.Fatal(err)
	}

	_, _, err = rendered(t, "", "--machine", printed, "--node-ip", "10.77.0.3")
	if err == nil || !strings.Contains(err.Error(), "--node-ip is for one machine") {
		t.Errorf("got %v", err)
	}

	rules := file(t, "global: {clusterName: mine}\ntransformations:\n- labels: {arch: '{{ .Architecture }}'}\n")
	_, tail, _ := bytes.Cut(text, []byte("node: 10.77.0.3\n"))
	worker := file(t, "node: 10.77.0.3\n"+string(tail))
	report := reportsOf(t, "--machine", worker, "--node-ip", "10.77.0.3", "--arch", "arm64", "--config", rules)[0]

	for _, want := range []string{"arch=arm64", "node.cloudprovider.kubernetes.io/clustername=mine"} {
		if !slices.ContainsFunc(report.Labels, func(l preview.Entry) bool { return l.Key+"="+l.Value == want }) {
			t.Errorf("%s is not in %v", want, report.Labels)
		}
	}
}

func TestRenderFails(t *testing.T) {
	pending := "node: n\nmetadata: {type: Nodenames.kubernetes.talos.dev, id: nodename}\nspec: {nodename: worker-1}\n"

	for _, test := range []struct {
		rule, want string
		args       []string
	}{
		{"without a machine", "machine", nil},
		{"with two kinds of machines", "none of the others can be", []string{"--machine", "-", "--node", "127.0.0.1"}},
		{"with a configuration that is not there", "read the configuration", []string{"--machine", printed, "--config", "/nowhere"}},
		{"with a bad configuration, by its lines", "file.yaml:3:", []string{"--machine", printed, "--config", file(t, "global: {}\n\nmistake: 1\n")}},
		{"with a machine that is not there", "read the machine: open /nowhere", []string{"--machine", "/nowhere"}},
		{"with what is no machine, by its lines", "document 1, from line 1", []string{"--machine", file(t, "kind: Node\n")}},
		{"with a Node that would stay uninitialized", "to stay uninitialized for now: worker-1", []string{"--machine", file(t, pending)}},
		{"with a node IP that is none", "--node-ip", []string{"--machine", printed, "--node-ip", "localhost"}},
		{"with a format that does not exist", `no output format "wide"`, []string{"--machine", printed, "-o", "wide"}},
		{"with a fallback that does not exist", "--provider-id-fallback", []string{"--machine", printed, "--provider-id-fallback", "mac"}},
		{"without the talosconfig", "talosconfig", []string{"--node", "127.0.0.1", "--talosconfig", "/nowhere"}},
	} {
		t.Run(test.rule, func(t *testing.T) {
			if _, _, err := rendered(t, "", test.args...); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got %v, want %q", err, test.want)
			}
		})
	}
}

func TestRenderShowsWhyANodeIsPending(t *testing.T) {
	stdout, _, err := rendered(t, "node: n\nmetadata: {type: Nodenames.kubernetes.talos.dev, id: nodename}\nspec: {nodename: worker-1}\n", "--machine", "-")
	if err == nil || !strings.Contains(stdout, "pending") {
		t.Errorf("got %v: %s", err, stdout)
	}
}

func TestRenderGoesByTheFallback(t *testing.T) {
	smbios := "---\nnode: 10.77.0.3\nmetadata: {type: SystemInformations.hardware.talos.dev, id: systeminformation}\nspec: {uuid: 30a0bdf7-4b1a-4f0e-9f86-2a3d64a3c5ee}\n"

	text, err := os.ReadFile(printed)
	if err != nil {
		t.Fatal(err)
	}

	machines := file(t, string(text)+smbios)

	for _, test := range []struct {
		rule, want string
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
		t.Run(test.rule, func(t *testing.T) {
			if got := reportsOf(t, append(test.args, "--machine", machines)...)[1].ProviderID.Value; got != test.want {
				t.Errorf("got %s, want %s", got, test.want)
			}
		})
	}
}

// liveSite is a control plane and a worker that can be dialed, and a talosconfig for them.
func liveSite(t *testing.T) (site *talostest.Cluster, talosconfig string) {
	t.Helper()

	site, err := talostest.New(talostest.Options{})
	if err != nil {
		t.Fatal(err)
	}

	t.Cleanup(site.Close)

	for name, typ := range map[string]talosmachine.Type{"cp-1": talosmachine.TypeControlPlane, "worker-1": talosmachine.TypeWorker} {
		if _, err := site.AddMachine(talostest.MachineSpec{
			Nodename: name, Type: typ, Platform: runtime.PlatformMetadataSpec{Platform: "aws", InstanceID: name, ProviderID: "aws:///" + name},
			// A version of Talos that lacks a kind.
			UnsupportedTypes: []string{runtime.ExtensionStatusType},
		}); err != nil {
			t.Fatal(err)
		}
	}

	config, err := site.Talosconfig(string(role.Reader))
	if err != nil {
		t.Fatal(err)
	}

	talosconfig = filepath.Join(t.TempDir(), "talosconfig")
	if err := config.Save(talosconfig); err != nil {
		t.Fatal(err)
	}

	return site, talosconfig
}

// nameService has names resolved over connections of dial, until the test ends: no test depends on what the network knows, or how fast.
func nameService(t *testing.T, dial func() (net.Conn, error)) {
	t.Helper()

	before := net.DefaultResolver
	net.DefaultResolver = &net.Resolver{PreferGo: true, Dial: func(context.Context, string, string) (net.Conn, error) { return dial() }}

	t.Cleanup(func() { net.DefaultResolver = before })
}

func noNameService() (net.Conn, error) { return nil, errors.New("there is no name service") }

func TestRenderAsksALiveMachine(t *testing.T) {
	nameService(t, noNameService)

	site, talosconfig := liveSite(t)
	worker := addMember(t, site)

	for _, node := range []string{worker.Address().String(), "worker-1.example.invalid"} {
		t.Run(node, func(t *testing.T) {
			report := reportsOf(t, "--node", node, "--talosconfig", talosconfig)[0]
			if report.Node != node || report.Name != "worker-1" || report.ProviderID.Value != "aws:///worker-1" {
				t.Errorf("got %+v", report)
			}
		})
	}

	t.Run("by the environment's talosconfig", func(t *testing.T) {
		t.Setenv("TALOSCONFIG", talosconfig)
		reportsOf(t, "--node", worker.Address().String())
	})

	t.Run("by the user's talosconfig", func(t *testing.T) {
		t.Setenv("TALOSCONFIG", "")
		t.Setenv("HOME", "/nowhere")

		if _, _, err := rendered(t, "", "--node", worker.Address().String()); err == nil || !strings.Contains(err.Error(), "/nowhere/.talos/config") {
			t.Errorf("got %v", err)
		}
	})

	t.Run("that nobody knows", func(t *testing.T) {
		if _, _, err := rendered(t, "", "--node", "worker-2.invalid", "--talosconfig", talosconfig); err == nil || !strings.Contains(err.Error(), "it knows no member worker-2.invalid") {
			t.Errorf("got %v", err)
		}
	})
}

// addMember has the control plane know worker-1 as a member with a name that name service does not know.
func addMember(t *testing.T, site *talostest.Cluster) *talostest.Machine {
	t.Helper()

	worker := site.Machine("worker-1")

	member := cluster.NewMember(cluster.NamespaceName, "worker-1")
	member.TypedSpec().Hostname = "worker-1.example.invalid"
	member.TypedSpec().Addresses = []netip.Addr{worker.Address()}

	if err := site.Machine("cp-1").State().Create(t.Context(), member); err != nil {
		t.Fatal(err)
	}

	return worker
}

func TestRenderFindsAMemberWhereNameServiceIsSilent(t *testing.T) {
	nameService(t, func() (net.Conn, error) {
		conn, other := net.Pipe()
		t.Cleanup(func() { _ = other.Close() })

		go func() { _, _ = io.Copy(io.Discard, other) }()

		return conn, nil
	})

	site, talosconfig := liveSite(t)
	addMember(t, site)

	if report := reportsOf(t, "--node", "worker-1.example.invalid", "--talosconfig", talosconfig)[0]; report.Name != "worker-1" {
		t.Errorf("got %+v", report)
	}
}

func TestRenderWritesNothingToAMachine(t *testing.T) {
	site, talosconfig := liveSite(t)
	worker := site.Machine("worker-1")
	reportsOf(t, "--node", worker.Address().String(), "--talosconfig", talosconfig)

	for _, call := range worker.Calls() {
		if call.Method != "/cosi.resource.State/List" {
			t.Errorf("called %s", call.Method)
		}
	}
}
