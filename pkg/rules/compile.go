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

// Rules are compiled rules. The nil Rules change nothing. They are safe for concurrent use.
type Set struct {
	rules []rule
}

type rule struct {
	name        string
	selector    *Selector
	labels      []entry
	annotations []entry
	taints      []entry
	platform    []replacement
	enforce     bool
	features    Features
}

// entry is a key with its template.
type entry struct {
	key  string
	text text
}

// replacement is a field of the metadata with its template.
type replacement struct {
	entry

	field field
}

// field is one of the metadata's fields that rules can replace.
type field struct {
	name     string
	identity bool
	set      func(meta *runtime.PlatformMetadataSpec, value string) error
}

func textField(name string, of func(*runtime.PlatformMetadataSpec) *string) field {
	return field{name: name, set: func(meta *runtime.PlatformMetadataSpec, value string) error {
		*of(meta) = value

		return nil
	}}
}

func identityField(name string, of func(*runtime.PlatformMetadataSpec) *string) field {
	f := textField(name, of)
	f.identity = true

	return f
}

// fields are by their names in lower case: Go and YAML spell them differently by case alone.
var fields = func() map[string]field {
	byName := map[string]field{}

	for _, f := range []field{
		textField("Region", func(m *runtime.PlatformMetadataSpec) *string { return &m.Region }),
		textField("Zone", func(m *runtime.PlatformMetadataSpec) *string { return &m.Zone }),
		textField("InstanceType", func(m *runtime.PlatformMetadataSpec) *string { return &m.InstanceType }),
		identityField("InstanceID", func(m *runtime.PlatformMetadataSpec) *string { return &m.InstanceID }),
		identityField("ProviderID", func(m *runtime.PlatformMetadataSpec) *string { return &m.ProviderID }),
		textField("InternalDNS", func(m *runtime.PlatformMetadataSpec) *string { return &m.InternalDNS }),
		textField("ExternalDNS", func(m *runtime.PlatformMetadataSpec) *string { return &m.ExternalDNS }),
		{name: "Spot", set: setSpot},
	} {
		byName[strings.ToLower(f.name)] = f
	}

	return byName
}()

func setSpot(meta *runtime.PlatformMetadataSpec, value string) error {
	switch value {
	case "true":
		meta.Spot = true
	case "false":
		meta.Spot = false
	default:
		return errors.New("is neither true nor false")
	}

	return nil
}

// prohibitedTaints are set by Kubernetes' own controllers and the cloud controller manager itself.
var prohibitedTaints = []string{
	corev1.TaintNodeNotReady, corev1.TaintNodeUnreachable, corev1.TaintNodeMemoryPressure, corev1.TaintNodeDiskPressure,
	corev1.TaintNodeNetworkUnavailable, corev1.TaintNodePIDPressure, cloudproviderapi.TaintExternalCloudProvider, cloudproviderapi.TaintNodeShutdown,
}

// reservedKeys are labels and annotations that others live by, and prefixes of them.
var reservedKeys = map[string]string{
	"talos.dev/owned-": "Talos keeps its own records there",
	cloudproviderapi.AnnotationAlphaProvidedIPAddr: "the kubelet says there which addresses it has",
	"node-role.kubernetes.io/control-plane":        "Talos sets it, and the approval of certificates relies on it",
	"talos-ccm.node-restriction.kubernetes.io/":    "talos-ccm keeps its own records there",
}

// Compile compiles rules, or returns all mistakes in them.
func Compile(rules []Rule) (*Set, []CompileError) {
	var (
		compiled Set
		errs     = duplicates(rules)
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

// nameOf is what a rule is called: one without a name by its number.
func nameOf(rules []Rule, index int) string {
	if name := rules[index].Name; name != "" {
		return name
	}

	return fmt.Sprintf("#%d", index+1)
}

// duplicates are the names of rules that others are called by.
func duplicates(rules []Rule) []CompileError {
	var errs []CompileError

	first := map[string]int{}

	for i := range rules {
		name := nameOf(rules, i)

		other, taken := first[name]
		if !taken {
			first[name] = i

			continue
		}

		at := i
		if rules[i].Name == "" {
			at, other = other, i
		}

		errs = append(errs, CompileError{Path: []any{at, "name"}, Rule: name, Err: fmt.Errorf("there is another rule %q: number %d", name, other+1)})
	}

	return errs
}

// compiler compiles one rule.
type compiler struct {
	index int
	name  string
	errs  []CompileError
}

func (c *compiler) refuse(err error, path ...any) {
	c.errs = append(c.errs, CompileError{Path: append([]any{c.index}, path...), Rule: c.name, Err: err})
}

func (c *compiler) compile(source Rule) rule {
	selector, errs := CompileSelector(source.NodeSelector)
	for _, err := range errs {
		c.refuse(err.Err, append([]any{"nodeSelector"}, err.Path...)...)
	}

	return rule{
		name:        c.name,
		selector:    selector,
		labels:      c.entries("labels", source.Labels, checkKey, checkLabel),
		annotations: c.entries("annotations", source.Annotations, checkKey, checkNothing),
		taints:      c.entries("taints", source.Taints, checkTaintKey, checkTaint),
		platform:    c.replacements(source.PlatformMetadata),
		enforce:     source.Enforce,
		features:    source.Features,
	}
}

// entries compiles a map in the order of its keys. A value that is known already is checked already.
func (c *compiler) entries(kind string, source map[string]string, checkKey, checkValue func(string) error) []entry {
	var entries []entry

	for _, key := range slices.Sorted(maps.Keys(source)) {
		if err := checkKey(key); err != nil {
			c.refuse(err, kind, key)
		}

		compiled, err := compileText(source[key])
		if err == nil && compiled.template == nil {
			err = checkValue(compiled.constant)
		}

		if err != nil {
			c.refuse(err, kind, key)
		}

		entries = append(entries, entry{key: key, text: compiled})
	}

	return entries
}

func (c *compiler) replacements(source map[string]string) []replacement {
	const kind = "platformMetadata"

	var replacements []replacement

	seen := map[string]string{}

	for _, e := range c.entries(kind, source, checkField, checkNothing) {
		f, known := fields[strings.ToLower(e.key)]
		if !known {
			continue
		}

		if other, twice := seen[f.name]; twice {
			c.refuse(fmt.Errorf("%s is replaced twice: as %s and as %s", f.name, other, e.key), kind, e.key)
		}

		if e.text.template == nil {
			if err := f.set(new(runtime.PlatformMetadataSpec), strings.TrimSpace(e.text.constant)); err != nil {
				c.refuse(fmt.Errorf("%q %w", e.text.constant, err), kind, e.key)
			}
		}

		seen[f.name] = e.key
		replacements = append(replacements, replacement{entry: e, field: f})
	}

	return replacements
}

func checkField(name string) error {
	switch lower := strings.ToLower(name); {
	case lower == "hostname" || lower == "platform":
		return fmt.Errorf("%s cannot be replaced", name)
	case fields[lower].set == nil:
		return fmt.Errorf("unknown field %q: there are ExternalDNS, InstanceID, InstanceType, InternalDNS, ProviderID, Region, Spot and Zone", name)
	}

	return nil
}

func checkKey(key string) error {
	if why := validation.IsQualifiedName(key); len(why) > 0 {
		return fmt.Errorf("key %q: %s", key, strings.Join(why, "; "))
	}

	for reserved, why := range reservedKeys {
		prefix := strings.TrimRight(reserved, "-/") != reserved

		if key == reserved || prefix && strings.HasPrefix(key, reserved) {
			return fmt.Errorf("key %q cannot be set: %s", key, why)
		}
	}

	return nil
}

func checkTaintKey(key string) error {
	if slices.Contains(prohibitedTaints, key) {
		return fmt.Errorf("taint %q cannot be set: Kubernetes' own controllers set and remove it", key)
	}

	if why := validation.IsQualifiedName(key); len(why) > 0 {
		return fmt.Errorf("key %q: %s", key, strings.Join(why, "; "))
	}

	return nil
}

func checkNothing(string) error { return nil }

func checkLabel(value string) error {
	if why := validation.IsValidLabelValue(value); len(why) > 0 {
		return errors.New(strings.Join(why, "; "))
	}

	return nil
}

func checkTaint(value string) error {
	_, err := parseTaint("", value)

	return err
}

// parseTaint reads "value:Effect" or "Effect".
func parseTaint(key, text string) (corev1.Taint, error) {
	value, effect, both := strings.Cut(text, ":")
	if !both {
		value, effect = "", text
	}

	taint := corev1.Taint{Key: key, Value: value, Effect: corev1.TaintEffect(effect)}

	if !slices.Contains([]corev1.TaintEffect{corev1.TaintEffectNoSchedule, corev1.TaintEffectPreferNoSchedule, corev1.TaintEffectNoExecute}, taint.Effect) {
		return taint, fmt.Errorf(`%q is neither "value:Effect" nor "Effect", with NoSchedule, PreferNoSchedule or NoExecute for Effect`, text)
	}

	return taint, checkLabel(value)
}
