package rules

import (
	"encoding/base32"
	"encoding/base64"
	"fmt"
	"maps"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"text/template"

	"github.com/Masterminds/sprig/v3"
)

// fromSprig are the functions of Masterminds/sprig v3 that are let in as they are. What is not on the list stays out: environment, files, network, time,
// chance, keys, what makes text or lists of any length from a number, what changes its arguments, and what has no order. The number is how many steps each
// byte of the arguments takes.
var fromSprig = map[string]int{
	"title": 1, "untitle": 1, "trimAll": 1, "nospace": 1, "initials": 1, "swapcase": 1, "snakecase": 1, "camelcase": 1, "kebabcase": 1,
	"abbrev": 1, "abbrevboth": 1, "trunc": 1, "substr": 1, "wrap": 1, "quote": 1, "squote": 1, "cat": 1, "plural": 1, "toString": 1,
	"splitList": 1, "split": 1, "splitn": 1, "list": 1, "append": 1, "prepend": 1, "concat": 1, "first": 1, "last": 1, "rest": 1, "initial": 1,
	"reverse": 1, "compact": 1, "has": 1, "dict": 1, "dig": 1, "any": 1, "all": 1, "fail": 1, "deepEqual": 1, "kindOf": 1, "kindIs": 1,
	"b32enc": 1, "sha1sum": 1, "sha256sum": 1, "sha512sum": 1, "adler32sum": 1,
	"add": 1, "add1": 1, "sub": 1, "mul": 1, "div": 1, "mod": 1, "max": 1, "min": 1, "floor": 1, "ceil": 1, "round": 1,
	"atoi": 1, "int": 1, "int64": 1, "float64": 1, "base": 1, "dir": 1, "clean": 1, "ext": 1, "isAbs": 1, "regexQuoteMeta": 1,
	"uniq": maxText / itemWeight, "without": maxText / itemWeight, // each item is compared with each
	"semver": 100, "semverCompare": 100, "urlParse": 100, // regular expressions
}

// builtins are text/template's own that make text.
var builtins = map[string]any{
	"print": fmt.Sprint, "println": fmt.Sprintln, "printf": printf,
	"html": template.HTMLEscaper, "js": template.JSEscaper, "urlquery": template.URLQueryEscaper,
}

// own are the functions of the upstream Talos CCM, with its order of arguments, and those of sprig's that must not be as they are there.
var own = map[string]any{
	"upper": strings.ToUpper, "lower": strings.ToLower, "trim": strings.TrimSpace,
	"trimSuffix": func(suffix, s string) string { return strings.TrimSuffix(s, suffix) },
	"trimPrefix": func(prefix, s string) string { return strings.TrimPrefix(s, prefix) },
	"contains":   func(substr, s string) bool { return strings.Contains(s, substr) },
	"hasPrefix":  func(prefix, s string) bool { return strings.HasPrefix(s, prefix) },
	"hasSuffix":  func(suffix, s string) bool { return strings.HasSuffix(s, suffix) },
	"replace":    replace,
	"regexFind":  regexFind, "regexFindString": regexFindString, "regexReplaceAll": regexReplaceAll,
	"b64enc":   func(s string) string { return base64.StdEncoding.EncodeToString([]byte(s)) },
	"b64dec":   b64dec,
	"getValue": getValue,
	"default":  byDefault, "empty": empty, "coalesce": coalesce, "ternary": ternary,

	"regexMatch": regexMatch, "regexFindAll": regexFindAll, "regexSplit": regexSplit, "regexReplaceAllLiteral": regexReplaceAllLiteral,
	"repeat": repeat, "indent": indent, "nindent": nindent, "join": join, "b32dec": b32dec,
	"sortAlpha": sortAlpha, "get": get, "hasKey": hasKey, "keys": keysOf,
}

// strict are sprig's own stricter kinds of functions that are let in under the plain name: what is wrong is said.
var strict = map[string]string{"fromJson": "mustFromJson", "toJson": "mustToJson", "toRawJson": "mustToRawJson"}

// Functions are the names of the functions that templates can call, besides those of text/template, sorted.
func Functions() []string { return slices.Sorted(maps.Keys(functions)) }

// function is a function as it was written, and how many steps it takes for each byte of its arguments.
type function struct {
	reflect.Value

	steps int
}

// library is what a template can call.
var library = func() map[string]function {
	all, available := map[string]function{}, sprig.TxtFuncMap()

	for name, steps := range fromSprig {
		all[name] = function{reflect.ValueOf(available[name]), steps}
	}

	for name, theirs := range strict {
		all[name] = function{reflect.ValueOf(available[theirs]), 1}
	}

	for _, more := range []map[string]any{builtins, own} {
		for name, f := range more {
			all[name] = function{reflect.ValueOf(f), 1}
		}
	}

	return all
}()

// functions are the library as templates call it.
var functions = func() template.FuncMap {
	all := template.FuncMap{}
	for name, f := range library {
		all[name] = f.metered()
	}

	return all
}()

// takesValues tells whether the function does its own metering.
func (f function) takesValues() bool {
	return f.Type().NumIn() > 0 && f.Type().In(0) == reflect.TypeFor[*values]()
}

// checkCount refuses to call the function with so many arguments.
func (f function) checkCount(given int) error {
	wanted := f.Type().NumIn()
	if f.takesValues() {
		wanted--
	}

	atLeast := ""
	if f.Type().IsVariadic() {
		wanted, atLeast = wanted-1, "at least "
	}

	if given == wanted || given > wanted && f.Type().IsVariadic() {
		return nil
	}

	plural := "s"
	if wanted == 1 {
		plural = ""
	}

	return fmt.Errorf("takes %s%d argument%s, not %d", atLeast, wanted, plural, given)
}

// Names of hooks. Templates cannot call them: they are made known only after parsing.
const (
	printHook = "_print"
	rangeHook = "_range"
)

// hooks are called by what checker adds to templates.
var hooks = template.FuncMap{printHook: printed, rangeHook: ranged}

// printed is the text of a value; nothing is "", and not "<no value>".
func printed(v *values, x any) (string, error) {
	if s, is := x.(string); is || x == nil {
		return s, nil
	}

	if err := v.pay(1, x); err != nil {
		return "", err
	}

	return fmt.Sprint(x), nil
}

// ranged takes the work of a loop over x, each turn of which has so many nodes.
func ranged(v *values, nodes int, x any) (any, error) {
	turns := 0

	switch value := reflect.ValueOf(x); {
	case value.CanInt():
		turns = int(min(max(value.Int(), 0), maxWork))
	case value.Kind() == reflect.Slice, value.Kind() == reflect.Map:
		turns = value.Len()
	case value.IsValid():
		return nil, fmt.Errorf("range goes over lists, maps and integers, not over %s", value.Type())
	}

	return x, v.spend(turns * nodes * nodeWork)
}

// metered is the function as templates call it: it takes the work from the values that checker puts first, and refuses arguments and results that are too large. What it
// makes of them in between is limited, too. A function that panics is an error to text/template.
func (f function) metered() any {
	return func(v *values, args ...any) (any, error) {
		if err := v.pay(f.steps, args...); err != nil {
			return nil, err
		}

		in, err := f.arguments(v, args)
		if err != nil {
			return nil, err
		}

		results := f.Call(in)
		if len(results) > 1 {
			if err, failed := reflect.TypeAssert[error](results[1]); failed {
				return nil, err
			}
		}

		return results[0].Interface(), checkWeight(results[0])
	}
}

// pay takes the work of looking at each byte of the arguments so many times.
func (v *values) pay(steps int, args ...any) error {
	list := reflect.ValueOf(args)
	if err := checkWeight(list); err != nil {
		return err
	}

	return v.spend(nodeWork + steps*weight(list, maxText))
}

// itemWeight is what an item of a list or map weighs besides what is in it.
const itemWeight = 16

func checkWeight(v reflect.Value) error {
	if weight(v, maxText) > maxText {
		return fmt.Errorf("a value is larger than %d bytes", maxText)
	}

	return nil
}

// weight is about how many bytes a value is long when it is printed. It stops counting at the limit: lists can hold the same list many times.
func weight(v reflect.Value, limit int) int {
	switch v.Kind() {
	case reflect.String:
		return v.Len()
	case reflect.Interface:
		return weight(v.Elem(), limit)
	case reflect.Slice:
		n := itemWeight * v.Len()
		for i := 0; i < v.Len() && n <= limit; i++ {
			n += weight(v.Index(i), limit-n)
		}

		return n
	case reflect.Map:
		n := 2 * itemWeight * v.Len()
		for entry := v.MapRange(); n <= limit && entry.Next(); {
			n += weight(entry.Key(), limit-n) + weight(entry.Value(), limit-n)
		}

		return n
	default:
		return plainWeight(v)
	}
}

func plainWeight(v reflect.Value) int {
	if !v.IsValid() || !v.CanInterface() {
		return itemWeight
	}

	if s, is := reflect.TypeAssert[fmt.Stringer](v); is {
		return len(s.String())
	}

	return itemWeight
}

// arguments are those that a template gives, as the function takes them. Compile has counted them.
func (f function) arguments(v *values, args []any) ([]reflect.Value, error) {
	typ, in := f.Type(), make([]reflect.Value, 0, len(args)+1)

	if f.takesValues() {
		in = append(in, reflect.ValueOf(v))
	}

	for i, arg := range args {
		position := len(in)
		wanted := typ.In(min(position, typ.NumIn()-1))

		if typ.IsVariadic() && position >= typ.NumIn()-1 {
			wanted = wanted.Elem()
		}

		converted, err := convert(arg, wanted)
		if err != nil {
			return nil, fmt.Errorf("argument %d: %w", i+1, err)
		}

		in = append(in, converted)
	}

	return in, nil
}

func convert(arg any, wanted reflect.Type) (reflect.Value, error) {
	switch v := reflect.ValueOf(arg); {
	case !v.IsValid() && wanted.Kind() == reflect.Interface:
		return reflect.Zero(wanted), nil
	case !v.IsValid():
		return v, fmt.Errorf("there is nothing, and not a %s", wanted)
	case v.Type().AssignableTo(wanted):
		return v, nil
	case v.CanInt() && (wanted.Kind() == reflect.Int || wanted.Kind() == reflect.Float64):
		return v.Convert(wanted), nil
	default:
		return v, fmt.Errorf("%v is a %s, and not a %s", arg, v.Type(), wanted)
	}
}

var (
	// verb is what begins a verb of a format: flags, width, precision and the number of an argument. "%%" is none.
	verb = regexp.MustCompile(`%%|%[-+# 0]*[0-9.*[\]]*`)
	// wide is in one whose width or precision makes much of little, or is an argument.
	wide = regexp.MustCompile(`[1-9]\d\d|[*[]`)
)

func printf(format string, args ...any) (string, error) {
	for _, v := range verb.FindAllString(format, -1) {
		if wide.MatchString(v) {
			return "", fmt.Errorf("width or precision in %q is over 99, or an argument", v)
		}
	}

	return fmt.Sprintf(format, args...), nil
}

func replace(old, replacement, s string) (string, error) {
	if err := checkLength(len(s) + strings.Count(s, old)*max(len(replacement)-len(old), 0)); err != nil {
		return "", err
	}

	return strings.ReplaceAll(s, old, replacement), nil
}

func repeat(count int, s string) (string, error) {
	if count < 0 || count > maxText {
		return "", fmt.Errorf("%d times is too many or too few", count)
	}

	if err := checkLength(count * len(s)); err != nil {
		return "", err
	}

	return strings.Repeat(s, count), nil
}

// indent puts spaces before each line.
func indent(spaces int, s string) (string, error) {
	pad, err := repeat(spaces, " ")
	if err != nil {
		return "", err
	}

	indented, err := replace("\n", "\n"+pad, s)

	return pad + indented, err
}

func nindent(spaces int, s string) (string, error) {
	indented, err := indent(spaces, s)

	return "\n" + indented, err
}

func join(separator string, list any) (string, error) {
	items := texts(list)

	length := len(separator) * len(items)
	for _, item := range items {
		length += len(item)
	}

	if err := checkLength(length); err != nil {
		return "", err
	}

	return strings.Join(items, separator), nil
}

// texts are the items of any list.
func texts(list any) []string {
	if items, is := list.([]string); is {
		return items
	}

	v := reflect.ValueOf(list)
	if v.Kind() != reflect.Slice {
		return []string{fmt.Sprint(list)}
	}

	items := make([]string, v.Len())
	for i := range items {
		items[i] = fmt.Sprint(v.Index(i))
	}

	return items
}

// sortAlpha does not sort in place, as sprig's does.
func sortAlpha(list any) []string { return slices.Sorted(slices.Values(texts(list))) }

func b64dec(s string) (string, error) {
	data, err := base64.StdEncoding.DecodeString(s)

	return string(data), err
}

func b32dec(s string) (string, error) {
	data, err := base32.StdEncoding.DecodeString(s)

	return string(data), err
}

// getValue returns the value of a key in a text such as "ds=nocloud;i=1234"; empty if it is not there. A value goes on to the next semicolon, whatever is in
// it.
func getValue(text, key string) string {
	for entry := range strings.SplitSeq(text, ";") {
		if name, value, found := strings.Cut(entry, "="); found && name == key {
			return value
		}
	}

	return ""
}

// get is an entry of .Tags, .Extensions or a dict; empty if there is none.
func get(entries any, name string) (any, error) {
	m, err := mapOf(entries)
	if err != nil || m[name] == nil {
		return "", err
	}

	return m[name], nil
}

func hasKey(entries any, name string) (bool, error) {
	m, err := mapOf(entries)
	_, exists := m[name]

	return exists, err
}

// keysOf are sorted, so that the same facts always make the same text.
func keysOf(entries any) ([]string, error) {
	m, err := mapOf(entries)

	return slices.Sorted(maps.Keys(m)), err
}

func mapOf(entries any) (map[string]any, error) {
	switch m := entries.(type) {
	case map[string]any:
		return m, nil
	case map[string]string:
		all := make(map[string]any, len(m))
		for name, value := range m {
			all[name] = value
		}

		return all, nil
	default:
		return nil, fmt.Errorf("%v has no entries", entries)
	}
}

func empty(v any) bool {
	truth, _ := template.IsTrue(v)

	return !truth
}

func byDefault(fallback any, given ...any) any {
	if len(given) == 0 || empty(given[0]) {
		return fallback
	}

	return given[0]
}

// coalesce is the first that is not empty, or nothing.
func coalesce(list ...any) any {
	for _, v := range list {
		if !empty(v) {
			return v
		}
	}

	return nil
}

func ternary(yes, no any, condition bool) any { //nolint:revive // the condition is the function's point
	if condition {
		return yes
	}

	return no
}
