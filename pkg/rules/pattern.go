package rules

import (
	"fmt"
	"regexp"
	"regexp/syntax"
	"strings"
)

const (
	// maxPattern is the longest regular expression in bytes.
	maxPattern = 4 << 10
	// maxInstructions bounds what it compiles to: `(?:…){1000}` is short, and large.
	maxInstructions = 10_000
)

// pattern is a regular expression that is known to be small.
type pattern struct {
	*regexp.Regexp

	// instructions is about how many there are: each byte of a text may be looked at by all of them.
	instructions int
}

func compilePattern(source string) (pattern, error) {
	if len(source) > maxPattern {
		return pattern{}, fmt.Errorf("the regular expression is longer than %d bytes", maxPattern)
	}

	parsed, err := syntax.Parse(source, syntax.Perl)
	if err != nil {
		return pattern{}, err
	}

	n := instructions(parsed)
	if n > maxInstructions {
		return pattern{}, fmt.Errorf("the regular expression %q is too large with its repetitions written out", source)
	}

	compiled, err := regexp.Compile(source)

	return pattern{Regexp: compiled, instructions: n}, err
}

func instructions(expression *syntax.Regexp) int {
	n := 1 + len(expression.Rune)
	if expression.Op == syntax.OpCharClass {
		n = 1
	}

	for _, sub := range expression.Sub {
		n += instructions(sub)
	}

	if expression.Op == syntax.OpRepeat {
		n *= max(expression.Min, expression.Max, 1)
	}

	return n
}

// expression returns the compiled regular expression, after it has paid for one pass over the text.
func (v *values) expression(source, over string) (pattern, error) {
	p, known := v.patterns[source]
	if !known {
		var err error
		if p, err = compilePattern(source); err != nil {
			return p, err
		}

		if err := v.spend(p.instructions * nodeWork); err != nil {
			return p, err
		}
	}

	return p, v.spend(p.instructions * (len(over) + 1))
}

// repeatedly is expression for what looks for all matches: each of them may look at all of the rest.
func (v *values) repeatedly(source, over string) (pattern, error) {
	p, err := v.expression(source, over)
	if err != nil {
		return p, err
	}

	return p, v.spend(p.instructions * len(over) * len(over))
}

func regexMatch(v *values, source, s string) (bool, error) {
	p, err := v.expression(source, s)

	return err == nil && p.MatchString(s), err
}

func regexFind(v *values, source, s string) (string, error) {
	p, err := v.expression(source, s)
	if err != nil {
		return "", err
	}

	return p.FindString(s), nil
}

// regexFindString returns a submatch; 0 is the whole match. It is empty if there is none.
func regexFindString(v *values, source, s string, index int) (string, error) {
	p, err := v.expression(source, s)
	if err != nil {
		return "", err
	}

	if index < 0 {
		return "", fmt.Errorf("there is no submatch %d", index)
	}

	if matches := p.FindStringSubmatch(s); index < len(matches) {
		return matches[index], nil
	}

	return "", nil
}

func regexFindAll(v *values, source, s string, n int) ([]string, error) {
	p, err := v.repeatedly(source, s)
	if err != nil {
		return nil, err
	}

	return p.FindAllString(s, n), nil
}

func regexSplit(v *values, source, s string, n int) ([]string, error) {
	p, err := v.repeatedly(source, s)
	if err != nil {
		return nil, err
	}

	return p.Split(s, n), nil
}

func regexReplaceAll(v *values, source, s, replacement string) (string, error) {
	p, err := v.repeatedly(source, s)
	if err != nil {
		return "", err
	}

	// Each "$" stands for a match or a part of it.
	if err := checkReplacement(p, s, len(replacement), strings.Count(replacement, "$")); err != nil {
		return "", err
	}

	return p.ReplaceAllString(s, replacement), nil
}

func regexReplaceAllLiteral(v *values, source, s, replacement string) (string, error) {
	p, err := v.repeatedly(source, s)
	if err != nil {
		return "", err
	}

	if err := checkReplacement(p, s, len(replacement), 0); err != nil {
		return "", err
	}

	return p.ReplaceAllLiteralString(s, replacement), nil
}

// checkReplacement refuses to put more text in the place of all matches than there may be.
func checkReplacement(p pattern, s string, length, references int) error {
	total := len(s)
	for _, match := range p.FindAllStringIndex(s, -1) {
		total += length + references*(match[1]-match[0])
	}

	return checkLength(total)
}
