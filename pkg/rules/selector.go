package rules

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
)

// Selector is a compiled list of terms. The nil Selector selects everything.
type Selector struct {
	terms       [][]requirement
	readsLabels bool
}

// requirement is one compiled expression.
type requirement struct {
	fact  fact
	holds func(value string, present bool) bool
}

// subject is what selectors look at: the facts, with the metadata as rules have left it.
type subject struct {
	facts    *Facts
	platform *runtime.PlatformMetadataSpec
}

// fact reads one fact, and tells whether there is one.
type fact func(subject) (value string, present bool)

// plainFact reads a fact that is absent when it is empty, as upstream.
type plainFact func(subject) string

func (f plainFact) read(s subject) (string, bool) {
	value := f(s)

	return value, value != ""
}

// Prefixes of keys that lead into a map.
const (
	tagKey       = "tags."
	extensionKey = "extensions."
	labelKey     = "labels."
)

// schematicExtension is the name of the extension that Image Factory adds to every image; its version is the schematic's ID.
const schematicExtension = "schematic"

// plainFacts are those with a name of their own, in lower case. The metadata's and SMBIOS's are the names of Talos's resources, whose spelling in Go
// and in YAML differs by case alone.
var plainFacts = map[string]plainFact{
	"platform":     func(s subject) string { return s.platform.Platform },
	"hostname":     func(s subject) string { return hostname(s.facts, s.platform) },
	"region":       func(s subject) string { return s.platform.Region },
	"zone":         func(s subject) string { return s.platform.Zone },
	"instancetype": func(s subject) string { return s.platform.InstanceType },
	"instanceid":   func(s subject) string { return s.platform.InstanceID },
	"providerid":   func(s subject) string { return s.platform.ProviderID },
	"spot":         func(s subject) string { return strconv.FormatBool(s.platform.Spot) },
	"internaldns":  func(s subject) string { return s.platform.InternalDNS },
	"externaldns":  func(s subject) string { return s.platform.ExternalDNS },

	"manufacturer": func(s subject) string { return s.facts.Machine.System.Manufacturer },
	"productname":  func(s subject) string { return s.facts.Machine.System.ProductName },
	"version":      func(s subject) string { return s.facts.Machine.System.Version },
	"serialnumber": func(s subject) string { return s.facts.Machine.System.SerialNumber },
	"uuid":         func(s subject) string { return s.facts.Machine.System.UUID },
	"wakeuptype":   func(s subject) string { return s.facts.Machine.System.WakeUpType },
	"skunumber":    func(s subject) string { return s.facts.Machine.System.SKUNumber },

	"nodename":     func(s subject) string { return s.facts.Machine.Nodename },
	"clustername":  func(s subject) string { return s.facts.Machine.ClusterName },
	"machinetype":  func(s subject) string { return machineType(s.facts) },
	"talosversion": func(s subject) string { return s.facts.Machine.TalosVersion },
	"schematic":    func(s subject) string { return s.facts.Machine.Extensions[schematicExtension] },
	"arch":         func(s subject) string { return s.facts.Architecture },
	"architecture": func(s subject) string { return s.facts.Architecture },
}

// Keys are the keys that can be selected, in lower case; those that end in a dot are followed by a name.
func Keys() []string {
	return append(slices.Sorted(maps.Keys(plainFacts)), extensionKey, tagKey)
}

// hostname is the metadata's, as upstream; where the platform gives none, the machine's own.
func hostname(facts *Facts, platform *runtime.PlatformMetadataSpec) string {
	if platform.Hostname != "" {
		return platform.Hostname
	}

	return facts.Machine.Hostname
}

func machineType(facts *Facts) string {
	if facts.Machine.Type == 0 {
		return ""
	}

	if facts.Machine.Type.IsControlPlane() {
		return "controlplane"
	}

	return facts.Machine.Type.String()
}

// ReadsLabels tells whether what is selected depends on the Node's labels.
func (s *Selector) ReadsLabels() bool { return s != nil && s.readsLabels }

// Matches tells whether any of the terms holds.
func (s *Selector) Matches(facts Facts) bool {
	return s.matches(subject{facts: &facts, platform: &facts.Machine.Platform})
}

func (s *Selector) matches(on subject) bool {
	if s == nil || len(s.terms) == 0 {
		return true
	}

	return slices.ContainsFunc(s.terms, func(term []requirement) bool {
		return len(term) > 0 && !slices.ContainsFunc(term, func(r requirement) bool {
			return !r.holds(r.fact(on))
		})
	})
}

// CompileSelector compiles terms over what a machine says. The errors' paths begin with the term's index. Without terms the Selector is nil.
func CompileSelector(terms []SelectorTerm) (*Selector, []CompileError) {
	return compileSelector(terms, plainKeys{})
}

// CompileNodeSelector compiles terms that may also look at the Node's labels, as "labels.<key>".
func CompileNodeSelector(terms []SelectorTerm) (*Selector, []CompileError) {
	return compileSelector(terms, nodeKeys{})
}

// keys finds the fact that a key names.
type keys interface {
	find(key string) (fact, error)
}

type plainKeys struct{}

func (plainKeys) find(key string) (fact, error) {
	lower := strings.ToLower(key)

	switch {
	case plainFacts[lower] != nil:
		return plainFacts[lower].read, nil
	case strings.HasPrefix(lower, tagKey) && len(key) > len(tagKey):
		name := key[len(tagKey):]

		return func(s subject) (string, bool) { return foldedEntry(s.platform.Tags, name) }, nil
	case strings.HasPrefix(lower, extensionKey) && len(key) > len(extensionKey):
		name := key[len(extensionKey):]

		return func(s subject) (string, bool) { return foldedEntry(s.facts.Machine.Extensions, name) }, nil
	}

	return nil, fmt.Errorf("unknown key %q: there are %s (with a name after the dot)", key, strings.Join(Keys(), ", "))
}

type nodeKeys struct{ plainKeys }

func (k nodeKeys) find(key string) (fact, error) {
	if isLabelKey(key) {
		name := key[len(labelKey):]

		return func(s subject) (string, bool) {
			value, present := s.facts.NodeLabels[name]

			return value, present
		}, nil
	}

	return k.plainKeys.find(key)
}

func isLabelKey(key string) bool {
	return len(key) > len(labelKey) && strings.EqualFold(key[:len(labelKey)], labelKey)
}

// foldedEntry is an entry by its name, or by its name in any case: then the first of several. It may be empty.
func foldedEntry(entries map[string]string, name string) (value string, present bool) {
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

func compileSelector(terms []SelectorTerm, keys keys) (*Selector, []CompileError) {
	if len(terms) == 0 {
		return nil, nil
	}

	var (
		selector = &Selector{terms: make([][]requirement, len(terms))}
		errs     []CompileError
	)

	for i, term := range terms {
		for j, expression := range term.MatchExpressions {
			r, problems := expression.compile(keys)
			selector.terms[i] = append(selector.terms[i], r)
			selector.readsLabels = selector.readsLabels || isLabelKey(expression.Key)

			for _, p := range problems {
				errs = append(errs, CompileError{Path: append([]any{i, "matchExpressions", j}, p.Path...), Err: p.Err})
			}
		}
	}

	if len(errs) > 0 {
		return nil, errs
	}

	return selector, nil
}

func (e Expression) compile(keys keys) (r requirement, errs []CompileError) {
	var err error

	if r.fact, err = keys.find(e.Key); err != nil {
		errs = append(errs, CompileError{Path: []any{"key"}, Err: err})
	}

	compile, known := operators[e.Operator]
	if !known {
		return r, append(errs, CompileError{Path: []any{"operator"}, Err: fmt.Errorf("unknown operator %q: there are In, NotIn, Exists, DoesNotExist, Gt, Lt and Regexp", e.Operator)})
	}

	if r.holds, err = compile(e.Values); err != nil {
		errs = append(errs, CompileError{Path: []any{"values"}, Err: fmt.Errorf("operator %s: %w", e.Operator, err)})
	}

	return r, errs
}

// operators have the semantics of Kubernetes' node selectors: NotIn and DoesNotExist hold for what is absent, all others do not, and Gt and Lt
// compare integers and hold for nothing else.
var operators = map[Operator]func(values []string) (func(value string, present bool) bool, error){
	In: func(values []string) (func(string, bool) bool, error) {
		return func(value string, present bool) bool { return present && slices.Contains(values, value) }, atLeastOne(values)
	},
	NotIn: func(values []string) (func(string, bool) bool, error) {
		return func(value string, present bool) bool { return !present || !slices.Contains(values, value) }, atLeastOne(values)
	},
	Exists: func(values []string) (func(string, bool) bool, error) {
		return func(_ string, present bool) bool { return present }, none(values)
	},
	DoesNotExist: func(values []string) (func(string, bool) bool, error) {
		return func(_ string, present bool) bool { return !present }, none(values)
	},
	Gt:     func(values []string) (func(string, bool) bool, error) { return compareIntegers(values, 1) },
	Lt:     func(values []string) (func(string, bool) bool, error) { return compareIntegers(values, -1) },
	Regexp: matchRegexp,
}

func atLeastOne(values []string) error {
	if len(values) == 0 {
		return errors.New("at least one value is needed")
	}

	return nil
}

func none(values []string) error {
	if len(values) > 0 {
		return errors.New("no values can be given")
	}

	return nil
}

func theOnly(values []string) (string, error) {
	if len(values) != 1 {
		return "", fmt.Errorf("exactly one value is needed, not %d", len(values))
	}

	return values[0], nil
}

func compareIntegers(values []string, wanted int) (func(string, bool) bool, error) {
	value, err := theOnly(values)
	if err != nil {
		return nil, err
	}

	limit, err := strconv.ParseInt(value, 10, 64)
	if err != nil {
		return nil, fmt.Errorf("%q is no integer", value)
	}

	return func(value string, _ bool) bool {
		n, err := strconv.ParseInt(value, 10, 64)

		return err == nil && ((wanted > 0 && n > limit) || (wanted < 0 && n < limit))
	}, nil
}

// matchRegexp matches nothing that is longer than maxText: a machine may say as much as a message holds, and a match takes time for each byte.
func matchRegexp(values []string) (func(string, bool) bool, error) {
	source, err := theOnly(values)
	if err != nil {
		return nil, err
	}

	expression, err := compilePattern(source)
	if err != nil {
		return nil, err
	}

	return func(value string, present bool) bool {
		return present && len(value) <= maxText && expression.MatchString(value)
	}, nil
}
