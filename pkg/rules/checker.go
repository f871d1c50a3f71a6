package rules

import (
	"fmt"
	"slices"
	"strings"
	"text/template/parse"
)

// dot is what "." stands for in a part of a template.
type dot bool

const (
	topDot   dot = true  // the values
	otherDot dot = false // inside with and range: something else
)

// checker looks for what must not be in a template, and prepares the rest: every call of a function, every loop and everything printed is given the
// values ("$"), from which it takes the work that it does; regular expressions are compiled.
type checker struct {
	patterns map[string]pattern
	nodes    int // seen so far
	errs     []error
}

func (c *checker) refuse(format string, args ...any) {
	c.errs = append(c.errs, fmt.Errorf(format, args...))
}

func (c *checker) list(list *parse.ListNode, d dot) {
	if list == nil {
		return
	}

	for _, node := range list.Nodes {
		c.node(node, d)
	}
}

func (c *checker) node(node parse.Node, d dot) {
	c.nodes++

	switch n := node.(type) {
	case *parse.ActionNode:
		_, variable := onlyField(n.Pipe) // of the values, it is never <no value>
		variable = variable && d == topDot

		c.pipe(n.Pipe, d)

		if !variable && len(n.Pipe.Decl) == 0 {
			through(n.Pipe, printHook)
		}
	case *parse.IfNode:
		c.branch(&n.BranchNode, d, d)
	case *parse.WithNode:
		c.branch(&n.BranchNode, d, otherDot)
	case *parse.RangeNode:
		before := c.nodes

		c.branch(&n.BranchNode, d, otherDot)
		through(n.Pipe, rangeHook, number(c.nodes-before))
	case *parse.TemplateNode:
		c.refuse("templates cannot call others")
	}
}

func (c *checker) branch(n *parse.BranchNode, outer, inner dot) {
	c.pipe(n.Pipe, outer)
	c.list(n.List, inner)
	c.list(n.ElseList, outer)
}

func (c *checker) pipe(pipe *parse.PipeNode, d dot) {
	for _, v := range pipe.Decl {
		if v.Ident[0] == "$" {
			c.refuse("$ is the name of all variables")
		}
	}

	for i, cmd := range pipe.Cmds {
		c.command(cmd, min(i, 1), d)
	}
}

// command looks at one command of a pipeline, which is given so many arguments by the one before.
func (c *checker) command(cmd *parse.CommandNode, piped int, d dot) {
	for i, arg := range cmd.Args {
		c.nodes++

		if name, is := arg.(*parse.IdentifierNode); is && i > 0 {
			// A function without arguments among the arguments of another: as if in parentheses.
			call := &parse.CommandNode{NodeType: parse.NodeCommand, Pos: name.Pos, Args: []parse.Node{name}}
			arg = &parse.PipeNode{NodeType: parse.NodePipe, Pos: name.Pos, Cmds: []*parse.CommandNode{call}}
			cmd.Args[i] = arg
		}

		c.argument(arg, d)
	}

	name, is := cmd.Args[0].(*parse.IdentifierNode)
	if !is {
		return
	}

	f, ours := library[name.Ident]
	if !ours {
		return
	}

	if err := f.checkCount(len(cmd.Args) - 1 + piped); err != nil {
		c.refuse("%s %w", name.Ident, err)
	}

	if takesPattern(name.Ident) && len(cmd.Args) > 1 {
		c.pattern(cmd.Args[1])
	}

	cmd.Args = slices.Insert(cmd.Args, 1, top(name.Pos))
}

func (c *checker) argument(node parse.Node, d dot) {
	switch n := node.(type) {
	case *parse.PipeNode:
		c.pipe(n, d)
	case *parse.DotNode:
		if d == topDot {
			c.refuse("a variable's name is missing after the dot")
		}
	case *parse.FieldNode:
		if d == topDot {
			c.field(n.Ident)
		}
	case *parse.VariableNode:
		switch {
		case n.Ident[0] != "$":
		case len(n.Ident) == 1:
			c.refuse("a variable's name is missing after $.")
		default:
			c.field(n.Ident[1:])
		}
	case *parse.ChainNode:
		c.argument(n.Node, d)
	}
}

func (c *checker) field(names []string) {
	isMap, known := variables[names[0]]

	switch {
	case !known:
		c.refuse("unknown variable .%s: there are .%s", names[0], strings.Join(Variables(), " ."))
	case len(names) > 2 || len(names) == 2 && !isMap:
		c.refuse("variable .%s has no .%s", names[0], strings.Join(names[1:], "."))
	}
}

// pattern compiles a regular expression that the template spells out.
func (c *checker) pattern(node parse.Node) {
	source, is := node.(*parse.StringNode)
	if !is {
		return
	}

	compiled, err := compilePattern(source.Text)
	if err != nil {
		c.errs = append(c.errs, err)

		return
	}

	c.patterns[source.Text] = compiled
}

func takesPattern(function string) bool {
	return strings.HasPrefix(function, "regex") && function != "regexQuoteMeta"
}

// through has the pipeline's value go through a hook.
func through(pipe *parse.PipeNode, hook string, args ...parse.Node) {
	pipe.Cmds = append(pipe.Cmds, &parse.CommandNode{
		NodeType: parse.NodeCommand,
		Pos:      pipe.Pos,
		Args:     append([]parse.Node{parse.NewIdentifier(hook).SetPos(pipe.Pos), top(pipe.Pos)}, args...),
	})
}

// top is the variable that stands for the values everywhere.
func top(pos parse.Pos) parse.Node {
	return &parse.VariableNode{NodeType: parse.NodeVariable, Pos: pos, Ident: []string{"$"}}
}

func number(n int) parse.Node {
	return &parse.NumberNode{NodeType: parse.NodeNumber, IsInt: true, Int64: int64(n), Text: fmt.Sprint(n)}
}
