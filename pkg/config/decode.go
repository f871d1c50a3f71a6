package config

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v4"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// Tags of the YAML core schema.
const (
	tagNull  = "!!null"
	tagBool  = "!!bool"
	tagInt   = "!!int"
	tagStr   = "!!str"
	tagMap   = "!!map"
	tagSeq   = "!!seq"
	tagMerge = "!!merge"
)

// maxExpanded bounds the size of the document with aliases and merge keys expanded. A node counts one more than its
// text.
const maxExpanded = 4 * MaxSize

// decoder fills a Config from YAML nodes and collects mistakes. The YAML library finds only some of them, and without
// paths.
type decoder struct {
	problems []Problem
	// stopped is true after a problem that leaves the rest of the document unread.
	stopped bool
	// root is the document; the zero Node if it is empty.
	root entry
	// parents are the structs that contain the current value, outermost first.
	parents []parent
	// active are the nodes with an anchor that contain the current node, to detect aliases that contain themselves.
	active map[*yaml.Node]bool
	// mappings are the entries of the mappings that have been read.
	mappings map[*yaml.Node][]entry
	// expanded is the size of what has been decoded.
	expanded int
}

type parent struct {
	typ  reflect.Type
	path *field.Path
}

// entry is a key of a mapping with its value. The key of a list item, and of the document, is its value.
type entry struct{ key, value *yaml.Node }

// load parses the document and decodes it.
func (d *decoder) load(data []byte, into *Config) {
	if len(data) > MaxSize {
		d.stop(d.root.value, nil, "file has %d bytes; the maximum is %d", len(data), MaxSize)

		return
	}

	var documents []yaml.Node

	err := yaml.Load(data, &documents, yaml.WithAllDocuments())

	switch {
	case err != nil:
		d.stopAtSyntaxError(data, err)
	case len(documents) > 1:
		d.stop(&documents[1], nil, "file contains more than one YAML document")
	case len(documents) == 1:
		root := documents[0].Content[0]
		d.root = entry{root, root}
		d.decode(root, reflect.ValueOf(into).Elem(), nil)
	}
}

// stopAtSyntaxError reports an error of the YAML library.
func (d *decoder) stopAtSyntaxError(data []byte, err error) {
	at, msg := yaml.Mark{}, err.Error()

	if e, found := errors.AsType[*yaml.LoadError](err); found {
		at, msg = e.Mark, e.Message

		// Invalid characters have an offset only.
		if at.Line == 0 {
			before := data[:min(at.Index, len(data))]
			at.Line = bytes.Count(before, []byte("\n")) + 1
			at.Column = utf8.RuneCount(before[bytes.LastIndexByte(before, '\n')+1:]) + 1
		}

		if e.ContextMsg != "" {
			msg += " " + e.ContextMsg
		}
	}

	lines := bytes.Split(bytes.TrimRight(data, "\n"), []byte("\n"))
	if at.Line > len(lines) {
		at = yaml.Mark{Line: len(lines)}
	}

	if at.Line > 0 && bytes.Contains(lines[at.Line-1], []byte("{{")) {
		msg += "; " + unquotedTemplate
	}

	d.stop(&yaml.Node{Line: at.Line, Column: at.Column}, nil, "invalid YAML: %s", msg)
}

// visit calls f with the node, or with the node that it is an alias of, unless the document becomes too large or the
// node contains itself.
func (d *decoder) visit(n *yaml.Node, path *field.Path, f func(n *yaml.Node)) {
	at, n := n, resolve(n)
	d.expanded += 1 + len(n.Value)

	switch {
	case d.stopped:
	case d.expanded > maxExpanded:
		d.stop(at, path, "document is too large with its aliases expanded")
	case d.active[n]:
		d.report(at, path, "alias %s refers to a value that contains it", quote(at.Value))
	case n.Anchor == "":
		f(n)
	default:
		d.active[n] = true
		f(n)
		delete(d.active, n)
	}
}

// decode stores the value of a node, except null: a key without a value is the same as no key.
func (d *decoder) decode(n *yaml.Node, into reflect.Value, path *field.Path) {
	d.visit(n, path, func(n *yaml.Node) {
		if isNull(n) {
			return
		}

		if into.Kind() == reflect.Pointer {
			into.Set(reflect.New(into.Type().Elem()))
			into = into.Elem()
		}

		isMapping := n.Kind == yaml.MappingNode && n.ShortTag() == tagMap

		switch kind := into.Kind(); {
		case kind == reflect.Struct && isMapping:
			d.setStruct(n, into, path)
		case kind == reflect.Map && isMapping:
			d.setMap(n, into, path)
		case kind == reflect.Slice && n.Kind == yaml.SequenceNode && n.ShortTag() == tagSeq:
			d.setSlice(n, into, path)
		default:
			d.setScalar(n, into, path)
		}
	})
}

// unquotedTemplate explains what isUnquotedTemplate finds.
const unquotedTemplate = `a value that begins with "{{" must be quoted`

// isUnquotedTemplate reports whether the node is what YAML reads for {{ .Region }}: a mapping with a mapping as its
// key.
func isUnquotedTemplate(n *yaml.Node) bool {
	return n.Kind == yaml.MappingNode && n.Style&yaml.FlowStyle != 0 && len(n.Content) > 0 && n.Content[0].Kind == yaml.MappingNode
}

func (d *decoder) setScalar(n *yaml.Node, into reflect.Value, path *field.Path) {
	number, err := strconv.Atoi(n.Value)
	isDecimal := err == nil && strconv.Itoa(number) == n.Value

	switch kind, tag := into.Kind(), n.ShortTag(); {
	case isUnquotedTemplate(n):
		d.report(n, path, "%s", unquotedTemplate)
	case kind == reflect.String && isString(n):
		into.SetString(n.Value)
	case kind == reflect.Bool && tag == tagBool:
		into.SetBool(strings.EqualFold(n.Value, "true"))
	case kind == reflect.Int && tag == tagInt && isDecimal:
		into.SetInt(int64(number))
	default:
		d.report(n, path, "must be %s, not %s", expected[kind], describe(n))
	}
}

// isString reports whether the node can be read as a string: plain numbers, booleans and dates can, as they are
// written.
func isString(n *yaml.Node) bool {
	return n.Kind == yaml.ScalarNode && slices.Contains([]string{tagStr, tagInt, "!!float", tagBool, "!!timestamp", tagMerge}, n.ShortTag())
}

// expected are the descriptions of the kinds that a Config is made of.
var expected = map[reflect.Kind]string{
	reflect.Struct: "a mapping",
	reflect.Map:    "a mapping",
	reflect.Slice:  "a list",
	reflect.String: "a string",
	reflect.Bool:   "true or false",
	reflect.Int:    "a decimal integer",
}

func describe(n *yaml.Node) string {
	switch tag := n.ShortTag(); {
	case tag == tagMap:
		return "a mapping"
	case tag == tagSeq:
		return "a list"
	case !isString(n):
		return "a value with the YAML tag " + quote(tag)
	case tag == tagStr:
		return "the string " + quote(n.Value)
	default:
		return quote(n.Value)
	}
}

func (d *decoder) setStruct(n *yaml.Node, into reflect.Value, path *field.Path) {
	t := into.Type()
	present := map[string]string{}

	d.parents = append(d.parents, parent{t, path})
	defer func() { d.parents = d.parents[:len(d.parents)-1] }()

	child := func(key string) *field.Path { return path.Child(key) }
	for _, e := range d.entries(n, path, child) {
		at := child(e.key.Value)
		f, known := fieldOf(t, e.key.Value)

		switch {
		case !known:
			d.reportUnknown(e.key, at, t)
		case present[f.Name] != "":
			d.report(e.key, at, "cannot be combined with %s, which is another spelling of this key", present[f.Name])
		default:
			d.decode(e.value, into.FieldByIndex(f.Index), at)

			if !isNull(e.value) {
				present[f.Name] = e.key.Value
			}
		}
	}

	for f := range t.Fields() {
		if name, isRequired := keyOf(f); isRequired && present[f.Name] == "" {
			d.reportInvalid(field.Required(path.Child(name), ""))
		}
	}
}

// keyOf returns the field's key in the file and whether it is required.
func keyOf(f reflect.StructField) (name string, isRequired bool) {
	name, _, optional := strings.Cut(f.Tag.Get("json"), ",")

	return name, !optional
}

func fieldOf(t reflect.Type, key string) (reflect.StructField, bool) {
	for f := range t.Fields() {
		if name, _ := keyOf(f); key != "" && (key == name || key == f.Tag.Get("alias")) {
			return f, true
		}
	}

	return reflect.StructField{}, false
}

func isNull(n *yaml.Node) bool {
	n = resolve(n)

	return n.Kind == yaml.ScalarNode && n.ShortTag() == tagNull
}

// reportUnknown reports a key that the struct does not have, and what may have been meant.
func (d *decoder) reportUnknown(key *yaml.Node, path *field.Path, t reflect.Type) {
	var names []string

	for f := range t.Fields() {
		name, _ := keyOf(f)
		names = append(names, name)
	}

	hint := "; expected " + strings.Join(names, ", ")
	if near := closest(key.Value, names); near != "" {
		hint = "; did you mean " + near + "?"
	}

	for _, p := range slices.Backward(d.parents) {
		if _, found := fieldOf(p.typ, key.Value); found {
			hint = "; it belongs to " + cmp.Or(pathString(p.path), "the top level") + ": check the indentation"

			break
		}
	}

	d.report(key, path, "unknown key%s", hint)
}

// setMap reads a mapping of strings to strings. A key without a value is an empty string, as in the upstream Talos CCM.
func (d *decoder) setMap(n *yaml.Node, into reflect.Value, path *field.Path) {
	into.Set(reflect.MakeMap(into.Type()))

	for _, e := range d.entries(n, path, path.Key) {
		var value string

		d.decode(e.value, reflect.ValueOf(&value).Elem(), path.Key(e.key.Value))
		into.SetMapIndex(reflect.ValueOf(e.key.Value), reflect.ValueOf(value))
	}
}

func (d *decoder) setSlice(n *yaml.Node, into reflect.Value, path *field.Path) {
	into.Set(reflect.MakeSlice(into.Type(), len(n.Content), len(n.Content)))

	for i, item := range n.Content {
		if isNull(item) {
			d.reportInvalid(field.Required(path.Index(i), "list item is empty"))
		}

		d.decode(item, into.Index(i), path.Index(i))
	}
}

// entries returns the entries of a mapping, followed by those that merge keys (<<) add, and reports duplicate keys.
func (d *decoder) entries(n *yaml.Node, path *field.Path, child func(key string) *field.Path) []entry {
	if list, found := d.mappings[n]; found {
		return list
	}

	lines := map[string]int{}

	var list, merged []entry

	for i := 0; i+1 < len(n.Content); i += 2 {
		value := n.Content[i+1]

		d.visit(n.Content[i], path, func(key *yaml.Node) {
			switch {
			case key.ShortTag() == tagMerge:
				merged = append(merged, d.merge(value, path.Child(key.Value), child)...)
			case !isString(key):
				msg := "a key must be a string"
				if isUnquotedTemplate(n) {
					msg = unquotedTemplate
				}

				d.report(key, path, "%s", msg)
			case lines[key.Value] > 0:
				d.report(n.Content[i], child(key.Value), "duplicate key, first set in line %d", lines[key.Value])
			default:
				lines[key.Value] = n.Content[i].Line
				list = append(list, entry{key, value})
			}
		})
	}

	for _, e := range merged {
		if lines[e.key.Value] == 0 {
			lines[e.key.Value] = e.key.Line
			list = append(list, e)
		}
	}

	d.mappings[n] = list

	return list
}

// merge returns the entries of the mapping, or of the list of mappings, that is the value of a merge key.
func (d *decoder) merge(n *yaml.Node, path *field.Path, child func(key string) *field.Path) (list []entry) {
	sources := []*yaml.Node{n}
	if resolved := resolve(n); resolved.Kind == yaml.SequenceNode {
		sources = resolved.Content
	}

	for _, source := range sources {
		d.visit(source, path, func(mapping *yaml.Node) {
			if mapping.Kind == yaml.MappingNode {
				list = append(list, d.entries(mapping, path, child)...)
				d.expanded += len(list)
			} else {
				d.report(n, path, "must be a mapping or a list of mappings")
			}
		})
	}

	return list
}

// resolve returns the node that an alias refers to, and any other node as it is.
func resolve(n *yaml.Node) *yaml.Node {
	if n.Kind == yaml.AliasNode {
		return n.Alias
	}

	return n
}

func (d *decoder) report(n *yaml.Node, path *field.Path, format string, args ...any) {
	d.add(Problem{Line: n.Line, Column: n.Column, Path: pathString(path), Msg: fmt.Sprintf(format, args...)})
}

// reportInvalid reports an invalid value at the position of the closest parent that is in the file.
func (d *decoder) reportInvalid(err *field.Error) {
	at, _ := d.find(d.root, err.Field)
	d.add(Problem{Line: at.key.Line, Column: at.key.Column, Path: err.Field, Msg: err.ErrorBody()})
}

// stop reports a problem that leaves the rest of the document unread.
func (d *decoder) stop(n *yaml.Node, path *field.Path, format string, args ...any) {
	d.report(n, path, format, args...)
	d.stopped = true
}

func (d *decoder) add(p Problem) {
	if !d.stopped && len(d.problems) < maxProblems {
		d.problems = append(d.problems, p)
	}
}

// find returns the entry at the path below another one, and whether it is in the file; if not, its closest parent that
// is.
func (d *decoder) find(at entry, path string) (found entry, exact bool) {
	if path == "" {
		return at, true
	}

	n := resolve(at.value)
	inner, isBracketed := strings.CutPrefix(path, "[")
	inner = strings.TrimPrefix(inner, ".")

	if index, rest, _ := strings.Cut(inner, "]"); n.Kind == yaml.SequenceNode {
		if i, err := strconv.Atoi(index); err == nil && i < len(n.Content) {
			return d.find(entry{n.Content[i], n.Content[i]}, rest)
		}
	}

	for _, e := range d.mappings[n] {
		rest, found := strings.CutPrefix(inner, e.key.Value)
		if isBracketed {
			rest, found = strings.CutPrefix(rest, "]")
		}

		if found && (rest == "" || rest[0] == '.' || rest[0] == '[') {
			return d.find(e, rest)
		}
	}

	return at, false
}

// err returns the problems as an *Error.
func (d *decoder) err(name string) error {
	for i := range d.problems {
		p := &d.problems[i]

		if list, _, found := strings.Cut(p.Path, "]"); found {
			if name, exact := d.find(d.root, list+"].name"); exact {
				p.Rule = shorten(resolve(name.value).Value, 80)
			}
		}

		p.Path, p.Msg = shorten(p.Path, 200), shorten(p.Msg, 1000)
	}

	slices.SortStableFunc(d.problems, func(a, b Problem) int {
		return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column))
	})

	if len(d.problems) == maxProblems {
		d.problems = append(d.problems, Problem{Msg: "too many problems; there may be more"})
	}

	return &Error{Name: name, Problems: d.problems}
}

func pathString(path *field.Path) string {
	if path == nil {
		return ""
	}

	return path.String()
}

// quote quotes a value of the file for a message.
func quote(s string) string { return strconv.Quote(shorten(s, 80)) }
