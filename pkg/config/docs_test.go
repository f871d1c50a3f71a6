package config_test

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/siderolabs/talos/pkg/machinery/config/configloader"
	"github.com/siderolabs/talos/pkg/machinery/platforms"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v4"

	"github.com/talos-ccm/talos-ccm/pkg/config"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/preview"
	"github.com/talos-ccm/talos-ccm/pkg/rules"
)

// page is a page of the docs.
type page struct {
	name, text string
}

func pages(t *testing.T) (list []page) {
	t.Helper()

	const root = "../../docs"

	err := filepath.WalkDir(root, func(path string, _ os.DirEntry, err error) error {
		if err != nil || filepath.Ext(path) != ".md" {
			return err
		}

		text, err := os.ReadFile(path)
		list = append(list, page{name: strings.TrimPrefix(path, root+"/"), text: string(text)})

		return err
	})
	require.NoError(t, err)

	return list
}

// block is a fenced block of a page. Its purpose is the second word after the fence.
type block struct {
	line             int
	purpose, content string
}

func blocks(text string) (list []block) {
	var current *block

	for i, line := range strings.Split(text, "\n") {
		info, isFence := strings.CutPrefix(strings.TrimSpace(line), "```")

		switch {
		case isFence && current == nil:
			_, purpose, _ := strings.Cut(info, " ")
			current = &block{line: i + 1, purpose: purpose}
		case isFence:
			list = append(list, *current)
			current = nil
		case current != nil:
			current.content += line + "\n"
		}
	}

	return list
}

// requirePublished fails the test if Talos does not publish such metadata on the platform.
func requirePublished(t *testing.T, metadata runtime.PlatformMetadataSpec) {
	t.Helper()

	rows := table(t, platformTable)
	i := slices.IndexFunc(rows, func(row []string) bool { return row[0] == "`"+metadata.Platform+"`" })
	require.GreaterOrEqual(t, i, 0, "unknown platform %q", metadata.Platform)

	for field, used := range map[string]bool{"spot": metadata.Spot, "tags": len(metadata.Tags) > 0, "DNS": metadata.InternalDNS+metadata.ExternalDNS != ""} {
		assert.True(t, !used || strings.Contains(strings.Join(rows[i], " "), field), "%s does not publish %s", metadata.Platform, field)
	}
}

const platformTable = "| platform | providerID | Talos also publishes |"

func TestDocs_Platforms(t *testing.T) {
	missing := []string{"container", platforms.MetalPlatform().Name}
	for _, platform := range platforms.CloudPlatforms() {
		missing = append(missing, platform.Name)
	}

	for _, row := range table(t, platformTable) {
		missing = slices.DeleteFunc(missing, func(name string) bool { return row[0] == "`"+name+"`" })
	}

	assert.Empty(t, missing)
}

// rendered is the result of rules in the format of the docs. PlatformMetadata defaults to the metadata of the machine.
type rendered struct {
	Labels, Annotations map[string]string
	Taints              []string
	PlatformMetadata    *runtime.PlatformMetadataSpec
}

// requireResult fails the test unless the rules set exactly the wanted values.
func requireResult(t *testing.T, want rendered, result rules.Result) {
	t.Helper()
	assert.Empty(t, result.Problems)

	got := rendered{Labels: texts(result.Labels), Annotations: texts(result.Annotations), PlatformMetadata: &result.Platform}
	for _, taint := range result.Taints {
		got.Taints = append(got.Taints, taint.ToString())
	}

	assert.Equal(t, want, got)
}

func texts(values map[string]rules.Value) map[string]string {
	if len(values) == 0 {
		return nil
	}

	m := map[string]string{}
	for key, v := range values {
		m[key] = v.Value
	}

	return m
}

// reader reads the examples of a page in order. A machine or a result refers to the configuration before it.
type reader struct {
	compiled *config.Compiled
	machine  machine.Machine
	wrong    string
}

// read checks an example. Package test/docs checks blocks with other purposes.
func (r *reader) read(t *testing.T, b block) {
	t.Helper()

	switch b.purpose {
	case "config":
		r.compiled = parsed(t, b.content)
	case "document":
		parsed(t, mounted(t, b.content))
	case "machine": // read as by `render --machine`
		m, _, err := preview.ReadMachine([]byte(b.content))
		require.NoError(t, err)

		r.machine = m
		requirePublished(t, r.machine.Platform)
	case "node": // the values that the rules set on the machine's Node
		var want rendered
		require.NoError(t, yaml.Load([]byte(b.content), &want, yaml.WithKnownFields()))

		want.PlatformMetadata = cmp.Or(want.PlatformMetadata, &r.machine.Platform)
		requireResult(t, want, r.compiled.Rules.Apply(rules.Facts{Machine: r.machine}))
	case "wrong":
		r.wrong = b.content
	case "mistakes":
		_, err := config.Parse("rules.yaml", []byte(r.wrong))
		require.Error(t, err)
		assert.Equal(t, b.content, err.Error()+"\n")
	}
}

func TestDocs_Examples(t *testing.T) {
	seen := map[string]int{}

	for _, p := range pages(t) {
		var r reader

		for _, b := range blocks(p.text) {
			seen[b.purpose]++

			t.Run(fmt.Sprintf("%s line %d", p.name, b.line), func(t *testing.T) { r.read(t, b) })
		}
	}

	for _, purpose := range []string{"config", "document", "machine", "node", "wrong", "mistakes"} {
		assert.Contains(t, seen, purpose)
	}
}

func parsed(t *testing.T, file string) *config.Compiled {
	t.Helper()

	compiled, err := config.ParseFile("config.yaml", []byte(file), config.Extension{})
	require.NoError(t, err)
	assert.Empty(t, compiled.Warnings)

	return compiled
}

// mounted returns the content of the only file in an ExtensionServiceConfig.
func mounted(t *testing.T, document string) string {
	t.Helper()

	talos, err := configloader.NewFromBytes([]byte(document))
	require.NoError(t, err)

	services := talos.ExtensionServiceConfigs()
	require.Len(t, services, 1)
	require.Equal(t, "talos-ccm", services[0].Name())
	require.Len(t, services[0].ConfigFiles(), 1)

	return services[0].ConfigFiles()[0].Content()
}

var code = regexp.MustCompile("`([^`]+)`")

// table returns the rows of the table with this head, cell by cell.
func table(t *testing.T, head string) (rows [][]string) {
	t.Helper()

	for _, p := range pages(t) {
		_, rest, found := strings.Cut(p.text, "\n"+head+"\n")
		if !found {
			continue
		}

		for _, line := range strings.Split(rest, "\n")[1:] {
			if !strings.HasPrefix(line, "| ") {
				return rows
			}

			rows = append(rows, strings.Split(strings.Trim(line, "| "), " | "))
		}
	}

	t.Fatalf("no table starts with %q", head)

	return nil
}

func TestDocs_SelectorKeys(t *testing.T) {
	missing := rules.Keys()

	for _, row := range slices.Concat(table(t, "| key | what it is |"), table(t, "| fact | `talosctl get` | value |")) {
		for _, key := range code.FindAllStringSubmatch(row[0], -1) {
			prefix, _, _ := strings.Cut(strings.ToLower(key[1]), "<")
			missing = slices.DeleteFunc(missing, func(known string) bool { return known == prefix })

			t.Run(key[1], func(t *testing.T) {
				name := strings.NewReplacer("<name>", "a", "<key>", "a").Replace(key[1])
				terms := []rules.SelectorTerm{{MatchExpressions: []rules.Expression{{Key: name, Operator: rules.Exists}}}}

				_, mistakes := rules.CompileNodeSelector(terms, nil)
				assert.Empty(t, mistakes)
			})
		}
	}

	assert.Empty(t, missing)
}

func TestDocs_Functions(t *testing.T) {
	missing := rules.Functions()

	for _, row := range table(t, "| function | gives |") {
		spans := code.FindAllStringSubmatch(row[0], -1)

		for _, span := range spans {
			name, _, _ := strings.Cut(span[1], " ")
			assert.Contains(t, rules.Functions(), name)

			missing = slices.DeleteFunc(missing, func(known string) bool { return known == name })
		}

		example, want := spans[0][1], code.FindStringSubmatch(row[1])[1]
		assert.Equal(t, want, apply(t, "{{ "+example+" }}"), example)
	}

	assert.Equal(t, []string{"fail"}, missing, "functions without a row")
}

func TestDocs_Variables(t *testing.T) {
	all := pages(t)

	for _, name := range rules.Variables() {
		assert.True(t, slices.ContainsFunc(all, func(p page) bool { return strings.Contains(p.text, "`."+name+"`") }), "the docs do not list .%s", name)
	}
}

// apply returns the output of a template.
func apply(t *testing.T, template string) string {
	t.Helper()

	tables := rules.Tables{"racks": {"CZJ1230A1B": "r12"}} // as on the page

	compiled, mistakes := rules.Compile([]rules.Rule{{Annotations: map[string]string{"example.org/value": template}}}, tables, nil)
	require.Empty(t, mistakes)

	result := compiled.Apply(rules.Facts{})
	require.Empty(t, result.Problems)

	return result.Annotations["example.org/value"].Value
}
