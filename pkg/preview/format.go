package preview

import (
	"bytes"
	"cmp"
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

// Write writes a value in one of Formats; a table if the format is another one.
func Write(out io.Writer, format string, value interface{ Table(out io.Writer) }) error {
	var text bytes.Buffer

	switch format {
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
		value.Table(&text)
	}

	_, err := out.Write(text.Bytes())

	return err
}

// Table writes the Nodes that differ or have problems, or all if c.Full, and a summary.
func (c Comparison) Table(out io.Writer) {
	for _, r := range c.Nodes {
		if c.Full || len(r.Changes)+len(r.Upstream)+len(r.Problems) > 0 || r.Pending || r.ProviderID != nil {
			r.Table(out)
			fmt.Fprintln(out)
		}
	}

	changed, pending := len(c.Changed()), len(c.Pending())
	unmanaged := len(c.names(func(r Report) bool { return r.Unmanaged }))

	fmt.Fprintf(out, "Lease %s: held by %s\n", c.Lease.Name, cmp.Or(Printable(c.Lease.Holder), "no controller manager"))
	fmt.Fprintf(out, "%d Nodes: %d would change, %d would not, %d cannot be compared, %d not managed\n",
		len(c.Nodes), changed, len(c.Nodes)-changed-pending-unmanaged, pending, unmanaged)
}

// Table writes a row per value with its sign, field, key, value and origin.
func (r Report) Table(out io.Writer) {
	fmt.Fprintf(out, "Node %s\n", Printable(r.Name))

	if r.Unmanaged {
		fmt.Fprintln(out, "  not managed: nodes.selector does not select the machine, or cloud-node-controller is off; talos-ccm would write none of the values below")
	}

	columns := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)

	if r.ProviderID != nil {
		writeRow(columns, "  providerID", "", r.ProviderID.Current, "kept; a new Node would get "+r.ProviderID.New)
	}

	for _, c := range r.Changes {
		c.rows(columns)
	}

	for _, m := range r.Rules {
		writeRow(columns, "  rule", m.Rule, strings.Join(append([]string{cmp.Or(m.Mismatch, "applies")}, m.Missing...), "; "))
	}

	for _, f := range r.Upstream {
		row := []string{"  upstream", f.Name, f.Key}

		switch {
		case f.TakenOver:
			row = append(row, "taken over")
		case f.Key != "" && !r.Pending:
			row = append(row, "stays, talos-ccm does not set it")
		}

		writeRow(columns, row...)
	}

	for _, p := range r.Problems {
		writeRow(columns, "  problem", p.Reason, p.Message)
	}

	columns.Flush() //nolint:errcheck // writes to memory
}

func (c Change) rows(columns io.Writer) {
	if c.Before != nil {
		writeRow(columns, "- "+c.Field, c.Key, *c.Before)
	}

	if c.After != nil {
		writeRow(columns, "+ "+c.Field, c.Key, *c.After, c.From)
	}
}

func writeRow(columns io.Writer, cells ...string) {
	for i := range cells {
		cells[i] = Printable(cells[i])
	}

	fmt.Fprintln(columns, "  "+strings.TrimRight(strings.Join(cells, "\t"), "\t"))
}

// Printable quotes a value with characters that would break a table or control the terminal.
func Printable(value string) string {
	if strings.ContainsFunc(value, func(r rune) bool { return !unicode.IsPrint(r) }) {
		return strconv.Quote(value)
	}

	return value
}
