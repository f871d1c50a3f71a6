package release_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// git runs git in a directory without system and user configuration.
func git(t *testing.T, folder string, args ...string) string {
	t.Helper()

	cmd := exec.CommandContext(t.Context(), "git", args...)
	cmd.Dir = folder
	cmd.Env = append(os.Environ(),
		"GIT_CONFIG_GLOBAL="+os.DevNull, "GIT_CONFIG_SYSTEM="+os.DevNull,
		"GIT_AUTHOR_NAME=Ada", "GIT_AUTHOR_EMAIL=ada@example.org", "GIT_COMMITTER_NAME=Ada", "GIT_COMMITTER_EMAIL=ada@example.org")

	output, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %v\n%s", cmd, err, output)
	}

	return strings.TrimSpace(string(output))
}

// check returns the output of the commit check for a commit with the given message; empty if it passes.
func check(t *testing.T, message string) string {
	t.Helper()

	script, err := filepath.Abs(root + "/.ci/commits")
	if err != nil {
		t.Fatal(err)
	}

	folder := t.TempDir()
	git(t, folder, "init", "--quiet")
	git(t, folder, "commit", "--quiet", "--allow-empty", "--message", "Earlier commits are not checked")
	base := git(t, folder, "rev-parse", "HEAD")
	git(t, folder, "commit", "--quiet", "--allow-empty", "--message", message)

	cmd := exec.CommandContext(t.Context(), script, base)
	cmd.Dir = folder

	output, err := cmd.CombinedOutput()
	if (err == nil) != (len(output) == 0) {
		t.Fatalf("got error %v, output %q", err, output)
	}

	return string(output)
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
			got := check(t, test.message)
			if (test.want == "") != (got == "") || !strings.Contains(got, test.want) {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}

func TestCommits_RequireKnownBase(t *testing.T) {
	script, err := filepath.Abs(root + "/.ci/commits")
	if err != nil {
		t.Fatal(err)
	}

	folder := t.TempDir()
	git(t, folder, "init", "--quiet")
	git(t, folder, "commit", "--quiet", "--allow-empty", "--message", "fix: this"+signed)

	for base, want := range map[string]bool{"HEAD": true, "0123456789012345678901234567890123456789": false, "": false} {
		cmd := exec.CommandContext(t.Context(), script, base)
		cmd.Dir = folder

		if err := cmd.Run(); (err == nil) != want {
			t.Errorf("base %q: got error %v, want success %t", base, err, want)
		}
	}
}
