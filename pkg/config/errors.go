package config

import (
	"fmt"
	"strings"
	"unicode"
)

// maxProblems bounds the number of problems that are reported for one file.
const maxProblems = 1000

// Problem is one mistake in a file.
type Problem struct {
	// Line and Column count from 1; 0 means unknown.
	Line, Column int
	// Path of the key, such as `transformations[2].labels[team]`; empty for the document as a whole.
	Path string
	// Rule is the name of the rule, pool or entry that contains the key; empty if there is none.
	Rule string
	Msg  string
}

// Error holds every mistake in a file, ordered by position.
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
	lines := make([]string, 0, len(e.Problems))

	for _, p := range e.Problems {
		place := e.Name

		if p.Line > 0 {
			place = fmt.Sprintf("%s:%d", place, p.Line)
		}

		if p.Column > 0 {
			place = fmt.Sprintf("%s:%d", place, p.Column)
		}

		lines = append(lines, place+": "+p.String())
	}

	return strings.Join(lines, "\n")
}

// String returns the path and the message.
func (p Problem) String() string {
	switch {
	case p.Path == "":
		return p.Msg
	case p.Rule == "":
		return p.Path + ": " + p.Msg
	default:
		return fmt.Sprintf("%s (%s %q): %s", p.Path, kindOf(p.Path), p.Rule, p.Msg)
	}
}

// kindOf returns what an entry of the list in the path is called.
func kindOf(path string) string {
	switch {
	case strings.HasPrefix(path, "transformations"):
		return "rule"
	case strings.HasPrefix(path, "ipam.pools"):
		return "pool"
	default:
		return "entry"
	}
}

// covers reports whether the problem is about the value at path, one of its parents or one of its children.
func (p Problem) covers(path string) bool {
	short, long := p.Path, path
	if len(short) > len(long) {
		short, long = long, short
	}

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

// closest returns the word that is most similar to the given one, ignoring case; empty if none is similar.
func closest(word string, words []string) string {
	const longest = 40
	if len(word) > longest {
		return ""
	}

	best, distance := "", len(word)/3+1

	for _, candidate := range words {
		if d := editDistance(strings.ToLower(word), strings.ToLower(candidate)); d <= distance && (best == "" || d < distance) {
			best, distance = candidate, d
		}
	}

	return best
}

// editDistance returns the Levenshtein distance in bytes.
func editDistance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}

	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1

		for j := range len(b) {
			replaced := diagonal
			if a[i] != b[j] {
				replaced++
			}

			diagonal = row[j+1]
			row[j+1] = min(replaced, diagonal+1, row[j]+1)
		}
	}

	return row[len(b)]
}
