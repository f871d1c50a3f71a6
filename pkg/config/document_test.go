package config_test

import (
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/siderolabs/talos/pkg/machinery/config/configloader"
	talosmachine "github.com/siderolabs/talos/pkg/machinery/config/machine"
	"github.com/siderolabs/talos/pkg/machinery/resources/hardware"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"go.yaml.in/yaml/v4"

	"github.com/talos-ccm/talos-ccm/pkg/config"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/rules"
)

// block is a fenced block of the document. What it is for is the second word behind the fence.
type block struct {
	line             int
	purpose, content string
}

func documentText(t *testing.T) string {
	t.Helper()

	text, err := os.ReadFile("../../docs/configuration.md")
	if err != nil {
		t.Fatal(err)
	}

	return string(text)
}

func blocks(t *testing.T) (list []block) {
	t.Helper()

	var current *block

	for i, line := range strings.Split(documentText(t), "\n") {
		info, isFence := strings.CutPrefix(line, "```")

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

// described is a machine as the document writes it.
type described struct {
	PlatformMetadata  runtime.PlatformMetadataSpec
	SystemInformation hardware.SystemInformationSpec
	Extensions        map[string]string
}

func (d described) facts() rules.Facts {
	return rules.Facts{Machine: machine.Machine{
		Nodename: "node-1", Type: talosmachine.TypeWorker, Platform: d.PlatformMetadata, PlatformPublished: true, System: d.SystemInformation, Extensions: d.Extensions,
	}}
}

// rendered is what rules make of a machine, as the document writes it. Metadata that is left out is the machine's.
type rendered struct {
	Labels, Annotations map[string]string
	Taints              []string
	PlatformMetadata    *runtime.PlatformMetadataSpec
}

func render(t *testing.T, result rules.Result) rendered {
	t.Helper()

	for _, p := range result.Problems {
		t.Errorf("problem: %+v", p)
	}

	r := rendered{PlatformMetadata: &result.Platform}

	texts := func(values map[string]rules.Value) map[string]string {
		if len(values) == 0 {
			return nil
		}

		m := map[string]string{}
		for key, v := range values {
			m[key] = v.Value
		}

		return m
	}
	r.Labels, r.Annotations = texts(result.Labels), texts(result.Annotations)

	for _, taint := range result.Taints {
		r.Taints = append(r.Taints, taint.ToString())
	}

	return r
}

// reader goes through the examples. What one shows is of those before it.
type reader struct {
	compiled *config.Compiled
	machine  described
	wrong    string
}

func (r *reader) read(t *testing.T, b block) {
	t.Helper()

	switch b.purpose {
	case "":
	case "config":
		r.compiled = parsed(t, b.content)
	case "document":
		parsed(t, mounted(t, b.content))
	case "machine":
		r.machine = described{}
		load(t, b.content, &r.machine)
	case "node":
		r.compare(t, b.content)
	case "wrong":
		r.wrong = b.content
	case "mistakes":
		if _, err := config.Parse("rules.yaml", []byte(r.wrong)); err == nil || err.Error()+"\n" != b.content {
			t.Errorf("got:\n%v", err)
		}
	default:
		t.Errorf("unknown purpose %q", b.purpose)
	}
}

// compare asserts what the rules make of the machine.
func (r *reader) compare(t *testing.T, node string) {
	t.Helper()

	var want rendered

	load(t, node, &want)

	if want.PlatformMetadata == nil {
		want.PlatformMetadata = &r.machine.PlatformMetadata
	}

	equal(t, render(t, r.compiled.Rules.Apply(r.machine.facts())), want)
}

func equal(t *testing.T, got, want rendered) {
	t.Helper()

	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("wanted is -, and the rules give +:\n%s", diff)
	}
}

func load(t *testing.T, data string, into any) {
	t.Helper()

	if err := yaml.Load([]byte(data), into, yaml.WithKnownFields()); err != nil {
		t.Fatal(err)
	}
}

// TestTheDocumentsExamples reads every example, and applies it where a result is shown.
func TestTheDocumentsExamples(t *testing.T) {
	var r reader

	seen := map[string]int{}

	for _, b := range blocks(t) {
		seen[b.purpose]++

		t.Run(fmt.Sprintf("%s in line %d", b.purpose, b.line), func(t *testing.T) { r.read(t, b) })
	}

	for _, purpose := range []string{"config", "document", "machine", "node", "wrong", "mistakes"} {
		if seen[purpose] == 0 {
			t.Errorf("no example is marked as %s", purpose)
		}
	}
}

func parsed(t *testing.T, file string) *config.Compiled {
	t.Helper()

	compiled, err := config.Parse("config.yaml", []byte(file))
	if err != nil {
		t.Fatal(err)
	}

	return compiled
}

// mounted is the content of the one file that an ExtensionServiceConfig has for talos-ccm.
func mounted(t *testing.T, document string) string {
	t.Helper()

	talos, err := configloader.NewFromBytes([]byte(document))
	if err != nil {
		t.Fatal(err)
	}

	services := talos.ExtensionServiceConfigs()
	if len(services) != 1 || services[0].Name() != "talos-ccm" || len(services[0].ConfigFiles()) != 1 {
		t.Fatalf("got %+v, want one file for talos-ccm", services)
	}

	return services[0].ConfigFiles()[0].Content()
}

var code = regexp.MustCompile("`([^`]+)`")

// table are the rows of the document's table with this head, cell by cell.
func table(t *testing.T, head string) (rows [][]string) {
	t.Helper()

	_, rest, found := strings.Cut(documentText(t), "\n"+head+"\n")
	if !found {
		t.Fatalf("no table begins with %q", head)
	}

	for _, line := range strings.Split(rest, "\n")[1:] {
		if !strings.HasPrefix(line, "| ") {
			return rows
		}

		rows = append(rows, strings.Split(strings.Trim(line, "| "), " | "))
	}

	return rows
}

func TestTheDocumentsFactsCanBeSelected(t *testing.T) {
	missing := rules.Keys()

	for _, row := range table(t, "| key | what it is |") {
		for _, key := range code.FindAllStringSubmatch(row[0], -1) {
			prefix, _, _ := strings.Cut(strings.ToLower(key[1]), "<")
			missing = slices.DeleteFunc(missing, func(known string) bool { return known == prefix })

			t.Run(key[1], func(t *testing.T) {
				terms := []rules.SelectorTerm{{MatchExpressions: []rules.Expression{{Key: strings.NewReplacer("<name>", "a", "<key>", "a").Replace(key[1]), Operator: rules.Exists}}}}

				if _, mistakes := rules.CompileNodeSelector(terms); len(mistakes) > 0 {
					t.Error(mistakes)
				}
			})
		}
	}

	if len(missing) > 0 {
		t.Errorf("the document does not have %v", missing)
	}
}

func TestTheDocumentsFunctions(t *testing.T) {
	for _, row := range table(t, "| function | example | gives |") {
		for _, name := range code.FindAllStringSubmatch(row[0], -1) {
			if !slices.Contains(rules.Functions(), name[1]) {
				t.Errorf("there is no function %s", name[1])
			}
		}

		example, want := code.FindStringSubmatch(row[1])[1], code.FindStringSubmatch(row[2])[1]

		if got := apply(t, example); got != want {
			t.Errorf("%s: got %q, want %q", example, got, want)
		}
	}
}

func TestTheDocumentHasAllVariables(t *testing.T) {
	text := documentText(t)

	for _, name := range rules.Variables() {
		if !strings.Contains(text, "`."+name+"`") {
			t.Errorf("the document does not have .%s", name)
		}
	}
}

// apply renders a template.
func apply(t *testing.T, template string) string {
	t.Helper()

	compiled, mistakes := rules.Compile([]rules.Rule{{Annotations: map[string]string{"example.org/value": template}}})
	if len(mistakes) > 0 {
		t.Fatal(mistakes)
	}

	result := compiled.Apply(rules.Facts{})
	if len(result.Problems) > 0 {
		t.Fatal(result.Problems)
	}

	return result.Annotations["example.org/value"].Value
}
