package main

import (
	"fmt"
	"reflect"
	"regexp"
	"strings"

	"github.com/invopop/jsonschema"

	"github.com/talos-ccm/talos-ccm/pkg/rules"
)

// keys documents the keys of the file and completes their schema.
type keys struct {
	docs strings.Builder
	// types are the schemas of structs by name.
	types jsonschema.Definitions
	// first is the path where a struct was described.
	first map[reflect.Type]string
}

// describe writes a section with a table for each key of the file, and a row for each key below it, in depth-first
// order. Structs that occur again are linked. It completes the schema of the struct.
func (k *keys) describe(t reflect.Type, s *jsonschema.Schema, prefix string) {
	for f := range t.Fields() {
		path, property := prefix+keyOf(f), s.Properties.Value(keyOf(f))
		text, typ := verb.ReplaceAllString(strings.TrimPrefix(property.Description, keyOf(f)+" "), ""), typeName(property)

		if alias, found := f.Tag.Lookup("alias"); found {
			text += fmt.Sprintf(" Also spelled `%s`.", alias)
			s.Properties.Set(alias, property)
			s.Not = &jsonschema.Schema{Type: "object", Required: []string{keyOf(f), alias}}
		}

		elem, below := f.Type, path+"."
		if elem.Kind() == reflect.Slice {
			elem, below = elem.Elem(), path+"[]."
		} else if elem.Kind() == reflect.Pointer {
			elem = elem.Elem()
		}

		first, isKnown := k.first[elem]
		if isKnown {
			section, _, _ := strings.Cut(first, "[")
			typ = fmt.Sprintf("[`%s`](#%s)", first, section)
		}

		if prefix != "" {
			k.docs.WriteString(item(fmt.Sprintf("`%s` (%s%s): %s", path, typ, presence(f), text)))
		} else {
			fmt.Fprintf(&k.docs, "### `%s`\n\n%s", path, wrap(property.Description))
		}

		if prefix == "" && elem.Kind() == reflect.Struct {
			k.docs.WriteString("\n")
		}

		acceptNull(f, property)

		if elem.Kind() == reflect.Struct && !isKnown {
			k.first[elem] = path
			k.describe(elem, k.types[elem.Name()], below)
		}

		if prefix == "" {
			k.docs.WriteString("\n")
		}
	}
}

// acceptNull accepts an optional key without a value, which is the same as no key. An empty enumerated value means the
// default.
func acceptNull(f reflect.StructField, property *jsonschema.Schema) {
	if isRequired(f) {
		return
	}

	value := *property
	value.Description = ""

	if len(value.Enum) > 0 {
		value.Enum = append(value.Enum, "")
	}

	*property = jsonschema.Schema{Description: property.Description, AnyOf: []*jsonschema.Schema{&value, {Type: "null"}}}
}

// presence returns the default of a key, or that it is required.
func presence(f reflect.StructField) string {
	switch value, found := f.Tag.Lookup("default"); {
	case found:
		return "; default: " + value
	case isRequired(f):
		return "; required"
	default:
		return ""
	}
}

// keyOf returns the field's key in the file.
func keyOf(f reflect.StructField) string {
	name, _, _ := strings.Cut(f.Tag.Get("json"), ",")

	return name
}

func isRequired(f reflect.StructField) bool { return !strings.Contains(f.Tag.Get("json"), ",") }

// mapStrings returns the schemas of strings, of maps of them, and of tables; nil for other types. Numbers and booleans are read as
// strings, and a missing value in a map is an empty string.
func mapStrings(t reflect.Type) *jsonschema.Schema {
	types := []string{"string", "number", "boolean"}

	switch t {
	case reflect.TypeFor[string]():
		return &jsonschema.Schema{Extras: map[string]any{"type": types}}
	case reflect.TypeFor[map[string]string]():
		values := &jsonschema.Schema{Extras: map[string]any{"type": append(types, "null")}}

		return &jsonschema.Schema{Type: "object", AdditionalProperties: values}
	case reflect.TypeFor[rules.Tables]():
		table := mapStrings(t.Elem())
		table.Type, table.Extras = "", map[string]any{"type": []string{"object", "null"}}

		return &jsonschema.Schema{Type: "object", AdditionalProperties: table}
	default:
		return nil
	}
}

// typeName describes the type that a schema has before acceptNull.
func typeName(s *jsonschema.Schema) string {
	switch {
	case len(s.Enum) > 0:
		return strings.Trim(strings.ReplaceAll(fmt.Sprintf("%#q", s.Enum), " ", ", "), "[]")
	case s.Ref != "":
		return "object"
	case s.Items != nil:
		return typeName(s.Items) + "[]"
	case s.AdditionalProperties != nil:
		return "map"
	case s.Type != "":
		return s.Type
	default:
		return "string"
	}
}

// verb matches the verb of a comment that a list does not need.
var verb = regexp.MustCompile(`^(is|are) `)

// line matches what fits into a line of less than 120 characters.
var line = regexp.MustCompile(`(.{1,119})( |$)`)

// wrap breaks text, which has single spaces, into lines.
func wrap(text string) string { return line.ReplaceAllString(text, "$1\n") }

// itemLine matches what fits into an indented line.
var itemLine = regexp.MustCompile(`(.{1,117})( |$)`)

// item returns text, which has single spaces, as an item of a list.
func item(text string) string {
	return "- " + strings.TrimSuffix(itemLine.ReplaceAllString(text, "$1\n  "), "  ")
}
