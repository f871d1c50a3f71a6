package preview

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"
	"unicode"

	"sigs.k8s.io/yaml"
)

// Formats returns the output formats of Write, the default first.
func Formats() []string { return []string{"table", "yaml", "json"} }

// Write writes the reports in one of Formats: a table per machine, or a YAML or JSON list.
func Write(out io.Writer, format string, reports []Report) error {
	var text bytes.Buffer

	switch format {
	case "table":
		for i, r := range reports {
			if i > 0 {
				fmt.Fprintln(&text)
			}

			r.table(&text)
		}
	case "yaml":
		list, err := yaml.Marshal(reports)
		if err != nil {
			return err
		}

		text.Write(list)
	case "json":
		encoder := json.NewEncoder(&text)
		encoder.SetEscapeHTML(false)
		encoder.SetIndent("", "  ")

		if err := encoder.Encode(reports); err != nil {
			return err
		}
	default:
		return fmt.Errorf("unknown output format %q, want one of %s", format, strings.Join(Formats(), ", "))
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
	row := func(cells ...string) {
		for i := range cells {
			cells[i] = printable(cells[i])
		}

		fmt.Fprintln(columns, "  "+strings.Join(cells, "\t"))
	}

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
