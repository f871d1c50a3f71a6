package docs

import (
	"context"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"mvdan.cc/sh/v3/syntax"
)

// commands checks each statement of a script, and runs those that only use talos-ccm and whose files exist.
func (r *reading) commands(ctx context.Context, script located) {
	file, err := syntax.NewParser(syntax.Variant(syntax.LangBash)).Parse(strings.NewReader(script.text), "")
	if err != nil {
		r.problem(script.line, "%v", err)

		return
	}

	for _, stmt := range file.Stmts {
		line := script.line + int(stmt.Pos().Line()) - 1
		found := r.statement(line, stmt)
		runs := found.ours && !found.foreign && !r.mentions

		switch {
		case runs:
			r.run(ctx, line, script.text[stmt.Pos().Offset():stmt.End().Offset()])
		case found.understood:
			r.report.Parsed++
		default:
			r.report.Named++
		}

		for file := range found.made {
			if _, shown := r.made[file]; !shown {
				r.made[file] = runs
			}
		}
	}
}

func (r *reading) run(ctx context.Context, line int, statement string) {
	r.report.Run++

	if err := r.product.run(ctx, r.folder, statement); err != nil {
		r.problem(line, "%s: %v", statement, err)
	}
}

// statement describes a shell statement.
type statement struct {
	// ours is true if it runs talos-ccm, foreign if some of its commands cannot be run here, understood if the arguments of a command were checked.
	ours, foreign, understood bool
	// made has the files that it creates.
	made map[string]bool
}

// statement checks a shell statement and everything in it.
func (r *reading) statement(line int, stmt *syntax.Stmt) statement {
	found := statement{made: map[string]bool{}}

	syntax.Walk(stmt, func(node syntax.Node) bool {
		switch n := node.(type) {
		case *syntax.Redirect:
			r.redirect(line, n, &found)
		case *syntax.CallExpr:
			if len(n.Args) > 0 {
				r.call(line, words(n.Args), &found)
			}
		}

		return true
	})

	return found
}

func (r *reading) redirect(line int, redirect *syntax.Redirect, found *statement) {
	switch redirect.Op {
	case syntax.Hdoc, syntax.DashHdoc:
		if err := r.documents([]byte(literal(redirect.Hdoc))); err != nil {
			r.problem(line, "%v", err)
		}
	case syntax.RdrOut, syntax.AppOut, syntax.RdrClob, syntax.RdrAll:
		found.made[literal(redirect.Word)] = true
	case syntax.RdrIn:
		r.file(line, literal(redirect.Word), found)
	default:
	}
}

// call checks a command.
func (r *reading) call(line int, args []string, found *statement) {
	args = unwrapped(args)
	name := commandName(args[0])

	if name == "talos-ccm" {
		found.ours = true
		// Binaries of make build may be for another architecture.
		found.foreign = found.foreign || args[0] != name

		r.tool(line, name, r.product.tool(), args[1:], found)

		return
	}

	if filters[name] {
		return
	}

	found.foreign = true

	switch {
	case others[name]:
	case name == "make":
		found.understood = true

		if err := r.makefile.check(args[1:]); err != nil {
			r.problem(line, "%v", err)
		}
	case tools[name].commands != nil:
		r.tool(line, name, tools[name], args[1:], found)
	default:
		r.problem(line, "unknown command %s", name)
	}
}

// unwrapped returns the command that sudo or go tool runs.
func unwrapped(args []string) []string {
	switch {
	case len(args) > 1 && args[0] == "sudo":
		return args[1:]
	case len(args) > 2 && args[0] == "go" && args[1] == "tool" && args[2] == "crane": // a tool of this module
		return args[2:]
	default:
		return args
	}
}

var release = regexp.MustCompile(`^talos-ccm-linux-(amd64|arm64|\$.*)$`)

// commandName returns the base name of a command; binaries of make build are talos-ccm.
func commandName(command string) string {
	name := path.Base(command)
	if release.MatchString(name) {
		return "talos-ccm"
	}

	return name
}

// tool checks flags and arguments of a program, and that its files exist.
func (r *reading) tool(line int, name string, t tool, args []string, found *statement) {
	found.understood = true

	call, err := t.parse(args)
	if err != nil {
		r.problem(line, "%s: %v", name, err)

		return
	}

	for _, output := range call.outputs {
		found.made[output] = true
	}

	for _, input := range call.inputs {
		r.file(line, input, found)
	}

	for _, patch := range call.patches {
		if file, isFile := strings.CutPrefix(patch, "@"); isFile {
			r.file(line, file, found)
		} else if err := r.machineConfig([]byte(patch)); err != nil {
			r.problem(line, "%s: patch %s: %v", name, patch, err)
		}
	}

	if call.inner != nil {
		r.tool(line, t.inner, tools[t.inner], call.inner, found)
	}

	found.foreign = found.foreign || !runsAlone(call, args)
}

// runsAlone reports whether a command of talos-ccm needs neither a cluster nor a machine.
func runsAlone(c call, args []string) bool {
	return c.command == "config validate" || c.command == "config schema" || c.command == "version" ||
		c.command == "render" && !slices.Contains(args, "--node") || slices.Contains(args, "--help") || slices.Contains(args, "--version")
}

// file checks that an input file of a command exists in the repository or is created by the page.
func (r *reading) file(line int, name string, found *statement) {
	if known, made := r.made[name]; made || found.made[name] {
		found.foreign = found.foreign || !known

		return
	}

	if r.mentions || name == "-" || strings.Contains(name, "://") || strings.HasPrefix(name, "/dev/") || strings.Contains(name, "$") {
		return
	}

	found.foreign = true

	if _, err := os.Stat(filepath.Join(r.Root, name)); err != nil && !r.makesFolderOf(name) {
		r.problem(line, "file %s exists neither in the repository nor on the page (a block whose first line is # %s creates it)", name, name)
	}
}

// makesFolderOf reports whether the page creates a parent directory of name; make creates _out.
func (r *reading) makesFolderOf(name string) bool {
	for folder := path.Dir(name); folder != "." && folder != "/"; folder = path.Dir(folder) {
		if _, made := r.made[folder]; made || folder == "_out" {
			return true
		}
	}

	return false
}

// words returns the words of a command without quotes. Expansions become $.
func words(args []*syntax.Word) []string {
	var list []string
	for _, arg := range args {
		list = append(list, literal(arg))
	}

	return list
}

func literal(word *syntax.Word) string {
	var b strings.Builder

	writeParts(&b, word.Parts)

	return b.String()
}

func writeParts(b *strings.Builder, parts []syntax.WordPart) {
	for _, part := range parts {
		switch p := part.(type) {
		case *syntax.Lit:
			b.WriteString(p.Value)
		case *syntax.SglQuoted:
			b.WriteString(p.Value)
		case *syntax.DblQuoted:
			writeParts(b, p.Parts)
		default:
			// An expansion. Printing to memory does not fail.
			fmt.Fprint(b, "$")
		}
	}
}
