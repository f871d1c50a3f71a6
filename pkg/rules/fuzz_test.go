package rules_test

import (
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/siderolabs/talos/pkg/machinery/resources/hardware"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/rules"
)

// Whatever the template and the facts: it ends, it does not panic, and what it makes is what a Node takes, or a problem.
func FuzzTemplate(f *testing.F) {
	for _, example := range examples {
		f.Add(example.template, "us-west-1f")
	}

	f.Add(`{{ range $k, $v := .Tags }}{{ $k }}={{ $v | upper | regexReplaceAll "[^A-Z]" . "-" }}{{ end }}`, "a.b")
	f.Add(`{{ with $x := splitList "," .Zone }}{{ range $x }}{{ . }}{{ end }}{{ $ }}{{ else }}{{ break }}{{ end }}`, "a,b")
	f.Add(`{{ $a := list .Zone .Zone }}{{ range 30 }}{{ $a = list $a $a }}{{ end }}{{ $a }}`, "a")
	f.Add(`{{ range 999999999 }}{{ range 999999999 }}{{ end }}{{ end }}`, "")
	f.Add(`{{ printf "%9999999d%[1]*d%.*f" 1 2 }}{{ printf .Zone 1 }}`, "%99999999d")
	f.Add(`{{ repeat 99999 .Zone | indent 99999 | replace "" .Zone | regexReplaceAll .Zone .Zone }}`, "(a*)*")
	f.Add(`{{ define "a" }}{{ template "a" }}{{ end }}{{ template "a" }}`, "")
	f.Add(`{{ (((((index .Tags "a"))))) }}{{ call .Zone }}{{ slice .Zone 1 2 3 }}{{ eq .Tags .Tags }}`, "a")
	f.Add(`{{ fromJson .Zone | toRawJson }}`, `{"a":[[[[1e9]]]]}`)

	f.Fuzz(func(t *testing.T, template, value string) {
		compiled, mistakes := rules.Compile([]rules.Rule{{
			Labels: map[string]string{"l": template}, Annotations: map[string]string{"a": template}, Taints: map[string]string{"t": template},
			PlatformMetadata: map[string]string{"ProviderID": template, "Spot": template},
		}})
		if len(mistakes) > 0 {
			return
		}

		result := compiled.Apply(rules.Facts{Machine: machine.Machine{
			Platform: runtime.PlatformMetadataSpec{Zone: value, Tags: map[string]string{"a": value, value: "b"}}, System: hardware.SystemInformationSpec{UUID: value},
		}})

		if n := len(result.Labels) + len(result.Annotations) + len(result.Taints) + len(result.Replaced) + len(result.Problems); n != 5 {
			t.Errorf("%d of 5 came to an end: %+v", n, result)
		}

		checkResult(t, template+value, result)
	})
}

// checkResult checks what holds of whatever comes out.
func checkResult(t *testing.T, input string, result rules.Result) {
	t.Helper()

	for _, v := range result.Labels {
		if why := validation.IsValidLabelValue(v.Value); len(why) > 0 {
			t.Errorf("label %q: %v", v.Value, why)
		}
	}

	for _, v := range result.Annotations {
		if len(v.Value) > 64<<10 || !utf8.ValidString(v.Value) || strings.Contains(v.Value, "<no value>") && !strings.Contains(input, "no value") {
			t.Errorf("annotation of %d bytes: %.100q", len(v.Value), v.Value)
		}
	}

	for _, p := range result.Problems {
		if p.Why == "" || p.Identity != (p.Key == "platformMetadata[ProviderID]") {
			t.Errorf("%+v", p)
		}
	}
}

// Whatever the selector: it compiles or says why not, does not panic, and the opposite of an operator says the opposite.
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
				Platform:   runtime.PlatformMetadataSpec{Zone: value, Tags: map[string]string{"a": value, value: "b"}},
				System:     hardware.SystemInformationSpec{UUID: value},
				Extensions: map[string]string{"a": value},
			},
			NodeLabels: map[string]string{"a": value},
		}

		s, mistakes := rules.CompileNodeSelector(one(key, rules.Operator(operator), values...))
		if len(mistakes) > 0 {
			if s != nil {
				t.Error("there is a selector in spite of mistakes")
			}

			return
		}

		matches := s.Matches(facts)

		if opposite, has := opposites[operator]; has {
			o, _ := rules.CompileNodeSelector(one(key, opposite, values...))
			if o == nil || o.Matches(facts) == matches {
				t.Errorf("%s and %s say the same", operator, opposite)
			}
		}
	})
}
