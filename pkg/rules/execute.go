package rules

import (
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"text/template/parse"
	"unicode/utf8"
)

// executor renders a template for one machine. The language is that of package text/template with the option
// missingkey=zero. The values are nil, booleans, numbers, strings, and lists and maps of strings.
//
// The executor of text/template looks up methods by name. The linker would then keep all exported methods, and the program
// would be half as large again.
type executor struct {
	out []byte
	// scope is a stack of the variables "$", "." and those that the template declares.
	scope  []binding
	tables Tables
	// missing is why the first lookup without a result has none.
	missing string
}

type binding struct {
	name  string
	value any
}

// render returns the text of a template, and why a lookup has no result. It returns no text with an error.
func render(root *parse.ListNode, variables map[string]any, tables Tables) (text, missing string, err error) {
	x := executor{scope: []binding{{"$", variables}, {".", variables}}, tables: tables}

	if err := x.list(root); err != nil {
		return "", x.missing, err
	}

	if !utf8.Valid(x.out) {
		return "", x.missing, errNotUTF8
	}

	return string(x.out), x.missing, nil
}

func (x *executor) list(list *parse.ListNode) error {
	if list == nil {
		return nil
	}

	for _, node := range list.Nodes {
		if err := x.node(node); err != nil {
			return err
		}
	}

	return nil
}

var errBreak, errContinue = errors.New("break"), errors.New("continue")

func (x *executor) node(node parse.Node) error {
	switch n := node.(type) {
	case *parse.TextNode:
		x.out = append(x.out, n.Text...)
	case *parse.ActionNode:
		value, err := x.pipe(n.Pipe)
		if err != nil || len(n.Pipe.Decl) > 0 {
			return err
		}

		x.out = fmt.Append(x.out, printable(value))
	case *parse.IfNode:
		return x.branch(&n.BranchNode)
	case *parse.WithNode:
		return x.branch(&n.BranchNode)
	case *parse.RangeNode:
		return x.loop(n)
	case *parse.BreakNode:
		return errBreak
	case *parse.ContinueNode:
		return errContinue
	}

	return checkLength(len(x.out))
}

func (x *executor) branch(n *parse.BranchNode) error {
	defer x.leave(len(x.scope))

	value, err := x.pipe(n.Pipe)

	switch {
	case err != nil:
		return err
	case empty(value):
		return x.list(n.ElseList)
	case n.Type() == parse.NodeWith:
		x.declare(".", value)
	}

	return x.list(n.List)
}

func (x *executor) loop(n *parse.RangeNode) error {
	defer x.leave(len(x.scope))

	value, err := x.pipe(n.Pipe)
	if err != nil {
		return err
	}

	if _, isNumber := integer(value).(int); isNumber && len(n.Pipe.Decl) > 1 {
		return fmt.Errorf("range over the number %v has one variable", value)
	}

	count, element, err := elements(value)

	for i := 0; i < count && err == nil; i++ {
		key, value := element(i)
		err = x.iterate(n, key, value)
	}

	if count <= 0 && err == nil {
		err = x.list(n.ElseList)
	}

	// As in text/template, break in else ends this loop, not the outer one.
	if errors.Is(err, errBreak) {
		return nil
	}

	return err
}

// elements returns the number of elements of a value, and a function that returns an element with its index or key.
func elements(value any) (count int, element func(i int) (key, value any), err error) {
	switch v := value.(type) {
	case nil:
		return 0, nil, nil
	case int:
		return v, func(i int) (any, any) { return nil, i }, nil
	case uint8:
		return int(v), func(i int) (any, any) { return nil, uint8(i) }, nil
	case []string:
		return len(v), func(i int) (any, any) { return i, v[i] }, nil
	case map[string]string:
		keys := slices.Sorted(maps.Keys(v))

		return len(v), func(i int) (any, any) { return keys[i], v[keys[i]] }, nil
	}

	return 0, nil, fmt.Errorf("range can't iterate over %v (%T)", value, value)
}

// iterate executes the body of a loop for one element.
func (x *executor) iterate(n *parse.RangeNode, key, value any) error {
	defer x.leave(len(x.scope))

	assigned := []any{key, value}[2-len(n.Pipe.Decl):] // a single variable receives the value

	for j, v := range n.Pipe.Decl {
		if err := x.assign(v.Ident[0], assigned[j]); err != nil {
			return err
		}
	}

	x.declare(".", value)

	if err := x.list(n.List); !errors.Is(err, errContinue) {
		return err
	}

	return nil
}

func (x *executor) declare(name string, value any) { x.scope = append(x.scope, binding{name, value}) }

// leave ends the scope of all variables except the first n.
func (x *executor) leave(n int) { x.scope = x.scope[:n] }

func (x *executor) assign(name string, value any) error {
	b, err := x.find(name)
	if err == nil {
		b.value = value
	}

	return err
}

// find returns the innermost variable with the name. It fails if "and" or "or" skipped the declaration.
func (x *executor) find(name string) (*binding, error) {
	for i := range slices.Backward(x.scope) {
		if x.scope[i].name == name {
			return &x.scope[i], nil
		}
	}

	return nil, fmt.Errorf("undefined variable %s", name)
}

func (x *executor) pipe(pipe *parse.PipeNode) (value any, err error) {
	var piped []any

	for _, cmd := range pipe.Cmds {
		if value, err = x.command(cmd, piped); err != nil {
			return nil, err
		}

		piped = []any{value}
	}

	for _, v := range pipe.Decl {
		if !pipe.IsAssign {
			x.declare(v.Ident[0], nil)
		}

		if err := x.assign(v.Ident[0], value); err != nil {
			return nil, err
		}
	}

	return value, nil
}

// command evaluates a command of a pipeline. piped is the value of the command before it, if there is one.
func (x *executor) command(cmd *parse.CommandNode, piped []any) (any, error) {
	first := cmd.Args[0]

	if function, isFunction := first.(*parse.IdentifierNode); isFunction {
		return x.call(function.Ident, cmd.Args[1:], piped)
	}

	value, err := x.operand(first)

	switch {
	case err != nil:
		return nil, err
	case first.Type() == parse.NodeNil:
		return nil, errors.New("nil is not a command")
	case len(cmd.Args)+len(piped) > 1 && (value != nil || !isField(first)):
		return nil, fmt.Errorf("can't give argument to non-function %s", first)
	}

	return value, nil
}

// isField reports whether the node is a field of a variable or an expression. With text/template, a field of nil can have
// arguments; so it can here.
func isField(node parse.Node) bool {
	v, isVariable := node.(*parse.VariableNode)

	return node.Type() == parse.NodeChain || isVariable && len(v.Ident) > 1
}

func (x *executor) operand(node parse.Node) (any, error) {
	switch n := node.(type) {
	case *parse.DotNode:
		return x.variable(".", nil)
	case *parse.FieldNode:
		return x.variable(".", n.Ident)
	case *parse.VariableNode:
		return x.variable(n.Ident[0], n.Ident[1:])
	case *parse.ChainNode:
		value, err := x.operand(n.Node)
		if err != nil {
			return nil, err
		}

		return valueAt(value, n.Field)
	case *parse.PipeNode:
		return x.pipe(n)
	case *parse.IdentifierNode:
		return x.call(n.Ident, nil, nil)
	case *parse.StringNode:
		return n.Text, nil
	case *parse.BoolNode:
		return n.True, nil
	case *parse.NumberNode:
		return number(n)
	}

	return nil, nil // nil
}

func (x *executor) variable(name string, path []string) (any, error) {
	b, err := x.find(name)
	if err != nil {
		return nil, err
	}

	return valueAt(b.value, path)
}

// valueAt returns the value at a path of keys. A missing key has an empty value, and so has a key of nil.
func valueAt(value any, path []string) (any, error) {
	for _, key := range path {
		switch m := value.(type) {
		case nil:
		case map[string]any:
			value = m[key]
		case map[string]string:
			value = m[key]
		default:
			return nil, fmt.Errorf("%v has no field %s", value, key)
		}
	}

	return value, nil
}

// number returns a constant as int, float64 or complex128. The notation determines the type, as in text/template.
func number(n *parse.NumberNode) (any, error) {
	isHex := strings.HasPrefix(strings.ToLower(n.Text), "0x") // text/template does not treat a signed number as hexadecimal

	switch {
	case n.IsComplex:
		return n.Complex128, nil
	case strings.ContainsAny(n.Text, ".pP"), strings.ContainsAny(n.Text, "eE") && !isHex:
		return n.Float64, nil
	case n.IsInt:
		return int(n.Int64), nil
	default:
		return nil, fmt.Errorf("%s overflows int", n.Text)
	}
}

// call calls a function. The piped value is its last argument.
func (x *executor) call(name string, args []parse.Node, piped []any) (any, error) {
	f := reflect.ValueOf(x.function(name))
	if err := checkArity(name, f.Type(), len(args)+len(piped)); err != nil {
		return nil, err
	}

	values := make([]any, 0, len(args)+len(piped))

	for i, arg := range args {
		value, err := x.operand(arg)
		if err != nil {
			return nil, err
		}

		if name == "and" && empty(value) || name == "or" && !empty(value) {
			return value, nil
		}

		// A constant such as 1.0 is an integer if the function wants one.
		if n, isNumber := arg.(*parse.NumberNode); isNumber && n.IsInt && parameter(f.Type(), i).Kind() == reflect.Int {
			value = int(n.Int64)
		}

		values = append(values, value)
	}

	return invoke(name, f, append(values, piped...))
}

func (x *executor) function(name string) any {
	if name == "lookup" {
		return x.lookup
	}

	if function, found := functions[name]; found {
		return function
	}

	return builtins[name]
}

// lookup returns the text of a key in a table; empty if the table does not have the key.
func (x *executor) lookup(table, key string) string {
	text, found := x.tables[table][key]
	if !found && x.missing == "" {
		x.missing = fmt.Sprintf("table %q has no key %.80q", table, key)
	}

	return text
}

func invoke(name string, f reflect.Value, values []any) (any, error) {
	args := make([]reflect.Value, len(values))

	for i, value := range values {
		want := parameter(f.Type(), i)

		switch {
		case value == nil && canBeNil(want):
			args[i] = reflect.Zero(want)
		case value == nil || !reflect.TypeOf(value).AssignableTo(want):
			return nil, fmt.Errorf("error calling %s: expected %s; found %T", name, want, value)
		default:
			args[i] = reflect.ValueOf(value)
		}
	}

	results := f.Call(args)
	if err, failed := reflect.TypeAssert[error](results[len(results)-1]); failed {
		return nil, fmt.Errorf("error calling %s: %w", name, err)
	}

	return results[0].Interface(), nil
}

func parameter(f reflect.Type, i int) reflect.Type {
	if f.IsVariadic() && i >= f.NumIn()-1 {
		return f.In(f.NumIn() - 1).Elem()
	}

	return f.In(i)
}

// checkArity returns an error if the function does not accept the number of arguments.
func checkArity(name string, f reflect.Type, given int) error {
	switch {
	case f.IsVariadic() && given < f.NumIn()-1:
		return fmt.Errorf("wrong number of args for %s: want at least %d got %d", name, f.NumIn()-1, given)
	case !f.IsVariadic() && given != f.NumIn():
		return fmt.Errorf("wrong number of args for %s: want %d got %d", name, f.NumIn(), given)
	}

	return nil
}
