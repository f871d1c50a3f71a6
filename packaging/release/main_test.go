// Package release_test compares the files of a release with each other, and tests the programs of the release process.
// `make lint` checks the workflows themselves.
package release_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v4"
)

// root is the directory of the repository.
const root = "../.."

func read(t *testing.T, path string) string {
	t.Helper()

	content, err := os.ReadFile(filepath.Join(root, path))
	require.NoError(t, err)

	return string(content)
}

// load reads a YAML file, ignoring keys that into does not have.
func load(t *testing.T, text string, into any) {
	t.Helper()
	require.NoError(t, yaml.Unmarshal([]byte(text), into), text)
}

// version returns the version of the next release, without v.
func version(t *testing.T) string {
	t.Helper()

	return firstMatch(t, `(?m)^VERSION: (.+)$`, read(t, "vars.yaml"))
}

// firstMatch returns the group of a pattern in a text.
func firstMatch(t *testing.T, pattern, text string) string {
	t.Helper()

	match := regexp.MustCompile(pattern).FindStringSubmatch(text)
	require.NotNil(t, match, "%s does not match\n%s", pattern, text)

	return match[1]
}

// run runs a program without git's system and user configuration, and without variables of a make that runs this test.
func run(t *testing.T, environment []string, name string, args ...string) (string, error) {
	t.Helper()

	cmd := exec.CommandContext(t.Context(), "env", append([]string{"-u", "TAG", "-u", "MAKEFLAGS", name}, args...)...)
	cmd.Env = append(append(os.Environ(),
		"GIT_CONFIG_GLOBAL="+os.DevNull, "GIT_CONFIG_SYSTEM="+os.DevNull,
		"GIT_AUTHOR_NAME=Ada", "GIT_AUTHOR_EMAIL=ada@example.org", "GIT_COMMITTER_NAME=Ada", "GIT_COMMITTER_EMAIL=ada@example.org"), environment...)

	output, err := cmd.CombinedOutput()

	return strings.TrimSpace(string(output)), err
}

// runMake runs make in this repository.
func runMake(t *testing.T, args ...string) (string, error) {
	t.Helper()

	return run(t, nil, "make", append([]string{"--silent", "--directory=" + root}, args...)...)
}

func git(t *testing.T, dir string, args ...string) {
	t.Helper()

	output, err := run(t, nil, "git", append([]string{"-C", dir}, args...)...)
	require.NoError(t, err, output)
}
