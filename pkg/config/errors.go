package config

import (
	"fmt"
	"strings"
	"unicode"
)

// maxProblems bounds the number of problems that are reported for one file.
const maxProblems = 1000

// Problem is one error or warning in a file.
type Problem struct {
	// Line and Column count from 1; 0 means unknown.
	Line   int `json:"line,omitempty"`
	Column int `json:"column,omitempty"`
	// Path of the key, such as `transformations[2].labels[team]`; empty for the document as a whole.
	Path string `json:"path,omitempty"`
	// Rule is the name of the rule, pool or entry that contains the key; empty if there is none.
	Rule string `json:"rule,omitempty"`
	Msg  string `json:"message"`
	// Warning is true if the file is valid nevertheless.
	Warning bool `json:"warning,omitempty"`
}

// Error holds every error and warning in a file, ordered by position.
type Error struct {
	// Name of the file.
	Name string
	// Problems is not empty.
	Problems []Problem
}

// Error returns one line per problem, such as
//
//	config.yaml:14:7: transformations[2].labels[foo bar] (rule "web"): ...
func (e *Error) Error() string {
	var lines []string

	for _, p := range e.Problems {
		place := e.Name

		for _, n := range []int{p.Line, p.Column} {
			if n > 0 {
				place = fmt.Sprintf("%s:%d", place, n)
			}
		}

		lines = append(lines, place+": "+p.String())
	}

	return strings.Join(lines, "\n")
}

// String returns the path and the message.
func (p Problem) String() string {
	if p.Warning {
		p.Warning = false

		return "warning: " + p.String()
	}

	kind := "entry"
	if strings.HasPrefix(p.Path, "transformations") {
		kind = "rule"
	} else if strings.HasPrefix(p.Path, "ipam.pools") {
		kind = "pool"
	}

	switch {
	case p.Path == "":
		return p.Msg
	case p.Rule == "":
		return p.Path + ": " + p.Msg
	default:
		return fmt.Sprintf("%s (%s %q): %s", p.Path, kind, p.Rule, p.Msg)
	}
}

// covers reports whether the problem is about the value at path, one of its parents or one of its children.
func (p Problem) covers(path string) bool {
	short, long := min(p.Path, path), max(p.Path, path)
	rest, found := strings.CutPrefix(long, short)

	return found && (rest == "" || rest[0] == '.' || rest[0] == '[')
}

// shorten returns s as a single line of valid UTF-8 with at most limit bytes and an ellipsis.
func shorten(s string, limit int) string {
	if len(s) > limit {
		s = s[:limit] + "…"
	}

	return strings.Map(func(r rune) rune {
		if unicode.IsControl(r) || r == '\u2028' || r == '\u2029' {
			return ' '
		}

		return r
	}, strings.ToValidUTF8(s, ""))
}
