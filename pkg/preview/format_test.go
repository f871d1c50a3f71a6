package preview_test

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"

	"github.com/talos-ccm/talos-ccm/pkg/preview"
)

func reports() []preview.Report {
	return []preview.Report{
		{
			Node:        "10.0.0.1",
			Name:        "worker-1",
			ProviderID:  &preview.Text{Value: "aws:///eu-1/i-1"},
			Addresses:   []preview.Address{{Type: "InternalIP", Address: "10.0.0.1"}, {Type: "InternalDNS", Address: "a.b", Rule: "dns"}},
			Labels:      []preview.Entry{{Key: "example.org/role", Value: "web", Rule: "web"}, {Key: "topology.kubernetes.io/zone", Value: "eu-1"}},
			Annotations: []preview.Entry{{Key: "note", Value: "two\nlines & a \x1b[31mcolor", Rule: "web"}},
			Taints:      []preview.Taint{{Key: "dedicated", Value: "web", Effect: "NoSchedule", Rule: "web"}, {Key: "slow", Effect: "NoExecute", Rule: "slow", Enforce: true}},
			Problems:    []preview.Problem{{Rule: "web", Key: "labels[bad]", Value: "not a label", Why: "it has spaces"}},
		},
		{Name: "worker-2", Pending: "the machine has not published its platform yet", Unmanaged: true},
	}
}

func format(t *testing.T, name string, reports []preview.Report) string {
	t.Helper()

	var out bytes.Buffer
	if err := preview.Write(&out, name, reports); err != nil {
		t.Fatal(err)
	}

	return out.String()
}

func TestWrite_Table(t *testing.T) {
	const want = `
Node worker-1
  providerID                               aws:///eu-1/i-1                         machine
  address     InternalIP                   10.0.0.1                                machine
  address     InternalDNS                  a.b                                     rule dns
  label       example.org/role             web                                     rule web
  label       topology.kubernetes.io/zone  eu-1                                    machine
  annotation  note                         "two\nlines & a \x1b[31mcolor"         rule web
  taint       dedicated                    web:NoSchedule                          rule web, at initialization
  taint       slow                         NoExecute                               rule slow, enforced
  problem     labels[bad]                  not a label                             rule web                     it has spaces

Node worker-2
  not managed: nodes.selector does not select the machine, so talos-ccm would write none of the values below
  pending  the machine has not published its platform yet
`
	if diff := cmp.Diff(squeeze(want), squeeze("\n"+format(t, "table", reports()))); diff != "" {
		t.Error(diff)
	}
}

// squeeze removes the padding of the columns.
func squeeze(table string) []string {
	var lines []string

	for line := range strings.Lines(table) {
		lines = append(lines, strings.Join(strings.Fields(line), " "))
	}

	return lines
}

func TestWrite_YAMLAndJSON(t *testing.T) {
	for _, name := range []string{"yaml", "json"} {
		t.Run(name, func(t *testing.T) {
			text := format(t, name, reports())
			if !strings.Contains(text, "lines & a") {
				t.Errorf("output has HTML escapes: %s", text)
			}

			var got []preview.Report
			if err := yaml.UnmarshalStrict([]byte(text), &got); err != nil {
				t.Fatal(err)
			}

			if diff := cmp.Diff(reports(), got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestWrite_EmptyListIsNotNull(t *testing.T) {
	var list []any
	if err := json.Unmarshal([]byte(format(t, "json", []preview.Report{})), &list); err != nil || list == nil {
		t.Errorf("got %v, %v", list, err)
	}
}

func TestWrite_RejectsUnknownFormat(t *testing.T) {
	if err := preview.Write(&bytes.Buffer{}, "xml", reports()); err == nil || !strings.Contains(err.Error(), "table, yaml, json") {
		t.Errorf("got %v", err)
	}
}

func TestWrite_OmitsUnknownProviderIDOfNode(t *testing.T) {
	want := "---\napiVersion: v1\nkind: Node\nmetadata:\n  name: web-7\nspec: {}\nstatus: {}\n"

	if diff := cmp.Diff(want, format(t, "node", []preview.Report{{Name: "web-7", Unknown: []string{"addresses", "name", "providerID"}}})); diff != "" {
		t.Error(diff)
	}
}
