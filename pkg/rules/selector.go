package rules

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation/field"
)

// Selector is a compiled list of terms. The nil Selector selects every machine. A Selector is safe for concurrent use.
type Selector struct {
	terms       [][]requirement
	readsLabels bool
}

// requirement is a compiled expression.
type requirement struct {
	fact    fact
	matches predicate
}

// fact reads a fact and reports whether it is present.
type fact func(*variables) (value string, present bool)

// predicate reports whether a fact satisfies an expression.
type predicate func(value string, present bool) bool

// CompileSelector compiles terms over the facts that the machine reports, or returns all mistakes in them. The path is
// the field path of the terms. Without terms it returns the nil Selector.
func CompileSelector(terms []SelectorTerm, path *field.Path) (*Selector, field.ErrorList) {
	return compileSelector(terms, path, findFact)
}

// CompileNodeSelector compiles terms that may also select the labels of the Node, as "labels.<key>".
func CompileNodeSelector(terms []SelectorTerm, path *field.Path) (*Selector, field.ErrorList) {
	return compileSelector(terms, path, func(key string) (fact, error) {
		if !isLabelKey(key) {
			return findFact(key)
		}

		return func(v *variables) (value string, present bool) {
			value, present = v.facts.NodeLabels[key[len(labelKey):]]

			return value, present
		}, nil
	})
}

// ReadsLabels reports whether the result of Matches depends on the labels of the Node.
func (s *Selector) ReadsLabels() bool { return s != nil && s.readsLabels }

// Matches reports whether any of the terms matches.
func (s *Selector) Matches(facts Facts) bool {
	return s.matches(newVariables(&facts, facts.Machine.Platform))
}

func (s *Selector) matches(v *variables) bool {
	return s == nil || slices.ContainsFunc(s.terms, func(term []requirement) bool {
		return len(term) > 0 && !slices.ContainsFunc(term, func(r requirement) bool {
			return !r.matches(r.fact(v))
		})
	})
}

func compileSelector(terms []SelectorTerm, path *field.Path, find func(key string) (fact, error)) (*Selector, field.ErrorList) {
	if len(terms) == 0 {
		return nil, nil
	}

	var (
		selector = &Selector{terms: make([][]requirement, len(terms))}
		errs     field.ErrorList
	)

	for i, term := range terms {
		for j, e := range term.MatchExpressions {
			at := path.Index(i).Child("matchExpressions").Index(j)

			read, err := find(e.Key)
			if err != nil {
				errs = append(errs, invalid(at.Child("key"), err))
			}

			matches, err := compilePredicate(e.Operator, e.Values)

			switch {
			case !slices.Contains(operators, e.Operator):
				errs = append(errs, invalid(at.Child("operator"), fmt.Errorf("unknown operator %q; supported operators: %v", e.Operator, operators)))
			case err != nil:
				errs = append(errs, invalid(at.Child("values"), fmt.Errorf("operator %s: %w", e.Operator, err)))
			}

			selector.terms[i] = append(selector.terms[i], requirement{read, matches})
			selector.readsLabels = selector.readsLabels || isLabelKey(e.Key)
		}
	}

	if len(errs) > 0 {
		return nil, errs
	}

	return selector, nil
}

// Prefixes of keys that select an entry of a map.
const (
	tagKey       = "tags."
	extensionKey = "extensions."
	labelKey     = "labels."
)

// facts are the variables of type string and bool by their names in lower case: the names of Talos resources in Go and in YAML differ in case only.
// As in the upstream Talos CCM, an empty string is an absent fact.
var facts = func() map[string]fact {
	byName := map[string]fact{}

	for name, zero := range zeroVariables {
		if _, isMap := zero.(map[string]string); isMap {
			continue // selected by entry
		}

		byName[strings.ToLower(name)] = func(v *variables) (string, bool) {
			value := fmt.Sprint(v.values[name])

			return value, value != ""
		}
	}

	byName["arch"] = byName["architecture"]

	return byName
}()

// Keys returns the keys that CompileSelector accepts, in lower case. A key that ends in a dot is followed by the name of a map entry.
func Keys() []string {
	return append(slices.Sorted(maps.Keys(facts)), extensionKey, tagKey)
}

func findFact(key string) (fact, error) {
	lower := strings.ToLower(key)
	_, name, _ := strings.Cut(key, ".")

	switch {
	case facts[lower] != nil:
		return facts[lower], nil
	case strings.HasPrefix(lower, tagKey) && name != "":
		return func(v *variables) (string, bool) { return getFold(v.facts.Machine.Platform.Tags, name) }, nil
	case strings.HasPrefix(lower, extensionKey) && name != "":
		return func(v *variables) (string, bool) { return getFold(v.facts.Machine.Extensions, name) }, nil
	default:
		return nil, fmt.Errorf("unknown key %q; supported keys: %s (with a name after the dot)", key, strings.Join(Keys(), ", "))
	}
}

func isLabelKey(key string) bool {
	return len(key) > len(labelKey) && strings.EqualFold(key[:len(labelKey)], labelKey)
}

// getFold returns the entry with this name, or else the first, in the order of the names, whose name differs in case only.
func getFold(entries map[string]string, name string) (value string, present bool) {
	if value, present = entries[name]; present {
		return value, true
	}

	found := ""

	for key := range entries {
		if strings.EqualFold(key, name) && (!present || key < found) {
			found, present = key, true
		}
	}

	return entries[found], present
}

var operators = []Operator{In, NotIn, Exists, DoesNotExist, Gt, Lt, Regexp}

// compilePredicate compiles an expression with one of the operators.
func compilePredicate(operator Operator, values []string) (predicate, error) {
	switch operator {
	case In, NotIn:
		if len(values) == 0 {
			return nil, errors.New("requires at least one value")
		}

		return func(value string, present bool) bool {
			return (present && slices.Contains(values, value)) == (operator == In)
		}, nil
	case Exists, DoesNotExist:
		if len(values) > 0 {
			return nil, errors.New("takes no values")
		}

		return func(_ string, present bool) bool { return present == (operator == Exists) }, nil
	default:
		if len(values) != 1 {
			return nil, fmt.Errorf("requires exactly one value, not %d", len(values))
		}
	}

	if operator == Regexp {
		expression, err := regexp.Compile(values[0])

		return func(value string, present bool) bool {
			return present && len(value) <= maxText && expression.MatchString(value)
		}, err
	}

	return compareIntegers(values[0], map[Operator]int{Gt: 1, Lt: -1}[operator])
}

// compareIntegers matches integers for which cmp.Compare with the limit returns the wanted result.
func compareIntegers(limit string, wanted int) (predicate, error) {
	parsed, err := strconv.ParseInt(limit, 10, 64)
	if err != nil {
		return nil, fmt.Errorf("%q is not an integer", limit)
	}

	return func(value string, _ bool) bool {
		n, err := strconv.ParseInt(value, 10, 64)

		return err == nil && cmp.Compare(n, parsed) == wanted
	}, nil
}
