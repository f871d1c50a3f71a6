package rules

import (
	"cmp"
	"slices"
)

// Apply evaluates the rules in order. The selector and the templates of a rule read the platform metadata as earlier
// rules left it; what the rule itself replaces takes effect with the next rule.
func (s *Set) Apply(facts Facts) Result {
	return s.apply(facts, func(*rule, *variables, []string) {})
}

// Match says whether a rule applies to a machine.
type Match struct {
	Rule string `json:"rule"`
	// Mismatch says that and why the rule does not apply; empty if it does.
	Mismatch string `json:"mismatch,omitempty"`
	// Missing are the values that read a key that its table does not have, with the table and the key.
	Missing []string `json:"missing,omitempty"`
}

// Explain returns for each rule, in the order of the rules, whether Apply would apply it.
func (s *Set) Explain(facts Facts) (matches []Match) {
	s.apply(facts, func(r *rule, v *variables, missing []string) {
		matches = append(matches, Match{r.name, r.selector.mismatch(v), missing})
	})

	return matches
}

// apply calls visit for each rule with the variables that it reads, and with what it missed in tables.
func (s *Set) apply(facts Facts, visit func(r *rule, v *variables, missing []string)) Result {
	result := newResult(facts.Machine.Platform)
	if s == nil {
		return result
	}

	v := newVariables(&facts, result.Platform)

	for _, r := range s.rules {
		if !r.selector.matches(v) {
			visit(r, v, nil)

			continue
		}

		visit(r, v, r.apply(v.values, &result))

		if slices.ContainsFunc(r.entries, func(e entry) bool { return e.kind == metadata }) {
			v = newVariables(&facts, result.Platform)
		}
	}

	slices.SortFunc(result.Taints, func(x, y Taint) int { return cmp.Or(cmp.Compare(x.Key, y.Key), cmp.Compare(x.Effect, y.Effect)) })

	return result
}

// apply adds the values of the rule to the result. It returns the values that read a key that its table does not have.
func (r *rule) apply(variables map[string]any, result *Result) (missing []string) {
	if r.tags != nil {
		r.applyTags(result)
	}

	for _, e := range r.entries {
		value, unknown, err := render(e.template, variables, r.tables)
		if unknown != "" {
			missing = append(missing, e.position()+": "+unknown)
		}

		if err == nil {
			err = e.kind.set(result, r, e.key, value)
		}

		if err != nil {
			result.Problems = append(result.Problems, Problem{
				Rule: r.name, Key: e.position(), Value: value, Why: err.Error(), Identity: e.kind == metadata && isIdentity(e.key),
			})
		}
	}

	if r.features.PublicIPDiscovery != nil {
		result.PublicIPDiscovery = r.features.PublicIPDiscovery
	}

	return missing
}
