package rules

import (
	"testing"
	"text/template"
	"text/template/parse"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestRender_RecoversPanics(t *testing.T) {
	broken := template.Must(template.New("").Parse("{{ .Zone }}"))
	broken.Root.Nodes = append(broken.Root.Nodes, (*parse.IfNode)(nil))

	compiled := Set{rules: []*rule{{name: "broken", entries: []entry{{kind: labels, key: "a", template: broken}}}}}

	problems := compiled.Apply(Facts{}).Problems
	require.Len(t, problems, 1)
	assert.Equal(t, "broken labels[a]", problems[0].Rule+" "+problems[0].Key)
	assert.Contains(t, problems[0].Why, "panic: ")
}
