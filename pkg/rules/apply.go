package rules

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// maxAnnotations limits the annotations of all rules together, in bytes of keys and values. Kubernetes rejects a Node with more than 256 KiB of
// annotations (TotalAnnotationSizeLimitB in apimachinery), and other clients set some too.
const maxAnnotations = 192 << 10

// Apply evaluates the rules in order. The selector and the templates of a rule read the platform metadata as earlier rules left it; what the rule
// itself replaces takes effect with the next rule.
func (s *Set) Apply(facts Facts) Result {
	a := application{
		facts: &facts,
		result: Result{
			Platform: facts.Machine.Platform, Labels: map[string]Value{}, Annotations: map[string]Value{}, Replaced: map[string]string{},
		},
		variables: newVariables(&facts, &facts.Machine.Platform),
	}

	if s != nil {
		for i := range s.rules {
			a.apply(&s.rules[i])
		}
	}

	a.limitAnnotations()
	slices.SortFunc(a.result.Taints, func(x, y Taint) int { return cmp.Or(cmp.Compare(x.Key, y.Key), cmp.Compare(x.Effect, y.Effect)) })

	return a.result
}

// application is the state of one Apply.
type application struct {
	facts  *Facts
	result Result
	// variables of the current rule.
	variables *variables
}

func (a *application) apply(r *rule) {
	if !r.selector.matches(a.variables) {
		return
	}

	for _, e := range r.labels {
		if value, ok := a.render(r, labelKind, e); ok {
			a.result.Labels[e.key] = Value{Value: value, Rule: r.name}
		}
	}

	for _, e := range r.annotations {
		if value, ok := a.render(r, annotationKind, e); ok {
			a.result.Annotations[e.key] = Value{Value: value, Rule: r.name}
		}
	}

	for _, e := range r.taints {
		if value, ok := a.render(r, taintKind, e); ok {
			a.setTaint(r, e.key, value)
		}
	}

	if r.features.PublicIPDiscovery != nil {
		a.result.PublicIPDiscovery = r.features.PublicIPDiscovery
	}

	for _, e := range r.metadata {
		f := fields[strings.ToLower(e.key)]

		if value, ok := a.render(r, metadataKind, e); ok {
			_ = f.set(&a.result.Platform, value) // render checked the value
			a.result.Replaced[f.name] = r.name
		} else {
			a.result.Problems[len(a.result.Problems)-1].Identity = f.isIdentity()
		}
	}

	if len(r.metadata) > 0 {
		a.variables = newVariables(a.facts, &a.result.Platform)
	}
}

// render returns the value of an entry. If the template fails or the value is invalid, it adds a Problem and returns false.
func (a *application) render(r *rule, k kind, e entry) (string, bool) {
	if e.text.template == nil {
		return e.text.constant, true // Compile checked the value
	}

	value, err := e.text.render(a.variables)
	if err == nil {
		err = k.checkValue(e.key, value)
	}

	if err != nil {
		a.addProblem(r.name, k, e.key, value, err)
	}

	return value, err == nil
}

func (a *application) addProblem(rule string, k kind, key, value string, err error) {
	a.result.Problems = append(a.result.Problems, Problem{Rule: rule, Key: fmt.Sprintf("%s[%s]", k.name, key), Value: value, Why: err.Error()})
}

// setTaint adds a taint, or replaces the one with the same key and effect.
func (a *application) setTaint(r *rule, key, value string) {
	parsed, err := parseTaint(key, value)
	if err != nil {
		return // unreachable: the value has been checked
	}

	taint := Taint{Taint: parsed, Rule: r.name, Enforce: r.enforce}

	i := slices.IndexFunc(a.result.Taints, func(other Taint) bool { return other.MatchTaint(&parsed) })
	if i < 0 {
		a.result.Taints = append(a.result.Taints, taint)
	} else {
		a.result.Taints[i] = taint
	}
}

// limitAnnotations removes the annotations that exceed maxAnnotations, in the order of their keys.
func (a *application) limitAnnotations() {
	size := 0

	for _, key := range slices.Sorted(maps.Keys(a.result.Annotations)) {
		annotation := a.result.Annotations[key]
		added := len(key) + len(annotation.Value)

		if size+added <= maxAnnotations {
			size += added

			continue
		}

		delete(a.result.Annotations, key)
		a.addProblem(annotation.Rule, annotationKind, key, "", fmt.Errorf("the annotations of all rules together exceed %d bytes", maxAnnotations))
	}
}
