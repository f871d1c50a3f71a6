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

// renderedRules set something of each kind that stays on a Node.
const renderedRules = `transformations:
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

// networkAnnotation matches the annotation with links and subnets.
var networkAnnotation = regexp.MustCompile(`example\.org/network \S*\blo\b\S* in \S+/`)

func TestRender_MatchesNodes(t *testing.T) {
	eventually(t, bothInitialized)

	rules := filepath.Join(t.TempDir(), "config.yaml")
	require.NoError(t, os.WriteFile(rules, []byte(renderedRules), 0o644))

	applyConfig(t, renderedRules)

	for _, m := range bed.Machines() {
		printed := filepath.Join(t.TempDir(), "machine.yaml")
		shell(t, strings.ReplaceAll(preview.Command("Links", "Subnets", "TalosVersion"), "NODE", m.Address().String())+" > "+printed)

		for way, flags := range map[string]string{
			"what talosctl prints": "--machine " + printed,
			"the live machine":     "--node " + m.Address().String(),
		} {
			t.Run(m.Name()+", from "+way, func(t *testing.T) {
				var reports []preview.Report
				require.NoError(t, json.Unmarshal(shell(t, binary()+" render --config "+rules+" --arch amd64 -o json "+flags), &reports))

				assert.Regexp(t, networkAnnotation, fmt.Sprint(reports[0].Annotations))

				took := eventually(t, func(ctx context.Context) error { return differs(ctx, m, reports[0]) })
				t.Logf("the Node was as rendered after %s", took.Round(time.Millisecond))
			})
		}

		t.Logf("\n%s", shell(t, binary()+" render --config "+rules+" --machine "+printed))
	}
}

// shell runs a script on the bed, also when the test is tidying up, and fails the test if the script fails.
func shell(t *testing.T, script string) []byte {
	t.Helper()

	out, err := bed.Shell(context.WithoutCancel(t.Context()), script)
	require.NoError(t, err)

	return out
}

// differs returns an error unless m's Node is as rendered.
func differs(ctx context.Context, m *talos.Machine, report preview.Report) error {
	node, err := getNode(ctx, m.Name())
	if err != nil {
		return err
	}

	if diff := cmp.Diff(report, observed(node, report)); diff != "" {
		return errors.New(diff)
	}

	return nil
}

// observed is a Report of what a Node carries of ours. It has the rules and problems of the report that it is to be compared with: a Node does not tell.
func observed(node *corev1.Node, report preview.Report) preview.Report {
	seen := preview.Report{
		Node: report.Node, Name: node.Name, Problems: report.Problems,
		ProviderID:  &preview.Text{Value: node.Spec.ProviderID, Rule: report.ProviderID.Rule},
		Labels:      ours(node, "f:labels", node.Labels, report.Labels),
		Annotations: ours(node, "f:annotations", node.Annotations, report.Annotations),
	}

	for i, a := range node.Status.Addresses {
		address := preview.Address{Type: string(a.Type), Address: a.Address}
		if i < len(report.Addresses) {
			address.Rule = report.Addresses[i].Rule
		}

		seen.Addresses = append(seen.Addresses, address)
	}

	for _, taint := range report.Taints {
		if slices.ContainsFunc(node.Spec.Taints, func(t corev1.Taint) bool {
			return t.Key == taint.Key && t.Value == taint.Value && string(t.Effect) == taint.Effect
		}) {
			seen.Taints = append(seen.Taints, taint)
		}
	}

	return seen
}

// enforcedTaint begins the labels by which talos-ccm remembers taints. They are its own business, and not rendered.
const enforcedTaint = "talos-ccm.node-restriction.kubernetes.io/"

// ours are the labels or annotations that talos-ccm has applied, by the Node's managed fields.
func ours(node *corev1.Node, field string, values map[string]string, rendered []preview.Entry) []preview.Entry {
	var list []preview.Entry

	for _, entry := range node.ManagedFields {
		if entry.Manager != "talos-ccm" || entry.Operation != metav1.ManagedFieldsOperationApply {
			continue
		}

		var fields struct {
			Metadata map[string]map[string]any `json:"f:metadata"`
		}

		if err := json.Unmarshal(entry.FieldsV1.GetRawBytes(), &fields); err != nil {
			panic(fmt.Sprintf("the managed fields of Node %s: %v", node.Name, err))
		}

		for name := range fields.Metadata[field] {
			key, isKey := strings.CutPrefix(name, "f:")
			if !isKey || strings.HasPrefix(key, enforcedTaint) {
				continue
			}

			e := preview.Entry{Key: key, Value: values[key]}
			if i := slices.IndexFunc(rendered, func(r preview.Entry) bool { return r.Key == key }); i >= 0 {
				e.Rule = rendered[i].Rule
			}

			list = append(list, e)
		}
	}

	slices.SortFunc(list, func(a, b preview.Entry) int { return strings.Compare(a.Key, b.Key) })

	return list
}
