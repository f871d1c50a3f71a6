package rules

import (
	"reflect"
	"strconv"
	"text/template/parse"
)

// part is a piece of a template that does no more than to name variables, as most do: it costs a hundredth of an execution.
type part func(v *values) string

// partsOf are the parts of a template, or nil if it does more. The checker must not have prepared it yet.
func partsOf(root *parse.ListNode) []part {
	parts := make([]part, 0, len(root.Nodes))

	for _, node := range root.Nodes {
		p := partOf(node)
		if p == nil {
			return nil
		}

		parts = append(parts, p)
	}

	return parts
}

func partOf(node parse.Node) part {
	switch n := node.(type) {
	case *parse.TextNode:
		text := string(n.Text)

		return func(*values) string { return text }
	case *parse.ActionNode:
		if name, alone := onlyField(n.Pipe); alone {
			return variable(name)
		}
	}

	return nil
}

// onlyField is the field that a pipeline consists of.
func onlyField(pipe *parse.PipeNode) (names []string, alone bool) {
	if len(pipe.Decl) > 0 || len(pipe.Cmds) != 1 || len(pipe.Cmds[0].Args) != 1 {
		return nil, false
	}

	field, alone := pipe.Cmds[0].Args[0].(*parse.FieldNode)
	if !alone {
		return nil, false
	}

	return field.Ident, true
}

// variable reads one variable, or one entry of one; nil if it is something else.
func variable(names []string) part {
	field, known := reflect.TypeFor[values]().FieldByName(names[0])
	if !known || !field.IsExported() {
		return nil
	}

	read := func(v *values) reflect.Value { return reflect.ValueOf(v).Elem().FieldByIndex(field.Index) }

	switch kind := field.Type.Kind(); {
	case kind == reflect.String && len(names) == 1:
		return func(v *values) string { return read(v).String() }
	case kind == reflect.Bool && len(names) == 1:
		return func(v *values) string { return strconv.FormatBool(read(v).Bool()) }
	case kind == reflect.Map && len(names) == 2: //nolint:mnd // .Tags.name
		return func(v *values) string {
			entries, _ := reflect.TypeAssert[map[string]string](read(v)) // there are no others

			return entries[names[1]]
		}
	default:
		return nil
	}
}
