package release_test

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// check returns the output and the error of the commit check in a directory.
func check(t *testing.T, dir, base string) (string, error) {
	t.Helper()

	script, err := filepath.Abs(root + "/.ci/commits")
	require.NoError(t, err)

	return run(t, nil, "sh", "-c", `cd "$0" && "$1" "$2"`, dir, script, base)
}

// commit makes a repository with a commit of each message.
func commit(t *testing.T, messages ...string) (dir string) {
	t.Helper()

	dir = t.TempDir()
	git(t, dir, "init", "--quiet")

	for _, message := range messages {
		git(t, dir, "commit", "--quiet", "--allow-empty", "--message", message)
	}

	return dir
}

const signed = "\n\nSigned-off-by: Ada <ada@example.org>"

func TestCommits_AreChecked(t *testing.T) {
	for name, test := range map[string]struct{ message, want string }{
		"type and subject":             {"fix: wait for the socket" + signed, ""},
		"scope":                        {"feat(nodeipam): carve blocks out of many pools\n\nBecause." + signed, ""},
		"path as scope, breaking":      {"refactor(controllers/node)!: take the key from the Node" + signed, ""},
		"89 characters":                {"docs: " + strings.Repeat("a", 83) + signed, ""},
		"90 characters":                {"docs: " + strings.Repeat("a", 84) + signed, "has 90 characters"},
		"unknown type":                 {"oops: wait for the socket" + signed, `is not "type(scope)`},
		"no type":                      {"wait for the socket" + signed, `is not "type(scope)`},
		"capital letter":               {"fix: Wait for the socket" + signed, `is not "type(scope)`},
		"full stop":                    {"fix: wait for the socket." + signed, `is not "type(scope)`},
		"no sign-off":                  {"fix: wait for the socket", "is not signed off"},
		"sign-off by another person":   {"fix: wait for the socket\n\nSigned-off-by: Bob <bob@example.org>", "is not signed off"},
		"sign-off by author and other": {"fix: wait for the socket\n\nSigned-off-by: Bob <bob@example.org>\nSigned-off-by: Ada <ada@example.org>", ""},
		"sign-off in the body":         {"fix: wait for the socket\n\nSigned-off-by: Ada <ada@example.org> said so.\n\nBut did not.", "is not signed off"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := check(t, commit(t, "Earlier commits are not checked", test.message), "HEAD~1")
			assert.Equal(t, []bool{test.want == "", test.want == ""}, []bool{got == "", err == nil}, got)
			assert.Contains(t, got, test.want)
		})
	}
}

func TestCommits_RequireKnownBase(t *testing.T) {
	dir := commit(t, "fix: this"+signed)

	for base, want := range map[string]bool{"HEAD": true, "0123456789012345678901234567890123456789": false, "": false} {
		output, err := check(t, dir, base)
		assert.Equal(t, want, err == nil, "base %q: %s", base, output)
	}
}
