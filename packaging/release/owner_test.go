package release_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// module returns the module path in go.mod. It contains the owner of the repository.
func module(t *testing.T) string {
	t.Helper()

	match := regexp.MustCompile(`(?m)^module (github\.com/[\w.-]+/talos-ccm)$`).FindSubmatch(read(t, "go.mod"))
	require.NotNil(t, match, "go.mod has no module path on GitHub")

	return string(match[1])
}

// Files that name the repository or a registry must agree with go.mod, so that a change of the owner misses none.
func TestOwner_IsThatOfTheModule(t *testing.T) {
	owned := strings.TrimPrefix(module(t), "github.com/")
	owner, _, _ := strings.Cut(owned, "/")

	for _, names := range []struct {
		// pattern matches names; its group must be want.
		pattern *regexp.Regexp
		want    string
		// files restricts the files by suffix.
		files string
	}{
		{pattern: regexp.MustCompile(`github\.com/([\w.-]+/talos-ccm)\b`), want: owned},
		{pattern: regexp.MustCompile(`depName=(\S+/talos-ccm)\b`), want: owned},
		{pattern: regexp.MustCompile(`cpe:2\.3:a:(\S+?):talos-ccm:`), want: owner},
		{pattern: regexp.MustCompile(`@([\w-]+)(?:/|\s|$)`), want: owner, files: "CODEOWNERS"},
		// The registry of releases is a variable of the repository.
		{pattern: regexp.MustCompile(`\b(?:ghcr|quay|docker)\.io/([\w-]+)`), want: "siderolabs"},
	} {
		found := 0

		for path := range strings.FieldsSeq(git(t, root, "ls-files", "--cached", "--others", "--exclude-standard")) {
			content, err := os.ReadFile(filepath.Join(root, path))
			if err != nil && !os.IsNotExist(err) {
				t.Fatal(err)
			}

			if !utf8.Valid(content) || !strings.HasSuffix(path, names.files) || strings.HasSuffix(path, "owner_test.go") {
				continue
			}

			for _, match := range names.pattern.FindAllSubmatch(content, -1) {
				found++
				assert.Equal(t, names.want, string(match[1]), "%s has %s,", path, match[0])
			}
		}

		assert.NotEqual(t, 0, found, "no file contains %s", names.pattern)
	}
}
