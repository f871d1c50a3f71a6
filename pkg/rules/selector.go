package rules

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apimachinery/pkg/util/version"

	"github.com/talos-ccm/talos-ccm/pkg/cidrset"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

// Selector is a compiled list of terms. The nil Selector selects every machine. A Selector is safe for concurrent use.
type Selector struct {
	terms       [][]requirement
	readsLabels bool
	factKinds   machine.FactKinds
}

type requirement struct {
	Expression

	fact    fact
	matches predicate
}

// fact reads the values of a fact: none if it is absent, any number of a list.
type fact func(*variables) []string

// predicate reports whether the values of a fact satisfy an expression.
type predicate func(values []string) bool

// CompileSelector compiles terms over the facts that the machine reports, or returns all errors in them. The path is
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

		return func(v *variables) []string {
			if value, present := v.facts.NodeLabels[key[len(labelKey):]]; present {
				return []string{value}
			}

			return nil
		}, nil
	})
}

// ReadsLabels reports whether the result of Matches depends on the labels of the Node.
func (s *Selector) ReadsLabels() bool { return s != nil && s.readsLabels }

// FactKinds returns the kinds of facts that the selector reads.
func (s *Selector) FactKinds() machine.FactKinds {
	if s == nil {
		return 0
	}

	return s.factKinds
}

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

// mismatch returns why the selector does not match: the first such expression of each term, with the values of the fact.
// It returns an empty string if the selector matches.
func (s *Selector) mismatch(v *variables) string {
	if s.matches(v) {
		return ""
	}

	var reasons []string

	for _, term := range s.terms {
		i := slices.IndexFunc(term, func(r requirement) bool { return !r.matches(r.fact(v)) })
		if i < 0 {
			reasons = append(reasons, "a term without expressions matches nothing")

			continue
		}

		reported := "the machine does not report it"
		if values := term[i].fact(v); len(values) > 0 {
			reported = "it is " + strings.Trim(fmt.Sprintf("%q", values), "[]")
		}

		reasons = append(reasons, strings.TrimSpace(fmt.Sprintf("%s %s %s", term[i].Key, term[i].Operator, strings.Join(term[i].Values, ", ")))+", but "+reported)
	}

	return "does not apply: " + strings.Join(reasons, "; ")
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

			matches, err := compilePredicate(variableOf(e.Key), e.Operator, e.Values)
			err = cmp.Or(err, checkValues(variableOf(e.Key), e))

			switch {
			case !slices.Contains(operators, e.Operator):
				errs = append(errs, field.NotSupported(at.Child("operator"), e.Operator, operators))
			case err != nil:
				errs = append(errs, invalid(at.Child("values"), fmt.Errorf("operator %s: %w", e.Operator, err)))
			}

			selector.terms[i] = append(selector.terms[i], requirement{e, read, matches})
			selector.readsLabels = selector.readsLabels || isLabelKey(e.Key)
			selector.factKinds |= machine.FactKindsOf(variableOf(e.Key))
		}
	}

	if len(errs) > 0 {
		return nil, errs
	}

	return selector, nil
}

// labelKey is the prefix of keys that select a label of the Node.
const labelKey = "labels."

// variableNames maps names of variables in lower case to the names: those of Talos resources in Go and in YAML differ in
// case only.
var variableNames = func() map[string]string {
	byName := map[string]string{"arch": "Architecture"}
	for name := range zeroVariables {
		byName[strings.ToLower(name)] = name
	}

	return byName
}()

// variableOf returns the name of the variable that a key reads, or "".
func variableOf(key string) string {
	prefix, _, _ := strings.Cut(key, ".")

	return variableNames[strings.ToLower(prefix)]
}

// Keys returns the keys that CompileSelector accepts, in lower case. A key that ends in a dot is followed by the name of a map entry.
func Keys() []string {
	var keys []string

	for lower, name := range variableNames {
		if _, isMap := zeroVariables[name].(map[string]string); isMap {
			lower += "."
		}

		keys = append(keys, lower)
	}

	slices.Sort(keys)

	return keys
}

func findFact(key string) (fact, error) {
	name := variableOf(key)
	_, isMap := zeroVariables[name].(map[string]string)
	_, entry, isEntry := strings.Cut(key, ".")

	if isLabelKey(key) {
		return nil, fmt.Errorf("key %q: labels can be selected in ipam.pools only, because a kubelet may set its own labels", key)
	}

	if name == "" || isEntry != isMap || isMap && entry == "" {
		return nil, fmt.Errorf("unknown key %q; supported keys: %s", key, strings.ReplaceAll(strings.Join(Keys(), ", "), ".,", ".<name>,"))
	}

	return func(v *variables) []string {
		switch value := v.values[name].(type) {
		case map[string]string:
			if text, present := getFold(value, entry); present {
				return []string{text}
			}
		case []string:
			return value
		case string:
			if value != "" { // as in the upstream Talos CCM, an empty string is an absent fact
				return []string{value}
			}
		default:
			return []string{fmt.Sprint(value)}
		}

		return nil
	}, nil
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

var operators = []Operator{In, NotIn, Exists, DoesNotExist, Gt, Lt, Regexp, InCIDR}

// versions are the variables that Gt and Lt compare as versions.
var versions = []string{"TalosVersion", "KubernetesVersion"}

func compilePredicate(variable string, operator Operator, values []string) (predicate, error) {
	if err := checkCount(operator, len(values)); err != nil {
		return nil, err
	}

	switch operator {
	case In, NotIn:
		isListed := func(value string) bool { return slices.Contains(values, value) }

		return func(facts []string) bool { return slices.ContainsFunc(facts, isListed) == (operator == In) }, nil
	case Exists, DoesNotExist:
		return func(facts []string) bool { return (len(facts) > 0) == (operator == Exists) }, nil
	case InCIDR:
		return compileCIDRs(values)
	case Regexp:
		expression, err := regexp.Compile(values[0])

		return anyOf(func(value string) bool { return expression.MatchString(value) }), err
	default:
		compare := compareIntegers
		if slices.Contains(versions, variable) {
			compare = compareVersions
		}

		return compare(values[0], map[Operator]int{Gt: 1, Lt: -1}[operator])
	}
}

// checkValues returns an error if one of the values to compare with cannot be one of the variable.
func checkValues(variable string, e Expression) error {
	types := []string{"controlplane", "worker"}

	for _, value := range e.Values {
		switch _, err := netip.ParsePrefix(value); {
		case e.Operator != In && e.Operator != NotIn:
		case variable == "MachineType" && !slices.Contains(types, value):
			return fmt.Errorf("unknown machine type %q; supported types: %s", value, strings.Join(types, ", "))
		case variable == "Addresses" && err == nil:
			return fmt.Errorf("%q is a CIDR; use %s", value, InCIDR)
		}
	}

	return nil
}

// checkCount returns an error if the operator does not take the number of values.
func checkCount(operator Operator, count int) error {
	switch operator {
	case In, NotIn, InCIDR:
		if count == 0 {
			return errors.New("requires at least one value")
		}
	case Exists, DoesNotExist:
		if count > 0 {
			return errors.New("takes no values")
		}
	default:
		if count != 1 {
			return fmt.Errorf("requires exactly one value, not %d", count)
		}
	}

	return nil
}

func anyOf(matches func(value string) bool) predicate {
	return func(values []string) bool { return slices.ContainsFunc(values, matches) }
}

// compileCIDRs matches addresses and subnets that one of the CIDRs contains.
func compileCIDRs(values []string) (predicate, error) {
	prefixes := make([]netip.Prefix, len(values))

	for i, value := range values {
		var err error
		if prefixes[i], err = cidrset.ParsePrefix(value); err != nil {
			return nil, err
		}
	}

	return anyOf(func(value string) bool {
		subnet, valid := machine.ParsePrefix(value)

		return valid && slices.ContainsFunc(prefixes, func(p netip.Prefix) bool {
			return p.Bits() <= subnet.Bits() && p.Contains(subnet.Addr())
		})
	}), nil
}

// compareIntegers matches integers for which cmp.Compare with the limit returns the wanted result.
func compareIntegers(limit string, wanted int) (predicate, error) {
	parsed, err := strconv.ParseInt(limit, 10, 64)
	if err != nil {
		return nil, fmt.Errorf("%q is not an integer, and other values of this key cannot be compared; use Regexp", limit)
	}

	return anyOf(func(value string) bool {
		n, err := strconv.ParseInt(value, 10, 64)

		return err == nil && cmp.Compare(n, parsed) == wanted
	}), nil
}

// compareVersions matches versions for which the comparison with the limit returns the wanted result. A limit without a
// patch version is equal to pre-releases, too: v1.14.0-beta.0 is less than 1.14.0, but not less than 1.14.
func compareVersions(limit string, wanted int) (predicate, error) {
	parsed, err := version.Parse(limit)
	if err != nil || parsed.String() != strings.TrimPrefix(limit, "v") { // Parse ignores what follows the numbers
		return nil, fmt.Errorf("%q is not a version such as 1.13 or v1.14.1", limit)
	}

	return anyOf(func(value string) bool {
		order, err := parsed.Compare(value)

		return err == nil && order == -wanted
	}), nil
}
