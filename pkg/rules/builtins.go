package rules

import (
	"cmp"
	"errors"
	"fmt"
	"html"
	"net/url"
	"reflect"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// builtins are the functions of text/template for the values of an executor.
var builtins = map[string]any{
	// The executor evaluates the arguments of and and or until one determines the result.
	"and": lastOf,
	"or":  lastOf,
	"not": empty,
	// No value is a function.
	"call": func(f any, _ ...any) (any, error) { return nil, fmt.Errorf("%T is not a function", f) },

	"print":   fmt.Sprint,
	"printf":  fmt.Sprintf,
	"println": fmt.Sprintln,
	"html": func(values ...any) string {
		return strings.ReplaceAll(html.EscapeString(sprint(values)), "\x00", "\uFFFD")
	},
	"js":       func(values ...any) string { return escapeJS(sprint(values)) },
	"urlquery": func(values ...any) string { return url.QueryEscape(sprint(values)) },

	"len":   length,
	"index": index,
	"slice": slice,

	"eq": equal,
	"ne": func(a, b any) (bool, error) {
		same, err := equal(a, b)

		return !same, err
	},
	"lt": ordered(func(order int) bool { return order < 0 }),
	"le": ordered(func(order int) bool { return order <= 0 }),
	"gt": ordered(func(order int) bool { return order > 0 }),
	"ge": ordered(func(order int) bool { return order >= 0 }),
}

func lastOf(first any, others ...any) any { return append([]any{first}, others...)[len(others)] }

// printable returns the value for package fmt.
func printable(value any) any {
	if value == nil {
		return "<no value>"
	}

	return value
}

func sprint(values []any) string {
	for i, value := range values {
		values[i] = printable(value)
	}

	return fmt.Sprint(values...)
}

// escapeJS escapes a text for a string literal of JavaScript.
func escapeJS(s string) string {
	var escaped strings.Builder

	for len(s) > 0 {
		r, size := utf8.DecodeRuneInString(s)

		switch {
		case strings.ContainsRune(`\'"`, r):
			escaped.WriteString(`\` + s[:size])
		case r < ' ', strings.ContainsRune("<>&=", r), r >= utf8.RuneSelf && !unicode.IsPrint(r):
			fmt.Fprintf(&escaped, `\u%04X`, r)
		default:
			escaped.WriteString(s[:size])
		}

		s = s[size:]
	}

	return escaped.String()
}

func length(value any) (int, error) {
	switch v := reflect.ValueOf(value); v.Kind() {
	case reflect.String, reflect.Slice, reflect.Map:
		return v.Len(), nil
	default:
		return 0, fmt.Errorf("%T has no length", value)
	}
}

func index(value any, keys ...any) (any, error) {
	if value == nil {
		return nil, errors.New("index of nil")
	}

	for _, key := range keys {
		entries, isMap := value.(map[string]string)
		name, isText := key.(string)
		size, _ := length(value)
		i, inRange := position(key, size-1)

		switch {
		case isMap && isText:
			value = entries[name]
		case !isMap && inRange:
			value = reflect.ValueOf(value).Index(i).Interface()
		default:
			return nil, fmt.Errorf("%T has no element %#v", value, key)
		}
	}

	return value, nil
}

// slice returns a part of a text or a list. As in Go, a list ends at its capacity, not at its length.
func slice(value any, bounds ...any) (any, error) {
	text, isText := value.(string)
	list, isList := value.([]string)
	limit := len(text) + cap(list)
	ends := []int{0, len(text) + len(list), limit}
	valid := isText && len(bounds) < 3 || isList && len(bounds) < 4

	for i := 0; i < len(bounds) && valid; i++ {
		ends[i], valid = position(bounds[i], limit)
	}

	switch {
	case !valid || !slices.IsSorted(ends):
		return nil, fmt.Errorf("cannot slice %T at %v", value, bounds)
	case isText:
		return text[ends[0]:ends[1]], nil
	default:
		return list[ends[0]:ends[1]:ends[2]], nil
	}
}

// position returns an index if it is an integer from 0 to limit.
func position(value any, limit int) (i int, inRange bool) {
	i, isInteger := integer(value).(int)

	return i, isInteger && 0 <= i && i <= limit
}

// integer returns a byte of a text as int. It does not change other values.
func integer(value any) any {
	if b, isByte := value.(uint8); isByte {
		return int(b)
	}

	return value
}

// equal reports whether the first value equals one of the others. A list or a map equals only nil, if it is nil.
func equal(first any, others ...any) (bool, error) {
	if len(others) == 0 {
		return false, errors.New("missing argument for comparison")
	}

	a := integer(first)

	for _, other := range others {
		b := integer(other)
		typed := a != nil && b != nil

		switch withNil := isNil(a) || isNil(b); {
		case typed && reflect.TypeOf(a) != reflect.TypeOf(b), !withNil && !reflect.TypeOf(a).Comparable():
			return false, fmt.Errorf("cannot compare %T with %T", a, b)
		case withNil && isNil(a) == isNil(b), !withNil && a == b:
			return true, nil
		}
	}

	return false, nil
}

func isNil(value any) bool {
	return value == nil || canBeNil(reflect.TypeOf(value)) && reflect.ValueOf(value).IsNil()
}

// canBeNil reports whether nil is a value of the type.
func canBeNil(t reflect.Type) bool {
	return t.Kind() == reflect.Interface || t.Kind() == reflect.Map || t.Kind() == reflect.Slice
}

// ordered returns a comparison of two integers, floats or texts.
func ordered(holds func(order int) bool) func(a, b any) (bool, error) {
	return func(a, b any) (bool, error) {
		v, w := reflect.ValueOf(integer(a)), reflect.ValueOf(integer(b))

		switch kind := v.Kind(); {
		case kind == reflect.Int && w.Kind() == kind:
			return holds(cmp.Compare(v.Int(), w.Int())), nil
		case kind == reflect.Float64 && w.Kind() == kind:
			return holds(cmp.Compare(v.Float(), w.Float())), nil
		case kind == reflect.String && w.Kind() == kind:
			return holds(cmp.Compare(v.String(), w.String())), nil
		default:
			return false, fmt.Errorf("cannot order %T and %T", a, b)
		}
	}
}
