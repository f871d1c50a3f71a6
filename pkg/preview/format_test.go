package preview_test

import (
	"bytes"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"sigs.k8s.io/yaml"

	"github.com/talos-ccm/talos-ccm/pkg/internal/events"
	"github.com/talos-ccm/talos-ccm/pkg/preview"
	"github.com/talos-ccm/talos-ccm/pkg/rules"
)

func report() preview.Report {
	return preview.Report{
		Name: "worker-1",
		Changes: []preview.Change{
			{Field: "providerID", After: new("aws:///eu-1/i-1"), From: "machine"},
			{Field: "address", Key: "InternalIP", After: new("10.0.0.1"), From: "machine"},
			{Field: "address", Key: "InternalDNS", After: new("a.b"), From: "rule dns"},
			{Field: "label", Key: "example.org/role", After: new("web"), From: "rule web"},
			{Field: "label", Key: "topology.kubernetes.io/zone", After: new("eu-1"), From: "machine"},
			{Field: "annotation", Key: "note", After: new("two\nlines & a \x1b[31mcolor"), From: "rule web"},
			{Field: "taint", Key: "dedicated:NoSchedule", After: new("web"), From: "rule web, at initialization"},
			{Field: "taint", Key: "slow:NoExecute", After: new(""), From: "rule slow, enforced"},
		},
		Rules:    []rules.Match{{Rule: "web"}, {Rule: "gpu", Mismatch: "does not apply: spot Exists"}, {Rule: "racks", Missing: []string{`labels[rack]: table "racks" has no key "a"`, "b"}}},
		Problems: []events.Problem{{Reason: "InvalidValue", Message: "rule \"web\": labels[bad]"}},
	}
}

func format(t *testing.T, name string, report preview.Report) string {
	t.Helper()

	var out bytes.Buffer
	require.NoError(t, preview.Write(&out, name, report))

	return out.String()
}

func TestWrite_Table(t *testing.T) {
	for _, test := range []struct {
		name, want string
		report     preview.Report
	}{
		{"managed", `
Node worker-1
  + providerID                               aws:///eu-1/i-1                  machine
  + address     InternalIP                   10.0.0.1                         machine
  + address     InternalDNS                  a.b                              rule dns
  + label       example.org/role             web                              rule web
  + label       topology.kubernetes.io/zone  eu-1                             machine
  + annotation  note                         "two\nlines & a \x1b[31mcolor"  rule web
  + taint       dedicated:NoSchedule         web                              rule web, at initialization
  + taint       slow:NoExecute                                                rule slow, enforced
    rule        web                              applies
    rule        gpu                              does not apply: spot Exists
    rule        racks                            applies; labels[rack]: table "racks" has no key "a"; b
    problem     InvalidValue                 rule "web": labels[bad]
`, report()},
		{"not managed", `
Node worker-2
  not managed: nodes.selector does not select the machine, or cloud-node-controller is off; talos-ccm would write none of the values below
    problem  MetadataPending  no platform
`, preview.Report{Name: "worker-2", Pending: true, Unmanaged: true, Problems: []events.Problem{{Reason: "MetadataPending", Message: "no platform"}}}},
	} {
		t.Run(test.name, func(t *testing.T) {
			assert.Equal(t, squeeze(test.want), squeeze("\n"+format(t, "table", test.report)))
		})
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
			text := format(t, name, report())
			assert.Contains(t, text, "lines & a", "output has HTML escapes")

			var got preview.Report
			require.NoError(t, yaml.UnmarshalStrict([]byte(text), &got))
			assert.Equal(t, report(), got)
		})
	}
}
