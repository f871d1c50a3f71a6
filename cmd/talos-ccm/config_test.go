package main

import (
	"bytes"
	"encoding/json"
	"os"
	"slices"
	"strings"
	"testing"
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
