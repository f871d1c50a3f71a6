package rules

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	cloudproviderapi "k8s.io/cloud-provider/api"
)

// Set is a compiled list of rules. The nil Set changes nothing. A Set is safe for concurrent use.
type Set struct {
	rules []rule
}

type rule struct {
	name        string
	selector    *Selector
	labels      []entry
	annotations []entry
	taints      []entry
	metadata    []entry
	enforce     bool
	features    Features
}

// entry is a key of a rule and its template.
type entry struct {
	key  string
	text text
}

// kind is a map of a rule, with the checks of its keys and values.
type kind struct {
	name       string
	checkKey   func(key string) error
	checkValue func(key, value string) error
}

var (
	labelKind      = kind{"labels", checkKey, checkLabel}
	annotationKind = kind{"annotations", checkKey, func(string, string) error { return nil }}
	taintKind      = kind{"taints", checkTaintKey, checkTaint}
	metadataKind   = kind{"platformMetadata", checkField, checkMetadata}
)

// Compile returns the compiled rules, or all mistakes in them.
func Compile(rules []Rule) (*Set, []CompileError) {
	var (
		compiled Set
		errs     = checkNames(rules)
	)

	for i, source := range rules {
		c := compiler{index: i, name: nameOf(rules, i)}

		compiled.rules = append(compiled.rules, c.compile(source))
		errs = append(errs, c.errs...)
	}

	if len(errs) > 0 {
		return nil, errs
	}

	return &compiled, nil
}

// nameOf returns the name of a rule, or its position if it has none.
func nameOf(rules []Rule, index int) string {
	if name := rules[index].Name; name != "" {
		return name
	}

	return fmt.Sprintf("#%d", index+1)
}

// checkNames reports names that identify more than one rule. One of two such rules has the name in the configuration file: the error is reported there.
func checkNames(rules []Rule) []CompileError {
	var errs []CompileError

	first := map[string]int{}

	for i := range rules {
		name := nameOf(rules, i)

		other, duplicate := first[name]
		if !duplicate {
			first[name] = i

			continue
		}

		at := i
		if rules[i].Name == "" {
			at, other = other, i
		}

		errs = append(errs, CompileError{Path: []any{at, "name"}, Rule: name, Err: fmt.Errorf("duplicate name %q: rule number %d has it too", name, other+1)})
	}

	return errs
}

// compiler compiles one rule and collects the mistakes in it.
type compiler struct {
	index int
	name  string
	errs  []CompileError
}

func (c *compiler) fail(err error, path ...any) {
	c.errs = append(c.errs, CompileError{Path: append([]any{c.index}, path...), Rule: c.name, Err: err})
}

func (c *compiler) compile(source Rule) rule {
	selector, errs := CompileSelector(source.NodeSelector)
	for _, err := range errs {
		c.fail(err.Err, append([]any{"nodeSelector"}, err.Path...)...)
	}

	compiled := rule{
		name:        c.name,
		selector:    selector,
		labels:      c.entries(labelKind, source.Labels),
		annotations: c.entries(annotationKind, source.Annotations),
		taints:      c.entries(taintKind, source.Taints),
		metadata:    c.entries(metadataKind, source.PlatformMetadata),
		enforce:     source.Enforce,
		features:    source.Features,
	}

	seen := map[string]string{}

	for _, e := range compiled.metadata {
		name := strings.ToLower(e.key)
		if other, duplicate := seen[name]; duplicate {
			c.fail(fmt.Errorf("duplicate field: %s and %s", other, e.key), metadataKind.name, e.key)
		}

		seen[name] = e.key
	}

	return compiled
}

// entries compiles a map of the rule, in the order of its keys. The values of constant templates are checked here, all others when they are rendered.
func (c *compiler) entries(k kind, source map[string]string) []entry {
	var entries []entry

	for _, key := range slices.Sorted(maps.Keys(source)) {
		if err := k.checkKey(key); err != nil {
			c.fail(err, k.name, key)
		}

		compiled, err := compileText(source[key])
		if err == nil && compiled.template == nil {
			err = k.checkValue(key, compiled.constant)
		}

		if err != nil {
			c.fail(err, k.name, key)
		}

		entries = append(entries, entry{key: key, text: compiled})
	}

	return entries
}

// field is a field of the platform metadata that rules can replace.
type field struct {
	name string
	// of returns a pointer to the field: *string or *bool.
	of func(*runtime.PlatformMetadataSpec) any
}

// fields by their names in lower case: the names in Go and in YAML differ in case only.
var fields = map[string]field{
	"region":       {"Region", func(m *runtime.PlatformMetadataSpec) any { return &m.Region }},
	"zone":         {"Zone", func(m *runtime.PlatformMetadataSpec) any { return &m.Zone }},
	"instancetype": {"InstanceType", func(m *runtime.PlatformMetadataSpec) any { return &m.InstanceType }},
	"instanceid":   {"InstanceID", func(m *runtime.PlatformMetadataSpec) any { return &m.InstanceID }},
	"providerid":   {"ProviderID", func(m *runtime.PlatformMetadataSpec) any { return &m.ProviderID }},
	"internaldns":  {"InternalDNS", func(m *runtime.PlatformMetadataSpec) any { return &m.InternalDNS }},
	"externaldns":  {"ExternalDNS", func(m *runtime.PlatformMetadataSpec) any { return &m.ExternalDNS }},
	"spot":         {"Spot", func(m *runtime.PlatformMetadataSpec) any { return &m.Spot }},
}

// isIdentity reports whether the field identifies the machine.
func (f field) isIdentity() bool { return f.name == "InstanceID" || f.name == "ProviderID" }

// set sets the field to the value without leading and trailing white space.
func (f field) set(metadata *runtime.PlatformMetadataSpec, value string) error {
	value = strings.TrimSpace(value)

	switch target := f.of(metadata).(type) {
	case *string:
		*target = value
	case *bool:
		if value != "true" && value != "false" {
			return fmt.Errorf("%q is neither true nor false", value)
		}

		*target = value == "true"
	}

	return nil
}

func checkField(name string) error {
	lower := strings.ToLower(name)
	if lower == "hostname" || lower == "platform" {
		return fmt.Errorf("%s cannot be replaced", name)
	}

	if _, known := fields[lower]; !known {
		return fmt.Errorf("unknown field %q; supported fields: ExternalDNS, InstanceID, InstanceType, InternalDNS, ProviderID, Region, Spot, Zone", name)
	}

	return nil
}

func checkMetadata(name, value string) error {
	f, known := fields[strings.ToLower(name)]
	if !known {
		return nil
	}

	return f.set(&runtime.PlatformMetadataSpec{}, value)
}

// reservedKeys are labels and annotations that rules cannot set, and prefixes of such keys that end in "/" or "-", with the reason.
var reservedKeys = map[string]string{
	"talos.dev/owned-": "Talos stores its own records under it",
	cloudproviderapi.AnnotationAlphaProvidedIPAddr: "the kubelet sets it to its node IPs",
	"node-role.kubernetes.io/control-plane":        "Talos sets it, and CSR approval relies on it",
	"talos-ccm.node-restriction.kubernetes.io/":    "talos-ccm stores its own records under it",
}

func checkKey(key string) error {
	if errs := validation.IsQualifiedName(key); len(errs) > 0 {
		return fmt.Errorf("invalid key %q: %s", key, strings.Join(errs, "; "))
	}

	for reserved, reason := range reservedKeys {
		isPrefix := strings.TrimRight(reserved, "-/") != reserved

		if key == reserved || isPrefix && strings.HasPrefix(key, reserved) {
			return fmt.Errorf("key %q cannot be set: %s", key, reason)
		}
	}

	return nil
}

func checkLabel(_, value string) error {
	if errs := validation.IsValidLabelValue(value); len(errs) > 0 {
		return errors.New(strings.Join(errs, "; "))
	}

	return nil
}

// prohibitedTaints are set and removed by Kubernetes controllers and the cloud controller manager.
var prohibitedTaints = []string{
	corev1.TaintNodeNotReady, corev1.TaintNodeUnreachable, corev1.TaintNodeMemoryPressure, corev1.TaintNodeDiskPressure,
	corev1.TaintNodeNetworkUnavailable, corev1.TaintNodePIDPressure, cloudproviderapi.TaintExternalCloudProvider, cloudproviderapi.TaintNodeShutdown,
}

func checkTaintKey(key string) error {
	if slices.Contains(prohibitedTaints, key) {
		return fmt.Errorf("taint %q cannot be set: Kubernetes controllers set and remove it", key)
	}

	if errs := validation.IsQualifiedName(key); len(errs) > 0 {
		return fmt.Errorf("invalid key %q: %s", key, strings.Join(errs, "; "))
	}

	return nil
}

func checkTaint(key, value string) error {
	_, err := parseTaint(key, value)

	return err
}

// parseTaint parses "value:Effect" or "Effect".
func parseTaint(key, text string) (corev1.Taint, error) {
	value, effect, found := strings.Cut(text, ":")
	if !found {
		value, effect = "", text
	}

	taint := corev1.Taint{Key: key, Value: value, Effect: corev1.TaintEffect(effect)}

	switch taint.Effect {
	case corev1.TaintEffectNoSchedule, corev1.TaintEffectPreferNoSchedule, corev1.TaintEffectNoExecute:
		return taint, checkLabel(key, value)
	default:
		return taint, fmt.Errorf(`%q is not "value:Effect" or "Effect", where Effect is NoSchedule, PreferNoSchedule or NoExecute`, text)
	}
}
