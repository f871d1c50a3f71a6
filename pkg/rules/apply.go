package rules

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// maxAnnotations limits the annotations of all rules together, in bytes of keys and values. Kubernetes rejects a Node
// with more than 256 KiB of annotations (TotalAnnotationSizeLimitB in apimachinery), and other clients set some too.
const maxAnnotations = 192 << 10

// Apply evaluates the rules in order. The selector and the templates of a rule read the platform metadata as earlier
// rules left it; what the rule itself replaces takes effect with the next rule.
func (s *Set) Apply(facts Facts) Result {
	platform := facts.Machine.Platform
	result := Result{Platform: platform, Labels: map[string]Value{}, Annotations: map[string]Value{}, Replaced: map[string]string{}}

	if s == nil {
		return result
	}

	v := newVariables(&facts, platform)

	for _, r := range s.rules {
		if !r.selector.matches(v) {
			continue
		}

		for _, e := range r.entries {
			set := e.constant

			if set == nil {
				value, err := render(e.template, v.values)
				if err == nil {
					set, err = e.kind.parse(r, e.key, value)
				}

				if err != nil {
					result.addProblem(r.name, e, value, err)

					continue
				}
			}

			set(&result)
		}

		if r.features.PublicIPDiscovery != nil {
			result.PublicIPDiscovery = r.features.PublicIPDiscovery
		}

		if slices.ContainsFunc(r.entries, func(e entry) bool { return e.kind == metadata }) {
			v = newVariables(&facts, result.Platform)
		}
	}

	result.limitAnnotations()
	slices.SortFunc(result.Taints, func(x, y Taint) int { return cmp.Or(cmp.Compare(x.Key, y.Key), cmp.Compare(x.Effect, y.Effect)) })

	return result
}

func (r *Result) addProblem(rule string, e entry, value string, err error) {
	name := strings.ToLower(e.key)
	r.Problems = append(r.Problems, Problem{
		Rule: rule, Key: fmt.Sprintf("%s[%s]", e.kind.name, e.key), Value: value, Why: err.Error(),
		Identity: e.kind == metadata && (name == "providerid" || name == "instanceid"),
	})
}

// limitAnnotations removes the annotations that exceed maxAnnotations, in the order of their keys.
func (r *Result) limitAnnotations() {
	size := 0

	for _, key := range slices.Sorted(maps.Keys(r.Annotations)) {
		annotation := r.Annotations[key]
		added := len(key) + len(annotation.Value)

		if size+added <= maxAnnotations {
			size += added

			continue
		}

		delete(r.Annotations, key)
		r.addProblem(annotation.Rule, entry{kind: annotations, key: key}, "", fmt.Errorf("the annotations of all rules together exceed %d bytes", maxAnnotations))
	}
}
