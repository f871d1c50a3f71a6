package preview

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"

	corev1 "k8s.io/api/core/v1"

	nodecontroller "github.com/talos-ccm/talos-ccm/pkg/controllers/node"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
)

// Comparison compares the Nodes of a cluster with what talos-ccm would write to them. Programs read it as JSON or YAML;
// keep the format stable.
type Comparison struct {
	Lease Lease  `json:"lease"`
	Nodes []Diff `json:"nodes"`
}

// Lease is the lease that talos-ccm and the upstream Talos CCM use.
type Lease struct {
	Name string `json:"name"`
	// Holder is empty if no controller manager holds the lease.
	Holder string `json:"holder,omitempty"`
}

// Diff is the difference between a Node and what talos-ccm would write to it.
type Diff struct {
	Name string `json:"name"`
	// Unmanaged is true if talos-ccm does not write the Node.
	Unmanaged bool `json:"unmanaged,omitempty"`
	// Unknown is true if the Node cannot be compared. The problems say why.
	Unknown    bool        `json:"unknown,omitempty"`
	ProviderID ProviderIDs `json:"providerID"`
	Changes    []Change    `json:"changes,omitempty"`
	// Upstream are the fields that the upstream Talos CCM owns.
	Upstream []UpstreamField `json:"upstream,omitempty"`
	// Problems are what talos-ccm would report as Events.
	Problems []Condition `json:"problems,omitempty"`
}

// ProviderIDs are the providerID of a Node and of a new Node of its machine.
type ProviderIDs struct {
	Current string `json:"current,omitempty"`
	// New is empty if it is not known.
	New string `json:"new,omitempty"`
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
}

// UpstreamField is a field of a Node that the upstream Talos CCM owns.
type UpstreamField struct {
	// Field is the path of the field, such as metadata.labels or status.addresses.
	Field string `json:"field"`
	// Key is the key of a label or an annotation.
	Key string `json:"key,omitempty"`
	// TakenOver is true if talos-ccm sets the label or the annotation and becomes its owner. Others keep their value.
	TakenOver bool `json:"takenOver,omitempty"`
}

// Condition is something that talos-ccm would report about a Node as an Event.
type Condition struct {
	Reason  string `json:"reason"`
	Message string `json:"message"`
}

// Compare compares all Nodes of a cluster with what talos-ccm would write to them. The inventory has their machines.
func Compare(nodes []*corev1.Node, machines *inventory.Inventory, options nodespec.Options) ([]Diff, error) {
	previews, err := nodecontroller.NewPreviews(nodes, machines, options)
	if err != nil {
		return nil, err
	}

	diffs := make([]Diff, 0, len(previews))

	for _, p := range previews {
		d := Diff{
			Name: p.Before.Name, Unmanaged: p.Unmanaged, Unknown: p.After == nil && !p.Unmanaged,
			ProviderID: ProviderIDs{Current: p.Before.Spec.ProviderID, New: p.ProviderID},
		}

		if p.After != nil {
			d.Changes = changes(p.Before, p.After)
		}

		for _, f := range p.Upstream {
			d.Upstream = append(d.Upstream, UpstreamField{Field: f.Name, Key: f.Key, TakenOver: f.TakenOver})
		}

		for _, c := range p.Conditions {
			d.Problems = append(d.Problems, Condition{Reason: c.Reason, Message: c.Message})
		}

		diffs = append(diffs, d)
	}

	return diffs, nil
}

func changes(before, after *corev1.Node) []Change {
	return slices.Concat(
		compareMaps("providerID", providerIDs(before), providerIDs(after)),
		compareAddresses(before.Status.Addresses, after.Status.Addresses),
		compareMaps("label", before.Labels, after.Labels),
		compareMaps("annotation", before.Annotations, after.Annotations),
		compareMaps("taint", taints(before), taints(after)),
	)
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
		values[t.Key+":"+string(t.Effect)] = t.Value
	}

	return values
}

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
			list = append(list, Change{Field: "address", Key: string(a.Type), Before: &a.Address})
		}
	}

	for _, a := range after {
		if !slices.Contains(before, a) {
			list = append(list, Change{Field: "address", Key: string(a.Type), After: &a.Address})
		}
	}

	if len(list) == 0 {
		old, current := joinAddresses(before), joinAddresses(after)
		list = append(list, Change{Field: "address order", Before: &old, After: &current})
	}

	return list
}

func joinAddresses(addresses []corev1.NodeAddress) string {
	var texts []string
	for _, a := range addresses {
		texts = append(texts, a.Address)
	}

	return strings.Join(texts, ", ")
}

// Changed returns the names of the Nodes that talos-ccm would change.
func (c Comparison) Changed() []string {
	return c.names(func(d Diff) bool { return len(d.Changes) > 0 })
}

// Unknown returns the names of the Nodes that cannot be compared.
func (c Comparison) Unknown() []string { return c.names(func(d Diff) bool { return d.Unknown }) }

func (c Comparison) names(matches func(Diff) bool) (names []string) {
	for _, d := range c.Nodes {
		if matches(d) {
			names = append(names, d.Name)
		}
	}

	return names
}

// table writes the Nodes that differ or have problems, and a summary.
func (c Comparison) table(out io.Writer) {
	for _, d := range c.Nodes {
		if len(d.Changes)+len(d.Upstream)+len(d.Problems) > 0 || d.Unknown || d.keepsProviderID() {
			d.table(out)
			fmt.Fprintln(out)
		}
	}

	changed, unknown := len(c.Changed()), len(c.Unknown())
	unmanaged := len(c.names(func(d Diff) bool { return d.Unmanaged }))

	fmt.Fprintf(out, "Lease %s: held by %s\n", c.Lease.Name, cmp.Or(printable(c.Lease.Holder), "no controller manager"))
	fmt.Fprintf(out, "%d Nodes: %d would change, %d would not, %d cannot be compared, %d not managed\n",
		len(c.Nodes), changed, len(c.Nodes)-changed-unknown-unmanaged, unknown, unmanaged)
}

// keepsProviderID reports whether the Node's providerID differs from the one that a new Node of the machine would get.
func (d Diff) keepsProviderID() bool {
	return d.ProviderID.Current != "" && d.ProviderID.New != "" && d.ProviderID.Current != d.ProviderID.New
}

// table writes a row per value with its sign, kind, key and value.
func (d Diff) table(out io.Writer) {
	fmt.Fprintf(out, "Node %s\n", printable(d.Name))

	columns := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)

	if d.keepsProviderID() {
		writeRow(columns, "  providerID", "", d.ProviderID.Current, "kept; a new Node would get "+d.ProviderID.New)
	}

	for _, c := range d.Changes {
		if c.Before != nil {
			writeRow(columns, "- "+c.Field, c.Key, *c.Before)
		}

		if c.After != nil {
			writeRow(columns, "+ "+c.Field, c.Key, *c.After)
		}
	}

	for _, f := range d.Upstream {
		row := []string{"  upstream", f.Field, f.Key}

		switch {
		case f.TakenOver:
			row = append(row, "taken over")
		case f.Key != "" && !d.Unknown:
			row = append(row, "stays, talos-ccm does not set it")
		}

		writeRow(columns, row...)
	}

	for _, p := range d.Problems {
		writeRow(columns, "  problem", p.Reason, p.Message)
	}

	columns.Flush() //nolint:errcheck // writes to memory
}
