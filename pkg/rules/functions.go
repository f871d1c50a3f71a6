package rules

import (
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"regexp"
	"slices"
	"strings"
)

// functions are the functions of templates, besides those of text/template. They have the names, the order of arguments
// and the results of the upstream Talos CCM or, where it has no such function, of Masterminds/sprig. Lists are lists of
// strings. No function converts a text to a number: a machine must not determine how often a loop runs.
var functions = map[string]any{
	"upper":      strings.ToUpper,
	"lower":      strings.ToLower,
	"trim":       strings.TrimSpace,
	"trimAll":    func(cutset, s string) string { return strings.Trim(s, cutset) },
	"trimPrefix": func(prefix, s string) string { return strings.TrimPrefix(s, prefix) },
	"trimSuffix": func(suffix, s string) string { return strings.TrimSuffix(s, suffix) },
	"contains":   func(substr, s string) bool { return strings.Contains(s, substr) },
	"hasPrefix":  func(prefix, s string) bool { return strings.HasPrefix(s, prefix) },
	"hasSuffix":  func(suffix, s string) bool { return strings.HasSuffix(s, suffix) },
	"replace":    func(old, replacement, s string) string { return strings.ReplaceAll(s, old, replacement) },
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

	"b64enc": func(s string) string { return base64.StdEncoding.EncodeToString([]byte(s)) },
	"b64dec": func(s string) (string, error) {
		data, err := base64.StdEncoding.DecodeString(s)

		return string(data), err
	},
	"sha256sum": func(s string) string { return fmt.Sprintf("%x", sha256.Sum256([]byte(s))) },

	// An executor calls its own method, which reads the tables of the configuration.
	"lookup": new(executor).lookup,

	"getValue":  getValue,
	"splitList": func(separator, s string) []string { return strings.Split(s, separator) },
	"join":      func(separator string, list []string) string { return strings.Join(list, separator) },
	// first and last return "" for an empty list.
	"first": func(list []string) string { return strings.Join(list[:min(1, len(list))], "") },
	"last":  func(list []string) string { return strings.Join(list[max(0, len(list)-1):], "") },

	"get": func(entries map[string]string, key string) string { return entries[key] },
	"hasKey": func(entries map[string]string, key string) bool {
		_, found := entries[key]

		return found
	},
	"keys": func(entries map[string]string) []string { return slices.Sorted(maps.Keys(entries)) },

	"regexFind":       func(pattern, s string) (string, error) { return findString(pattern, s, 0) },
	"regexFindString": findString,
	"regexMatch":      regexp.MatchString,
	"regexReplaceAll": func(pattern, s, replacement string) (string, error) {
		compiled, err := regexp.Compile(pattern)
		if err != nil {
			return "", err
		}

		return compiled.ReplaceAllString(s, replacement), nil
	},
}

// Functions returns the names of the functions that templates can call besides those of text/template, sorted.
func Functions() []string { return slices.Sorted(maps.Keys(functions)) }

// empty reports whether the value is false, 0, nil, or an empty string, list or map.
func empty(v any) bool {
	switch value := reflect.ValueOf(v); value.Kind() {
	case reflect.Invalid: // nil
		return true
	case reflect.Map, reflect.Slice:
		return value.Len() == 0
	default:
		return value.IsZero()
	}
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

// findString returns a submatch of the first match; 0 is the match itself. It returns "" if there is none.
func findString(pattern, s string, index int) (string, error) {
	compiled, err := regexp.Compile(pattern)

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
