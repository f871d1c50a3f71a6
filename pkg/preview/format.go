package preview

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"unicode"

	corev1 "k8s.io/api/core/v1"
	corev1ac "k8s.io/client-go/applyconfigurations/core/v1"
	"sigs.k8s.io/yaml"
)

// formatNode is the format of Nodes that `kubectl diff -f -` reads.
const formatNode = "node"

// Formats returns the output formats of Write, the default first.
func Formats() []string { return append(ComparisonFormats(), formatNode) }

// ComparisonFormats returns the output formats of WriteComparison, the default first.
func ComparisonFormats() []string { return []string{"table", "yaml", "json"} }

// Write writes the reports in one of Formats: a table per machine, a YAML or JSON list, or Nodes as YAML documents.
func Write(out io.Writer, format string, reports []Report) error {
	if format == formatNode {
		return writeNodes(out, reports)
	}

	if !slices.Contains(Formats(), format) {
		return unknownFormat(format, Formats())
	}

	return write(out, format, reports, func(text io.Writer) {
		for i, r := range reports {
			if i > 0 {
				fmt.Fprintln(text)
			}

			r.table(text)
		}
	})
}

// WriteComparison writes the comparison in one of ComparisonFormats.
func WriteComparison(out io.Writer, format string, c Comparison) error {
	return write(out, format, c, c.table)
}

func unknownFormat(format string, formats []string) error {
	return fmt.Errorf("unknown output format %q, want one of %s", format, strings.Join(formats, ", "))
}

func write(out io.Writer, format string, value any, table func(io.Writer)) error {
	var text bytes.Buffer

	switch format {
	case "table":
		table(&text)
	case "yaml":
		document, err := yaml.Marshal(value)
		if err != nil {
			return err
		}

		text.Write(document)
	case "json":
		encoder := json.NewEncoder(&text)
		encoder.SetEscapeHTML(false)
		encoder.SetIndent("", "  ")

		if err := encoder.Encode(value); err != nil {
			return err
		}
	default:
		return unknownFormat(format, ComparisonFormats())
	}

	_, err := out.Write(text.Bytes())

	return err
}

// table writes a row per value with its kind, key, value and origin.
func (r Report) table(out io.Writer) {
	fmt.Fprintf(out, "Node %s\n", printable(r.Name))

	if r.Unmanaged {
		fmt.Fprintln(out, "  not managed: nodes.selector does not select the machine, so talos-ccm would write none of the values below")
	}

	columns := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	row := func(cells ...string) { writeRow(columns, cells...) }

	for _, part := range r.Unknown {
		row("unknown", part, "", "missing resources of the machine")
	}

	switch {
	case r.Pending != "":
		row("pending", r.Pending)
	case r.ProviderID != nil:
		row("providerID", "", r.ProviderID.Value, from(r.ProviderID.Rule))
	}

	for _, a := range r.Addresses {
		row("address", a.Type, a.Address, from(a.Rule))
	}

	for _, l := range r.Labels {
		row("label", l.Key, l.Value, from(l.Rule))
	}

	for _, a := range r.Annotations {
		row("annotation", a.Key, a.Value, from(a.Rule))
	}

	for _, t := range r.Taints {
		row("taint", t.Key, strings.TrimPrefix(t.Value+":"+t.Effect, ":"), t.from())
	}

	for _, p := range r.Problems {
		row("problem", p.Key, p.Value, from(p.Rule), p.Why)
	}

	columns.Flush() //nolint:errcheck // writes to memory
}

func writeRow(columns io.Writer, cells ...string) {
	for i := range cells {
		cells[i] = printable(cells[i])
	}

	fmt.Fprintln(columns, "  "+strings.Join(cells, "\t"))
}

// writeNodes writes the Nodes as YAML documents that contain only what talos-ccm sets. It omits Nodes that would not be
// written.
func writeNodes(out io.Writer, reports []Report) error {
	for _, r := range reports {
		if r.Pending != "" || r.Unmanaged {
			continue
		}

		document, err := yaml.Marshal(r.node())
		if err != nil {
			return err
		}

		if _, err := fmt.Fprintf(out, "---\n%s", document); err != nil {
			return err
		}
	}

	return nil
}

func (r Report) node() *corev1ac.NodeApplyConfiguration {
	node := corev1ac.Node(r.Name).WithSpec(corev1ac.NodeSpec()).WithStatus(corev1ac.NodeStatus())

	if r.ProviderID != nil {
		node.Spec.WithProviderID(r.ProviderID.Value)
	}

	for _, l := range r.Labels {
		node.WithLabels(map[string]string{l.Key: l.Value})
	}

	for _, a := range r.Annotations {
		node.WithAnnotations(map[string]string{a.Key: a.Value})
	}

	for _, t := range r.Taints {
		taint := corev1ac.Taint().WithKey(t.Key).WithEffect(corev1.TaintEffect(t.Effect))
		if t.Value != "" {
			taint.WithValue(t.Value)
		}

		node.Spec.WithTaints(taint)
	}

	for _, a := range r.Addresses {
		node.Status.WithAddresses(corev1ac.NodeAddress().WithType(corev1.NodeAddressType(a.Type)).WithAddress(a.Address))
	}

	return node
}

func from(rule string) string {
	if rule == "" {
		return "machine"
	}

	return "rule " + rule
}

func (t Taint) from() string {
	if t.Enforce {
		return from(t.Rule) + ", enforced"
	}

	return from(t.Rule) + ", at initialization"
}

// printable quotes values with characters that would break the table or control the terminal.
func printable(value string) string {
	if strings.ContainsFunc(value, func(r rune) bool { return !unicode.IsPrint(r) }) {
		return strconv.Quote(value)
	}

	return value
}
