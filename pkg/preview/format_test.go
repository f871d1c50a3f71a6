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
		{Name: "worker-2", Pending: "the machine has not published its platform yet", Unclaimed: true},
	}
}

func written(t *testing.T, format string, reports []preview.Report) string {
	t.Helper()

	var out bytes.Buffer
	if err := preview.Write(&out, format, reports); err != nil {
		t.Fatal(err)
	}

	return out.String()
}

func TestTableIsForPeople(t *testing.T) {
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
  is none of ours: nodes.nodeSelector does not select its machine, and nothing of this would be written
  pending  the machine has not published its platform yet
`
	if diff := cmp.Diff(squeeze(want), squeeze("\n"+written(t, "table", reports()))); diff != "" {
		t.Error(diff)
	}
}

// squeeze keeps the columns of a table, but not their width.
func squeeze(table string) []string {
	var lines []string

	for line := range strings.Lines(table) {
		lines = append(lines, strings.Join(strings.Fields(line), " "))
	}

	return lines
}

func TestListsAreForPrograms(t *testing.T) {
	for _, format := range []string{"yaml", "json"} {
		t.Run(format, func(t *testing.T) {
			text := written(t, format, reports())
			if !strings.Contains(text, "lines & a") {
				t.Errorf("%s has escapes for HTML", text)
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

func TestListOfNothingIsAList(t *testing.T) {
	var list []any
	if err := json.Unmarshal([]byte(written(t, "json", []preview.Report{})), &list); err != nil || list == nil {
		t.Errorf("got %v, %v", list, err)
	}
}

func TestOtherFormatsAreRefused(t *testing.T) {
	if err := preview.Write(&bytes.Buffer{}, "xml", reports()); err == nil || !strings.Contains(err.Error(), "table, yaml, json") {
		t.Errorf("got %v", err)
	}
}
