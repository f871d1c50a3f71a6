package rules_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/rules"
)

// examples are calls of every function, and what they make.
var examples = []struct{ function, template, want string }{
	{"abbrev", `{{ abbrev 5 "hello world" }}`, "he..."},
	{"abbrevboth", `{{ abbrevboth 5 10 "1234 5678 9123" }}`, "...5678..."},
	{"add", `{{ add 1 2 3 }}`, "6"},
	{"add1", `{{ add1 2 }}`, "3"},
	{"adler32sum", `{{ adler32sum "hello" }}`, "103547413"},
	{"all", `{{ all 1 "" }}`, "false"},
	{"any", `{{ any 1 "" }}`, "true"},
	{"append", `{{ append (list 1) 2 }}`, "[1 2]"},
	{"atoi", `{{ add (atoi "12") 1 }}`, "13"},
	{"b32dec", `{{ b32dec "NBUQ====" }}`, "hi"},
	{"b32enc", `{{ b32enc "hi" }}`, "NBUQ===="},
	{"b64dec", `{{ b64dec "aGVsbG8=" }}`, "hello"},
	{"b64enc", `{{ b64enc "hello" }}`, "aGVsbG8="},
	{"base", `{{ base "/a/b.c" }}`, "b.c"},
	{"camelcase", `{{ camelcase "http_server" }}`, "HttpServer"},
	{"cat", `{{ cat "a" 1 }}`, "a 1"},
	{"ceil", `{{ ceil 1.2 }}`, "2"},
	{"clean", `{{ clean "/a/../b" }}`, "/b"},
	{"coalesce", `{{ coalesce "" 0 "a" "b" }}`, "a"},
	{"compact", `{{ compact (list 1 "" 2) }}`, "[1 2]"},
	{"concat", `{{ concat (list 1) (list 2) }}`, "[1 2]"},
	{"contains", `{{ contains "lo" "hello" }}`, "true"},
	{"deepEqual", `{{ deepEqual (list 1) (list 1) }}`, "true"},
	{"default", `{{ "" | default "a" }}{{ default "a" "b" }}`, "ab"},
	{"dict", `{{ (dict "a" 1).a }}`, "1"},
	{"dig", `{{ dig "a" "b" "none" (dict "a" (dict "b" 1)) }}`, "1"},
	{"dir", `{{ dir "/a/b" }}`, "/a"},
	{"div", `{{ div 7 2 }}`, "3"},
	{"empty", `{{ empty "" }}{{ empty "a" }}{{ empty false }}{{ empty (list) }}`, "truefalsetruetrue"},
	{"ext", `{{ ext "a.b" }}`, ".b"},
	{"fail", `{{ if false }}{{ fail "no" }}{{ end }}`, ""},
	{"first", `{{ first (list 1 2) }}`, "1"},
	{"float64", `{{ float64 "1.5" }}`, "1.5"},
	{"floor", `{{ floor 1.8 }}`, "1"},
	{"fromJson", `{{ (fromJson "{\"a\": [1, 2]}").a }}`, "[1 2]"},
	{"get", `{{ get (dict "a" 1) "a" }}{{ get .Tags "absent" }}`, "1"},
	{"getValue", `{{ getValue "ds=nocloud;i=1234" "i" }}`, "1234"},
	{"has", `{{ has 1 (list 1 2) }}`, "true"},
	{"hasKey", `{{ hasKey (dict "a" "") "a" }}{{ hasKey .Tags "a" }}`, "truefalse"},
	{"hasPrefix", `{{ hasPrefix "he" "hello" }}`, "true"},
	{"hasSuffix", `{{ hasSuffix "lo" "hello" }}`, "true"},
	{"html", `{{ html "<" }}`, "&lt;"},
	{"indent", `{{ indent 2 "a\nb" }}`, "  a\n  b"},
	{"initial", `{{ initial (list 1 2) }}`, "[1]"},
	{"initials", `{{ initials "First Try" }}`, "FT"},
	{"int", `{{ int "12" }}`, "12"},
	{"int64", `{{ int64 "12" }}`, "12"},
	{"isAbs", `{{ isAbs "/a" }}`, "true"},
	{"join", `{{ join "-" (list "a" 1) }}{{ splitList "," "b,c" | join "+" }}`, "a-1b+c"},
	{"js", `{{ js "'" }}`, `\'`},
	{"kebabcase", `{{ kebabcase "HTTPServer" }}`, "http-server"},
	{"keys", `{{ keys (dict "b" 1 "a" 2) }}`, "[a b]"},
	{"kindIs", `{{ kindIs "string" "a" }}`, "true"},
	{"kindOf", `{{ kindOf 1 }}`, "int"},
	{"last", `{{ last (list 1 2) }}`, "2"},
	{"list", `{{ list 1 "a" }}`, "[1 a]"},
	{"lower", `{{ lower "HELLO" }}`, "hello"},
	{"max", `{{ max 1 3 2 }}`, "3"},
	{"min", `{{ min 2 1 3 }}`, "1"},
	{"mod", `{{ mod 7 2 }}`, "1"},
	{"mul", `{{ mul 2 3 }}`, "6"},
	{"nindent", `{{ nindent 1 "a" }}`, "\n a"},
	{"nospace", `{{ nospace "a b c" }}`, "abc"},
	{"plural", `{{ plural "one" "many" 2 }}`, "many"},
	{"prepend", `{{ prepend (list 1) 2 }}`, "[2 1]"},
	{"print", `{{ print "a" 1 }}`, "a1"},
	{"printf", `{{ printf "%s-%03d" "a" 7 }}`, "a-007"},
	{"println", `{{ println "a" }}`, "a\n"},
	{"quote", `{{ quote "a" }}`, `"a"`},
	{"regexFind", `{{ regexFind "[a-zA-Z][1-9]" "abcd1234" }}`, "d1"},
	{"regexFindAll", `{{ regexFindAll "[1-9]" "a1b2" -1 }}`, "[1 2]"},
	{"regexFindString", `{{ regexFindString "^type-([a-z0-9]+)-(.*)$" "type-metal1-asz" 1 }}{{ regexFindString "a" "b" 1 }}`, "metal1"},
	{"regexMatch", `{{ regexMatch "^a" "ab" }}`, "true"},
	{"regexQuoteMeta", `{{ regexQuoteMeta "(" }}`, `\(`},
	{"regexReplaceAll", `{{ regexReplaceAll "a(x*)b" "-ab-axxb-" "${1}W" }}`, "-W-xxW-"},
	{"regexReplaceAllLiteral", `{{ regexReplaceAllLiteral "a(x*)b" "-ab-axxb-" "${1}" }}`, "-${1}-${1}-"},
	{"regexSplit", `{{ regexSplit "x+" "axxb" -1 }}`, "[a b]"},
	{"repeat", `{{ repeat 3 "ab" }}`, "ababab"},
	{"replace", `{{ replace "l" "L" "hello" }}`, "heLLo"},
	{"rest", `{{ rest (list 1 2) }}`, "[2]"},
	{"reverse", `{{ reverse (list 1 2) }}`, "[2 1]"},
	{"round", `{{ round 1.256 2 }}`, "1.26"},
	{"semver", `{{ (semver "v1.13.5").Minor }}`, "13"},
	{"semverCompare", `{{ semverCompare ">=1.12" "v1.13.5" }}`, "true"},
	{"sha1sum", `{{ sha1sum "a" | trunc 8 }}`, "86f7e437"},
	{"sha256sum", `{{ sha256sum "a" | trunc 8 }}`, "ca978112"},
	{"sha512sum", `{{ sha512sum "a" | trunc 8 }}`, "1f40fc92"},
	{"snakecase", `{{ snakecase "HTTPServer" }}`, "http_server"},
	{"sortAlpha", `{{ sortAlpha (list "b" "a") }}`, "[a b]"},
	{"split", `{{ (split "." "a.b")._1 }}`, "b"},
	{"splitList", `{{ index (splitList "." "a.b") 1 }}`, "b"},
	{"splitn", `{{ (splitn "." 2 "a.b.c")._1 }}`, "b.c"},
	{"squote", `{{ squote "a" }}`, `'a'`},
	{"sub", `{{ sub 3 2 }}`, "1"},
	{"substr", `{{ substr 1 3 "hello" }}`, "el"},
	{"swapcase", `{{ swapcase "aB" }}`, "Ab"},
	{"ternary", `{{ ternary "a" "b" true }}{{ eq .Zone "" | ternary "none" .Zone }}`, "anone"},
	{"title", `{{ title "hello" }}`, "Hello"},
	{"toJson", `{{ toJson (dict "b" "<" "a" 1) }}`, `{"a":1,"b":"\u003c"}`},
	{"toRawJson", `{{ toRawJson (list "<") }}`, `["<"]`},
	{"toString", `{{ toString 1 }}`, "1"},
	{"trim", `{{ trim "  hello  " }}`, "hello"},
	{"trimAll", `{{ trimAll "-" "-a-" }}`, "a"},
	{"trimPrefix", `{{ trimPrefix "he" "hello" }}`, "llo"},
	{"trimSuffix", `{{ trimSuffix "lo" "hello" }}`, "hel"},
	{"trunc", `{{ trunc 3 "hello" }}{{ trunc -2 "hello" }}`, "hello"},
	{"uniq", `{{ uniq (list 1 2 1) }}`, "[1 2]"},
	{"untitle", `{{ untitle "Hello" }}`, "hello"},
	{"upper", `{{ upper "hello" }}`, "HELLO"},
	{"urlParse", `{{ (urlParse "https://a.b/c").host }}`, "a.b"},
	{"urlquery", `{{ urlquery "a b" }}`, "a+b"},
	{"without", `{{ without (list 1 2) 1 }}`, "[2]"},
	{"wrap", `{{ wrap 3 "aaa bbb" }}`, "aaa\nbbb"},
}

func TestFunctions(t *testing.T) {
	untested := map[string]bool{}
	for _, name := range rules.Functions() {
		untested[name] = true
	}

	for _, example := range examples {
		delete(untested, example.function)

		t.Run(example.function, func(t *testing.T) {
			if got := render(t, example.template, rules.Facts{}); got != example.want {
				t.Errorf("%s: got %q, want %q", example.template, got, example.want)
			}
		})
	}

	if len(untested) > 0 {
		t.Errorf("there is no example of %v", untested)
	}
}

func TestTemplates(t *testing.T) {
	facts := everything()

	for _, test := range []struct{ name, template, want string }{
		{"text is text", "a } b", "a } b"},
		{"a comment is nothing", "a{{/* no */}}b", "ab"},
		{"space can be trimmed", "a {{- .Zone -}} b", "aZoneb"},
		{"an absent tag is nothing", "[{{ .Tags.absent }}]", "[]"},
		{"a tag", `{{ .Tags.Owner }}{{ index .Tags "Owner" }}{{ get .Tags "Owner" }}`, "mememe"},
		{"a schematic and an extension", `{{ .Schematic }} {{ index .Extensions "qemu-guest-agent" }}`, "Schematic 9.0"},
		{"what Talos says", "{{ .Nodename }} {{ .TalosVersion }} {{ .MachineType }} {{ .ClusterName }} {{ .Architecture }}", "Nodename TalosVersion worker ClusterName Architecture"},
		{"Version is SMBIOS's", "{{ .Version }}", "Version"},
		{"nothing is not <no value>", `[{{ coalesce "" "" }}{{ first (list) }}{{ (dict).absent }}]`, "[]"},
		{"functions without arguments may be arguments", `{{ empty list }}`, "true"},
		{"the builtin slice cuts text", `{{ slice .Zone 0 2 }}`, "Zo"},
		{"pipelines put the text last", `{{ .Zone | lower | trimPrefix "z" | printf "%s-%s" "a" }}`, "a-one"},
		{"conditions", `{{ if and .Spot (eq .Zone "Zone") }}a{{ else if .Region }}b{{ else }}c{{ end }}`, "a"},
		{"with", `{{ with .Tags }}{{ .Owner }}-{{ $.Zone }}{{ end }}`, "me-Zone"},
		{"variables", `{{ $z := .Zone }}{{ $z = upper $z }}{{ $z }}`, "ZONE"},
		{"range over a map is in order", `{{ range $name, $value := .Tags }}{{ $name }}={{ $value }};{{ end }}`, "Owner=me;Team=web;empty=;team=lower;"},
		{"range over a list", `{{ range $i, $x := splitList "," "a,b" }}{{ $i }}{{ $x }}{{ end }}`, "0a1b"},
		{"range over a number", `{{ range 3 }}{{ . }}{{ end }}`, "012"},
		{"range over nothing", `{{ range (first list) }}{{ else }}none{{ end }}`, "none"},
		{"break and continue", `{{ range 9 }}{{ if eq . 1 }}{{ continue }}{{ end }}{{ if gt . 2 }}{{ break }}{{ end }}{{ . }}{{ end }}`, "02"},
		{"numbers of one kind for another", `{{ trunc (add 1 1) "abc" }}{{ round 2 0 }}`, "ab2"},
	} {
		t.Run(test.name, func(t *testing.T) {
			if got := render(t, test.template, facts); got != test.want {
				t.Errorf("%s: got %q, want %q", test.template, got, test.want)
			}
		})
	}
}

// A template that only names variables is not executed; it must make the same as one that is.
func TestVariablesAloneAreTheSameAsInFunctions(t *testing.T) {
	for _, facts := range []rules.Facts{everything(), {}} {
		names := rules.Variables()
		names = append(names, "Tags.Owner", "Tags.team", "Tags.absent", "Extensions.schematic")

		for _, name := range names {
			alone := render(t, "<{{ ."+name+" }}>", facts)

			for _, template := range []string{"<{{ print ." + name + " }}>", "{{ if true }}<{{ ." + name + " }}>{{ end }}"} {
				if got := render(t, template, facts); got != alone {
					t.Errorf("%s: got %q, alone %q", template, got, alone)
				}
			}
		}
	}

	facts := rules.Facts{Machine: machine.Machine{Platform: runtime.PlatformMetadataSpec{Region: strings.Repeat("a", 40<<10), Zone: "\xff"}}}

	for template, want := range map[string]string{"{{ .Region }}{{ .Region }}": "longer than 65536", "{{ .Zone }}": "UTF-8"} {
		if why := problem(t, template, facts); !strings.Contains(why, want) {
			t.Errorf("%s: %s", template, why)
		}
	}
}

func TestMistakesInTemplates(t *testing.T) {
	for _, test := range []struct{ name, template, want string }{
		{"an unclosed action", "{{ .Zone", `unclosed action`},
		{"its line", "\n\n{{ end }}", `line:3: unexpected {{end}}`},
		{"an unknown function", "{{ env \"HOME\" }}", `line:1: function "env" not defined`},
		{"a hook", "{{ _print . }}", `function "_print" not defined`},
		{"an unknown variable", "{{ .Zones }}", "unknown variable .Zones"},
		{"a variable in another case", "{{ .zone }}", "unknown variable .zone"},
		{"what is not exported", "{{ .work }}", "unknown variable .work"},
		{"an unknown variable in a branch", "{{ if .Spot }}{{ else }}{{ upper .Zones }}{{ end }}", "unknown variable .Zones"},
		{"an unknown variable of the top", "{{ with .Tags }}{{ $.Zones }}{{ end }}", "unknown variable .Zones"},
		{"a field of a text", "{{ .Zone.Name }}", "variable .Zone has no .Name"},
		{"a field of a tag", "{{ .Tags.a.b }}", "variable .Tags has no .a.b"},
		{"all variables", "{{ . }}", "a variable's name is missing"},
		{"all variables by name", "{{ range .Tags }}{{ print $ }}{{ end }}", "a variable's name is missing"},
		{"all variables replaced", "{{ $ := .Zone }}", "$ is the name of all variables"},
		{"a definition", `{{ define "a" }}b{{ end }}`, "cannot define others"},
		{"a block", `{{ block "a" . }}{{ template "a" . }}{{ end }}`, "cannot define others"},
		{"a call", `{{ template "a" }}`, "cannot call others"},
		{"too few arguments", `{{ upper }}`, "upper takes 1 argument, not 0"},
		{"too few arguments in parentheses", `{{ if eq (upper) .Zone }}{{ end }}`, "upper takes 1 argument, not 0"},
		{"too few arguments among arguments", `{{ eq .Zone upper }}`, "upper takes 1 argument, not 0"},
		{"too few arguments in a pipeline", `{{ .Zone | trimSuffix }}`, "trimSuffix takes 2 arguments, not 1"},
		{"too many arguments", `{{ regexFind "a" "b" "c" }}`, "regexFind takes 2 arguments, not 3"},
		{"too many arguments in a pipeline", `{{ range .Zone | splitList "," .Zone }}{{ end }}`, "splitList takes 2 arguments, not 3"},
		{"too few of any number", `{{ without }}`, "without takes at least 1 argument, not 0"},
		{"a huge regular expression", `{{ regexFind "(abcdefghijkl){1000}" .Zone }}`, "too large"},
		{"a long regular expression", `{{ regexFind "` + strings.Repeat("a", 5000) + `" .Zone }}`, "longer than 4096"},
		{"a long text", strings.Repeat("a", 64<<10+1), "longer than 65536"},
		{"a text that is not UTF-8", "\xff", "UTF-8"},
	} {
		t.Run(test.name, func(t *testing.T) {
			if m := mistake(t, annotate(test.template)); !strings.Contains(m.Error(), test.want) {
				t.Errorf("%q does not say %q", m, test.want)
			}
		})
	}
}

func TestProblemsOfTemplates(t *testing.T) {
	for _, test := range []struct{ name, template, want string }{
		{"arguments of another kind", `{{ upper 1 }}`, "argument 1: 1 is a int, and not a string"},
		{"no argument", `{{ upper (first list) }}`, "argument 1: there is nothing, and not a string"},
		{"a panic", `{{ substr 9 2 "a" }}`, "error calling substr"},
		{"division by zero", `{{ div 1 0 }}`, "divide by zero"},
		{"failure on purpose", `{{ fail "no zone" }}`, "no zone"},
		{"no base64", `{{ b64dec "?" }}`, "illegal base64"},
		{"no base32", `{{ b32dec "?" }}`, "illegal base32"},
		{"no JSON", `{{ fromJson "{" }}`, "unexpected end"},
		{"no map", `{{ get "a" "b" }}`, "a has no entries"},
		{"no list to range over", `{{ range .Zone }}{{ end }}`, "range goes over lists, maps and integers, not over string"},
		{"too much work", `{{ range 1000000 }}{{ end }}`, "the template does too much"},
		{"no such submatch", `{{ regexFindString "a" "a" -1 }}`, "no submatch -1"},
	} {
		t.Run(test.name, func(t *testing.T) {
			if why := problem(t, test.template, everything()); !strings.Contains(why, test.want) {
				t.Errorf("%q does not say %q", why, test.want)
			}
		})
	}
}

// Each of these would take gigabytes, or for ever, if it were let.
func TestTemplatesAreBounded(t *testing.T) {
	facts := rules.Facts{Machine: machine.Machine{Platform: runtime.PlatformMetadataSpec{
		Zone:   strings.Repeat("a", 60<<10),
		Region: strings.Repeat("a", 2<<20),
	}}}

	for name, template := range map[string]string{
		"output":                        `{{ .Zone }}{{ .Zone }}`,
		"a fact":                        `{{ .Region }}`,
		"text in a loop":                `{{ range 100000 }}` + strings.Repeat("x", 1000) + `{{ end }}`,
		"a long loop":                   `{{ range 1000000000 }}{{ end }}`,
		"a negative loop and a long":    `{{ range -5 }}{{ end }}{{ range 9223372036854775807 }}{{ end }}`,
		"loops in loops":                `{{ range 1000 }}{{ range 1000 }}{{ range 1000 }}{{ end }}{{ end }}{{ end }}`,
		"repeat":                        `{{ repeat 1000000000 "aaaa" }}`,
		"repeat less than never":        `{{ repeat -1 "a" }}`,
		"repeat repeated":               `{{ repeat 60000 "a" | repeat 60000 | repeat 60000 }}`,
		"indent":                        `{{ indent 60000 (repeat 60000 "\n") }}`,
		"nindent":                       `{{ nindent 1000000000 "a" }}`,
		"replace":                       `{{ replace "a" .Zone .Zone }}`,
		"replace nothing":               `{{ replace "" .Zone .Zone }}`,
		"join":                          `{{ splitList "b" (repeat 2000 "b") | join (trunc 30000 .Zone) }}`,
		"a wide verb":                   `{{ printf "%999999999d" 1 }}`,
		"a wide verb with flags":        `{{ printf "%-+# 0999999d" 1 }}`,
		"a precise verb":                `{{ printf "%.999999f" 1.0 }}`,
		"a wide and precise verb":       `{{ printf "%1.999999f" 1.0 }}`,
		"a width that is an argument":   `{{ printf "%*d" 999999 1 }}`,
		"the same argument many times":  `{{ printf "%[1]s%[1]s%[1]s" .Zone }}`,
		"escapes of escapes":            `{{ "<" | js` + strings.Repeat(" | js", 40) + ` }}`,
		"lists of lists":                `{{ $a := list "aaaaaaaa" }}` + strings.Repeat(`{{ $a = list $a $a $a $a }}`, 30) + `{{ $a }}`,
		"dicts of dicts":                `{{ $a := dict "a" "b" }}` + strings.Repeat(`{{ $a = dict "a" $a "b" $a }}`, 30) + `{{ toJson $a }}`,
		"many items":                    `{{ splitList "" .Zone }}`,
		"each item with each":           `{{ range 100 }}{{ uniq (splitList "" (repeat 3000 "a")) }}{{ end }}`,
		"a replacement":                 `{{ regexReplaceAll "a" (repeat 1000 "a") (repeat 1000 "b") }}`,
		"a replacement with references": `{{ regexReplaceAll "a+" (repeat 1000 "a") (repeat 1000 "$0") }}`,
		"a literal replacement":         `{{ regexReplaceAllLiteral "" (repeat 1000 "a") (repeat 1000 "b") }}`,
		"a long text for a pattern":     `{{ regexFind "(a?){500}b" .Zone }}`,
		"all matches in a long text":    `{{ regexFindAll "a|.*b" .Zone -1 }}`,
		"a pattern from a loop":         `{{ range 100 }}{{ range 1000 }}{{ regexMatch (printf "(a{%d}){9}" .) "a" }}{{ end }}{{ end }}`,
		"a huge pattern from a fact":    `{{ regexMatch (repeat 3 "((abcdefgh){1000})") "a" }}`,
		"a long pattern from a fact":    `{{ regexMatch .Zone "a" }}`,
		"a call in a loop":              `{{ range 60000 }}{{ $x := sha512sum $.Zone }}{{ end }}`,
	} {
		t.Run(name, func(t *testing.T) { t.Log(problem(t, template, facts)) })
	}
}

// What is printed is refused if it is too long; a width makes that much before anybody can look.
func TestWidthsAndPrecisionsAreSmallAndConstant(t *testing.T) {
	for _, format := range []string{
		"%1000d", "%01000d", "%-1000d", "%*d", "%[1]*d", "%.[1]*d", "%3.[1]*d", "%.*d", "%.1000f", "%5.1000d", "%+.1000d", "%[1]d", "% x%[1]*d", "%%%1000d",
	} {
		if why := problem(t, fmt.Sprintf("{{ printf %q 1 2 }}", format), rules.Facts{}); !strings.Contains(why, "width") {
			t.Errorf("%s: %s", format, why)
		}
	}

	for format, want := range map[string]string{
		"%5s|%-5s|": "   ab|cd   |", "%.1s%s": "acd", "100%%5000 %s%s": "100%5000 abcd", "%99s%s": strings.Repeat(" ", 97) + "abcd", "%s[1]%s": "ab[1]cd", "%s*%s": "ab*cd",
	} {
		if got := render(t, fmt.Sprintf(`{{ printf %q "ab" "cd" }}`, format), rules.Facts{}); got != want {
			t.Errorf("%s: got %q, want %q", format, got, want)
		}
	}
}

func TestWhatIsUsualIsNotBounded(t *testing.T) {
	facts := rules.Facts{Machine: machine.Machine{Platform: runtime.PlatformMetadataSpec{Zone: strings.Repeat("a", 60<<10), Tags: map[string]string{}}}}
	for i := range 500 {
		facts.Machine.Platform.Tags[fmt.Sprintf("tag-number-%d", i)] = "Value of the tag"
	}

	for name, template := range map[string]string{
		"a long value":               `{{ .Zone }}`,
		"a long value and functions": `{{ .Zone | upper | trimSuffix "A" | trunc 40000 | b64enc | b64dec | trunc 10 }}`,
		"a long value and a pattern": `{{ regexFind "^[a-z]+([0-9]*)$" .Zone }}`,
		"all tags":                   `{{ range $k, $v := .Tags }}{{ $k | lower }}={{ regexReplaceAll "[^a-z0-9]+" (lower $v) "-" | trimSuffix "-" }};{{ end }}`,
		"all matches in a text":      `{{ regexReplaceAll "[^a-z0-9-]+" (repeat 100 "a b C d") "-" }}`,
	} {
		t.Run(name, func(t *testing.T) { render(t, template, facts) })
	}
}
