package rules_test

import (
	"math/rand/v2"
	"regexp"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/siderolabs/talos/pkg/machinery/resources/hardware"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/rules"
)

// expensive matches large numbers and assignments.
var expensive = regexp.MustCompile(`[0-9][0-9a-zA-Z_]{3}|=`)

// pointer matches the verb %p of printf.
var pointer = regexp.MustCompile(`%[^%]*p`)

// FuzzTemplate checks that templates render as with text/template, and that results are deterministic, bounded and valid.
func FuzzTemplate(f *testing.F) {
	for _, example := range examples {
		f.Add(example.template, "us-west-1f")
	}

	f.Add(`{{ range $k, $v := .Tags }}{{ $k }}={{ $v | upper | regexReplaceAll "[^A-Z]" . "-" }}{{ end }}`, "a.b")
	f.Add(`{{ with $x := splitList "," .Zone }}{{ range $x }}{{ . }}{{ end }}{{ $ }}{{ else }}{{ break }}{{ end }}`, "a,b")
	f.Add(`{{ $a := splitList "" .Zone }}{{ $a = print $a $a | splitList " " }}{{ $a }}`, "a")
	f.Add(`{{ range 999 }}{{ . }}{{ end }}`, "")
	f.Add(`{{ printf "%9999999d%[1]*d%.*f" 1 2 }}{{ printf .Zone 1 }}`, "%99999999d")
	f.Add(`{{ print .Zone | js | replace "" .Zone | regexReplaceAll .Zone .Zone }}`, "(a*)*")
	f.Add(`{{ define "a" }}{{ template "a" }}{{ end }}{{ template "a" }}`, "")
	f.Add(`{{ (((((index .Tags "a"))))) }}{{ call .Zone }}{{ slice .Zone 1 2 3 }}{{ eq .Tags .Tags }}`, "a")
	f.Add(`{{ coalesce nil "" | default nil | or nil | print }}`, "")
	f.Add(`{{ and .Spot ($x := 1) }}{{ $x }}`, "")
	f.Add(`{{ (default nil "").a 1 }} {{ -0xe }} {{ 0xe }} {{ 1+2i }} {{ 0x1p-2 }} {{ trunc 1e0 .Zone }} {{ 1_000 }} {{ lt 1.5 2.0 }}`, "ab")
	f.Add(`{{ range 2 }}{{ . }}{{ range 0 }}{{ else }}{{ break }}{{ end }}{{ range 0 }}{{ else }}{{ continue }}{{ end }}no{{ end }}`, "")
	f.Add(`{{ range index "\x03" 0 }}{{ printf "%T" . }}{{ end }}{{ eq (index "a" 0) 97 }}`, "")
	f.Add(`{{ range $i, $e := 3 }}{{ end }}`, "")
	f.Add(`{{ slice (slice (keys .Tags) 0 1 1) 0 2 }}`, "")
	f.Add(`{{ $x := .Zone }}{{ range $i, $x = splitList "," $x }}{{ $i }}{{ end }}{{ $x }}`, "a,b")
	f.Add(`{{ slice (slice (keys .Tags) 0 1) 0 2 }}{{ slice (keys .Tags) 0 1 2 | len }}{{ eq .Tags nil }}{{ .Tags.absent | html | js | urlquery }}`, "'")

	f.Add(`{{ lookup "racks" .Zone }}{{ range .Tags }}{{ . | lookup "racks" | default "none" }}{{ end }}`, "a")

	for i := range uint64(200) {
		f.Add((&generator{Rand: rand.New(rand.NewPCG(0, i))}).body(2), "a,b")
	}

	f.Fuzz(func(t *testing.T, template, value string) {
		// Nothing limits the duration of nested and long loops, and the memory of values that grow in them.
		if loops := strings.Count(template, "range"); loops > 1 || loops == 1 && expensive.MatchString(template) || len(value) > 1<<10 {
			return
		}

		// Addresses of values in memory differ.
		if pointer.MatchString(template + value) {
			return
		}

		facts := rules.Facts{Machine: machine.Machine{
			Platform: runtime.PlatformMetadataSpec{Zone: value, Tags: map[string]string{"a": value, value: "b"}}, System: hardware.SystemInformationSpec{UUID: value},
		}}

		compare(t, template, facts)

		compiled, errs := rules.Compile([]rules.Rule{{
			Labels: map[string]string{"l": template}, Annotations: map[string]string{"a": template}, Taints: map[string]string{"t": template},
			PlatformMetadata: map[string]string{"ProviderID": template, "Spot": template},
		}}, nil, nil)
		if len(errs) > 0 {
			return
		}

		result := compiled.Apply(facts)
		assert.Equal(t, 5, len(result.Labels)+len(result.Annotations)+len(result.Taints)+len(result.Replaced)+len(result.Problems), result)
		assert.Equal(t, result, compiled.Apply(facts))

		checkResult(t, template+value, result)
	})
}

// checkResult checks the invariants of a Result.
func checkResult(t *testing.T, input string, result rules.Result) {
	t.Helper()

	for _, v := range result.Labels {
		assert.Empty(t, validation.IsValidLabelValue(v.Value))
	}

	for _, v := range result.Annotations {
		assert.LessOrEqual(t, len(v.Value), 64<<10)
		assert.True(t, utf8.ValidString(v.Value))

		// A template can print "<no value>" only on purpose.
		if strings.Contains(v.Value, "<no value>") && !strings.Contains(input, "no value") && !strings.Contains(input, "nil") {
			t.Errorf("annotation without a value: %.100q", v.Value)
		}
	}

	for _, p := range result.Problems {
		assert.NotEmpty(t, p.Why)
		assert.Equal(t, p.Key == "platformMetadata[ProviderID]", p.Identity)
	}
}

// FuzzSelector checks that no selector causes a panic, and that an operator and its negation disagree.
func FuzzSelector(f *testing.F) {
	f.Add("zone", "In", "a", "a")
	f.Add("Tags.a", "Regexp", "^a$", "a")
	f.Add("labels.a", "Gt", "10", "11")
	f.Add("extensions.a", "Exists", "", "")
	f.Add("UUID", "Regexp", "(a{1000}){1000}", "a")

	opposites := map[string]rules.Operator{"In": rules.NotIn, "NotIn": rules.In, "Exists": rules.DoesNotExist, "DoesNotExist": rules.Exists}

	f.Fuzz(func(t *testing.T, key, operator, against, value string) {
		var values []string
		if against != "" {
			values = []string{against}
		}

		facts := rules.Facts{
			Machine: machine.Machine{
				Platform: runtime.PlatformMetadataSpec{Zone: value, Tags: map[string]string{"a": value, value: "b"}},
				System:   hardware.SystemInformationSpec{UUID: value},
				Facts:    &machine.Facts{Extensions: map[string]string{"a": value}},
			},
			NodeLabels: map[string]string{"a": value},
		}

		s, errs := rules.CompileNodeSelector(one(key, rules.Operator(operator), values...), nil)
		if len(errs) > 0 {
			assert.Nil(t, s)

			return
		}

		matches := s.Matches(facts)

		if opposite, has := opposites[operator]; has {
			o, _ := rules.CompileNodeSelector(one(key, opposite, values...), nil)
			require.NotNil(t, o)
			assert.NotEqual(t, matches, o.Matches(facts))
		}
	})
}
