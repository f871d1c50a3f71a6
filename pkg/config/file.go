package config

import (
	"bytes"
	"cmp"
	"fmt"
	"path"
	"reflect"
	"slices"
	"strings"

	"go.yaml.in/yaml/v4"

	"github.com/talos-ccm/talos-ccm/pkg/similar"
)

// Extension describes the extension service that reads the configuration.
type Extension struct {
	// Name is the name of its ExtensionServiceConfig document.
	Name string
	// MountPath is the mountPath of its only file.
	MountPath string
	// CheckEnvironment returns why the service cannot be started with the variables, one line per error.
	CheckEnvironment func(variables []string) error
}

// File is a valid file.
type File struct {
	*Compiled

	// Document is the ExtensionServiceConfig document that the file was converted to; empty if it needs no conversion.
	Document string
}

// helmHeading is the first line of Helm values in the default output format.
const helmHeading = "USER-SUPPLIED VALUES:"

// ParseFile reads a configuration file, or a file that contains one: an ExtensionServiceConfig document, a machine
// configuration with such a document, or a ConfigMap. It converts the Helm values of the upstream Talos CCM. The error
// is an *Error that holds every error, with its position in this file.
func ParseFile(name string, data []byte, service Extension) (*File, error) {
	f := &file{decoder: newDecoder(), service: service, lines: strings.Split(string(data), "\n")}

	if bytes.HasPrefix(data, []byte(helmHeading)) {
		f.add(Problem{Line: 1, Column: 1, Msg: helmHeading + ` is no YAML key; write the values with "helm get values -o yaml"`})

		return &f.result, f.err(name)
	}

	roots := f.load(data)

	switch isStream := slices.ContainsFunc(roots, isDocument); {
	case roots == nil:
	case isStream:
		f.stream(roots)
	case len(roots) == 1 && isChart(roots[0]):
		f.convert(name, roots[0])
	default:
		f.result.Compiled = f.parse(roots)
	}

	return &f.result, f.err(name)
}

// file reads a file that contains a configuration.
type file struct {
	*decoder

	service Extension
	lines   []string
	result  File
	// extensionDocument is the document of the extension service, text that of the configuration file; nil until read.
	extensionDocument, text *yaml.Node
}

// child returns the value of a key of a mapping; the zero node if there is none.
func child(mapping *yaml.Node, key string) *yaml.Node {
	for pair := range slices.Chunk(mapping.Content, 2) {
		if mapping.Kind == yaml.MappingNode && pair[0].Value == key {
			return resolve(pair[1])
		}
	}

	return new(yaml.Node)
}

// isDocument reports whether the node is a document of Talos or Kubernetes. The first document of a machine
// configuration has no kind.
func isDocument(n *yaml.Node) bool {
	return !child(n, "kind").IsZero() || !child(n, "apiVersion").IsZero() || !child(n, "machine").IsZero()
}

const extensionKind = "ExtensionServiceConfig"

// stream reads the documents of the extension service and ConfigMaps, and ignores other documents.
func (f *file) stream(roots []*yaml.Node) {
	found := false

	for _, root := range roots {
		kind, name := child(root, "kind").Value, child(root, "name").Value

		switch {
		case kind == extensionKind && name == f.service.Name:
			f.extension(root)

			found = true
		case kind == "ConfigMap" && f.configMap(child(root, "data")):
			found = true
		}
	}

	if !found {
		f.missing(roots)
	}
}

// configMap reads the files in the data of a ConfigMap, and reports whether there are any.
func (f *file) configMap(data *yaml.Node) (found bool) {
	for pair := range slices.Chunk(data.Content, 2) {
		if key := pair[0].Value; data.Kind == yaml.MappingNode && strings.HasPrefix(strings.ToLower(path.Ext(key)), ".y") {
			f.embedded(resolve(pair[1]))

			found = true
		}
	}

	return found
}

// missing reports that there is no document of the extension service, at a document that was probably meant to be it.
func (f *file) missing(roots []*yaml.Node) {
	for _, root := range roots {
		kind, name := child(root, "kind"), child(root, "name")

		switch {
		case kind.Value == extensionKind:
			f.report(cmp.Or(name, root), "name", "must be %s, the name of the extension service, not %s", f.service.Name, quote(name.Value))
		case similar.Hint(kind.Value, []string{extensionKind}) != "":
			f.report(kind, "kind", "must be %s, not %s", extensionKind, quote(kind.Value))
		case kind.Value == "ConfigMap":
			f.report(root, "data", "has no key that ends in .yaml or .yml")
		}
	}

	if len(f.problems) == 0 {
		f.report(roots[0], "", "file has no %s document with the name %s", extensionKind, f.service.Name)
	}
}

// extensionServiceConfig is the document of an extension service. Talos requires what is required here.
type extensionServiceConfig struct {
	APIVersion  string          `json:"apiVersion"`
	Kind        string          `json:"kind"`
	Name        string          `json:"name"`
	ConfigFiles []extensionFile `json:"configFiles,omitempty"`
	Environment []string        `json:"environment,omitempty"`
}

type extensionFile struct {
	Content   string `json:"content"`
	MountPath string `json:"mountPath"`
}

// extension reads the document of the extension service.
func (f *file) extension(root *yaml.Node) {
	if f.extensionDocument != nil {
		f.report(root, "", "another %s document with the name %s is in line %d", extensionKind, f.service.Name, f.extensionDocument.Line)
	}

	f.extensionDocument = root

	d := newDecoder()
	if !d.checkAliases(root, map[*yaml.Node]int{}) {
		f.include(d)

		return
	}

	var document extensionServiceConfig

	d.decode(entry{key: root, value: root}, reflect.ValueOf(&document).Elem())

	d.explainTypes()

	if document.APIVersion != "" && document.APIVersion != "v1alpha1" {
		d.report(d.find("apiVersion"), "apiVersion", "must be v1alpha1, not %s", quote(document.APIVersion))
	}

	if len(document.ConfigFiles)+len(document.Environment) == 0 && len(d.problems) == 0 {
		d.report(root, "", "document needs configFiles or environment")
	}

	f.files(d, document.ConfigFiles)

	var at []string
	for i := range document.Environment {
		at = append(at, fmt.Sprintf("environment[%d]", i))
	}

	d.checkEnvironment(document.Environment, at, f.service.CheckEnvironment)
	f.include(d)

	if f.result.Compiled == nil {
		f.result.Compiled, _ = Parse("", nil) // the defaults are valid
	}
}

// explainTypes completes the messages about values of other types in the document.
func (d *decoder) explainTypes() {
	for i := range d.problems {
		switch p := &d.problems[i]; {
		case !strings.Contains(p.Msg, "must be "):
		case strings.HasPrefix(p.Path, "environment"):
			p.Msg += "; write a list such as [TALOS_CCM_V=4]"
		case strings.HasSuffix(p.Path, ".content"):
			p.Msg += `; write "content: |" and indent the file below it`
		}
	}
}

// files reads the files of the document that d decodes.
func (f *file) files(d *decoder, files []extensionFile) {
	for i, file := range files {
		at := fmt.Sprintf("configFiles[%d]", i)
		if file.MountPath != "" && file.MountPath != f.service.MountPath {
			d.report(d.find(at+".mountPath"), at+".mountPath", "must be %s, not %s", f.service.MountPath, quote(file.MountPath))
		}

		if e, found := d.values[at+".content"]; found && resolve(e.value).Kind == yaml.ScalarNode && !isNull(e.value) {
			f.embedded(resolve(e.value))
		}
	}
}

func (f *file) include(d *decoder) {
	for _, p := range d.finish() {
		f.add(p)
	}
}

// checkEnvironment reports why the service cannot be started with variables, which are at the given paths. An error
// caused by a single variable is reported at that variable, any other at the first variable.
func (d *decoder) checkEnvironment(variables, at []string, check func([]string) error) {
	mistakes := func(variables ...string) []string {
		if err := check(variables); err != nil {
			return strings.Split(err.Error(), "\n")
		}

		return nil
	}

	if len(variables) == 0 {
		return
	}

	for _, mistake := range mistakes(variables...) {
		i := slices.IndexFunc(variables, func(v string) bool { return slices.Contains(mistakes(v), mistake) })
		path := at[max(i, 0)]
		d.report(d.find(path), path, "%s", strings.TrimPrefix(mistake, "environment: "))
	}
}

// embedded reads the configuration file that is the text of a node.
func (f *file) embedded(n *yaml.Node) {
	switch {
	case n.Kind != yaml.ScalarNode:
		f.report(n, "", `must be a string, not %s; write "|" after the key`, describe(n))
	case strings.TrimSpace(n.Value) == "":
		f.report(n, "", "configuration file is empty; use {} for the defaults")
	case f.text != nil:
		f.report(n, "", "another configuration file begins in line %d", f.text.Line)
	}

	f.text = n

	d := newDecoder()

	if n.Style&yaml.LiteralStyle != 0 {
		d.origin = origin{lines: n.Line, columns: f.indentation(n)}
	}

	f.result.Compiled = d.parse(d.load([]byte(n.Value)))

	switch {
	case len(d.problems) == 0:
	case n.Style&yaml.FoldedStyle != 0:
		d.problems = []Problem{{Line: n.Line, Column: n.Column, Msg: `">" joins the lines of the text; use "|"`}}
	case n.Style&yaml.LiteralStyle == 0:
		for i, p := range d.problems {
			d.problems[i].Line, d.problems[i].Column = n.Line, n.Column
			d.problems[i].Msg = fmt.Sprintf("%s (in line %d of the text)", p.Msg, p.Line)
		}
	}

	f.include(d)
}

// indentation returns by how many columns the text of a block is indented.
func (f *file) indentation(n *yaml.Node) int {
	leading := func(lines []string) int {
		for _, line := range lines {
			if trimmed := strings.TrimLeft(line, " "); strings.TrimSpace(trimmed) != "" {
				return len(line) - len(trimmed)
			}
		}

		return 0
	}

	return leading(f.lines[min(n.Line, len(f.lines)):]) - leading(strings.Split(n.Value, "\n"))
}
