package rules

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// maxAnnotations bounds all annotations of a Node's rules together, keys included: Kubernetes refuses a Node with more than 256 KiB of them
// (apimachinery, TotalAnnotationSizeLimitB), and others need some.
const maxAnnotations = 192 << 10

// Apply applies the rules in their order. Selectors and templates see the metadata as earlier rules have left it; within one rule
// everything sees it as it was before that rule.
func (r *Set) Apply(facts Facts) Result {
	a := application{
		facts: &facts,
		result: Result{
			Platform: facts.Machine.Platform, Labels: map[string]Value{}, Annotations: map[string]Value{}, Replaced: map[string]string{},
		},
	}

	if r != nil {
		for i := range r.rules {
			a.apply(&r.rules[i])
		}
	}

	a.limitAnnotations()
	slices.SortFunc(a.result.Taints, func(x, y Taint) int { return cmp.Or(cmp.Compare(x.Key, y.Key), cmp.Compare(x.Effect, y.Effect)) })

	return a.result
}

// application is one run of all rules.
type application struct {
	facts  *Facts
	result Result
	values *values // of the metadata as it is; nil until a template needs them
}

func (a *application) apply(r *rule) {
	if !r.selector.matches(subject{facts: a.facts, platform: &a.result.Platform}) {
		return
	}

	for _, e := range r.labels {
		if value, ok := a.render(r, "labels", e, checkLabel); ok {
			a.result.Labels[e.key] = Value{Value: value, Rule: r.name}
		}
	}

	for _, e := range r.annotations {
		if value, ok := a.render(r, "annotations", e, checkNothing); ok {
			a.result.Annotations[e.key] = Value{Value: value, Rule: r.name}
		}
	}

	for _, e := range r.taints {
		a.taint(r, e)
	}

	if r.features.PublicIPDiscovery != nil {
		a.result.PublicIPDiscovery = r.features.PublicIPDiscovery
	}

	a.replace(r)
}

// render returns an entry's value, or false after it has noted the problem.
func (a *application) render(r *rule, kind string, e entry, check func(string) error) (string, bool) {
	if e.text.template == nil {
		return e.text.constant, true // checked when it was compiled
	}

	if a.values == nil {
		a.values = newValues(subject{facts: a.facts, platform: &a.result.Platform})
	}

	value, err := e.text.render(a.values)
	if err == nil {
		err = check(value)
	}

	if err != nil {
		a.problem(r, kind, e.key, value, err)

		return "", false
	}

	return value, true
}

func (a *application) problem(r *rule, kind, key, value string, err error) {
	a.result.Problems = append(a.result.Problems, Problem{Rule: r.name, Key: fmt.Sprintf("%s[%s]", kind, key), Value: value, Why: err.Error()})
}

func (a *application) taint(r *rule, e entry) {
	text, ok := a.render(r, "taints", e, checkTaint)
	if !ok {
		return
	}

	parsed, err := parseTaint(e.key, text)
	if err != nil { // cannot be: it was checked
		return
	}

	taint := Taint{Taint: parsed, Rule: r.name, Enforce: r.enforce}
	same := func(other Taint) bool { return other.Key == taint.Key && other.Effect == taint.Effect }

	if i := slices.IndexFunc(a.result.Taints, same); i >= 0 {
		a.result.Taints[i] = taint
	} else {
		a.result.Taints = append(a.result.Taints, taint)
	}
}

// replace replaces metadata, all fields at once.
func (a *application) replace(r *rule) {
	next := a.result.Platform

	for _, e := range r.platform {
		problems := len(a.result.Problems)

		value, ok := a.render(r, "platformMetadata", e.entry, checkNothing)
		if value = strings.TrimSpace(value); ok {
			if err := e.field.set(&next, value); err != nil {
				a.problem(r, "platformMetadata", e.key, value, err)
			} else {
				a.result.Replaced[e.field.name] = r.name
			}
		}

		for i := problems; i < len(a.result.Problems); i++ {
			a.result.Problems[i].Identity = e.field.identity
		}
	}

	if len(r.platform) > 0 {
		a.result.Platform, a.values = next, nil
	}
}

// limitAnnotations leaves out what would make Kubernetes refuse the Node as a whole.
func (a *application) limitAnnotations() {
	size := 0

	for _, key := range slices.Sorted(maps.Keys(a.result.Annotations)) {
		value := a.result.Annotations[key]

		if size += len(key) + len(value.Value); size <= maxAnnotations {
			continue
		}

		size -= len(key) + len(value.Value)

		delete(a.result.Annotations, key)
		a.problem(&rule{name: value.Rule}, "annotations", key, "", fmt.Errorf("all annotations of rules together are longer than %d bytes", maxAnnotations))
	}
}
