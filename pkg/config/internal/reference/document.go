package main

import (
	"bytes"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"github.com/talos-ccm/talos-ccm/pkg/config"
	"github.com/talos-ccm/talos-ccm/pkg/rules"
)

// Between such lines the document is made, not written.
const (
	begin = "<!-- made by go generate: %s -->\n"
	end   = "<!-- end -->\n"
)

// document is the old one with its made parts made anew.
func document(text []byte, c comments) ([]byte, error) {
	for part, content := range map[string][]byte{"keys": keys(c), "functions": functions()} {
		line := fmt.Appendf(nil, begin, part)
		before, rest, found := bytes.Cut(text, line)
		_, after, ended := bytes.Cut(rest, []byte(end))

		if !found || !ended {
			return nil, fmt.Errorf("the line %q is missing, or %q after it", line, end)
		}

		text = slices.Concat(before, line, content, []byte(end), after)
	}

	return text, nil
}

// functions are those that templates can call.
func functions() []byte {
	return fmt.Appendf(nil, "\nAll functions, besides those of text/template itself: `%s`.\n\n", strings.Join(rules.Functions(), "`, `"))
}

// keys are the sections of the reference.
func keys(c comments) []byte {
	r := reference{comments: c, titles: map[reflect.Type]string{}}
	r.text.WriteByte('\n')
	r.name(reflect.TypeFor[config.Config](), "the top level")

	for len(r.order) > 0 {
		next := r.order[0]
		r.order = r.order[1:]
		r.section(next)
	}

	return r.text.Bytes()
}

// reference writes a section for each struct that the file has.
type reference struct {
	comments comments
	text     bytes.Buffer
	// order is what is still to be written.
	order  []reflect.Type
	titles map[reflect.Type]string
}

// name notes a struct and where it is found first. One that is found in several places is called by its key alone.
func (r *reference) name(t reflect.Type, place string) {
	known, found := r.titles[t]

	switch {
	case !found:
		r.order = append(r.order, t)
		r.titles[t] = place
	case known != place:
		r.titles[t] = place[strings.LastIndexByte(place, '.')+1:]
	}
}

func (r *reference) section(t reflect.Type) {
	place := r.titles[t] + "."
	if t == reflect.TypeFor[config.Config]() {
		place = ""
	}

	for f := range t.Fields() {
		if of, list := structOf(f.Type); of != nil {
			r.name(of, place+keyOf(f)+list)
		}
	}

	heading := "`" + r.titles[t] + "`"
	if place == "" {
		heading = "Top level"
	}

	fmt.Fprintf(&r.text, "### %s\n\n%s\n\n| key | type | default | meaning |\n|---|---|---|---|\n", heading, r.comments.of(t, ""))

	for f := range t.Fields() {
		fmt.Fprintf(&r.text, "| `%s` | %s | %s | %s |\n", keyOf(f), typeName(f.Type), defaultOf(f), strings.ReplaceAll(r.meaning(t, f), "|", `\|`))
	}

	r.text.WriteByte('\n')
}

func (r *reference) meaning(t reflect.Type, f reflect.StructField) string {
	text := r.comments.of(t, f.Name)
	if rest, ok := strings.CutPrefix(text, keyOf(f)+" "); ok {
		text = "`" + keyOf(f) + "` " + rest
	}

	if alias := f.Tag.Get("alias"); alias != "" {
		text += " `" + alias + "` is another spelling."
	}

	return text
}

// structOf is the struct that a value of the type is or has, and how its place is marked if that is a list.
func structOf(t reflect.Type) (of reflect.Type, list string) {
	if t.Kind() == reflect.Slice {
		t, list = t.Elem(), "[]"
	}

	if t.Kind() != reflect.Struct {
		return nil, ""
	}

	return t, list
}

func typeName(t reflect.Type) string {
	if values, ok := choices[t]; ok {
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
		if t.Elem().Kind() == reflect.String {
			return "list of texts"
		}

		return "list"
	case reflect.Map:
		return "text by key"
	case reflect.Struct:
		return "mapping"
	case reflect.Bool:
		return "`true`, `false`"
	case reflect.Int:
		return "number"
	default:
		return "text"
	}
}

func defaultOf(f reflect.StructField) string {
	switch value := f.Tag.Get("default"); {
	case value != "":
		return value
	case isRequired(f):
		return "required"
	case f.Type.Kind() == reflect.Bool:
		return "`false`"
	default:
		return ""
	}
}
