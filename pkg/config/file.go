package config

import (
	"fmt"
	"reflect"
	"slices"
	"strings"

	"go.yaml.in/yaml/v4"
)

// Extension describes the extension service that reads the configuration.
type Extension struct {
	// Name is the name of its ExtensionServiceConfig document.
	Name string
	// MountPath is the mountPath of its only file.
	MountPath string
	// CheckEnvironment returns why the service cannot be started with the variables, one line per error.
	CheckEnvironment func(variables []string) error
	// Warn returns warnings about the variables.
	Warn func(variables []string) []string
	// Unused returns the top-level keys of the configuration that have no effect with the variables, and why.
	Unused func(variables []string) map[string]string
}

// ParseFile reads a configuration file, or a stream of documents that contains the ExtensionServiceConfig document of
// the extension, such as a machine configuration. The error is an *Error that holds every error, with its position in
// this file.
func ParseFile(name string, data []byte, extension Extension) (*Compiled, error) {
	f := &file{decoder: newDecoder(), extension: extension}
	roots := f.load(data)

	var compiled *Compiled

	switch {
	case slices.ContainsFunc(roots, func(n *yaml.Node) bool { return !child(n, "sops").IsZero() }):
		f.add(Problem{Msg: "file is encrypted; validate the output of `sops decrypt`"})
	case slices.ContainsFunc(roots, isDocument):
		compiled = f.stream(roots)
	default:
		compiled = f.parse(roots)
	}

	if err := f.err(name); err != nil {
		return nil, err
	}

	compiled.Warnings, compiled.Environment = f.problems, f.environment

	return compiled, nil
}

// IsOurs reports whether a file is probably meant for ParseFile: it contains the document of the named extension, or a
// mapping with more keys of the configuration than others, or nothing, or it is not valid YAML.
func IsOurs(extension string, data []byte) bool {
	roots := newDecoder().load(data)

	return roots == nil || slices.ContainsFunc(roots, func(n *yaml.Node) bool {
		known, name := 0, child(n, "name")

		for pair := range slices.Chunk(n.Content, 2) {
			if _, isKey := fieldOf(reflect.TypeFor[Config](), pair[0].Value); isKey {
				known++
			}
		}

		if isDocument(n) {
			return name.Value == extension || name.IsZero() && child(n, "kind").Value == extensionKind
		}

		return isNull(n) || n.Kind == yaml.MappingNode && 4*known >= len(n.Content)
	})
}

// file reads a file that may contain the document of the extension.
type file struct {
	*decoder

	extension   Extension
	environment []string
}

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

// stream reads the document of the extension, and ignores other documents.
func (f *file) stream(roots []*yaml.Node) *Compiled {
	var found *yaml.Node

	for _, root := range roots {
		name := child(root, "name") // without one, the document has an error

		switch {
		case !isDocument(root) && child(root, "cluster").IsZero() && child(root, "version").IsZero():
			f.report(root, "", "configuration beside documents is ignored; put it into configFiles of the %s document", extensionKind)
		case child(root, "kind").Value != extensionKind || name.Value != f.extension.Name && !name.IsZero():
		case found != nil:
			f.report(root, "", "another %s document with the name %s is in line %d", extensionKind, f.extension.Name, found.Line)
		default:
			found = root
		}
	}

	if found != nil {
		return f.document(found)
	}

	f.report(roots[0], "", "file has no %s document with the name %s, and other kinds are not read", extensionKind, f.extension.Name)

	return nil
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

func (f *file) document(root *yaml.Node) *Compiled {
	var document extensionServiceConfig

	f.decodeDocument(root, &document)

	if document.APIVersion != "" && document.APIVersion != "v1alpha1" {
		f.report(f.find("apiVersion"), "apiVersion", "must be v1alpha1, not %s", quote(document.APIVersion))
	}

	if len(document.ConfigFiles)+len(document.Environment) == 0 && len(f.problems) == 0 {
		f.report(root, "", "document needs configFiles or environment")
	}

	f.environment = document.Environment
	f.checkEnvironment(document.Environment)

	compiled, _ := Parse("", nil) // the defaults are valid

	for i, file := range document.ConfigFiles {
		at := fmt.Sprintf("configFiles[%d]", i)
		content := f.values[at+".content"].value

		switch {
		case i > 0:
			f.report(f.find(at), at, "the extension has one file only")
		case file.MountPath != "" && file.MountPath != f.extension.MountPath:
			f.report(f.find(at+".mountPath"), at+".mountPath", "must be %s, not %s", f.extension.MountPath, quote(file.MountPath))
		}

		if content != nil && canBe(reflect.String, resolve(content)) {
			compiled = f.embedded(resolve(content), f.extension.Unused(document.Environment))
		}
	}

	return compiled
}

// checkEnvironment reports why the service cannot be started with the variables, and warnings. A message caused by a
// single variable is reported at that variable, any other at the first variable.
func (f *file) checkEnvironment(variables []string) {
	check := func(variables []string) []string {
		if err := f.extension.CheckEnvironment(variables); err != nil {
			return strings.Split(err.Error(), "\n")
		}

		return nil
	}
	place := func(message string, messages func([]string) []string) string {
		i := slices.IndexFunc(variables, func(v string) bool { return slices.Contains(messages([]string{v}), message) })

		return fmt.Sprintf("environment[%d]", max(i, 0))
	}

	if len(variables) == 0 {
		return
	}

	for i, variable := range variables {
		name, _, _ := strings.Cut(variable, "=")
		if slices.ContainsFunc(variables[i+1:], func(v string) bool { return strings.HasPrefix(v, name+"=") }) {
			f.warn(fmt.Sprintf("environment[%d]", i), name+" is set again below, and the last value applies")
		}
	}

	for _, warning := range f.extension.Warn(variables) {
		f.warn(place(warning, f.extension.Warn), warning)
	}

	for _, mistake := range check(variables) {
		path := place(mistake, check)
		f.report(f.find(path), path, "%s", strings.TrimPrefix(mistake, "environment: "))
	}
}

// embedded reads the configuration file in the text of a node. Lines in a literal block refer to the containing file.
// Lines in other texts are unknown, because YAML joins them. Columns are unknown, because YAML removes the indentation.
// It warns of unused keys.
func (f *file) embedded(n *yaml.Node, unused map[string]string) *Compiled {
	if strings.TrimSpace(n.Value) == "" {
		f.report(n, "", "configuration file is empty; use {} for the defaults")
	}

	d, text, isLiteral := newDecoder(), n.Value, n.Style&yaml.LiteralStyle != 0
	if isLiteral {
		text = strings.Repeat("\n", n.Line) + text
	}

	compiled := d.parse(d.load([]byte(text)))

	for key, reason := range unused {
		if e, found := d.values[key]; found && len(resolve(e.value).Content) > 0 {
			d.warn(key, reason)
		}
	}

	for _, p := range d.finish() {
		if isLiteral {
			p.Column = 0
		} else {
			p.Line, p.Column, p.Msg = n.Line, n.Column, fmt.Sprintf("%s (in line %d of the text)", p.Msg, p.Line)
		}

		f.add(p)
	}

	return compiled
}
