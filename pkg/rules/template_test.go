package rules_test

import (
	"fmt"
	"reflect"
	"strings"
	"testing"

	"github.com/siderolabs/talos/pkg/machinery/resources/hardware"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/assert"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/rules"
)

// examples are calls of all functions with their results.
var examples = []struct{ function, template, want string }{
	{"b64dec", `{{ b64dec "aGVsbG8=" }}`, "hello"},
	{"b64enc", `{{ b64enc "hello" }}`, "aGVsbG8="},
	{"coalesce", `{{ coalesce "" 0 "a" "b" }}`, "a"},
	{"contains", `{{ contains "lo" "hello" }}`, "true"},
	{"default", `{{ "" | default "a" }}{{ default "a" "b" }}`, "ab"},
	{"empty", `{{ empty "" }}{{ empty "a" }}{{ empty false }}{{ empty .Tags }}`, "truefalsetruetrue"},
	{"fail", `{{ if false }}{{ fail "no" }}{{ end }}`, ""},
	{"first", `{{ first (splitList "," "a,b") }}`, "a"},
	{"get", `{{ get .Tags "absent" }}`, ""},
	{"getValue", `{{ getValue "ds=nocloud;i=1234" "i" }}`, "1234"},
	{"hasKey", `{{ hasKey .Tags "a" }}`, "false"},
	{"hasPrefix", `{{ hasPrefix "he" "hello" }}`, "true"},
	{"hasSuffix", `{{ hasSuffix "lo" "hello" }}`, "true"},
	{"join", `{{ splitList "," "b,c" | join "+" }}{{ join "+" (splitList "," "") }}`, "b+c"},
	{"keys", `{{ keys .Tags }}`, "[]"},
	{"last", `{{ last (splitList "," "a,b") }}`, "b"},
	{"lookup", `{{ lookup "racks" "a" }}{{ lookup "racks" "absent" }}`, "r7"},
	{"lower", `{{ lower "HELLO" }}`, "hello"},
	{"regexFind", `{{ regexFind "[a-zA-Z][1-9]" "abcd1234" }}`, "d1"},
	{"regexFindString", `{{ regexFindString "^type-([a-z0-9]+)-(.*)$" "type-metal1-asz" 1 }}{{ regexFindString "a" "b" 1 }}`, "metal1"},
	{"regexMatch", `{{ regexMatch "^a" "ab" }}`, "true"},
	{"regexReplaceAll", `{{ regexReplaceAll "a(x*)b" "-ab-axxb-" "${1}W" }}`, "-W-xxW-"},
	{"replace", `{{ replace "l" "L" "hello" }}`, "heLLo"},
	{"sha256sum", `{{ sha256sum "a" | trunc 8 }}`, "ca978112"},
	{"splitList", `{{ index (splitList "." "a.b") 1 }}`, "b"},
	{"ternary", `{{ ternary "a" "b" true }}{{ eq .Zone "" | ternary "none" .Zone }}`, "anone"},
	{"trim", `{{ trim "  hello  " }}`, "hello"},
	{"trimAll", `{{ trimAll "-" "-a-" }}`, "a"},
	{"trimPrefix", `{{ trimPrefix "he" "hello" }}`, "llo"},
	{"trimSuffix", `{{ trimSuffix "lo" "hello" }}`, "hel"},
	{"trunc", `{{ trunc 3 "hello" }}{{ trunc -2 "hello" }}{{ trunc 9 "a" }}{{ trunc -9 "b" }}`, "helloab"},
	{"upper", `{{ upper "hello" }}`, "HELLO"},
	{"html", `{{ html "<" }}`, "&lt;"},
	{"js", `{{ js "'" }}`, `\'`},
	{"print", `{{ print "a" 1 }}`, "a1"},
	{"printf", `{{ printf "%s-%03d" "a" 7 }}`, "a-007"},
	{"println", `{{ println "a" }}`, "a\n"},
	{"urlquery", `{{ urlquery "a b" }}`, "a+b"},
}

func TestFunctions(t *testing.T) {
	var tested []string

	for _, example := range examples {
		tested = append(tested, example.function)

		t.Run(example.function, func(t *testing.T) {
			assert.Equal(t, example.want, render(t, example.template, rules.Facts{}), example.template)
		})
	}

	assert.Subset(t, tested, rules.Functions())
}

func TestTemplates(t *testing.T) {
	facts := everything()

	for _, test := range []struct{ name, template, want string }{
		{"text", "a } b", "a } b"},
		{"empty template", "", ""},
		{"comment", "a{{/* no */}}b", "ab"},
		{"trimmed white space", "a {{- .Zone -}} b", "aZoneb"},
		{"absent tag", "[{{ .Tags.absent }}]", "[]"},
		{"tag", `{{ .Tags.Owner }}{{ index .Tags "Owner" }}{{ get .Tags "Owner" }}`, "mememe"},
		{"keys of tags", `{{ keys .Tags | join "," }} {{ hasKey .Tags "empty" }} {{ empty .Tags }}`, "Owner,Team,empty,team true false"},
		{"schematic and extension", `{{ .Schematic }} {{ index .Extensions "qemu-guest-agent" }}`, "Schematic 9.0"},
		{"facts of Talos", "{{ .Nodename }} {{ .TalosVersion }} {{ .MachineType }} {{ .ClusterName }} {{ .Architecture }}", "Nodename TalosVersion worker ClusterName Architecture"},
		{"version of SMBIOS", "{{ .Version }}", "Version"},
		{"no <no value>", `[{{ coalesce "" "" }}{{ first (splitList "," "") }}{{ .Tags.absent }}{{ index .Tags "absent" }}]`, "[]"},
		{"function without arguments as argument", `{{ empty coalesce }}`, "true"},
		{"slice of text/template", `{{ slice .Zone 0 2 }}`, "Zo"},
		{"pipeline", `{{ .Zone | lower | trimPrefix "z" | printf "%s-%s" "a" }}`, "a-one"},
		{"conditions", `{{ if and .Spot (eq .Zone "Zone") }}a{{ else if .Region }}b{{ else }}c{{ end }}`, "a"},
		{"with", `{{ with .Tags }}{{ .Owner }}-{{ $.Zone }}{{ end }}`, "me-Zone"},
		{"variables", `{{ $z := .Zone }}{{ $z = upper $z }}{{ $z }}`, "ZONE"},
		{"range over a map in order", `{{ range $name, $value := .Tags }}{{ $name }}={{ $value }};{{ end }}`, "Owner=me;Team=web;empty=;team=lower;"},
		{"range over a list", `{{ range $i, $x := splitList "," "a,b" }}{{ $i }}{{ $x }}{{ end }}`, "0a1b"},
		{"range over a number", `{{ range 3 }}{{ . }}{{ end }}`, "012"},
		{"range over an empty list", `{{ range slice (splitList "," "a") 1 }}{{ else }}none{{ end }}`, "none"},
		{"break and continue", `{{ range 9 }}{{ if eq . 1 }}{{ continue }}{{ end }}{{ if gt . 2 }}{{ break }}{{ end }}{{ . }}{{ end }}`, "02"},
		{"number from len", `{{ trunc (len "ab") "abc" }}`, "ab"},
		{"large number", `{{ ternary 1500 9000 .Spot }} {{ range default 1500 "" }}{{ end }}`, "1500 "},
		{"field in parentheses", `{{ (.Tags).Owner }}`, "me"},
	} {
		t.Run(test.name, func(t *testing.T) { assert.Equal(t, test.want, render(t, test.template, facts), test.template) })
	}
}

func TestTemplates_EveryVariable(t *testing.T) {
	for _, facts := range []rules.Facts{everything(), {}} {
		for _, name := range append(rules.Variables(), "Tags.Owner", "Tags.team", "Tags.absent", "Extensions.schematic") {
			alone := render(t, "<{{ ."+name+" }}>", facts)

			for _, template := range []string{"<{{ print ." + name + " }}>", "{{ if true }}<{{ ." + name + " }}>{{ end }}"} {
				assert.Equal(t, alone, render(t, template, facts), name)
			}
		}
	}
}

// A variable is text, true or false, or a map of text; a field that Talos adds to its resources must become a variable.
func TestVariables_CoverResources(t *testing.T) {
	for _, resource := range []reflect.Type{reflect.TypeFor[runtime.PlatformMetadataSpec](), reflect.TypeFor[hardware.SystemInformationSpec]()} {
		for _, field := range reflect.VisibleFields(resource) {
			assert.Contains(t, rules.Variables(), field.Name)

			if field.Name != "Tags" {
				selector(t, one(field.Name, rules.Exists))
			}
		}
	}
}

func TestTemplates_CompileErrors(t *testing.T) {
	for _, test := range []struct{ name, template, want string }{
		{"unclosed action", "{{ .Zone", `unclosed action`},
		{"action that ends with a single brace", "{{ .Zone }", "end the action with }}"},
		{"line of a parse error", "\n\n{{ end }}", `line:3: unexpected {{end}}`},
		{"unknown function", "{{ env \"HOME\" }}", `function "env" not defined; text needs double quotes; supported functions: b64dec, b64enc`},
		{"variable without its dot", "{{ zone }}", `function "zone" not defined; did you mean .Zone?`},
		{"misspelled variable", "{{ .Zoen }}", "unknown variable .Zoen; supported variables: .Addresses, ."},
		{"character instead of text", "{{ default 'a' .Zone }}", "'a' is a character; write text in double quotes or backquotes"},
		{"text in single quotes", "{{ default 'none' .Zone }}", "write text in double quotes or backquotes"},
		{"character constant that is not closed", "{{ default 'a }}", "unterminated character constant; write text in double quotes or backquotes"},
		{"hyphen in the name of a tag", "{{ .Zone }}-{{ .Tags.rack-id | upper }}", `bad character U+002D '-'; use get .Tags "rack-id"`},
		{"slash in the name of a tag", "{{ upper ($.Tags.topology.kubernetes.io/zone) }}", `bad character U+002F '/'; use get $.Tags "topology.kubernetes.io/zone"`},
		{"text without quotes", "{{ eq .Platform metal }}", `function "metal" not defined; text needs double quotes; supported functions: b64dec, b64enc`},
		{"function of sprig", "{{ uuidv4 }}", `function "uuidv4" not defined`},
		{"unknown variable", "{{ .Zones }}", "unknown variable .Zones"},
		{"variable in another case", "{{ .zone }}", "unknown variable .zone"},
		{"unexported field", "{{ .nodeLabels }}", "unknown variable .nodeLabels"},
		{"unknown variable in a branch", "{{ if .Spot }}{{ else }}{{ upper .Zones }}{{ end }}", "unknown variable .Zones"},
		{"unknown variable after with", "{{ with .Tags }}{{ else }}{{ .Zones }}{{ end }}", "unknown variable .Zones"},
		{"unknown variable of $", "{{ with .Tags }}{{ $.Zones }}{{ end }}", "unknown variable .Zones"},
		{"field of text", "{{ .Zone.Name }}", "variable .Zone has no field .Name"},
		{"field of a tag", "{{ .Tags.a.b }}", "variable .Tags has no field .a.b"},
		{"all variables", "{{ . }}", "the name of a variable is missing"},
		{"all variables as $", "{{ range .Tags }}{{ print $ }}{{ end }}", "the name of a variable is missing"},
		{"assignment to $", "{{ $ := .Zone }}", "$ cannot be assigned"},
		{"definition", `{{ define "a" }}b{{ end }}`, "cannot define other templates"},
		{"block", `{{ block "a" . }}{{ template "a" . }}{{ end }}`, "cannot define other templates"},
		{"call of a template", `{{ template "a" }}`, "cannot execute other templates"},
		{"too few arguments", `{{ upper }}`, "wrong number of args for upper: want 1 got 0"},
		{"too few arguments in parentheses", `{{ if eq (upper) .Zone }}{{ end }}`, "wrong number of args for upper: want 1 got 0"},
		{"too few arguments in an argument", `{{ eq .Zone upper }}`, "wrong number of args for upper: want 1 got 0"},
		{"too few arguments in a pipeline", `{{ .Zone | trimSuffix }}`, "wrong number of args for trimSuffix: want 2 got 1"},
		{"too many arguments", `{{ regexFind "a" "b" "c" }}`, "wrong number of args for regexFind: want 2 got 3"},
		{"too many arguments in a pipeline", `{{ range .Zone | splitList "," .Zone }}{{ end }}`, "wrong number of args for splitList: want 2 got 3"},
		{"too few variadic arguments", `{{ default }}`, "wrong number of args for default: want at least 1 got 0"},
		{"regular expression over the limit of package regexp", `{{ regexFind "(a{1000}){1000}" .Zone }}`, "invalid repeat count"},
		{"format that is not a literal", `{{ printf .Zone }}`, "the format of printf must be a string literal"},
		{"format from a pipeline", `{{ .Zone | printf }}`, "the format of printf must be a string literal"},
		{"long template", strings.Repeat("a", 64<<10+1), "longer than 65536"},
		{"invalid UTF-8", "\xff", "UTF-8"},
	} {
		t.Run(test.name, func(t *testing.T) { assert.Contains(t, compileError(t, annotate(test.template)).Error(), test.want) })
	}
}

func TestTemplates_GiveNoHintWithoutAUsualCause(t *testing.T) {
	for template, want := range map[string]string{
		"{{ .Zone; }}":          "Invalid value: bad character U+003B ';'",
		"{{ .Zone = .Region }}": `Invalid value: unexpected "=" in operand`,
	} {
		assert.Equal(t, want, compileError(t, annotate(template)).ErrorBody())
	}
}

func TestTemplates_RenderErrors(t *testing.T) {
	for _, test := range []struct{ name, template, want string }{
		{"argument of another type", `{{ upper 1 }}`, "error calling upper: expected string; found int"},
		{"nil argument", `{{ upper nil }}`, "expected string; found <nil>"},
		{"map instead of text", `{{ upper .Tags }}`, "expected string; found map[string]string"},
		{"text instead of a map", `{{ get .Zone "b" }}`, "expected map[string]string; found string"},
		{"failure", `{{ fail "no zone" }}`, "no zone"},
		{"invalid base64", `{{ b64dec "?" }}`, "illegal base64"},
		{"range over text", `{{ range .Zone }}{{ end }}`, "range can't iterate over Zone"},
		{"negative submatch", `{{ regexFindString "a" "a" -1 }}`, "no submatch -1"},
		{"invalid UTF-8", `{{ b64dec "/w==" }}`, "UTF-8"},
		{"regular expression over the limit of package regexp", `{{ regexMatch (printf "(a{%d}){%d}" 1000 1000) "a" }}`, "invalid repeat count"},
	} {
		t.Run(test.name, func(t *testing.T) { assert.Contains(t, renderError(t, test.template, everything()), test.want) })
	}
}

func TestTemplates_LimitLengthOfText(t *testing.T) {
	facts := rules.Facts{Machine: machine.Machine{Platform: runtime.PlatformMetadataSpec{Zone: strings.Repeat("a", 60<<10), Region: strings.Repeat("a", 2<<20)}}}

	for name, template := range map[string]string{
		"output":       `{{ .Zone }}{{ .Zone }}`,
		"variable":     `{{ .Region }}`,
		"loop":         `{{ range 100000 }}x{{ end }}`,
		"replace":      `{{ replace "a" .Zone (trunc 9 .Zone) }}`,
		"join":         `{{ splitList "" .Zone | join "bb" }}`,
		"width":        `{{ printf "%999999d" 1 }}`,
		"argument":     `{{ printf "%[1]s%[1]s%[1]s" .Zone }}`,
		"list":         `{{ splitList "" .Zone }}`,
		"replacement":  `{{ regexReplaceAll "a" .Zone "bb" }}`,
		"with a value": `{{ $a := "a" }}{{ range 16 }}{{ $a = print $a $a }}{{ end }}{{ $a }}b`,
	} {
		t.Run(name, func(t *testing.T) { assert.Contains(t, renderError(t, template, facts), "longer than 65536 bytes") })
	}
}

func TestTemplates_AcceptLargeFacts(t *testing.T) {
	facts := rules.Facts{Machine: machine.Machine{Platform: runtime.PlatformMetadataSpec{Zone: strings.Repeat("a", 60<<10), Tags: map[string]string{}}}}
	for i := range 500 {
		facts.Machine.Platform.Tags[fmt.Sprintf("tag-number-%d", i)] = "Value of the tag"
	}

	for name, template := range map[string]string{
		"text":                   `{{ .Zone }}`,
		"functions":              `{{ .Zone | upper | trimSuffix "A" | trunc 40000 | b64enc | b64dec | trunc 10 }}`,
		"regular expression":     `{{ regexFind "^[a-z]+([0-9]*)$" .Zone }}`,
		"all tags":               `{{ range $k, $v := .Tags }}{{ $k | lower }}={{ regexReplaceAll "[^a-z0-9]+" (lower $v) "-" | trimSuffix "-" }};{{ end }}`,
		"matches in a long text": `{{ regexReplaceAll "[^b-z0-9-]" .Zone "-" }}`,
	} {
		t.Run(name, func(t *testing.T) { render(t, template, facts) })
	}
}
