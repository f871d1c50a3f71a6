package config

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"reflect"
	"unicode/utf8"

	"go.yaml.in/yaml/v4"
)

// Tags of YAML's core schema, as package yaml shortens them.
const (
	tagNull   = "!!null"
	tagBool   = "!!bool"
	tagInt    = "!!int"
	tagFloat  = "!!float"
	tagTime   = "!!timestamp"
	tagString = "!!str"
	tagMap    = "!!map"
	tagSeq    = "!!seq"
	tagMerge  = "!!merge"
)

// value is a node of the file: aliases and merge keys are resolved, keys are unique.
type value struct {
	line, column int
	tag          string
	// text of a scalar, as it is written but for quotes.
	text string
	// items of a sequence; nil for one that has been reported.
	items []*value
	// entries of a mapping, in the file's order.
	entries []entry
	// size is what the value counts towards the limit, with all below it.
	size int
}

type entry struct {
	line, column int
	key          string
	// value is nil for one that has been reported.
	value *value
}

func (v *value) entry(key string) (entry, bool) {
	if v != nil {
		for _, e := range v.entries {
			if e.key == key {
				return e, true
			}
		}
	}

	return entry{}, false
}

// position is that of the key or item at the path, or of the last one on the way there that exists.
func (v *value) position(p path) (line, column int) {
	if v == nil {
		return 0, 0
	}

	line, column = v.line, v.column

	for _, step := range p {
		switch step := step.(type) {
		case string:
			e, found := v.entry(step)
			if !found {
				return line, column
			}

			v, line, column = e.value, e.line, e.column
		case int:
			if v == nil || step >= len(v.items) || v.items[step] == nil {
				return line, column
			}

			v = v.items[step]
			line, column = v.line, v.column
		}
	}

	return line, column
}

// nameOn is the name of the innermost named list item on the path.
func (v *value) nameOn(p path) (name string) {
	for _, step := range p {
		switch step := step.(type) {
		case string:
			e, _ := v.entry(step)
			v = e.value
		case int:
			if v == nil || step >= len(v.items) {
				return name
			}

			v = v.items[step]

			// Selector terms have names as well, and are not what is looked for.
			if e, found := v.entry("name"); found && e.value != nil && name == "" {
				name = e.value.text
			}
		}
	}

	return name
}

// errStop ends the reading of a file after a problem that leaves nothing to go on with. The problem is in the report.
var errStop = errors.New("stop")

// load reads the one document that a file is into the report's root, which stays nil if there is none. Its only error is errStop.
func load(data []byte, r *report) error {
	if len(data) > MaxSize {
		r.add(0, 0, nil, fmt.Sprintf("%d bytes are more than a configuration may have (%d)", len(data), MaxSize))

		return errStop
	}

	loader, err := yaml.NewLoader(bytes.NewReader(data))
	if err != nil {
		return syntaxError(data, err, r)
	}

	var document, next yaml.Node

	switch err := loader.Load(&document); {
	case errors.Is(err, io.EOF):
		return nil
	case err != nil:
		return syntaxError(data, err, r)
	}

	switch err := loader.Load(&next); {
	case errors.Is(err, io.EOF):
	case err != nil:
		return syntaxError(data, err, r)
	default:
		r.add(next.Line, next.Column, nil, "a second document begins here; a configuration is one")

		return errStop
	}

	b := builder{report: r, anchored: map[*yaml.Node]*value{}}
	r.root, err = b.build(document.Content[0], nil)

	return err
}

// syntaxError reports what package yaml says. Its errors know the position, and their types cannot be named outside of it.
func syntaxError(data []byte, err error, r *report) error {
	v := reflect.ValueOf(err)
	zeroBased := v.Kind() == reflect.Struct && v.Type().Name() == "ParserError" // unlike all others
	v = reflect.Indirect(v)

	line, column, msg := 0, 0, err.Error()

	if v.Kind() == reflect.Struct {
		if mark := v.FieldByName("Mark"); mark.IsValid() {
			line, column = int(mark.FieldByName("Line").Int()), int(mark.FieldByName("Column").Int())+1
			msg = v.FieldByName("Message").String()
		}

		if offset := v.FieldByName("Offset"); offset.IsValid() {
			line, column = lineAndColumn(data, int(offset.Int()))
			msg = errors.Unwrap(err).Error()
		}
	}

	if zeroBased {
		line++
	}

	// The end of the file is behind its last line.
	line = min(line, bytes.Count(bytes.TrimRight(data, "\n"), []byte("\n"))+1)

	r.add(line, column, nil, "not YAML: "+msg)

	return errStop
}

func lineAndColumn(data []byte, offset int) (line, column int) {
	before := data[:min(offset, len(data))]
	start := bytes.LastIndexByte(before, '\n') + 1

	return bytes.Count(before, []byte("\n")) + 1, utf8.RuneCount(before[start:]) + 1
}

// builder makes values of nodes.
type builder struct {
	report *report
	// anchored are the values of nodes that aliases may point to; nil while one is being built, and if it has been reported.
	anchored map[*yaml.Node]*value
	// spent is the size of all that has been built, with aliases and merge keys expanded.
	spent int
}

// expansion is how much larger than the file its content may be: a byte may make a node, and a node counts one more than its text.
const expansion = 4

// spend bounds what aliases can make of a small file.
func (b *builder) spend(n *yaml.Node, p path, size int) error {
	if b.spent += size; b.spent > expansion*MaxSize {
		b.report.add(n.Line, n.Column, p, "with its aliases expanded the configuration is too large")

		return errStop
	}

	return nil
}

// build returns nil for a node that it has reported.
func (b *builder) build(n *yaml.Node, p path) (*value, error) {
	if n.Kind == yaml.AliasNode {
		return b.alias(n, p)
	}

	if n.Anchor != "" {
		b.anchored[n] = nil
	}

	before := b.spent

	if err := b.spend(n, p, 1+len(n.Value)); err != nil {
		return nil, err
	}

	v := &value{line: n.Line, column: n.Column, tag: n.ShortTag(), text: n.Value}

	var err error

	switch {
	case isBareTemplate(n):
		b.report.add(n.Line, n.Column, p, `a text that begins with "{{" must be in quotes`)

		v = nil
	case !hasOwnTag(n, v.tag):
		b.report.add(n.Line, n.Column, p, fmt.Sprintf("tag %s is not understood", quote(v.tag)))

		v = nil
	case n.Kind == yaml.MappingNode:
		err = b.entries(n, v, p)
	case n.Kind == yaml.SequenceNode:
		err = b.items(n, v, p)
	}

	if v != nil {
		v.size = b.spent - before
	}

	if n.Anchor != "" {
		b.anchored[n] = v
	}

	return v, err
}

func (b *builder) alias(n *yaml.Node, p path) (*value, error) {
	if v := b.anchored[n.Alias]; v != nil {
		return v, b.spend(n, p, v.size)
	}

	b.report.add(n.Line, n.Column, p, fmt.Sprintf("alias %s stands for something that contains it, or that is wrong", quote(n.Value)))

	return nil, errStop
}

// isBareTemplate tells whether n is what YAML makes of {{ .Region }} without quotes: a mapping whose key is a mapping.
func isBareTemplate(n *yaml.Node) bool {
	return n.Kind == yaml.MappingNode && n.Style&yaml.FlowStyle != 0 && len(n.Content) > 0 && n.Content[0].Kind == yaml.MappingNode
}

// hasOwnTag tells whether the tag is one of YAML's core schema for a node of that kind.
func hasOwnTag(n *yaml.Node, tag string) bool {
	switch n.Kind {
	case yaml.MappingNode:
		return tag == tagMap
	case yaml.SequenceNode:
		return tag == tagSeq
	default:
		return tag == tagNull || isText(tag)
	}
}

func (b *builder) items(n *yaml.Node, v *value, p path) error {
	for i, item := range n.Content {
		built, err := b.build(item, p.with(i))
		if err != nil {
			return err
		}

		v.items = append(v.items, built)
	}

	return nil
}

func (b *builder) entries(n *yaml.Node, v *value, p path) error {
	lines := map[string]int{}

	var merged []*yaml.Node

	for i := 0; i+1 < len(n.Content); i += 2 {
		key, content := n.Content[i], n.Content[i+1]
		if key.ShortTag() == tagMerge {
			merged = append(merged, content)

			continue
		}

		name, err := b.key(key, p)
		if err != nil {
			return err
		}

		built, err := b.build(content, p.with(name))
		if err != nil {
			return err
		}

		if first := lines[name]; first > 0 {
			b.report.add(key.Line, key.Column, p.with(name), fmt.Sprintf("set twice, first in line %d", first))

			continue
		}

		lines[name] = key.Line
		v.entries = append(v.entries, entry{line: key.Line, column: key.Column, key: name, value: built})
	}

	for _, content := range merged {
		if err := b.merge(content, v, lines, p); err != nil {
			return err
		}
	}

	return nil
}

// key is a mapping's key. One that is no text is reported.
func (b *builder) key(n *yaml.Node, p path) (string, error) {
	if n.Kind == yaml.AliasNode {
		n = n.Alias
	}

	if n.Kind != yaml.ScalarNode || !isText(n.ShortTag()) {
		b.report.add(n.Line, n.Column, p, "a key must be text")

		return "", errStop
	}

	return n.Value, b.spend(n, p, 1+len(n.Value))
}

// merge adds to v what the value of a merge key (<<) has and v has not.
func (b *builder) merge(n *yaml.Node, v *value, lines map[string]int, p path) error {
	from, err := b.build(n, p.with("<<"))
	if err != nil || from == nil {
		return err
	}

	sources := []*value{from}
	if from.tag == tagSeq {
		sources = from.items
	}

	for _, source := range sources {
		if source == nil || source.tag != tagMap {
			b.report.add(n.Line, n.Column, p.with("<<"), "must be a mapping, or a list of mappings")

			return nil
		}

		for _, e := range source.entries {
			if lines[e.key] > 0 {
				continue
			}

			if e.value != nil {
				if err := b.spend(n, p, 1+e.value.size); err != nil {
					return err
				}
			}

			lines[e.key] = e.line
			v.entries = append(v.entries, e)
		}
	}

	return nil
}
