// Command reference generates the JSON schema of the configuration file and the lists of docs/reference: the keys of the
// file from the types of package config, metrics from their definitions, Events and labels from constants, all with their
// comments. It also copies the RBAC of the extension to the Helm chart, because Flux drops symbolic links. It runs in its
// own directory (go generate).
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"

	"github.com/invopop/jsonschema"

	"github.com/talos-ccm/talos-ccm/extension"
	"github.com/talos-ccm/talos-ccm/pkg/config"
)

//go:generate go run .

const root = "../../.."

func main() {
	generated, err := generate()

	for name, content := range generated {
		err = errors.Join(err, os.WriteFile(name, content, 0o644))
	}

	if err != nil {
		fmt.Fprintln(os.Stderr, "Error:", err)
		os.Exit(1)
	}
}

// region matches a generated part of a page. Its first line names the kind of the list and the packages.
var region = regexp.MustCompile(`(?s)(<!-- generated: ([^>]+) -->\n).*?(<!-- end -->\n)`)

// generate returns the content of the generated files by name, relative to the directory of this package.
func generate() (map[string][]byte, error) {
	schema, docs, err := configuration()
	if err != nil {
		return nil, err
	}

	t := tables{"configuration": docs}
	pages, err := filepath.Glob(root + "/docs/reference/*.md")

	if err := errors.Join(err, t.scan("extension"), t.scan("pkg")); err != nil {
		return nil, err
	}

	files := map[string][]byte{
		root + "/pkg/config/schema.json":    schema,
		root + "/packaging/chart/rbac.yaml": append([]byte("# Generated from extension/rbac.yaml by make generate; do not edit.\n#\n"), extension.RBAC...),
	}

	for _, page := range pages {
		text, err := os.ReadFile(page)
		if err != nil {
			return nil, err
		}

		files[page] = region.ReplaceAllFunc(text, func(old []byte) []byte {
			match := region.FindSubmatch(old)

			return fmt.Appendf(nil, "%s\n%s\n\n%s", match[1], strings.TrimSpace(t.take(string(match[2]))), match[3])
		})
	}

	if len(t) > 0 {
		return nil, fmt.Errorf("no page of docs/reference has %q", slices.Sorted(maps.Keys(t)))
	}

	return files, nil
}

// configuration returns the JSON schema and the reference of the configuration file.
func configuration() (schema []byte, docs string, err error) {
	r := jsonschema.Reflector{ExpandedStruct: true, Anonymous: true, Mapper: mapStrings}

	// AddGoComments appends the directory to the import path.
	for _, dir := range []string{"pkg/config", "pkg/rules"} {
		if err := r.AddGoComments("github.com/talos-ccm/talos-ccm/test/docs/reference", root+"/"+dir); err != nil {
			return nil, "", err
		}
	}

	// CommentMap has the first sentence of a type's comment, and a field's whole comment with the name of the Go field.
	r.LookupComment = func(t reflect.Type, field string) string {
		name := t.PkgPath() + "." + t.Name()
		if field == "" {
			return strings.Join(strings.Fields(r.CommentMap[name]), " ")
		}

		f, _ := t.FieldByName(field)
		text := strings.Join(strings.Fields(r.CommentMap[name+"."+field]), " ")

		if rest, found := strings.CutPrefix(text, field+" "); found {
			text = keyOf(f) + " " + rest
		}

		return text
	}
	top := r.Reflect(config.Config{})
	top.Title = "talos-ccm configuration"

	k := keys{types: top.Definitions, first: map[reflect.Type]string{}}
	k.describe(reflect.TypeFor[config.Config](), top, "")
	top.Type, top.Extras = "", map[string]any{"type": []string{"object", "null"}}

	var text bytes.Buffer

	encoder := json.NewEncoder(&text)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", "  ")
	err = encoder.Encode(top)

	return text.Bytes(), k.docs.String(), err
}
