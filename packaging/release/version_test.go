package release_test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"testing"
)

func TestRelease_RequiresMatchingTag(t *testing.T) {
	version := withVariables(t, "vars.yaml", platform("x86_64"))["VERSION"]

	for tag, released := range map[string]bool{"v" + version: true, version: false, "v" + version + "-rc.1": false, "v" + version + "-dirty": false, "": false} {
		cmd := exec.CommandContext(t.Context(), "make", "--silent", "--directory="+root, "release-tag", "TAG="+tag)

		output, err := cmd.CombinedOutput()
		if (err == nil) != released {
			t.Errorf("tag %q: got error %v, want success %t\n%s", tag, err, released, output)
		}
	}
}

func TestVersion_DescribesSources(t *testing.T) {
	folder := t.TempDir()
	vars := filepath.Join(folder, "vars.yaml")

	if err := errors.Join(os.WriteFile(filepath.Join(folder, "Makefile"), read(t, "Makefile"), 0o600), os.WriteFile(vars, nil, 0o600)); err != nil {
		t.Fatal(err)
	}

	requireTag := func(situation, want string) {
		t.Helper()

		// Ignore the variables of a make that runs this test.
		cmd := exec.CommandContext(t.Context(), "env", "-u", "TAG", "-u", "MAKEFLAGS", "make", "--silent", "--directory="+folder, "release-tag")

		output, err := cmd.CombinedOutput()
		if err == nil || !regexp.MustCompile(`tag is `+want+`, but`).Match(output) {
			t.Errorf("%s: got error %v, want tag %s\n%s", situation, err, want, output)
		}
	}

	git(t, folder, "init", "--quiet")
	git(t, folder, "add", ".")
	git(t, folder, "commit", "--quiet", "--message", "first")
	requireTag("no tag", `v0\.0\.0-g[0-9a-f]{12}`)
	git(t, folder, "tag", "v0.1.0")
	requireTag("tag", `v0\.1\.0`)
	git(t, folder, "commit", "--quiet", "--allow-empty", "--message", "second")
	requireTag("commit after tag", `v0\.1\.0-1-g[0-9a-f]{12}`)

	if err := os.WriteFile(vars, []byte("\n"), 0o600); err != nil {
		t.Fatal(err)
	}

	requireTag("changes after tag", `v0\.1\.0-1-g[0-9a-f]{12}-dirty`)
	git(t, folder, "tag", "--delete", "v0.1.0")
	requireTag("changes without tag", `v0\.0\.0-g[0-9a-f]{12}-dirty`)
}
