package rules_test

import (
	"math/rand/v2"
	"slices"
	"strings"
)

// generator generates templates at random. Most operands have the type that a function wants, so most templates render.
type generator struct {
	*rand.Rand

	variables []string // that are in scope
	rebound   bool     // inside with and range
	loops     int
}

// The kinds of operands: text, small number, float, number of any size or type, boolean, list, dictionary, format, regular
// expression.
const kinds = "tnFNbldfr"

var constants = map[byte][]string{
	't': {`"a"`, `""`, "`x,y`", `"ds=nocloud;i=<é>"`, `"aGVsbG8="`, `"1"`, `"<no value>"`, `"a'\"&=\x00\x01\x7f\\"`, `"\xff"`, "coalesce", "print"},
	'n': {"0", "0", "0", "1", "1", "0x2", "0b1", "+0", "1.0", "2e0", "0o0", "1_0", "-1"},
	'F': {"1.5", "-0.0", "0.", "1e3", "0x1p-2", "-0xe", "0xep1", "1_000.5"},
	'N': {"1.5", "1e3", "0XE", "2i", "1+0i", "1+2i", "18446744073709551615"},
	'b': {"true", "false"},
	'l': {`(splitList "," "a,b,c")`, `(splitList "" "ab")`},
	'd': {},
	'f': {`"%v-%s"`, `"%d|%q"`, `"%T %x"`, `"%5v%-3v"`, `"%[2]v%[1]v"`, `"%*d"`, `"%#v %t"`, `"%.2f%c"`, `"%v"`, `"%%"`, `"%v%v%v"`},
	'r': {`"a(b)?"`, `"[a-z]+"`, `"^(.)(.*)$"`, `""`},
}

var paths = map[byte][]string{
	't': {".Zone", ".Region", ".Hostname", ".CPUs", ".Tags.Owner", ".Tags.absent", ".Meta.absent", ".KernelArgs.ds"},
	'b': {".Spot", ".SecureBoot"},
	'l': {".Addresses", ".Links", ".PCIDevices", ".Gateways"},
	'd': {".Tags", ".Extensions", ".KernelArgs", ".Meta"},
}

// calls are functions by the kind of their result, with the kinds of their arguments; a is any kind. No result is a number
// for which a loop would take long.
var calls = map[byte][]string{
	't': {
		"upper t", "lower t", "trim t", "trimAll t t", "trimPrefix t t", "trimSuffix t t", "replace t t t", "trunc n t", "b64enc t", "b64dec t", "sha256sum t",
		"getValue t t", "lookup `racks` t", "join t l", "first l", "last l", "get d t", "regexFind r t", "regexFindString r t n", "regexReplaceAll r t t", "fail t", "print a a", "print",
		"println a", "printf f a a", "printf f t", "print -9223372036854775808 N", "html a", "html t t", "js t", "js a a", "urlquery t", "urlquery a",
		"slice t n", "slice t n n", "slice t n n n", "slice t", "index a",
		"index d t", "index l n", "default t t", "coalesce t t", "coalesce a a a", "ternary t t b", "and t t", "or t t t",
	},
	'n': {"len t", "len l", "len d", "index t n", "ternary n n b", "default n n", "and n n", "index l n n"},
	'F': {"default F F", "or F F", "ternary F F b"},
	'N': {"default N N", "or N F", "ternary N n b"},
	'b': {
		"contains t t", "hasPrefix t t", "hasSuffix t t", "regexMatch r t", "hasKey d t", "empty a", "not a", "not b", "and b b", "or a b", "eq a a", "eq t t t",
		"eq n n n", "eq F F", "eq N N", "lt n 9223372036854775807", "eq b b", "eq l nil", "eq nil d", "eq d d", "ne t t", "ne a a", "lt n n", "lt F F", "le t t", "le F F", "gt n n", "gt t t", "gt F F",
		"ge n n", "ge N n", "ge F F",
	},
	'l': {"splitList t t", "keys d", "slice l n", "slice l n n", "slice l n n n", "default l l", "or l l"},
	'd': {"default d d", "or d d", "and d d"},
}

func (g *generator) oneOf(list ...string) string { return list[g.IntN(len(list))] }

// operand returns an operand, which may be a call in parentheses.
func (g *generator) operand(kind byte, depth int) string {
	if kind == 'a' || kind != 'f' && g.IntN(100) == 0 {
		kind = kinds[g.IntN(len(kinds)-2)] // no format, no regular expression
	}

	if depth > 0 && calls[kind] != nil && g.IntN(2) == 0 {
		return "(" + g.call(kind, depth-1) + ")"
	}

	return g.leaf(kind)
}

// leaf returns an operand that is not a call of a function.
func (g *generator) leaf(kind byte) string {
	switch constant := kind == 'f' || kind == 'r'; {
	case !constant && len(g.variables) > 0 && g.IntN(6) == 0:
		return g.oneOf(g.variables...)
	case !constant && g.IntN(15) == 0:
		return g.oneOf(unusual...)
	}

	leaves := slices.Clone(constants[kind])

	for _, path := range paths[kind] {
		if g.rebound && g.IntN(50) > 0 {
			path = "$" + path
		}

		leaves = append(leaves, path)
	}

	return g.oneOf(leaves...)
}

// unusual are operands that are rare in rules.
var unusual = []string{
	".", "nil", "(default nil ``)", "(.Tags).Owner", "($.Tags).absent", "(default nil nil).a.b", "((default nil nil).a 1)", "(1 | (default nil nil).a)", "(0 1)",
	"($n := 1)", "($n := $.Zone | lower)", "(print ($n := default nil nil) $n.a ($n.a 1))", "(or (and $.Spot ($n := 2)) $n)", "(slice (slice $.Addresses 0 1 2) 0 2)",
}

// call returns a call, sometimes as a pipeline.
func (g *generator) call(kind byte, depth int) string {
	words := strings.Fields(g.oneOf(calls[kind]...))
	for i, word := range words[1:] {
		if len(word) == 1 {
			words[i+1] = g.operand(word[0], depth)
		}
	}

	last := len(words) - 1
	if last == 0 || g.IntN(4) > 0 || words[last] == "nil" {
		return strings.Join(words, " ")
	}

	return words[last] + " | " + strings.Join(words[:last], " ")
}

func (g *generator) pipeline(of string) string {
	kind := of[g.IntN(len(of))]
	if g.IntN(3) == 0 {
		return g.operand(kind, 1)
	}

	return g.call(kind, 2)
}

func (g *generator) action(text string) string {
	return g.oneOf("{{ ", "{{", "{{- ") + text + g.oneOf(" }}", "}}", " -}}")
}

// block returns statements with variables of their own.
func (g *generator) block(depth int, rebound bool) string {
	variables, outer := g.variables, g.rebound
	g.rebound = g.rebound || rebound
	source := g.body(depth)
	g.variables, g.rebound = variables, outer

	return source
}

// targets returns the declaration of, or the assignment to at most that number of variables.
func (g *generator) targets(most int) string {
	names := make([]string, g.IntN(most+1))
	for i := range names {
		names[i] = g.oneOf("$a", "$b", "$c")
	}

	isUndeclared := func(name string) bool { return !slices.Contains(g.variables, name) }
	list := strings.Join(names, ", ")

	switch {
	case list == "":
		return ""
	case slices.ContainsFunc(names, isUndeclared) || g.IntN(2) == 0:
		g.variables = slices.Concat(g.variables, names)

		return list + " := "
	default:
		return list + " = "
	}
}

// body returns one or more statements.
func (g *generator) body(depth int) (source string) {
	for range 1 + g.IntN(2) {
		source += g.statement(depth)
	}

	return source
}

func (g *generator) statement(depth int) string {
	n := g.IntN(16)
	if depth == 0 {
		n = g.IntN(7)
	}

	switch n {
	case 0:
		return g.oneOf("text", " \n ", "é", "{{/* comment */}}", "{{- /* comment */ -}}")
	case 1, 2:
		value := g.pipeline("tnFNbld")

		return g.action(g.targets(1) + value)
	case 3:
		if g.loops > 0 {
			return g.action("if "+g.pipeline("b")) + g.action(g.oneOf("break", "continue")) + g.action("end")
		}
	case 4:
		return g.action("print (" + g.oneOf("$n := ", "$m := ") + g.pipeline("tnb") + ") " + g.operand('a', 1))
	case 7, 8, 9, 10, 11:
		return g.conditional(g.oneOf("if", "with"), depth-1)
	case 12, 13, 14, 15:
		return g.loop(depth - 1)
	}

	return g.action(g.pipeline("tttnFNbld"))
}

func (g *generator) conditional(keyword string, depth int) string {
	variables := g.variables
	defer func() { g.variables = variables }()

	condition := g.pipeline("tnFbbbld")
	if g.IntN(4) == 0 {
		condition = g.targets(1) + condition
	}

	source := g.action(keyword+" "+condition) + g.block(depth, keyword == "with")

	switch g.IntN(3) {
	case 0:
		source += g.action("else") + g.block(depth, false)
	case 1:
		source += g.action("else "+keyword+" "+g.pipeline("tb")) + g.block(depth, keyword == "with")
	}

	return source + g.action("end")
}

func (g *generator) loop(depth int) string {
	variables := g.variables
	defer func() { g.variables = variables }()

	elements, most := g.pipeline("lld"), 2
	if g.IntN(4) == 0 {
		elements, most = g.oneOf("3", "0", "(len $.Tags)", "(index `a` 0)", "(default nil ``)", "2.0", "1.5", "``"), 1+g.IntN(10)/9
	}

	source := g.action("range " + g.targets(most) + elements)

	g.loops++
	source += g.block(depth, true)
	g.loops--

	if g.IntN(3) == 0 {
		source += g.action("else") + g.block(depth, false)

		if g.loops > 0 && g.IntN(2) == 0 {
			source += g.action(g.oneOf("break", "continue"))
		}
	}

	return source + g.action("end")
}
