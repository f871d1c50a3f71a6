package rules

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/siderolabs/talos/pkg/machinery/platforms"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// Warning is a part of a rule or a selector that is valid, but has no effect.
type Warning struct {
	Path *field.Path
	Msg  string
}

// effectOfTemplate finds the effect after the last action of a taint's template.
var effectOfTemplate = regexp.MustCompile(`}}[^{}]*:([^{}:]*)$`)

// Warnings returns the warnings of rules and of their selectors. The path is the field path of the rules.
func Warnings(rules []Rule, path *field.Path) (warnings []Warning) {
	for i, r := range rules {
		at := path.Index(i)
		warnings = append(warnings, SelectorWarnings(r.NodeSelector, at.Child("nodeSelector"))...)

		if len(r.Labels)+len(r.Annotations)+len(r.Taints)+len(r.PlatformMetadata) == 0 && r.Features == (Features{}) {
			warnings = append(warnings, Warning{at, "the rule sets nothing"})
		}

		for _, key := range slices.Sorted(maps.Keys(r.Taints)) {
			effect := effectOfTemplate.FindStringSubmatch(r.Taints[key])
			if effect != nil && !slices.Contains(taintEffects, strings.TrimSpace(effect[1])) {
				warnings = append(warnings, Warning{at.Child("taints").Key(key), fmt.Sprintf("%q is not an effect of taints: the taint is never set", effect[1])})
			}
		}
	}

	return warnings
}

// knownValues are all values of variables that have few.
var knownValues = func() map[string][]string {
	known := map[string][]string{"Architecture": {platforms.ArchAmd64, platforms.ArchArm64}, "Spot": {"true", "false"}, "Platform": {"metal", "container"}}
	for _, platform := range platforms.CloudPlatforms() {
		known["Platform"] = append(known["Platform"], platform.Name)
	}

	return known
}()

// SelectorWarnings returns the warnings of a selector. The path is the field path of the terms.
func SelectorWarnings(terms []SelectorTerm, path *field.Path) (warnings []Warning) {
	for i, term := range terms {
		if len(term.MatchExpressions) == 0 {
			warnings = append(warnings, Warning{path.Index(i), "a term without expressions matches nothing"})
		}

		for j, e := range term.MatchExpressions {
			values := knownValues[variableOf(e.Key)]
			if len(values) == 0 || (e.Operator != In && e.Operator != NotIn) {
				continue
			}

			for _, value := range e.Values {
				if !slices.Contains(values, value) {
					at := path.Index(i).Child("matchExpressions").Index(j).Child("values")
					warnings = append(warnings, Warning{at, fmt.Sprintf("no machine has %s %q; known values: %s", e.Key, value, strings.Join(values, ", "))})
				}
			}
		}
	}

	return warnings
}
