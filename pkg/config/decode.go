package config

import (
	"cmp"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v4"
)

// decoder fills a Config from YAML nodes and collects errors. The YAML library cannot: it names Go types instead of
// paths, reads 030 as 24 and yes as true, and skips list items and mappings with errors.
type decoder struct {
	problems []Problem
	// values are what has been read, by path. The path of the document is empty.
	values map[string]entry
	// merging are the mappings whose merge keys are being read.
	merging map[*yaml.Node]bool
}

// entry is a key of a mapping with its value. The key of a list item, and of the document, is its value.
type entry struct {
	key, value *yaml.Node
	path       string
}

func newDecoder() *decoder {
	return &decoder{values: map[string]entry{}, merging: map[*yaml.Node]bool{}}
}

// parse reads the only document of the roots, and returns nil if it has errors.
func (d *decoder) parse(roots []*yaml.Node) *Compiled {
	if len(roots) > 1 {
		d.report(roots[1], "", "file contains more than one YAML document")
	}

	if len(d.problems) > 0 {
		return nil
	}

	var file Config

	d.decodeDocument(roots[0], &file)

	if compiled := d.validate(&file); !slices.ContainsFunc(d.problems, func(p Problem) bool { return !p.Warning }) {
		return compiled
	}

	return nil
}

func (d *decoder) decodeDocument(root *yaml.Node, into any) {
	d.decode(entry{key: root, value: root}, reflect.ValueOf(into).Elem())
}

// load returns the roots of the documents, at least one, or nil if they cannot be read.
func (d *decoder) load(data []byte) []*yaml.Node {
	if len(data) > MaxSize {
		d.add(Problem{Msg: fmt.Sprintf("file is larger than %d bytes", MaxSize)})

		return nil
	}

	var (
		documents []yaml.Node
		roots     []*yaml.Node
	)

	if err := yaml.Load(data, &documents, yaml.WithAllDocuments()); err != nil {
		d.add(syntaxProblem(string(data), err))

		return nil
	}

	for _, document := range documents {
		roots = append(roots, document.Content[0])
	}

	if len(roots) == 0 {
		roots = append(roots, &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!null"})
	}

	return roots
}

// kinds are the kinds of Go values that a Config is made of, and the nodes that can be read into them. Plain numbers,
// booleans and dates can be read as strings.
var kinds = map[reflect.Kind]struct {
	name string
	node yaml.Kind
	tags []string
}{
	reflect.Struct: {"a mapping", yaml.MappingNode, []string{"!!map"}},
	reflect.Map:    {"a mapping", yaml.MappingNode, []string{"!!map"}},
	reflect.Slice:  {"a list", yaml.SequenceNode, []string{"!!seq"}},
	reflect.String: {"a string", yaml.ScalarNode, []string{"!!str", "!!int", "!!float", "!!bool", "!!timestamp", "!!merge"}},
	reflect.Bool:   {"true or false", yaml.ScalarNode, []string{"!!bool"}},
	reflect.Int:    {"a decimal integer", yaml.ScalarNode, []string{"!!int"}},
}

func canBe(kind reflect.Kind, n *yaml.Node) bool {
	return n.Kind == kinds[kind].node && slices.Contains(kinds[kind].tags, n.ShortTag())
}

// decode stores the value of an entry, except null: a key without a value is the same as no key.
func (d *decoder) decode(e entry, into reflect.Value) {
	d.values[e.path] = e

	n, path := resolve(e.value), e.path
	if isNull(n) {
		return
	}

	if into.Kind() == reflect.Pointer {
		into.Set(reflect.New(into.Type().Elem()))
		into = into.Elem()
	}

	kind := into.Kind()
	number, _ := strconv.Atoi(n.Value)

	switch {
	case isUnquotedTemplate(n):
		d.report(n, path, unquotedTemplate)
	case !canBe(kind, n), kind == reflect.Int && strconv.Itoa(number) != n.Value:
		d.report(n, path, "must be %s, not %s", kinds[kind].name, describe(n))
	case kind == reflect.Struct:
		d.setStruct(n, into, path)
	case kind == reflect.Map:
		d.setMap(n, into, path)
	case kind == reflect.Slice:
		d.setSlice(n, into, path)
	case kind == reflect.String:
		into.SetString(n.Value)
	case kind == reflect.Bool:
		into.SetBool(strings.EqualFold(n.Value, "true"))
	default:
		into.SetInt(int64(number))
	}
}

// isUnquotedTemplate reports whether the node is what YAML reads for {{ .Region }}: a mapping with a mapping as its
// key.
func isUnquotedTemplate(n *yaml.Node) bool {
	return n.Kind == yaml.MappingNode && n.Style&yaml.FlowStyle != 0 && len(n.Content) > 0 && n.Content[0].Kind == yaml.MappingNode
}

func describe(n *yaml.Node) string {
	switch {
	case canBe(reflect.Map, n):
		return kinds[reflect.Map].name
	case canBe(reflect.Slice, n):
		return kinds[reflect.Slice].name
	case !canBe(reflect.String, n):
		return "a value with the YAML tag " + quote(n.ShortTag())
	case n.ShortTag() == "!!str":
		return "the string " + quote(n.Value)
	default:
		return quote(n.Value)
	}
}

func (d *decoder) setStruct(n *yaml.Node, into reflect.Value, path string) {
	t := into.Type()
	present := map[string]string{}

	for _, e := range d.entries(n, t, path) {
		key := e.key.Value
		f, known := fieldOf(t, key)

		switch {
		case !known:
			d.report(e.key, e.path, "unknown key; expected %s", strings.Join(keysOf(t), ", "))
		case present[f.Name] != "":
			d.report(e.key, e.path, "cannot be combined with %s, which is another spelling of this key", present[f.Name])
		default:
			d.decode(e, into.FieldByIndex(f.Index))

			if !isNull(e.value) {
				present[f.Name] = key
			}
		}
	}

	for f := range t.Fields() {
		if name, isRequired := keyOf(f); isRequired && present[f.Name] == "" {
			at := childPath(t, path, name)
			d.report(d.find(at), at, "Required value")
		}
	}
}

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

func childPath(t reflect.Type, path, key string) string {
	switch {
	case t.Kind() == reflect.Map, key == "":
		return path + "[" + key + "]"
	case path == "":
		return key
	default:
		return path + "." + key
	}
}

func isNull(n *yaml.Node) bool {
	n = resolve(n)

	return n.Kind == yaml.ScalarNode && n.ShortTag() == "!!null"
}

func keysOf(t reflect.Type) (names []string) {
	for f := range t.Fields() {
		name, _ := keyOf(f)
		names = append(names, name)
	}

	return names
}

// setMap reads a mapping of strings to strings. A key without a value is an empty string, as in the upstream Talos CCM.
func (d *decoder) setMap(n *yaml.Node, into reflect.Value, path string) {
	into.Set(reflect.MakeMap(into.Type()))

	for _, e := range d.entries(n, into.Type(), path) {
		value := reflect.New(into.Type().Elem()).Elem()
		d.decode(e, value)
		into.SetMapIndex(reflect.ValueOf(e.key.Value), value)
	}
}

func (d *decoder) setSlice(n *yaml.Node, into reflect.Value, path string) {
	into.Set(reflect.MakeSlice(into.Type(), len(n.Content), len(n.Content)))

	for i, item := range n.Content {
		e := entry{item, item, fmt.Sprintf("%s[%d]", path, i)}
		if isNull(item) {
			d.report(item, e.path, "Required value: list item is empty")
		}

		d.decode(e, into.Index(i))
	}
}

// entries returns the entries of a mapping, followed by those that merge keys (<<) add, and reports duplicate keys.
// The type describes the struct or map to fill.
func (d *decoder) entries(n *yaml.Node, t reflect.Type, path string) []entry {
	var list, merged []entry

	lines := map[string]int{}

	for pair := range slices.Chunk(n.Content, 2) {
		key, value := resolve(pair[0]), pair[1]
		at := childPath(t, path, key.Value)

		switch {
		case key.ShortTag() == "!!merge":
			merged = append(merged, d.merge(value, t, path)...)
		case !canBe(reflect.String, key):
			d.report(key, path, "a key must be a string")
		case lines[key.Value] > 0:
			d.report(pair[0], at, "duplicate key, first set in line %d", lines[key.Value])
		default:
			lines[key.Value] = pair[0].Line
			list = append(list, entry{key, value, at})
		}
	}

	for _, e := range merged {
		if lines[e.key.Value] == 0 {
			lines[e.key.Value] = e.key.Line
			list = append(list, e)
		}
	}

	return list
}

// merge returns the entries of the mapping, or of the list of mappings, that is the value of a merge key.
func (d *decoder) merge(n *yaml.Node, t reflect.Type, path string) (list []entry) {
	sources := []*yaml.Node{n}
	if resolved := resolve(n); resolved.Kind == yaml.SequenceNode {
		sources = resolved.Content
	}

	for _, source := range sources {
		switch mapping := resolve(source); {
		case mapping.Kind != yaml.MappingNode:
			d.report(n, childPath(t, path, "<<"), "must be a mapping or a list of mappings, not %s", describe(mapping))
		case d.merging[mapping]:
			d.report(n, childPath(t, path, "<<"), "must not contain itself")
		default:
			d.merging[mapping] = true
			list = append(list, d.entries(mapping, t, path)...)

			delete(d.merging, mapping)
		}
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

func (d *decoder) report(n *yaml.Node, path, format string, args ...any) {
	d.add(Problem{Line: n.Line, Column: n.Column, Path: path, Msg: fmt.Sprintf(format, args...)})
}

func (d *decoder) warn(path, msg string) {
	n := d.find(path)
	d.add(Problem{Line: n.Line, Column: n.Column, Path: path, Msg: msg, Warning: true})
}

func (d *decoder) add(p Problem) {
	if len(d.problems) < maxProblems {
		d.problems = append(d.problems, p)
	}
}

// find returns the key at the path, or its closest parent that is in the file.
func (d *decoder) find(path string) *yaml.Node {
	for {
		if e, found := d.values[path]; found {
			return e.key
		}

		path = path[:max(0, strings.LastIndexAny(path, ".["))]
	}
}

// finish returns the problems in the order of their positions.
func (d *decoder) finish() []Problem {
	for i := range d.problems {
		p := &d.problems[i]

		if list, _, found := strings.Cut(p.Path, "]"); found && p.Rule == "" {
			if e, found := d.values[list+"].name"]; found {
				p.Rule = shorten(resolve(e.value).Value, 80)
			}
		}

		p.Path, p.Msg = shorten(p.Path, 200), shorten(p.Msg, 1000)
	}

	slices.SortStableFunc(d.problems, func(a, b Problem) int {
		return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column))
	})

	return d.problems
}

// err returns the errors, without warnings, as an *Error, or nil if there are none.
func (d *decoder) err(name string) error {
	problems := slices.DeleteFunc(slices.Clone(d.finish()), func(p Problem) bool { return p.Warning })

	switch {
	case len(problems) == 0:
		return nil
	case len(problems) == maxProblems:
		problems = append(problems, Problem{Msg: "too many problems; there may be more"})
	}

	return &Error{Name: name, Problems: problems}
}

// quote quotes a value of the file for a message.
func quote(s string) string { return strconv.Quote(shorten(s, 80)) }
