package rules_test

import (
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"go/scanner"
	"go/token"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"text/template"
	"unicode/utf8"

	"github.com/siderolabs/talos/pkg/machinery/resources/hardware"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"sigs.k8s.io/yaml"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/rules"
)

// outcome is the text of a template, or the stage that fails.
type outcome struct {
	text   string
	failed string
}

const (
	compiling = "compile"
	rendering = "render"
)

// outcomeOf compiles and renders a template.
func outcomeOf(source string, facts rules.Facts) (outcome, error) {
	compiled, errs := rules.Compile([]rules.Rule{annotate(source)}, tables, nil)
	if len(errs) > 0 {
		return outcome{failed: compiling}, errs.ToAggregate()
	}

	result := compiled.Apply(facts)
	if len(result.Problems) > 0 {
		return outcome{failed: rendering}, errors.New(result.Problems[0].Why)
	}

	return outcome{text: result.Annotations[key].Value}, nil
}

// oracle compiles and renders a template with package text/template.
func oracle(source string, facts rules.Facts) (result outcome, err error) {
	t, err := template.New("line").Option("missingkey=zero").Funcs(rules.FunctionMap).Funcs(template.FuncMap{"lookup": func(table, key string) string { return tables[table][key] }}).Parse(source)
	if err == nil {
		err = rules.Check(t.Root, tables)
	}

	if err != nil || len(source) > maxText || !utf8.ValidString(source) || len(t.Templates()) > 1 {
		return outcome{failed: compiling}, err
	}

	defer func() {
		if r := recover(); r != nil {
			result, err = outcome{failed: rendering}, fmt.Errorf("panic: %v", r)
		}
	}()

	var out limited

	if err := t.Execute(&out, rules.Values(facts)); err != nil || !utf8.Valid(out) {
		return outcome{failed: rendering}, err
	}

	return outcome{text: string(out)}, nil
}

const maxText = 64 << 10

type limited []byte

func (l *limited) Write(p []byte) (int, error) {
	*l = append(*l, p...)
	if len(*l) > maxText {
		return 0, errors.New("too long")
	}

	return len(p), nil
}

// compare reports a difference between text/template and this package.
func compare(t testing.TB, source string, facts rules.Facts) outcome {
	t.Helper()

	want, oracleErr := oracle(source, facts)

	got, err := outcomeOf(source, facts)
	if got != want {
		t.Errorf("%s\ntext/template: %+.2000q (%v)\nthis package:  %+.2000q (%v)", source, want, oracleErr, got, err)
	}

	return got
}

// reported are machines that report everything, nothing, and values that functions treat specially.
func reported() []rules.Facts {
	full := everything()
	full.Machine.Facts = &machine.Facts{
		Addresses: []string{"10.0.0.1/24", "fd00::1/64", ""}, Links: []string{"eth0"}, CPUs: "8", SecureBoot: true, PCIDevices: []string{},
		KernelArgs: map[string]string{"ds": "nocloud;i=1234", "quiet": ""}, Extensions: map[string]string{},
	}

	special := rules.Facts{Machine: machine.Machine{Platform: runtime.PlatformMetadataSpec{
		Zone: `<a href='x"&=\>` + "\x00\x1f\u00e9\u2028", Region: "%d{{ . }}", Tags: map[string]string{"Owner": "a,b", "": "no name", "a-b": "1"},
	}}}

	return []rules.Facts{full, {}, special}
}

// randomTemplates is the number of templates that TestTemplates_EqualTextTemplate generates, from a fixed seed.
const randomTemplates = 20_000

func TestTemplates_EqualTextTemplate(t *testing.T) {
	facts, word := reported(), regexp.MustCompile(`\w+`)
	rendered, words := 0, map[string]bool{}

	for i := range uint64(randomTemplates) {
		g := generator{Rand: rand.New(rand.NewPCG(43, i))}

		source := g.body(2)
		if compare(t, source, facts[g.IntN(len(facts))]).failed == "" {
			rendered++

			for _, w := range word.FindAllString(source, -1) {
				words[w] = true
			}
		}
	}

	t.Logf("%d of %d templates rendered", rendered, randomTemplates)
	assert.Greater(t, rendered, randomTemplates/4)

	never := slices.DeleteFunc(slices.Collect(maps.Keys(rules.Builtins)), func(name string) bool { return name == "call" })
	for _, w := range slices.Concat(never, rules.Functions(), []string{"if", "else", "with", "range", "break", "continue", "nil"}) {
		assert.True(t, words[w], "no template with %s was rendered", w)
	}
}

// known returns the templates in documentation, tests and the recorded cases of the upstream, which come with machines.
func known(t *testing.T) map[string][]rules.Facts {
	t.Helper()

	templates := map[string][]rules.Facts{}
	add := func(text string, facts ...rules.Facts) {
		for _, source := range templatesIn(text) {
			templates[source] = append(templates[source], facts...)
		}
	}

	for _, root := range []string{"../../docs", "../../cmd", "../../extension", "../../pkg", "../../test", "../../README.md"} {
		require.NoError(t, filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() {
				return err
			}

			data, err := os.ReadFile(path)
			require.NoError(t, err)

			switch filepath.Ext(path) {
			case ".md":
				for _, code := range regexp.MustCompile("(?s)```.*?\n(.*?)```|`([^`\n]+)`").FindAllStringSubmatch(string(data), -1) {
					add(code[1])
					add(code[2])
				}
			case ".yaml":
				add(string(data))
			case ".go":
				for _, literal := range literals(data) {
					add(literal)
				}
			}

			return nil
		}))
	}

	for _, name := range []string{"cases", "templates"} {
		file, err := os.Open("../../test/upstream/testdata/" + name + ".json.gz")
		require.NoError(t, err)

		defer file.Close() //nolint:errcheck // only read

		unzipped, err := gzip.NewReader(file)
		require.NoError(t, err)

		for decoder := json.NewDecoder(unzipped); decoder.More(); {
			var recorded struct {
				Config   string
				Platform runtime.PlatformMetadataSpec
				System   hardware.SystemInformationSpec
			}

			require.NoError(t, decoder.Decode(&recorded))
			add(recorded.Config, rules.Facts{Machine: machine.Machine{Platform: recorded.Platform, System: recorded.System}})
		}
	}

	return templates
}

// templatesIn returns the texts with actions in a YAML document, or the text itself.
func templatesIn(text string) (templates []string) {
	if !strings.Contains(text, "{{") {
		return nil
	}

	var walk func(node any)

	walk = func(node any) {
		switch n := node.(type) {
		case string:
			templates = append(templates, templatesIn(n)...)
		case []any:
			for _, element := range n {
				walk(element)
			}
		case map[string]any:
			for _, value := range n {
				walk(value)
			}
		}
	}

	for document := range strings.SplitSeq(text, "\n---\n") {
		var node any

		if yaml.Unmarshal([]byte(document), &node) == nil && node != text {
			walk(node)
		}
	}

	if len(templates) == 0 {
		return []string{text}
	}

	return templates
}

// literals returns the texts in a Go program.
func literals(program []byte) (texts []string) {
	var s scanner.Scanner

	files := token.NewFileSet()
	s.Init(files.AddFile("", files.Base(), len(program)), program, nil, 0)

	for {
		_, kind, literal := s.Scan()
		if kind == token.EOF {
			return texts
		}

		if text, err := strconv.Unquote(literal); err == nil && kind == token.STRING {
			texts = append(texts, text)
		}
	}
}

func TestTemplates_EqualTextTemplateInDocumentationAndTests(t *testing.T) {
	accepted, rendered := 0, 0

	for source, facts := range known(t) {
		stages := map[string]int{}
		for _, f := range append(facts, reported()...) {
			stages[compare(t, source, f).failed]++
		}

		accepted += min(1, stages[""]+stages[rendering])
		rendered += stages[""]
	}

	t.Logf("%d templates accepted, rendered %d times", accepted, rendered)
	assert.GreaterOrEqual(t, accepted, 340)
	assert.GreaterOrEqual(t, rendered, 7_000)
}
