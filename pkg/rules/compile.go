package rules

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"text/template/parse"
	"unicode"

	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	cloudproviderapi "k8s.io/cloud-provider/api"

	"github.com/talos-ccm/talos-ccm/pkg/cidrset"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

// Set is a compiled list of rules. The nil Set changes nothing. A Set is safe for concurrent use.
type Set struct {
	rules                    []*rule
	factKinds, identityFacts machine.FactKinds
}

// FactKinds returns the kinds of facts that the rules read.
func (s *Set) FactKinds() machine.FactKinds {
	if s == nil {
		return 0
	}

	return s.factKinds
}

// IdentityFacts returns the kinds of facts that may determine the providerID or the instance ID that rules set.
func (s *Set) IdentityFacts() machine.FactKinds {
	if s == nil {
		return 0
	}

	return s.identityFacts
}

// SetAddresses reports whether a rule sets addresses.
func (s *Set) SetAddresses() bool {
	return s != nil && slices.ContainsFunc(s.rules, func(r *rule) bool {
		return slices.ContainsFunc(r.entries, func(e entry) bool { return e.kind == addresses })
	})
}

type rule struct {
	name     string
	selector *Selector
	entries  []entry
	tables   Tables
	// tags is nil if the rule sets no labels from tags.
	tags      *regexp.Regexp
	tagPrefix string
	enforce   bool
	features  Features
	cidrs     []netip.Prefix
	// factKinds are read by the selector and the templates.
	factKinds machine.FactKinds
}

type entry struct {
	kind     *kind
	key      string
	template *parse.ListNode
}

// position returns the position in the rule, such as "labels[team]".
func (e entry) position() string { return fmt.Sprintf("%s[%s]", e.kind.name, e.key) }

// kind is a map of a rule.
type kind struct {
	name     string
	checkKey func(key string) error
	// set adds a value to a result, or returns why the value is invalid.
	set func(result *Result, r *rule, key, value string) error
}

var (
	labels = &kind{"labels", checkKey, func(result *Result, r *rule, key, value string) error {
		err := checkLabelValue(value)
		if err == nil {
			result.Labels[key] = Value{Value: value, Rule: r.name}
		}

		return err
	}}
	annotations = &kind{"annotations", checkKey, func(result *Result, r *rule, key, value string) error {
		result.Annotations[key] = Value{Value: value, Rule: r.name}

		return nil
	}}
	taints    = &kind{"taints", checkTaintKey, setTaint}
	metadata  = &kind{"platformMetadata", checkField, setField}
	addresses = &kind{"addresses", checkAddressType, setAddresses}
)

// Compile returns the compiled rules, or all errors in them. The path is the field path of the rules. They may read the
// tables, which must not change any more.
func Compile(rules []Rule, tables Tables, path *field.Path) (*Set, field.ErrorList) {
	var (
		compiled      Set
		metadataFacts machine.FactKinds // of the rules that replace metadata, which later rules can read
		errs          field.ErrorList
	)

	first := map[string]int{}

	for i, source := range rules {
		r := &rule{name: cmp.Or(source.Name, fmt.Sprintf("#%d", i+1)), tables: tables, enforce: source.Enforce, features: source.Features}

		if other, duplicate := first[r.name]; !duplicate {
			first[r.name] = i
		} else {
			// One of the two rules has the name in the configuration file: the error is reported there.
			at := i
			if source.Name == "" {
				at, other = other, i
			}

			errs = append(errs, invalid(path.Index(at).Child("name"), fmt.Errorf("duplicate name %q: rule number %d has it too", r.name, other+1)))
		}

		errs = append(errs, r.compile(source, path.Index(i))...)
		compiled.rules = append(compiled.rules, r)
		compiled.factKinds |= r.factKinds

		if len(source.PlatformMetadata) > 0 {
			metadataFacts |= r.factKinds
		}

		if slices.ContainsFunc(slices.Collect(maps.Keys(source.PlatformMetadata)), isIdentity) {
			compiled.identityFacts = metadataFacts
		}
	}

	if len(errs) > 0 {
		return nil, errs
	}

	return &compiled, nil
}

// invalid returns an error whose message includes the value.
func invalid(path *field.Path, err error) *field.Error {
	return field.Invalid(path, field.OmitValueType{}, err.Error())
}

func (r *rule) compile(source Rule, path *field.Path) (errs field.ErrorList) {
	r.selector, errs = CompileSelector(source.NodeSelector, path.Child("nodeSelector"))
	r.factKinds = r.selector.FactKinds()
	errs = append(errs, r.add(labels, source.Labels, path)...)
	errs = append(errs, r.compileTags(source.LabelsFromTags, path.Child("labelsFromTags"))...)
	errs = append(errs, r.add(annotations, source.Annotations, path)...)
	errs = append(errs, r.add(taints, source.Taints, path)...)
	errs = append(errs, r.add(metadata, source.PlatformMetadata, path)...)
	errs = append(errs, r.compileCIDRs(source, path)...)
	errs = append(errs, r.add(addresses, source.Addresses, path)...)

	seen := map[string]string{}

	for _, key := range slices.Sorted(maps.Keys(source.PlatformMetadata)) {
		name := strings.ToLower(key)
		if other, duplicate := seen[name]; duplicate {
			errs = append(errs, invalid(path.Child(metadata.name).Key(key), fmt.Errorf("duplicate field: %s and %s", other, key)))
		}

		seen[name] = key
	}

	return errs
}

func (r *rule) compileCIDRs(source Rule, path *field.Path) (errs field.ErrorList) {
	if len(source.Addresses) > 0 && len(source.AddressCIDRs) == 0 {
		errs = append(errs, field.Required(path.Child("addressCIDRs"), "must contain the rule's addresses"))
	}

	for i, s := range source.AddressCIDRs {
		cidr, err := cidrset.ParsePrefix(s)
		if err == nil && cidr.Bits() == 0 {
			err = fmt.Errorf("%q must not contain all addresses", s)
		}

		if err != nil {
			errs = append(errs, invalid(path.Child("addressCIDRs").Index(i), err))
		}

		r.cidrs = append(r.cidrs, cidr)
	}

	if len(errs) > 0 { // that an address is in none of the CIDRs would be misleading
		r.cidrs = []netip.Prefix{netip.PrefixFrom(netip.IPv4Unspecified(), 0), netip.PrefixFrom(netip.IPv6Unspecified(), 0)}
	}

	return errs
}

// add compiles a map of the rule, in the order of its keys. The values of constants are checked here, all others when
// they are rendered.
func (r *rule) add(k *kind, source map[string]string, path *field.Path) (errs field.ErrorList) {
	isAction := func(n parse.Node) bool { return n.Type() != parse.NodeText }

	for _, key := range slices.Sorted(maps.Keys(source)) {
		at := path.Child(k.name).Key(key)

		if err := k.checkKey(key); err != nil {
			errs = append(errs, invalid(at, err))
		}

		compiled, factKinds, err := compileTemplate(source[key], r.tables)
		r.factKinds |= factKinds

		if err == nil && !slices.ContainsFunc(compiled.Nodes, isAction) {
			err = k.checkConstant(r, key, compiled.String())
		}

		if err != nil {
			errs = append(errs, invalid(at, err))
		}

		r.entries = append(r.entries, entry{kind: k, key: key, template: compiled})
	}

	return errs
}

// checkConstant returns why the value of a template without actions is invalid. The error contains the value.
func (k *kind) checkConstant(r *rule, key, value string) error {
	result := newResult(runtime.PlatformMetadataSpec{})

	err := k.set(&result, r, key, value)
	if err == nil && k == metadata {
		err = checkMetadata(fieldName(key), strings.TrimSpace(value))
	}

	if err != nil && !strings.Contains(err.Error(), strconv.Quote(value)) {
		err = fmt.Errorf("%q: %w", value, err)
	}

	return err
}

// checkMetadata returns why Nodes cannot have a value of the metadata. The result of a template is checked when the Node
// is written, since later rules can replace it.
func checkMetadata(name, value string) error {
	switch name {
	case "ProviderID":
		if !IsProviderID(value) {
			return fmt.Errorf("%q does not identify an instance; the form is <provider>://<ID>", value)
		}
	case "Region", "Zone", "InstanceType":
		return checkLabelValue(value)
	case "InternalDNS", "ExternalDNS":
		if value != "" && !machine.ValidName(machine.CanonicalName(value)) {
			return errors.New(string(machine.NameInvalid))
		}
	}

	return nil
}

// fields are the fields of the platform metadata that rules can replace.
var fields = []string{"ExternalDNS", "InstanceID", "InstanceType", "InternalDNS", "ProviderID", "Region", "Spot", "Zone"}

// fieldName returns the name of a field; empty if it is unknown. The names in Go and in YAML differ in case only.
func fieldName(key string) string {
	for _, name := range fields {
		if strings.EqualFold(name, key) {
			return name
		}
	}

	return ""
}

func isIdentity(key string) bool {
	return slices.Contains([]string{"ProviderID", "InstanceID"}, fieldName(key))
}

func checkField(key string) error {
	switch {
	case fieldName(key) != "":
		return nil
	case strings.EqualFold(key, "hostname"), strings.EqualFold(key, "platform"):
		return fmt.Errorf("%s cannot be replaced", key)
	default:
		return fmt.Errorf("unknown field %q; supported fields: %s", key, strings.Join(fields, ", "))
	}
}

// IsProviderID reports whether providerID has the form <provider>://<ID> (k8s.io/cloud-provider, GetInstanceProviderID).
func IsProviderID(providerID string) bool {
	provider, id, _ := strings.Cut(providerID, "://")

	return provider != "" && id != "" && !strings.HasSuffix(id, "/")
}

// setField replaces a field; leading and trailing white space of the value does not count.
func setField(result *Result, r *rule, key, value string) error {
	name, value := fieldName(key), strings.TrimSpace(value)

	switch f := reflect.ValueOf(&result.Platform).Elem().FieldByName(name); {
	case !f.IsValid(): // checkField reports it
	case f.Kind() == reflect.String:
		f.SetString(value)
	case value != "true" && value != "false":
		return fmt.Errorf("%q is neither true nor false", value)
	default:
		f.SetBool(value == "true")
	}

	result.Replaced[name] = r.name

	return nil
}

// reservedKeys are labels and annotations that rules cannot set, and prefixes of such keys that end in "/" or "-", with the reason.
var reservedKeys = map[string]string{
	"talos.dev/owned-": "Talos stores its own records under it",
	cloudproviderapi.AnnotationAlphaProvidedIPAddr:           "the kubelet sets it to its node IPs",
	"node-role.kubernetes.io/control-plane":                  "Talos sets it, and CSR approval relies on it",
	"talos-ccm.node-restriction.kubernetes.io/":              "talos-ccm stores its own records under it",
	corev1.LabelHostname:                                     "the kubelet sets it",
	corev1.LabelOSStable:                                     "the kubelet sets it",
	corev1.LabelArchStable:                                   "the kubelet sets it",
	"beta.kubernetes.io/os":                                  "Kubernetes copies it from kubernetes.io/os",
	"beta.kubernetes.io/arch":                                "Kubernetes copies it from kubernetes.io/arch",
	"csi.volume.kubernetes.io/nodeid":                        "the kubelet sets it",
	"volumes.kubernetes.io/controller-managed-attach-detach": "the kubelet sets it",
}

func checkKey(key string) error {
	for reserved, reason := range reservedKeys {
		isPrefix := strings.TrimRight(reserved, "-/") != reserved

		if key == reserved || isPrefix && strings.HasPrefix(key, reserved) {
			return fmt.Errorf("key %.80q cannot be set: %s", key, reason)
		}
	}

	return checkQualifiedName(key)
}

func checkQualifiedName(key string) error {
	if errs := validation.IsQualifiedName(key); len(errs) > 0 {
		return fmt.Errorf("invalid key %.80q: %s", key, strings.Join(errs, "; "))
	}

	return nil
}

func checkLabelValue(value string) error {
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

	return checkQualifiedName(key)
}

var taintEffects = []string{string(corev1.TaintEffectNoSchedule), string(corev1.TaintEffectPreferNoSchedule), string(corev1.TaintEffectNoExecute)}

// setTaint parses "value:Effect" or "Effect". The taint replaces the one with the same key and effect.
func setTaint(result *Result, r *rule, key, text string) error {
	value, effect, found := strings.Cut(text, ":")
	if !found {
		value, effect = "", text
	}

	taint := Taint{Taint: corev1.Taint{Key: key, Value: value, Effect: corev1.TaintEffect(effect)}, Rule: r.name, Enforce: r.enforce}

	if !slices.Contains(taintEffects, effect) {
		return fmt.Errorf(`%q is not "value:Effect" or "Effect", where Effect is NoSchedule, PreferNoSchedule or NoExecute`, text)
	}

	if err := checkLabelValue(value); err != nil {
		return err
	}

	isReplaced := func(other Taint) bool { return other.MatchTaint(&taint.Taint) }
	result.Taints = append(slices.DeleteFunc(result.Taints, isReplaced), taint)

	return nil
}

// maxAddresses limits what root on a machine can have listed, if the template reads what the machine reports.
const maxAddresses = 16

func checkAddressType(key string) error {
	if types := []string{string(corev1.NodeExternalIP), string(corev1.NodeInternalIP)}; !slices.Contains(types, key) {
		return fmt.Errorf("unknown type %q; supported types: %s", key, strings.Join(types, ", "))
	}

	return nil
}

// setAddresses replaces the addresses of a type. If one is invalid, none is set.
func setAddresses(result *Result, r *rule, key, text string) error {
	list := strings.FieldsFunc(text, func(c rune) bool { return c == ',' || unicode.IsSpace(c) })
	if len(list) == 0 || len(list) > maxAddresses {
		return fmt.Errorf("must be 1 to %d IP addresses", maxAddresses)
	}

	set := slices.DeleteFunc(slices.Clone(result.Addresses), func(a Address) bool { return string(a.Type) == key })

	for _, s := range list {
		ip, err := netip.ParseAddr(s)
		if ip = ip.Unmap(); err != nil || !ip.IsGlobalUnicast() {
			return fmt.Errorf("%.80q is not a unicast IP address", s)
		}

		// No CIDR contains an address with a zone.
		if !slices.ContainsFunc(r.cidrs, func(cidr netip.Prefix) bool { return cidr.Contains(ip) }) {
			return fmt.Errorf("%.80q is in none of the rule's addressCIDRs", s)
		}

		set = append(set, Address{corev1.NodeAddressType(key), ip, r.name})
	}

	result.Addresses = set

	return nil
}
