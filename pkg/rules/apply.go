package rules

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
)

// maxAnnotations limits the annotations of all rules together, in bytes of keys and values. Kubernetes rejects a Node
// with more than 256 KiB of annotations (TotalAnnotationSizeLimitB in apimachinery), and other clients set some too.
const maxAnnotations = 192 << 10

// Apply evaluates the rules in order. The selector and the templates of a rule read the platform metadata as earlier
// rules left it; what the rule itself replaces takes effect with the next rule.
func (s *Set) Apply(facts Facts) Result {
	result := newResult(facts.Machine.Platform)
	if s == nil {
		return *result
	}

	v := newVariables(&facts, result.Platform)

	for i := range s.rules {
		r := &s.rules[i]
		if !r.selector.matches(v) {
			continue
		}

		for _, e := range r.entries {
			value, err := e.text.render(v)
			if err == nil {
				err = e.kind.set(result, r, e.key, value)
			}

			if err != nil {
				result.addProblem(r.name, e, value, err)
			}
		}

		if r.features.PublicIPDiscovery != nil {
			result.PublicIPDiscovery = r.features.PublicIPDiscovery
		}

		v = newVariables(&facts, result.Platform)
	}

	result.limitAnnotations()
	slices.SortFunc(result.Taints, func(x, y Taint) int { return cmp.Or(cmp.Compare(x.Key, y.Key), cmp.Compare(x.Effect, y.Effect)) })

	return *result
}

func newResult(platform runtime.PlatformMetadataSpec) *Result {
	return &Result{Platform: platform, Labels: map[string]Value{}, Annotations: map[string]Value{}, Replaced: map[string]string{}}
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
