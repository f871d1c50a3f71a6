package config

import (
	"errors"
	"regexp"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v4"
)

// unquotedTemplate is the hint for a value that isUnquotedTemplate finds.
const unquotedTemplate = `a value that begins with "{{" must be quoted`

var bareTemplate = regexp.MustCompile(`[:,\[{-]\s+\{\{`)

// syntaxProblem returns an error of the YAML library with its position. It adds a hint for unquoted
// templates, since the library's message does not suggest any.
func syntaxProblem(data string, err error) Problem {
	e := &yaml.LoadError{Message: err.Error()}
	errors.As(err, &e)

	if e.Mark.Line == 0 { // An invalid character has an offset only.
		before := data[:min(e.Mark.Index, len(data))]
		e.Mark.Line = strings.Count(before, "\n") + 1
		e.Mark.Column = utf8.RuneCountInString(before[strings.LastIndexByte(before, '\n')+1:]) + 1
	}

	// The end of the file is not where a quote was left open.
	if strings.HasPrefix(e.Message, "found unexpected end of stream") && e.ContextMark.Line > 0 {
		e.Mark = e.ContextMark
	}

	p := Problem{Line: e.Mark.Line, Column: e.Mark.Column, Msg: strings.TrimSpace("invalid YAML: " + e.Message + " " + e.ContextMsg)}

	lines := strings.Split(strings.TrimRight(data, "\n"), "\n")
	if p.Line > len(lines) {
		p.Line, p.Column = len(lines), 0
	}

	if bareTemplate.MatchString(lines[p.Line-1]) {
		p.Msg += "; " + unquotedTemplate
	}

	return p
}
