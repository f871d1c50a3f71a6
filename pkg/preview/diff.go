package preview

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/siderolabs/gen/xslices"
	corev1 "k8s.io/api/core/v1"

	nodecontroller "github.com/talos-ccm/talos-ccm/pkg/controllers/node"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/noderecord"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/pkg/rules"
)

// Comparison compares the Nodes of a cluster with what talos-ccm would write to them. Programs read it as JSON or YAML;
// keep the format stable.
type Comparison struct {
	Lease Lease    `json:"lease"`
	Nodes []Report `json:"nodes"`
	// Full makes the table contain the Nodes that would not change.
	Full bool `json:"-"`
}

// Lease is the lease that talos-ccm and the upstream Talos CCM use.
type Lease struct {
	Name string `json:"name"`
	// Holder is empty if no controller manager holds the lease.
	Holder string `json:"holder,omitempty"`
}

// Change is a value that talos-ccm would add, remove or replace.
type Change struct {
	// Field is providerID, address, label, annotation or taint, or "address order" if only the order changes.
	Field string `json:"field"`
	// Key is the type of an address, the key of a label or an annotation, or the key and the effect of a taint.
	Key string `json:"key,omitempty"`
	// Before is nil for an added value.
	Before *string `json:"before,omitempty"`
	// After is nil for a removed value.
	After *string `json:"after,omitempty"`
	// From is the origin of an added value: the machine, or a rule and, for a taint, when it is set. It is empty for a
	// value that only records what talos-ccm has written.
	From string `json:"from,omitempty"`
}

const (
	fieldProviderID = "providerID"
	fieldAddress    = "address"
	fieldLabel      = "label"
	fieldAnnotation = "annotation"
	fieldTaint      = "taint"
)

// Compare compares all Nodes of a cluster with what talos-ccm would write to them. The inventory has their machines.
func Compare(nodes []*corev1.Node, machines *inventory.Inventory, options nodespec.Options) ([]Report, error) {
	previews, err := nodecontroller.NewPreviews(nodes, machines, options)
	if err != nil {
		return nil, err
	}

	reports := make([]Report, 0, len(previews))

	for _, p := range previews {
		r := Report{Name: p.Before.Name, Unmanaged: p.Unmanaged, Pending: p.After == nil && !p.Unmanaged, Rules: p.Rules, Upstream: p.Upstream, Problems: p.Problems}

		if current := p.Before.Spec.ProviderID; current != "" && p.Spec.ProviderID != "" && current != p.Spec.ProviderID {
			r.ProviderID = &ProviderIDs{Current: current, New: p.Spec.ProviderID}
		}

		if p.After != nil {
			r.Changes = changes(p.Before, p.After, p.Spec)
		}

		// Other cloud controller managers set it only on Nodes with the taint. If it is added, it is the first change.
		if len(r.Changes) > 0 && r.Changes[0].Field == fieldProviderID && !nodespec.IsUninitialized(p.Before) {
			r.Changes[0].From += ", permanently, although the Node is initialized"
		}

		reports = append(reports, r)
	}

	return reports, nil
}

// changes compares two states of a Node. The spec has the values that were added, and their origins.
func changes(before, after *corev1.Node, spec nodespec.Spec) []Change {
	list := slices.Concat(
		compareMaps(fieldProviderID, providerIDs(before), providerIDs(after)),
		compareAddresses(before.Status.Addresses, after.Status.Addresses),
		compareMaps(fieldLabel, before.Labels, after.Labels),
		compareMaps(fieldAnnotation, before.Annotations, after.Annotations),
		compareMaps(fieldTaint, taints(before), taints(after)),
	)

	for i, c := range list {
		if c.After == nil {
			continue
		}

		field, key := c.Field, c.Key

		// A label records each address that a rule sets.
		if ip, err := netip.ParseAddr(*c.After); err == nil && field == fieldAddress && spec.Labels[noderecord.RuleAddressLabel(ip)] != "" {
			field, key = fieldLabel, noderecord.RuleAddressLabel(ip)
		}

		list[i].From = origin(spec, field, key)
	}

	return list
}

// Fields of the platform metadata, which a rule may replace, by the label or address that is derived from them.
var replaceable = map[string]string{
	corev1.LabelTopologyRegion:          "Region",
	corev1.LabelFailureDomainBetaRegion: "Region",
	corev1.LabelTopologyZone:            "Zone",
	corev1.LabelFailureDomainBetaZone:   "Zone",
	corev1.LabelInstanceTypeStable:      "InstanceType",
	corev1.LabelInstanceType:            "InstanceType",
	nodespec.LabelLifecycle:             "Spot",
	string(corev1.NodeInternalDNS):      "InternalDNS",
	string(corev1.NodeExternalDNS):      "ExternalDNS",
}

// origin returns the origin of a value in the spec, or an empty string if the value is not in it.
func origin(spec nodespec.Spec, field, key string) string {
	rule, isSet, suffix := spec.Transformed.Replaced[replaceable[key]], true, ""

	switch field {
	case fieldProviderID:
		rule = spec.Transformed.Replaced["InstanceID"]
		if spec.ProviderID == spec.Transformed.Platform.ProviderID {
			rule = spec.Transformed.Replaced["ProviderID"]
		}
	case fieldLabel:
		rule = cmp.Or(spec.Transformed.Labels[key].Rule, rule)
		_, isSet = spec.Labels[key]
	case fieldAnnotation:
		rule = spec.Transformed.Annotations[key].Rule
		_, isSet = spec.Annotations[key]
	case fieldTaint:
		i := slices.IndexFunc(spec.Taints, func(t rules.Taint) bool { return taintKey(t.Taint) == key })
		if isSet = i >= 0; isSet {
			rule, suffix = spec.Taints[i].Rule, ", at initialization"
		}

		if isSet && spec.Taints[i].Enforce {
			suffix = ", enforced"
		}
	}

	switch {
	case !isSet:
		return ""
	case rule == "":
		return "machine" + suffix
	default:
		return "rule " + rule + suffix
	}
}

func providerIDs(node *corev1.Node) map[string]string {
	if node.Spec.ProviderID == "" {
		return nil
	}

	return map[string]string{"": node.Spec.ProviderID}
}

func taints(node *corev1.Node) map[string]string {
	values := map[string]string{}

	for _, t := range node.Spec.Taints {
		values[taintKey(t)] = t.Value
	}

	return values
}

func taintKey(t corev1.Taint) string { return t.Key + ":" + string(t.Effect) }

func compareMaps(field string, before, after map[string]string) []Change {
	var list []Change

	keys := slices.AppendSeq(slices.Collect(maps.Keys(before)), maps.Keys(after))
	slices.Sort(keys)

	for _, key := range slices.Compact(keys) {
		old, existed := before[key]
		current, exists := after[key]

		if existed == exists && old == current {
			continue
		}

		change := Change{Field: field, Key: key}

		if existed {
			change.Before = &old
		}

		if exists {
			change.After = &current
		}

		list = append(list, change)
	}

	return list
}

func compareAddresses(before, after []corev1.NodeAddress) []Change {
	if slices.Equal(before, after) {
		return nil
	}

	var list []Change

	for _, a := range before {
		if !slices.Contains(after, a) {
			list = append(list, Change{Field: fieldAddress, Key: string(a.Type), Before: &a.Address})
		}
	}

	for _, a := range after {
		if !slices.Contains(before, a) {
			list = append(list, Change{Field: fieldAddress, Key: string(a.Type), After: &a.Address})
		}
	}

	if len(list) == 0 {
		text := func(a corev1.NodeAddress) string { return a.Address }
		old, current := strings.Join(xslices.Map(before, text), ", "), strings.Join(xslices.Map(after, text), ", ")
		list = append(list, Change{Field: "address order", Before: &old, After: &current})
	}

	return list
}

// Changed returns the names of the Nodes that talos-ccm would change.
func (c Comparison) Changed() []string {
	return c.names(func(r Report) bool { return len(r.Changes) > 0 })
}

// Pending returns the names of the Nodes that cannot be compared.
func (c Comparison) Pending() []string { return c.names(func(r Report) bool { return r.Pending }) }

func (c Comparison) names(matches func(Report) bool) (names []string) {
	for _, r := range c.Nodes {
		if matches(r) {
			names = append(names, r.Name)
		}
	}

	return names
}
