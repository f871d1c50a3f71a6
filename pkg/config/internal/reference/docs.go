package main

import (
	"fmt"
	"reflect"
	"regexp"
	"strings"
)

// docs are the sections of the keys of the file.
type docs struct {
	comments comments
	text     strings.Builder
	// first is the path where a type was described.
	first map[reflect.Type]string
}

// describe writes a section for each key of a struct and for the keys below it, in depth-first order. Structs that
// occur again are linked.
func (d *docs) describe(t reflect.Type, prefix string) {
	for f := range t.Fields() {
		path := prefix + keyOf(f)
		heading := "####"

		if prefix == "" {
			heading = "###"
		}

		fmt.Fprintf(&d.text, "%s `%s`\n\nType: %s.", heading, path, typeName(f.Type))

		switch value, described := f.Tag.Lookup("default"); {
		case described:
			fmt.Fprintf(&d.text, " Default: %s.", value)
		case f.Type.Kind() == reflect.Bool:
			d.text.WriteString(" Default: `false`.")
		case isRequired(f):
			d.text.WriteString(" Required.")
		}

		text := d.comments.of(t, f.Name)
		if alias := f.Tag.Get("alias"); alias != "" {
			text += fmt.Sprintf(" `%s` is another spelling of this key.", alias)
		}

		elem, below := f.Type, path+"."
		if elem.Kind() == reflect.Slice {
			elem, below = elem.Elem(), path+"[]."
		}

		first, isKnown := d.first[elem]
		if isKnown {
			text += fmt.Sprintf(" See [`%s`](#%s) for the keys.", first, notInAnchor.ReplaceAllString(strings.ToLower(first), ""))
		}

		d.text.WriteString("\n\n" + wrap(text) + "\n")

		if elem.Kind() == reflect.Struct && !isKnown {
			d.first[elem] = path
			d.describe(elem, below)
		}
	}
}

// notInAnchor matches what GitHub omits in the anchors of headings.
var notInAnchor = regexp.MustCompile(`[^a-z0-9_-]`)

// line matches what fits into a line of less than 120 characters.
var line = regexp.MustCompile(`(.{1,119})( |$)`)

// wrap breaks text, which has single spaces, into lines.
func wrap(text string) string { return line.ReplaceAllString(text, "$1\n") }

func typeName(t reflect.Type) string {
	if values, found := enums[t]; found {
		names := make([]string, len(values))
		for i, value := range values {
			names[i] = fmt.Sprintf("`%s`", value)
		}

		return strings.Join(names, ", ")
	}

	switch t.Kind() {
	case reflect.Pointer:
		return typeName(t.Elem())
	case reflect.Slice:
		return "list of " + typeName(t.Elem()) + "s"
	case reflect.Map:
		return "map of strings to strings"
	case reflect.Struct:
		return "object"
	case reflect.Bool:
		return "boolean"
	case reflect.Int:
		return "integer"
	default:
		return "string"
	}
}
