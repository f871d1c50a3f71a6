package config

import (
	"cmp"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"unicode"
)

// maxProblems are told; who has more will come again.
const maxProblems = 1000

// Problem is one mistake in a file.
type Problem struct {
	// Line and Column count from 1. Line is 0 if the file as a whole is meant, Column if the line is.
	Line, Column int
	// Path leads to the place, such as `transformations[2].labels[team]`; empty at the top.
	Path string
	// Rule is the name of the rule, pool or entry that the place is in; empty if it has none.
	Rule string
	Msg  string
}

// Error is every mistake in a file, ordered by line.
type Error struct {
	// Name of the file.
	Name string
	// Problems, at least one.
	Problems []Problem
}

// Error has one line for each problem, such as
//
//	config.yaml:14: transformations[2].labels[foo bar] (rule "web"): ...
func (e *Error) Error() string {
	lines := make([]string, 0, len(e.Problems))

	for _, p := range e.Problems {
		place := e.Name
		if p.Line > 0 {
			place = fmt.Sprintf("%s:%d", e.Name, p.Line)
		}

		lines = append(lines, place+": "+p.String())
	}

	return strings.Join(lines, "\n")
}

// String is the problem without its line.
func (p Problem) String() string {
	switch {
	case p.Path == "":
		return p.Msg
	case p.Rule == "":
		return p.Path + ": " + p.Msg
	default:
		return fmt.Sprintf("%s (%s %s): %s", p.Path, noun(p.Path), quote(p.Rule), p.Msg)
	}
}

// noun is what the list's entries are called that the path goes through.
func noun(path string) string {
	switch {
	case strings.HasPrefix(path, "transformations"):
		return "rule"
	case strings.HasPrefix(path, "ipam.pools"):
		return "pool"
	default:
		return "entry"
	}
}

// quote makes what a user wrote fit for a message of one line.
func quote(s string) string {
	const enough = 80
	if len(s) <= enough {
		return strconv.Quote(s)
	}

	return fmt.Sprintf("%.*q…", enough, s)
}

// inOneLine makes a message of one line and a sensible length of what may quote anything.
func inOneLine(s string) string {
	const enough = 1000
	if len(s) > enough {
		s = strings.ToValidUTF8(s[:enough], "") + "…"
	}

	return strings.Map(func(r rune) rune {
		if unicode.IsControl(r) || r == '\u2028' || r == '\u2029' {
			return ' '
		}

		return r
	}, s)
}

// path leads from the top of the file to a place in it: keys are strings, indices ints.
type path []any

// with is the path to what is below; it shares nothing with p.
func (p path) with(steps ...any) path { return slices.Concat(p, steps) }

func (p path) startsWith(other path) bool {
	return len(p) >= len(other) && slices.Equal(p[:len(other)], other)
}

// String writes keys of the format with dots and keys that the user chose in brackets.
func (p path) String() string {
	var s strings.Builder

	for i, step := range p {
		name, isKey := step.(string)

		switch {
		case !isKey:
			fmt.Fprintf(&s, "[%d]", step)
		case p[:i].kind() == reflect.Map:
			fmt.Fprintf(&s, "[%.80s]", name)
		case i == 0:
			fmt.Fprintf(&s, "%.80s", name)
		default:
			fmt.Fprintf(&s, ".%.80s", name)
		}
	}

	return s.String()
}

// kind is that of the Go value at the path; Invalid if there is none.
func (p path) kind() reflect.Kind {
	if t := p.typ(); t != nil {
		return t.Kind()
	}

	return reflect.Invalid
}

// typ is the type of the Go value at the path; nil if there is none.
func (p path) typ() reflect.Type {
	t := reflect.TypeFor[Config]()

	for _, step := range p {
		key, _ := step.(string)

		switch t.Kind() {
		case reflect.Slice, reflect.Map, reflect.Pointer:
			t = t.Elem()
		case reflect.Struct:
			f, known := fieldsOf(t).byName(key)
			if !known {
				return nil
			}

			t = t.Field(f.index).Type
		default:
			return nil
		}
	}

	return t
}

// ownerOf is the nearest place above that has such a key.
func (p path) ownerOf(key string) (path, bool) {
	for i := range slices.Backward(p) {
		if t := p[:i].typ(); t.Kind() == reflect.Struct {
			if _, found := fieldsOf(t).byName(key); found {
				return p[:i], true
			}
		}
	}

	return nil, false
}

// report gathers problems.
type report struct {
	root     *value
	problems []Problem
	paths    []path
}

// at reports a problem with what is at the path.
func (r *report) at(p path, format string, args ...any) {
	line, column := r.root.position(p)
	r.add(line, column, p, fmt.Sprintf(format, args...))
}

func (r *report) add(line, column int, p path, msg string) {
	if len(r.problems) == maxProblems {
		return
	}

	r.problems = append(r.problems, Problem{Line: line, Column: column, Path: inOneLine(p.String()), Msg: inOneLine(msg)})
	r.paths = append(r.paths, p)
}

// involves tells whether a problem has been reported with what is at the path, above or below it.
func (r *report) involves(p path) bool {
	return slices.ContainsFunc(r.paths, func(other path) bool { return p.startsWith(other) || other.startsWith(p) })
}

// err is the Error of all problems, nil if there are none.
func (r *report) err(name string) error {
	if len(r.problems) == 0 {
		return nil
	}

	for i, p := range r.paths {
		r.problems[i].Rule = r.root.nameOn(p)
	}

	slices.SortStableFunc(r.problems, func(a, b Problem) int {
		return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column))
	})

	if len(r.problems) == maxProblems {
		r.problems = append(r.problems, Problem{Msg: "there may be more; these are enough for a start"})
	}

	return &Error{Name: name, Problems: r.problems}
}
