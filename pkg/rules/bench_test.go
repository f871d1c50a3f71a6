package rules_test

import (
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/talos-ccm/talos-ccm/pkg/rules"
)

// BenchmarkApply applies 100 rules, about half of which match, to one of 1,000 machines per operation.
func BenchmarkApply(b *testing.B) {
	for _, bench := range []struct {
		name string
		rule rules.Rule
	}{
		{"constants", rules.Rule{Labels: map[string]string{"example.org/label-%d": "", "example.org/other-%d": "value"}}},
		{"variables", rules.Rule{Labels: map[string]string{"example.org/label-%d": "{{ .Zone }}-%d", "example.org/other-%d": "{{ .Tags.Owner }}"}}},
		{"conditions", rules.Rule{Labels: map[string]string{"example.org/label-%d": "{{ if .Spot }}spot{{ else }}on-demand{{ end }}"}}},
		{"functions", rules.Rule{
			Labels: map[string]string{
				"example.org/label-%d": `{{ regexFindString "^node-([0-9]+)$" .Hostname 1 }}`, "example.org/other-%d": `{{ .Region | lower | replace " " "-" | trunc 63 }}`,
			},
		}},
		{"metadata", rules.Rule{PlatformMetadata: map[string]string{"zone": "{{ .Zone }}", "region": "r-%d"}}},
		{"mixture", rules.Rule{
			Labels:      map[string]string{"node-role.kubernetes.io/role-%d": "", "example.org/zone-%d": "{{ .Zone }}"},
			Annotations: map[string]string{"example.org/host-%d": `{{ .Hostname | upper | trimPrefix "NODE-" }}`},
			Taints:      map[string]string{"example.org/taint-%d": "{{ .Zone }}:NoSchedule"},
		}},
	} {
		b.Run(bench.name, func(b *testing.B) {
			compiled, machines := compile(b, numbered(bench.rule, 100)...), machines(1000)

			b.ReportAllocs()

			for i := 0; b.Loop(); i++ {
				if result := compiled.Apply(machines[i%len(machines)]); len(result.Problems) > 0 {
					b.Fatal(result.Problems)
				}
			}
		})
	}
}

// BenchmarkRacks gives each of 1,000 machines the label of its rack, which 500 of them have: by a rule for each machine,
// and by one rule with a table.
func BenchmarkRacks(b *testing.B) {
	const rows = 500

	machines, racks, byRule := machines(1000), map[string]string{}, make([]rules.Rule, rows)

	for i := range machines {
		serial := fmt.Sprintf("4c4c4544-0000-%04d", i)
		machines[i].Machine.System.SerialNumber = serial

		if i < rows {
			racks[serial] = fmt.Sprintf("r%d", i/20)
			byRule[i] = rules.Rule{NodeSelector: one("serialNumber", rules.In, serial), Labels: map[string]string{"example.org/rack": racks[serial]}}
		}
	}

	byTable := rules.Rule{Labels: map[string]string{"example.org/rack": `{{ lookup "racks" .SerialNumber }}`}}

	for _, bench := range []struct {
		name  string
		rules []rules.Rule
	}{{"no rules", nil}, {"rule for each machine", byRule}, {"table", []rules.Rule{byTable}}} {
		compiled, errs := rules.Compile(bench.rules, rules.Tables{"racks": racks}, nil)
		if len(errs) > 0 {
			b.Fatal(errs)
		}

		b.Run(bench.name, func(b *testing.B) {
			b.ReportAllocs()

			for i := 0; b.Loop(); i++ {
				compiled.Apply(machines[i%len(machines)])
			}
		})
	}
}

// numbered returns count copies of the rule with their numbers in place of "%d". Half select by zone, half by hostname.
func numbered(rule rules.Rule, count int) []rules.Rule {
	fill := func(templates map[string]string, i int) map[string]string {
		filled := map[string]string{}
		for key, template := range templates {
			filled[strings.ReplaceAll(key, "%d", strconv.Itoa(i))] = strings.ReplaceAll(template, "%d", strconv.Itoa(i))
		}

		return filled
	}

	list := make([]rules.Rule, count)
	for i := range list {
		selector := one("hostname", rules.Regexp, fmt.Sprintf("^node-[0-9]*%d$", i%10))
		if i%2 == 0 {
			selector = one("zone", rules.In, "zone-1", "zone-2", "zone-3")
		}

		list[i] = rules.Rule{
			Name: fmt.Sprintf("rule-%d", i), NodeSelector: selector, Labels: fill(rule.Labels, i), Annotations: fill(rule.Annotations, i), Taints: fill(rule.Taints, i),
			PlatformMetadata: fill(rule.PlatformMetadata, i),
		}
	}

	return list
}

func machines(count int) []rules.Facts {
	list := make([]rules.Facts, count)
	for i := range list {
		list[i] = everything()
		list[i].Machine.Platform.Hostname, list[i].Machine.Platform.Zone = fmt.Sprintf("node-%d", i), fmt.Sprintf("zone-%d", i%4)
	}

	return list
}
