package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// configCommand runs `config` with args. The content is in rules.yaml and on standard input.
func configCommand(t *testing.T, content string, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	t.Chdir(t.TempDir())

	if err := os.WriteFile("rules.yaml", []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}

	var out, errOut bytes.Buffer

	cmd := newConfigCommand()
	cmd.SetArgs(args)
	cmd.SetIn(strings.NewReader(content))
	cmd.SetOut(&out)
	cmd.SetErr(&errOut)

	err = cmd.ExecuteContext(t.Context())

	return out.String(), errOut.String(), err
}

func TestConfigValidate(t *testing.T) {
	const (
		good = "transformations:\n- {name: web, labels: {team: web}}\nipam: {pools: [{name: a, cidrs: [10.0.0.0/16]}]}\n"
		bad  = "lables: {}\nipam: {pools: [{name: a, cidrs: [10.0.0.1/16]}]}\n"
	)

	for _, test := range []struct {
		name, content string
		args          []string
		stdout        string
		// lines are the prefixes of the lines on standard error.
		lines []string
		// mention is part of the error; empty if there is none.
		mention string
	}{
		{name: "valid file", content: good, args: []string{"rules.yaml"}, stdout: "rules.yaml: valid: 1 rule, 1 pool, 0 allowed SANs\n"},
		{name: "valid standard input", content: good, args: []string{"-"}, stdout: "stdin: valid: 1 rule, 1 pool, 0 allowed SANs\n"},
		{name: "defaults", content: "{}", args: []string{"-"}, stdout: "stdin: valid: 0 rules, 0 pools, 0 allowed SANs\n"},
		{name: "blank file", content: " \n", args: []string{"-"}, mention: "stdin is empty"},
		{
			name: "invalid file", content: bad, args: []string{"rules.yaml"},
			lines: []string{"rules.yaml:1:1: lables: unknown key", "rules.yaml:2:34: ipam.pools[0].cidrs[0]"}, mention: "rules.yaml is invalid",
		},
		{
			name: "invalid standard input", content: bad, args: []string{"-"},
			lines: []string{"stdin:1:1: lables: unknown key", "stdin:2:34: ipam.pools[0].cidrs[0]"}, mention: "stdin is invalid",
		},
		{
			name: "file that is too large", content: strings.Repeat("#\n", 1<<20), args: []string{"-"},
			lines: []string{"stdin: file has 1048577 bytes; the maximum is 1048576"}, mention: "stdin is invalid",
		},
		{name: "missing file", args: []string{"none.yaml"}, mention: "open none.yaml"},
		{name: "directory", args: []string{"."}, mention: "is a directory"},
		{name: "missing argument", mention: "accepts 1 arg"},
	} {
		t.Run(test.name, func(t *testing.T) {
			stdout, stderr, err := configCommand(t, test.content, append([]string{"validate"}, test.args...)...)
			if stdout != test.stdout {
				t.Errorf("got %q, want %q", stdout, test.stdout)
			}

			if (err != nil) != (test.mention != "") || err != nil && !strings.Contains(err.Error(), test.mention) {
				t.Errorf("got %v, want %q", err, test.mention)
			}

			lines := strings.Split(strings.TrimSuffix(stderr, "\n"), "\n")
			if stderr == "" {
				lines = nil
			}

			if !slices.EqualFunc(lines, test.lines, strings.HasPrefix) {
				t.Errorf("got %q, want lines with the prefixes %q", lines, test.lines)
			}
		})
	}
}

func TestConfigSchema(t *testing.T) {
	stdout, _, err := configCommand(t, "", "schema")
	if err != nil || !json.Valid([]byte(stdout)) {
		t.Errorf("got %.200q and %v", stdout, err)
	}
}

// TestConfigValidate_Files validates files of the kinds that users have. messages.txt has what the command prints for each.
func TestConfigValidate_Files(t *testing.T) {
	want, err := os.ReadFile("testdata/config/messages.txt")
	if err != nil {
		t.Fatal(err)
	}

	t.Chdir("testdata/config")

	files, err := filepath.Glob("*.yaml")
	if err != nil {
		t.Fatal(err)
	}

	var all strings.Builder

	for _, name := range files {
		var out, errOut bytes.Buffer

		cmd := newConfigCommand()
		cmd.SetArgs([]string{"validate", name})
		cmd.SetOut(&out)
		cmd.SetErr(&errOut)

		err := cmd.ExecuteContext(t.Context())
		if isGood := strings.HasPrefix(name, "good"); isGood != (err == nil) || isGood == (errOut.Len() > 0) || isGood != (out.Len() > 0) {
			t.Errorf("%s: got %v", name, err)
		}

		fmt.Fprintf(&all, "%s%s\n", out.String(), errOut.String())
	}

	if diff := cmp.Diff(string(want), all.String()); diff != "" {
		t.Errorf("unexpected messages (-want +got):\n%s", diff)
	}
}

// The document that Helm values are converted to is valid, and has the same rules.
func TestConfigValidate_ConvertsHelmValues(t *testing.T) {
	values, err := os.ReadFile("testdata/config/good-chart.yaml")
	if err != nil {
		t.Fatal(err)
	}

	document, _, err := configCommand(t, string(values), "validate", "-")
	if err != nil {
		t.Fatal(err)
	}

	stdout, stderr, err := configCommand(t, document, "validate", "-")
	if err != nil || stdout != "stdin: valid: 1 rule, 0 pools, 0 allowed SANs\n" {
		t.Errorf("got %v: %s%s", err, stdout, stderr)
	}
}

func TestConfigValidate_PrintsJSON(t *testing.T) {
	for content, want := range map[string]string{
		"{}": `{"file":"stdin","valid":true,"problems":[]}`,
		"":   `{"file":"stdin","valid":false,"problems":[{"message":"stdin is empty; use {} for the defaults"}]}`,
		"transformations: [{name: web, lables: {}}]\n": `{"file":"stdin","valid":false,"problems":[{"line":1,"column":31,"path":"transformations[0].lables",` +
			`"rule":"web","message":"unknown key; did you mean labels?"}]}`,
	} {
		var got bytes.Buffer

		stdout, stderr, err := configCommand(t, content, "validate", "-", "-o", "json")
		if jsonErr := json.Compact(&got, []byte(stdout)); jsonErr != nil || got.String() != want || stderr != "" || (err == nil) != (content == "{}") {
			t.Errorf("%s: got %v, %v: %s", content, err, jsonErr, stdout+stderr)
		}
	}

	if _, _, err := configCommand(t, "{}", "validate", "-", "-o", "xml"); err == nil || !strings.Contains(err.Error(), `unknown output format "xml"`) {
		t.Errorf("got %v", err)
	}
}
