package main

import (
	"bytes"
	"encoding/json"
	"os"
	"slices"
	"strings"
	"testing"
)

// configCommand runs `config` with args. The file rules.yaml has the content, and standard input has it, too.
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
		rule, content string
		args          []string
		stdout        string
		// lines are the beginnings of those on standard error.
		lines []string
		// mention is what the error says; empty: no error.
		mention string
	}{
		{rule: "a good file has a summary", content: good, args: []string{"rules.yaml"}, stdout: "rules.yaml: valid: 1 rule, 1 pool, 0 allowed SANs\n"},
		{rule: "so has standard input", content: good, args: []string{"-"}, stdout: "stdin: valid: 1 rule, 1 pool, 0 allowed SANs\n"},
		{rule: "the defaults are valid", content: "{}", args: []string{"-"}, stdout: "stdin: valid: 0 rules, 0 pools, 0 allowed SANs\n"},
		{rule: "nothing at all is not", content: " \n", args: []string{"-"}, mention: "stdin is empty"},
		{
			rule: "all mistakes are told", content: bad, args: []string{"rules.yaml"},
			lines: []string{"rules.yaml:1: lables: unknown key", "rules.yaml:2: ipam.pools[0].cidrs[0]"}, mention: "rules.yaml is no valid configuration",
		},
		{rule: "of standard input, too", content: bad, args: []string{"-"}, lines: []string{"stdin:1: lables: unknown key", "stdin:2: ipam.pools[0].cidrs[0]"}, mention: "stdin is no valid configuration"},
		{
			rule: "too much is refused and not cut", content: strings.Repeat("#\n", 1<<20), args: []string{"-"},
			lines: []string{"stdin: 1048577 bytes are more than a configuration may have"}, mention: "stdin is no valid configuration",
		},
		{rule: "a file must be there", args: []string{"none.yaml"}, mention: "open none.yaml"},
		{rule: "a folder is no file", args: []string{"."}, mention: "is a directory"},
		{rule: "a file must be named", mention: "accepts 1 arg"},
	} {
		t.Run(test.rule, func(t *testing.T) {
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
				t.Errorf("got %q, want lines that begin with %q", lines, test.lines)
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
