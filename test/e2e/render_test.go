//go:build e2e

package e2e_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/talos-ccm/talos-ccm/pkg/preview"
	"github.com/talos-ccm/talos-ccm/test/talos"
)

// renderRules sets labels, annotations and taints that talos-ccm keeps on Nodes, and a zone.
const renderRules = `transformations:
  - name: size
    labels:
      example.org/size: '{{ .InstanceType | lower }}'
      example.org/type: '{{ .MachineType }}'
    annotations:
      example.org/talos: '{{ .TalosVersion }} on {{ .Platform }}'
      example.org/network: '{{ join "," .Links }} in {{ join "," .Subnets }}'
    taints:
      example.org/kept: yes:PreferNoSchedule
    enforce: true
  - name: rack
    nodeSelector:
      - matchExpressions:
          - {key: machineType, operator: In, values: [worker]}
    platformMetadata:
      Zone: rack-1
`

// networkAnnotation matches the annotation with the links and subnets of a machine.
var networkAnnotation = regexp.MustCompile(`\blo\b\S* in \S+/`)

// networkOf returns the value of the annotation with the links and subnets.
func networkOf(report preview.Report) string {
	for _, c := range report.Changes {
		if c.Key == "example.org/network" {
			return *c.After
		}
	}

	return ""
}

func TestRender_MatchesNodes(t *testing.T) {
	eventually(t, checkNodesInitialized)

	rules := filepath.Join(t.TempDir(), "config.yaml")
	require.NoError(t, os.WriteFile(rules, []byte(renderRules), 0o644))

	applyConfig(t, renderRules)

	for _, m := range bed.Machines() {
		saved := filepath.Join(t.TempDir(), "machine.yaml")
		shell(t, binaryPath()+" render -o machine --node "+m.Address().String()+" > "+saved)

		for source, flags := range map[string]string{
			"the saved machine": "--machine " + saved,
			"the live machine":  "--node " + m.Address().String(),
		} {
			t.Run(m.Name()+", from "+source, func(t *testing.T) {
				var report preview.Report
				require.NoError(t, json.Unmarshal(shell(t, binaryPath()+" render --config "+rules+" --arch amd64 -o json "+flags), &report))

				assert.Regexp(t, networkAnnotation, networkOf(report))

				took := eventually(t, func(ctx context.Context) error { return checkRendered(ctx, m, report) })
				t.Logf("the Node matched the report after %s", took.Round(time.Millisecond))
			})
		}

		t.Logf("\n%s", shell(t, binaryPath()+" render --config "+rules+" --machine "+saved))
	}
}

// shell runs a script with Bed.Shell, requires that it succeeds, and returns its output. Cleanup functions can use it.
func shell(t *testing.T, script string) []byte {
	t.Helper()

	out, err := bed.Shell(context.WithoutCancel(t.Context()), script)
	require.NoError(t, err)

	return out
}

// checkRendered returns an error unless m's Node matches the report.
func checkRendered(ctx context.Context, m *talos.Machine, report preview.Report) error {
	node, err := getNode(ctx, m.Name())
	if err != nil {
		return err
	}

	if diff := cmp.Diff(report, reportOf(node, report)); diff != "" {
		return errors.New(diff)
	}

	return nil
}

// reportOf returns a Report of what talos-ccm has set on a Node. Origins, rules and problems, which are not on the Node, are
// copied from report.
func reportOf(node *corev1.Node, report preview.Report) preview.Report {
	values := []preview.Change{{Field: "providerID", After: &node.Spec.ProviderID}}

	for _, a := range node.Status.Addresses {
		values = append(values, preview.Change{Field: "address", Key: string(a.Type), After: &a.Address})
	}

	values = append(values, applied(node, "label", node.Labels)...)
	values = append(values, applied(node, "annotation", node.Annotations)...)

	for _, taint := range node.Spec.Taints {
		// Other clients set taints, too.
		key := taint.Key + ":" + string(taint.Effect)
		if slices.ContainsFunc(report.Changes, func(c preview.Change) bool { return c.Field == "taint" && c.Key == key }) {
			values = append(values, preview.Change{Field: "taint", Key: key, After: &taint.Value})
		}
	}

	for i, v := range values {
		if i < len(report.Changes) && report.Changes[i].Key == v.Key {
			values[i].From = report.Changes[i].From
		}
	}

	return preview.Report{Name: node.Name, Changes: values, Rules: report.Rules, Problems: report.Problems}
}

// taintLabelPrefix is the prefix of the labels in which talos-ccm records its taints. They are not rendered.
const taintLabelPrefix = "talos-ccm.node-restriction.kubernetes.io/"

// applied returns the labels or annotations that talos-ccm has applied, according to the Node's managed fields.
func applied(node *corev1.Node, field string, values map[string]string) []preview.Change {
	var list []preview.Change

	for _, entry := range node.ManagedFields {
		if entry.Manager != "talos-ccm" || entry.Operation != metav1.ManagedFieldsOperationApply {
			continue
		}

		var fields struct {
			Metadata map[string]map[string]any `json:"f:metadata"`
		}

		if err := json.Unmarshal(entry.FieldsV1.GetRawBytes(), &fields); err != nil {
			panic(fmt.Sprintf("decode managed fields of node %s: %v", node.Name, err))
		}

		for name := range fields.Metadata["f:"+field+"s"] {
			key, isKey := strings.CutPrefix(name, "f:")
			if isKey && !strings.HasPrefix(key, taintLabelPrefix) {
				list = append(list, preview.Change{Field: field, Key: key, After: new(values[key])})
			}
		}
	}

	slices.SortFunc(list, func(a, b preview.Change) int { return strings.Compare(a.Key, b.Key) })

	return list
}
