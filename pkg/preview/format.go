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

// Write writes the reports in a format of Formats: to people as a table for each machine, and to programs as a list.
func Write(out io.Writer, format string, reports []Report) error {
	write, known := map[string]func(io.Writer, []Report) error{"table": writeTables, "yaml": writeYAML, "json": writeJSON}[format]
	if !known {
		return fmt.Errorf("there is no output format %q, but %s", format, strings.Join(Formats(), ", "))
	}

	return write(out, reports)
}

// Formats are those of Write, the usual one first.
func Formats() []string { return []string{"table", "yaml", "json"} }

func writeYAML(out io.Writer, reports []Report) error {
	text, err := yaml.Marshal(reports)
	if err != nil {
		return err
	}

	_, err = out.Write(text)

	return err
}

func writeJSON(out io.Writer, reports []Report) error {
	encoder := json.NewEncoder(out)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", "  ")

	return encoder.Encode(reports)
}

func writeTables(out io.Writer, reports []Report) error {
	var text bytes.Buffer

	for i, r := range reports {
		if i > 0 {
			fmt.Fprintln(&text)
		}

		r.table(&text)
	}

	_, err := out.Write(text.Bytes())

	return err
}

// table has a line for each value: what it is, the value, and whose it is.
func (r Report) table(out io.Writer) {
	fmt.Fprintf(out, "Node %s\n", printable(cmp.Or(r.Name, "without a name")))

	if r.Unclaimed {
		fmt.Fprintln(out, "  is none of ours: nodes.nodeSelector does not select its machine, and nothing of this would be written")
	}

	columns := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	row := func(cells ...string) {
		for i := range cells {
			cells[i] = printable(cells[i])
		}

		fmt.Fprintln(columns, "  "+strings.Join(cells, "\t"))
	}

	if r.Pending != "" {
		row("pending", r.Pending)
	} else {
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

	columns.Flush() //nolint:errcheck // it writes to memory
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

// printable quotes what would disturb a table or a terminal.
func printable(value string) string {
	if strings.ContainsFunc(value, func(r rune) bool { return !unicode.IsPrint(r) }) {
		return strconv.Quote(value)
	}

	return value
}
