// Package upstream_test compares talos-ccm with recorded results of the upstream Talos CCM.
//
// Each line of testdata/cases.json.gz is a machine, its Node, a configuration file, and the Node as the upstream Talos CCM
// initialized it. Machines and files were generated at random from one seed. To record, the node controller of
// k8s.io/cloud-provider called InstanceMetadata of the upstream Talos CCM, commit 3e16ef5, which read the machine's
// resources from an in-memory COSI state. API server and COSI state were fakes, so the API server accepted label values
// that a real one rejects; the generated metadata has none.
//
// Each line of testdata/templates.json.gz is a machine of these with one template. TransformNode of the same commit
// executed the template.
package upstream_test

import (
	"bufio"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/siderolabs/talos/pkg/machinery/nethelpers"
	"github.com/siderolabs/talos/pkg/machinery/resources/cluster"
	"github.com/siderolabs/talos/pkg/machinery/resources/hardware"
	"github.com/siderolabs/talos/pkg/machinery/resources/k8s"
	"github.com/siderolabs/talos/pkg/machinery/resources/network"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	cloudproviderapi "k8s.io/cloud-provider/api"

	"github.com/talos-ccm/talos-ccm/pkg/ccm"
	"github.com/talos-ccm/talos-ccm/pkg/config"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
)

// minCases is the number of cases below which the file is not the recorded one.
const minCases = 3000

// record is a case and the upstream's result.
type record struct {
	Node      string                         `json:"node"`
	NodeIPs   string                         `json:"nodeIPs"`
	Cluster   string                         `json:"cluster"`
	Config    string                         `json:"config"`
	Platform  runtime.PlatformMetadataSpec   `json:"platform"`
	System    hardware.SystemInformationSpec `json:"system"`
	Addresses []address                      `json:"addresses"`
	Upstream  result                         `json:"upstream"`
}

type address struct {
	Link   string       `json:"link"`
	Prefix netip.Prefix `json:"prefix"`
	Flags  uint32       `json:"flags"`
}

// result is the state of a Node after initialization. A Node with an error stays uninitialized.
type result struct {
	Error       string            `json:"error"`
	ProviderID  string            `json:"providerID"`
	Labels      map[string]string `json:"labels"`
	Annotations map[string]string `json:"annotations"`
	Taints      []string          `json:"taints"`
	Addresses   []string          `json:"addresses"`
	// problems are the values that talos-ccm omits.
	problems []nodespec.Problem
}

func records(t *testing.T) []record {
	t.Helper()

	var list []record

	for _, name := range []string{"cases", "templates"} {
		file, err := os.Open("testdata/" + name + ".json.gz")
		require.NoError(t, err)

		defer file.Close() //nolint:errcheck // only read

		unzipped, err := gzip.NewReader(bufio.NewReader(file))
		require.NoError(t, err)

		for decoder := json.NewDecoder(unzipped); decoder.More(); {
			var r record

			require.NoError(t, decoder.Decode(&r))

			list = append(list, r)
		}
	}

	return list
}

// machine returns the machine as the inventory has it.
func (r record) machine() machine.Machine {
	var view machine.View

	metadata := runtime.NewPlatformMetadataSpec(runtime.NamespaceName, runtime.PlatformMetadataID)
	*metadata.TypedSpec() = r.Platform
	view.Put(metadata)

	delivered := network.NewPlatformConfig(network.NamespaceName, network.PlatformConfigActiveID)
	delivered.TypedSpec().Metadata = &r.Platform
	view.Put(delivered)

	system := hardware.NewSystemInformation(hardware.SystemInformationID)
	*system.TypedSpec() = r.System
	view.Put(system)

	status := runtime.NewMachineStatus()
	status.TypedSpec().Stage = runtime.MachineStageRunning
	view.Put(status)

	nodename := k8s.NewNodename(k8s.NamespaceName, k8s.NodenameID)
	nodename.TypedSpec().Nodename = r.Node
	view.Put(nodename)

	nodeIPs := k8s.NewNodeIP(k8s.NamespaceName, k8s.KubeletID)
	nodeIPs.TypedSpec().Addresses = []netip.Addr{r.Addresses[0].Prefix.Addr()}
	view.Put(nodeIPs)

	info := cluster.NewInfo()
	info.TypedSpec().ClusterName = r.Cluster
	view.Put(info)

	for _, a := range r.Addresses {
		res := network.NewAddressStatus(network.NamespaceName, network.AddressID(a.Link, a.Prefix))
		*res.TypedSpec() = network.AddressStatusSpec{Address: a.Prefix, LinkName: a.Link, Scope: nethelpers.ScopeGlobal, Flags: nethelpers.AddressFlags(a.Flags)}
		view.Put(res)
	}

	return view.Machine()
}

// ours returns the results of talos-ccm with the settings for users of the upstream, and with its defaults.
func (r record) ours() (compatible, defaults result) {
	compiled, err := config.Parse("config.yaml", []byte(r.Config))
	if err != nil {
		return result{Error: err.Error()}, result{Error: err.Error()}
	}

	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: r.Node, Annotations: map[string]string{cloudproviderapi.AnnotationAlphaProvidedIPAddr: r.NodeIPs}}}
	in := nodespec.NewInput(node, r.machine(), ccm.NodeOptions(compiled, config.FallbackUUID))
	defaults = desired(in)

	in.Options.ProviderIDFromNodeIP, in.Options.OneExternalIPPerFamily = true, true

	return desired(in), defaults
}

func desired(in nodespec.Input) result {
	spec, problems, pending := nodespec.Desired(in)
	if pending != "" {
		return result{Error: pending, problems: problems}
	}

	own := result{ProviderID: spec.ProviderID, Labels: spec.Labels, Annotations: spec.Annotations, problems: problems}

	for _, taint := range spec.Taints {
		own.Taints = append(own.Taints, taint.ToString())
	}

	slices.Sort(own.Taints)

	for _, a := range spec.Addresses {
		own.Addresses = append(own.Addresses, string(a.Type)+" "+a.Address)
	}

	return own
}

// difference is a field that has two values.
type difference struct{ field, upstream, ours string }

func (d difference) String() string {
	return fmt.Sprintf("%s: upstream %q, ours %q", d.field, d.upstream, d.ours)
}

func compare(upstream, ours result) []difference {
	if upstream.Error != "" || ours.Error != "" {
		if upstream.Error != "" && ours.Error != "" {
			return nil
		}

		return []difference{{"error", upstream.Error, ours.Error}}
	}

	var list []difference

	add := func(field, a, b string) {
		if a != b {
			list = append(list, difference{field, a, b})
		}
	}

	add("providerID", upstream.ProviderID, ours.ProviderID)

	for name, both := range map[string][2]map[string]string{"labels": {upstream.Labels, ours.Labels}, "annotations": {upstream.Annotations, ours.Annotations}} {
		all := maps.Clone(both[0])
		if all == nil {
			all = map[string]string{}
		}

		maps.Copy(all, both[1])

		for _, key := range slices.Sorted(maps.Keys(all)) {
			present := func(m map[string]string) string {
				if value, found := m[key]; found {
					return "=" + value
				}

				return ""
			}

			add(name+" "+key, present(both[0]), present(both[1]))
		}
	}

	add("taints", strings.Join(upstream.Taints, " "), strings.Join(ours.Taints, " "))

	for _, typ := range []corev1.NodeAddressType{corev1.NodeInternalIP, corev1.NodeExternalIP, corev1.NodeHostName, corev1.NodeInternalDNS, corev1.NodeExternalDNS} {
		of := func(r result) string {
			return strings.Join(slices.DeleteFunc(slices.Clone(r.Addresses), func(a string) bool { return !strings.HasPrefix(a, string(typ)+" ") }), ",")
		}

		add(string(typ), of(upstream), of(ours))
	}

	return list
}

// documented returns the first cells of the table of differences.
func documented(t *testing.T) []string {
	t.Helper()

	page, err := os.ReadFile("../../docs/reference/upstream-differences.md")
	require.NoError(t, err)

	_, table, _ := strings.Cut(string(page), "|---|---|---|\n")

	var names []string

	for line := range strings.SplitSeq(table, "\n") {
		cells := strings.Split(line, " | ")
		if len(cells) < 2 {
			break
		}

		names = append(names, strings.TrimPrefix(cells[0], "| "))
	}

	return names
}

// tally counts the differences by their rows.
type tally struct {
	seen                     map[string]int
	agreements, undocumented int
}

// add counts the differences of a case. It fails the test for those without a row.
func (c *tally) add(t *testing.T, r record) {
	t.Helper()

	own, defaults := r.ours()

	found := compare(r.Upstream, own)
	if len(found) == 0 {
		c.agreements++
	}

	for _, d := range found {
		if i := slices.IndexFunc(rows, func(row row) bool { return row.explains(r, d) }); i >= 0 {
			c.seen[rows[i].name]++

			continue
		}

		c.undocumented++
		t.Errorf("node %s: %s; problems %v\n%s", r.Node, d, own.problems, r.Config)
	}

	for _, d := range compare(own, defaults) {
		switch {
		case d.field == "ExternalIP":
			c.seen[rowExternalIPs]++
		case r.Platform.ProviderID == "":
			c.seen[rowFallback]++
		default:
			t.Errorf("node %s: the settings for users of the upstream change %s", r.Node, d)
		}
	}
}

// TestUpstream_DifferencesAreDocumented fails for a difference without a row in docs/reference/upstream-differences.md,
// and for a row without a difference.
func TestUpstream_DifferencesAreDocumented(t *testing.T) {
	list, counts := records(t), tally{seen: map[string]int{}}
	for _, r := range list {
		counts.add(t, r)
	}

	names := documented(t)

	for _, name := range names {
		assert.NotZero(t, counts.seen[name], "no case has the documented difference %q", name)
	}

	total := 0

	for _, name := range slices.Sorted(maps.Keys(counts.seen)) {
		t.Logf("%5d %s", counts.seen[name], name)

		if total += counts.seen[name]; !slices.Contains(names, name) {
			t.Errorf("docs/reference/upstream-differences.md has no row %q", name)
		}
	}

	t.Logf("%d cases, %d agreements, %d documented differences, %d undocumented", len(list), counts.agreements, total, counts.undocumented)

	if len(list) < minCases {
		t.Errorf("got %d cases, want at least %d", len(list), minCases)
	}
}
