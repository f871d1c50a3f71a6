package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// configCommand runs `config` with args. The content is in rules.yaml and on standard input.
func configCommand(t *testing.T, content string, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	t.Chdir(t.TempDir())
	require.NoError(t, os.WriteFile("rules.yaml", []byte(content), 0o600))

	return execute(t, newConfigCommand(), content, args...)
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
		{name: "valid file", content: good, args: []string{"rules.yaml"}, stdout: "rules.yaml: valid\n"},
		{name: "valid standard input", content: good, args: []string{"-"}, stdout: "stdin: valid\n"},
		{name: "defaults", content: "{}", args: []string{"-"}, stdout: "stdin: valid\n"},
		{name: "blank file", content: " \n", args: []string{"-"}, mention: "stdin is empty"},
		{name: "mistakes", content: bad, args: []string{"rules.yaml"}, lines: []string{"rules.yaml:1:1: lables: unknown key", "rules.yaml:2:34: ipam.pools[0].cidrs[0]"}, mention: "rules.yaml is invalid"},
		{name: "invalid standard input", content: bad, args: []string{"-"}, lines: []string{"stdin:1:1: lables: unknown key", "stdin:2:34: ipam.pools[0].cidrs[0]"}, mention: "stdin is invalid"},
		{name: "large file", content: strings.Repeat("#\n", 1<<20), args: []string{"-"}, lines: []string{"stdin: file is larger than 1048576 bytes"}, mention: "stdin is invalid"},
		{
			name: "configuration beside a document", content: "kind: Pod\n---\n" + good, args: []string{"-"}, mention: "stdin is invalid",
			lines: []string{"stdin:1:1: file has no", "stdin:3:1: configuration beside documents"},
		},
		{name: "missing file", args: []string{"none.yaml"}, mention: "open none.yaml"},
		{name: "directory", args: []string{"."}, mention: "rules.yaml is empty"},
		{name: "missing argument", mention: "requires a file, a directory, or -"},
	} {
		t.Run(test.name, func(t *testing.T) {
			stdout, stderr, err := configCommand(t, test.content, append([]string{"validate"}, test.args...)...)
			assert.Equal(t, test.stdout, stdout)

			requireError(t, err, test.mention)

			lines := slices.Collect(strings.Lines(stderr))
			assert.True(t, slices.EqualFunc(lines, test.lines, strings.HasPrefix), stderr)
		})
	}
}

func TestConfigSchema(t *testing.T) {
	stdout, _, err := configCommand(t, "", "schema")
	assert.NoError(t, err)
	assert.True(t, json.Valid([]byte(stdout)))
}

// The starter is valid, with and without its optional parts.
func TestConfigInit(t *testing.T) {
	starter, _, err := configCommand(t, "", "init")
	require.NoError(t, err)

	all := regexp.MustCompile(`(?m)^( *)# (\w+:.*| +.*|- .*)$`).ReplaceAllString(starter, "$1$2")

	for content, pools := range map[string]int{starter: 0, all: 1} {
		compiled, err := parseFile("starter", []byte(content))
		require.NoError(t, err)
		assert.Empty(t, compiled.Warnings)
		assert.Len(t, compiled.Pools, pools)
	}
}

// notOurs are the files that are skipped in a directory.
var notOurs = []string{"bad-configmap.yaml", "bad-document-name.yaml", "bad-key-top-level.yaml", "bad-machine-config-without-document.yaml"}

// TestConfigValidate_Files validates typical files of users. messages.txt has the output of the command for each.
func TestConfigValidate_Files(t *testing.T) {
	want, err := os.ReadFile("testdata/config/messages.txt")
	require.NoError(t, err)

	t.Chdir("testdata/config")

	files, err := filepath.Glob("*.yaml")
	require.NoError(t, err)

	var all strings.Builder

	for _, name := range files {
		stdout, stderr, err := execute(t, newConfigCommand(), "", "validate", name)
		isValid, isGood := !strings.HasPrefix(name, "bad"), strings.HasPrefix(name, "good")
		assert.Equal(t, []bool{isValid, !isGood, isValid}, []bool{err == nil, stderr != "", stdout != ""}, "%s: %v", name, err)
		fmt.Fprintf(&all, "%s%s\n", stdout, stderr)
	}

	assert.Equal(t, string(want), all.String())

	_, stderr, err := execute(t, newConfigCommand(), "", "validate", "good-json.yaml", ".", t.TempDir())
	_, skipped, _ := strings.Cut(stderr, ".: skipped files without a configuration of talos-ccm: ")
	assert.Equal(t, strings.Count(string(want), "\n\n"), strings.Count(err.Error(), " is invalid")+strings.Count(string(want), ": valid\n")+len(notOurs))
	assert.Equal(t, strconv.Itoa(len(notOurs)), strings.SplitN(skipped, "\n", 2)[0])
	assert.ErrorContains(t, err, "has no configuration of talos-ccm")
	assert.Contains(t, stderr, "bad-key.yaml:3:5")

	for _, name := range notOurs {
		assert.NotContains(t, err.Error(), name)
	}
}

func TestConfigValidate_PrintsJSON(t *testing.T) {
	for content, want := range map[string]string{
		"{}":                             `{"file":"stdin","valid":true,"problems":[]}`,
		"transformations: [{name: web}]": `{"file":"stdin","valid":true,"problems":[{"line":1,"column":19,"path":"transformations[0]","rule":"web","message":"the rule sets nothing","warning":true}]}`,
		"":                               `{"file":"stdin","valid":false,"problems":[{"message":"stdin is empty; use {} for the defaults"}]}`,
		"transformations: [{name: web, lables: {}}]\n": `{"file":"stdin","valid":false,"problems":[{"line":1,"column":31,"path":"transformations[0].lables",` +
			`"rule":"web","message":"unknown key; expected name, nodeSelector, annotations, labels, labelsFromTags, taints, enforce, platformMetadata, addresses, addressCIDRs, features"}]}`,
	} {
		var got bytes.Buffer

		stdout, stderr, err := configCommand(t, content, "validate", "-", "-o", "json")
		assert.Equal(t, strings.Contains(want, `"valid":true`), err == nil, err)
		assert.NoError(t, json.Compact(&got, []byte(stdout)))
		assert.Equal(t, want, got.String())
		assert.Empty(t, stderr)
	}

	_, _, err := configCommand(t, "{}", "validate", "-", "-o", "xml")
	assert.ErrorContains(t, err, `invalid argument "xml"`)
}
