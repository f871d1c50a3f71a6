package rules

import (
	"strings"
	"testing"
	"text/template"
	"text/template/parse"
)

func TestRender_RecoversPanics(t *testing.T) {
	broken := template.Must(template.New("").Parse("{{ .Zone }}"))
	broken.Root.Nodes = append(broken.Root.Nodes, (*parse.IfNode)(nil))

	compiled := Set{rules: []*rule{{name: "broken", entries: []entry{{kind: labels, key: "a", template: broken}}}}}

	problems := compiled.Apply(Facts{}).Problems
	if len(problems) != 1 || problems[0].Rule != "broken" || problems[0].Key != "labels[a]" || !strings.Contains(problems[0].Why, "panic: ") {
		t.Errorf("got problems %+v, want one with the panic", problems)
	}
}
