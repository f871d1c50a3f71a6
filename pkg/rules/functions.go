package rules

import (
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"text/template"
)

// functions are the functions of templates, besides those of patterns and of text/template. They have the names, the
// order of arguments and the results of the upstream Talos CCM or, where it has no such function, of Masterminds/sprig.
// Lists are lists of strings. None returns a number: apart from its length, a text that a machine reports must not
// determine how often a loop runs.
var functions = template.FuncMap{
	"upper":      strings.ToUpper,
	"lower":      strings.ToLower,
	"trim":       strings.TrimSpace,
	"trimAll":    func(cutset, s string) string { return strings.Trim(s, cutset) },
	"trimPrefix": func(prefix, s string) string { return strings.TrimPrefix(s, prefix) },
	"trimSuffix": func(suffix, s string) string { return strings.TrimSuffix(s, suffix) },
	"contains":   func(substr, s string) bool { return strings.Contains(s, substr) },
	"hasPrefix":  func(prefix, s string) bool { return strings.HasPrefix(s, prefix) },
	"hasSuffix":  func(suffix, s string) bool { return strings.HasSuffix(s, suffix) },
	"replace":    replace,
	// trunc returns the first n bytes, or the last -n bytes if n is negative.
	"trunc": func(n int, s string) string {
		if n < 0 {
			return s[max(0, len(s)+n):]
		}

		return s[:min(n, len(s))]
	},

	"default": func(fallback any, given ...any) any {
		if len(given) == 0 || empty(given[0]) {
			return fallback
		}

		return given[0]
	},
	// coalesce returns the first value that is not empty, or "".
	"coalesce": func(values ...any) any {
		for _, v := range values {
			if !empty(v) {
				return v
			}
		}

		return ""
	},
	"empty": empty,
	"ternary": func(yes, no any, condition bool) any {
		if condition {
			return yes
		}

		return no
	},
	"fail": func(message string) (string, error) { return "", errors.New(message) },

	"b64enc": func(s string) (string, error) { return limit(base64.StdEncoding.EncodeToString([]byte(s))) },
	"b64dec": func(s string) (string, error) {
		data, err := base64.StdEncoding.DecodeString(s)

		return string(data), err
	},
	"sha256sum": func(s string) string { return fmt.Sprintf("%x", sha256.Sum256([]byte(s))) },

	"getValue":  getValue,
	"splitList": func(separator, s string) []string { return strings.Split(s, separator) },
	"join":      join,
	// first and last return "" for an empty list.
	"first": func(list []string) string { return strings.Join(list[:min(1, len(list))], "") },
	"last":  func(list []string) string { return strings.Join(list[max(0, len(list)-1):], "") },

	"get": func(entries map[string]string, key string) string { return entries[key] },
	"hasKey": func(entries map[string]string, key string) bool {
		_, found := entries[key]

		return found
	},
	"keys": func(entries map[string]string) []string { return slices.Sorted(maps.Keys(entries)) },
}

// printers replace functions of text/template whose results can be longer than maxText.
var printers = template.FuncMap{
	"print":    limited(fmt.Sprint),
	"println":  limited(fmt.Sprintln),
	"html":     limited(template.HTMLEscaper),
	"js":       limited(template.JSEscaper),
	"urlquery": limited(template.URLQueryEscaper),
	"printf":   printf,
}

// Functions returns the names of the functions that templates can call besides those of text/template, sorted.
func Functions() []string { return slices.Sorted(maps.Keys(patterns{}.functions())) }

// limit fails if a function's result is longer than maxText.
func limit(s string) (string, error) { return s, checkLength(len(s)) }

func limited(f func(...any) string) func(...any) (string, error) {
	return func(args ...any) (string, error) { return limit(f(args...)) }
}

var (
	directives = regexp.MustCompile(`%[^a-zA-Z%]*`)
	numbers    = regexp.MustCompile(`[0-9]+`)
)

// printf checks the length that its result could have first: every directive of the format can insert the longest
// argument, or as many characters as a width or precision demands, which package fmt limits to maxWidth.
func printf(format string, args ...any) (string, error) {
	const maxWidth = 1_000_000

	longest := 0

	for _, arg := range args {
		longest = max(longest, len(fmt.Sprint(arg)))

		if width, ok := arg.(int); ok { // of a directive such as %*d
			longest = max(longest, min(width, maxWidth))
		}
	}

	found := directives.FindAllString(format, -1)

	for _, number := range numbers.FindAllString(strings.Join(found, ""), -1) {
		width, err := strconv.Atoi(number)
		if err != nil {
			width = maxWidth
		}

		longest = max(longest, min(width, maxWidth))
	}

	if err := checkExpansion(len(found) * longest); err != nil {
		return "", err
	}

	return limit(fmt.Sprintf(format, args...))
}

// replace checks the length of its result first: it can be the product of the lengths of its arguments.
func replace(old, replacement, s string) (string, error) {
	if err := checkLength(len(s) + strings.Count(s, old)*(len(replacement)-len(old))); err != nil {
		return "", err
	}

	return strings.ReplaceAll(s, old, replacement), nil
}

// empty reports whether the value is false, 0, nil, or an empty string, list or map.
func empty(v any) bool {
	truth, _ := template.IsTrue(v)

	return !truth
}

// getValue returns the value of a key in a text such as "ds=nocloud;i=1234", or "" without such a key. A value ends at
// the next semicolon.
func getValue(text, key string) string {
	for entry := range strings.SplitSeq(text, ";") {
		if name, value, found := strings.Cut(entry, "="); found && name == key {
			return value
		}
	}

	return ""
}

// join checks the length of its result first: it can be the product of the lengths of its arguments.
func join(separator string, list []string) (string, error) {
	length := len(separator) * (len(list) - 1)
	for _, item := range list {
		length += len(item)
	}

	if err := checkLength(length); err != nil {
		return "", err
	}

	return strings.Join(list, separator), nil
}

// patterns are the regular expressions that a template has as literals. Its functions compile others at each call.
type patterns map[string]*regexp.Regexp

// functions returns the functions of templates.
func (p patterns) functions() template.FuncMap {
	all := maps.Clone(functions)
	all["regexFind"] = func(pattern, s string) (string, error) { return p.findString(pattern, s, 0) }
	all["regexFindString"] = p.findString
	all["regexReplaceAll"] = p.replaceAll
	all["regexMatch"] = func(pattern, s string) (bool, error) {
		compiled, err := p.compile(pattern)

		return err == nil && compiled.MatchString(s), err
	}

	return all
}

func (p patterns) compile(source string) (*regexp.Regexp, error) {
	if compiled, found := p[source]; found {
		return compiled, nil
	}

	return regexp.Compile(source)
}

// findString returns a submatch of the first match; 0 is the match itself. It returns "" if there is none.
func (p patterns) findString(pattern, s string, index int) (string, error) {
	compiled, err := p.compile(pattern)

	switch {
	case err != nil:
		return "", err
	case index < 0:
		return "", fmt.Errorf("no submatch %d", index)
	}

	if matches := compiled.FindStringSubmatch(s); index < len(matches) {
		return matches[index], nil
	}

	return "", nil
}

// replaceAll is ReplaceAllString, but stops when the result becomes too long.
func (p patterns) replaceAll(pattern, s, replacement string) (string, error) {
	compiled, err := p.compile(pattern)
	if err != nil {
		return "", err
	}

	var (
		result []byte
		end    int
	)

	for _, match := range compiled.FindAllStringSubmatchIndex(s, -1) {
		if err := checkExpansion(strings.Count(replacement, "$") * (match[1] - match[0])); err != nil {
			return "", err
		}

		result = compiled.ExpandString(append(result, s[end:match[0]]...), replacement, s, match)
		end = match[1]

		if err := checkLength(len(result)); err != nil {
			return "", err
		}
	}

	return limit(string(result) + s[end:])
}
