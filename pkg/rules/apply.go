package rules

import (
	"cmp"
	"fmt"
	"slices"
)

// Apply evaluates the rules in order. The selector and the templates of a rule read the platform metadata as earlier
// rules left it; what the rule itself replaces takes effect with the next rule.
func (s *Set) Apply(facts Facts) Result {
	return s.apply(facts, func(*rule, *variables) {})
}

// Match says whether a rule applies to a machine.
type Match struct {
	Rule string `json:"rule"`
	// Mismatch says that and why the rule does not apply; empty if it does.
	Mismatch string `json:"mismatch,omitempty"`
}

// Explain returns for each rule, in the order of the rules, whether Apply would apply it.
func (s *Set) Explain(facts Facts) (matches []Match) {
	s.apply(facts, func(r *rule, v *variables) { matches = append(matches, Match{r.name, r.selector.mismatch(v)}) })

	return matches
}

// apply calls visit for each rule with the variables that its selector reads.
func (s *Set) apply(facts Facts, visit func(*rule, *variables)) Result {
	result := newResult(facts.Machine.Platform)
	if s == nil {
		return result
	}

	v := newVariables(&facts, result.Platform)

	for _, r := range s.rules {
		visit(r, v)

		if !r.selector.matches(v) {
			continue
		}

		for _, e := range r.entries {
			value, err := render(e.template, v.values)
			if err == nil {
				err = e.kind.set(&result, r, e.key, value)
			}

			if err != nil {
				result.Problems = append(result.Problems, Problem{
					Rule: r.name, Key: fmt.Sprintf("%s[%s]", e.kind.name, e.key), Value: value, Why: err.Error(),
					Identity: e.kind == metadata && isIdentity(e.key),
				})
			}
		}

		if r.features.PublicIPDiscovery != nil {
			result.PublicIPDiscovery = r.features.PublicIPDiscovery
		}

		if slices.ContainsFunc(r.entries, func(e entry) bool { return e.kind == metadata }) {
			v = newVariables(&facts, result.Platform)
		}
	}

	slices.SortFunc(result.Taints, func(x, y Taint) int { return cmp.Or(cmp.Compare(x.Key, y.Key), cmp.Compare(x.Effect, y.Effect)) })

	return result
}
