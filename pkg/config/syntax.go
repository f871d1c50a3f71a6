package config

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v4"
)

// syntaxProblem returns an error of the YAML library with its position and, if its cause is a usual one, what to do.
func syntaxProblem(data string, err error) Problem {
	e := &yaml.LoadError{Message: err.Error()}
	errors.As(err, &e)

	if e.Mark.Line == 0 { // An invalid character has an offset only.
		before := data[:min(e.Mark.Index, len(data))]
		e.Mark.Line = strings.Count(before, "\n") + 1
		e.Mark.Column = utf8.RuneCountInString(before[strings.LastIndexByte(before, '\n')+1:]) + 1
	}

	if strings.HasPrefix(e.Message, unclosedQuote) && e.ContextMark.Line > 0 {
		e.Mark = e.ContextMark
	}

	p := Problem{Line: e.Mark.Line, Column: e.Mark.Column, Msg: strings.TrimSpace("invalid YAML: " + e.Message + " " + e.ContextMsg)}

	lines := strings.Split(strings.TrimRight(data, "\n"), "\n")
	if p.Line > len(lines) {
		p.Line, p.Column = len(lines), 0
	}

	if hint := syntaxHint(e.Message, lines[p.Line-1], p.Column); hint != "" {
		p.Msg += "; " + hint
	}

	return p
}

const (
	// unquotedTemplate explains what isUnquotedTemplate finds.
	unquotedTemplate = `a value that begins with "{{" must be quoted`
	unclosedQuote    = "found unexpected end of stream"
)

var (
	nestedQuotes = regexp.MustCompile(`"[^"']*\{\{[^}]*"|'[^"']*\{\{[^}]*'`)
	bareTemplate = regexp.MustCompile(`[:,\[{-]\s+\{\{`)
	tab          = regexp.MustCompile(`^ *\t`)
)

// syntaxHint returns how to correct a line that the YAML library rejects at a column, or an empty string.
func syntaxHint(message, line string, column int) string {
	nested := nestedQuotes.FindString(line)

	switch {
	case strings.HasPrefix(message, unclosedQuote):
		return "the quote is not closed"
	case strings.HasPrefix(message, "found unknown escape character"):
		return `write \ as \\, or enclose the value in '`
	case tab.MatchString(line):
		return "indent with spaces instead of tabs"
	case nested != "":
		return fmt.Sprintf(`the value ends at the second %c, which is inside {{ }}: `+
			`enclose the value in ' and text in the template in ", as in '{{ default "none" .Zone }}'`, nested[0])
	case bareTemplate.MatchString(line):
		return unquotedTemplate
	case strings.HasPrefix(message, "found character that cannot start") && column <= len(line):
		return fmt.Sprintf("a value that begins with %q must be quoted", line[max(column, 1)-1:column])
	case strings.HasPrefix(message, "did not find expected ','"):
		return "quote a value that contains brackets, braces or commas"
	case strings.HasPrefix(message, "mapping values are not allowed"):
		return `check the indentation, quote a value that contains ": ", and put a space after the colon of a key`
	case strings.HasPrefix(message, "did not find expected"):
		return "check the indentation"
	}

	return ""
}
