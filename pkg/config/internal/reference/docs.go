package main

import (
	"cmp"
	"fmt"
	"reflect"
	"regexp"
	"strings"

	"github.com/talos-ccm/talos-ccm/pkg/config"
	"github.com/talos-ccm/talos-ccm/pkg/rules"
)

// functions returns a list of the functions that templates can call.
func functions() string {
	return wrap("All functions in addition to those of text/template: `"+strings.Join(rules.Functions(), "`, `")+"`.") + "\n"
}

// keys returns one section for each key of the file.
func keys(c comments) string {
	r := reference{comments: c, first: map[reflect.Type]string{}}
	r.describe(reflect.TypeFor[config.Config](), "")

	return r.text.String()
}

type reference struct {
	comments comments
	text     strings.Builder
	// first is the path where a type was described.
	first map[reflect.Type]string
}

// describe writes a section for each key of a struct and for the keys below it, in depth-first order. Structs that
// occur again are linked.
func (r *reference) describe(t reflect.Type, prefix string) {
	for f := range t.Fields() {
		path := prefix + keyOf(f)
		heading := "####"

		if prefix == "" {
			heading = "###"
		}

		fmt.Fprintf(&r.text, "%s `%s`\n\nType: %s.", heading, path, typeName(f.Type))

		if value := defaultOf(f); value != "" {
			fmt.Fprintf(&r.text, " Default: %s.", value)
		} else if isRequired(f) {
			r.text.WriteString(" Required.")
		}

		text := r.comments.of(t, f.Name)
		if alias := f.Tag.Get("alias"); alias != "" {
			text += fmt.Sprintf(" `%s` is another spelling of this key.", alias)
		}

		elem := f.Type
		if elem.Kind() == reflect.Slice {
			elem, path = elem.Elem(), path+"[]"
		}

		first, isKnown := r.first[elem]
		if isKnown {
			text += fmt.Sprintf(" See [`%s`](#%s) for the keys.", first, notInAnchor.ReplaceAllString(strings.ToLower(first), ""))
		}

		fmt.Fprintf(&r.text, "\n\n%s\n", wrap(text))

		if elem.Kind() == reflect.Struct && !isKnown {
			r.first[elem] = prefix + keyOf(f)
			r.describe(elem, path+".")
		}
	}
}

// notInAnchor matches what GitHub omits in the anchors of headings.
var notInAnchor = regexp.MustCompile(`[^a-z0-9_-]`)

// wrap breaks text into lines of less than 120 characters.
func wrap(text string) string {
	var lines strings.Builder

	width := 0

	for word := range strings.FieldsSeq(text) {
		separator := " "
		if width == 0 {
			separator = ""
		} else if width+len(word) >= 119 {
			separator, width = "\n", 0
		}

		lines.WriteString(separator + word)

		width += len(separator + word)
	}

	return lines.String() + "\n"
}

func typeName(t reflect.Type) string {
	if values, found := enums[t]; found {
		var names []string

		for _, v := range values {
			if name := fmt.Sprint(v); name != "" {
				names = append(names, "`"+name+"`")
			}
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

func defaultOf(f reflect.StructField) string {
	if f.Type.Kind() == reflect.Bool {
		return cmp.Or(f.Tag.Get("default"), "`false`")
	}

	return f.Tag.Get("default")
}
