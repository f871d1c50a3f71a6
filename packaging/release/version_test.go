package release_test

import (
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v4"
)

func TestRelease_RequiresMatchingTag(t *testing.T) {
	version := withVariables(t, "vars.yaml", platform("x86_64"))["VERSION"]

	for tag, released := range map[string]bool{"v" + version: true, version: false, "v" + version + "-rc.1": false, "v" + version + "-dirty": false, "": false} {
		cmd := exec.CommandContext(t.Context(), "make", "--silent", "--directory="+root, "release-tag", "TAG="+tag)

		output, err := cmd.CombinedOutput()
		assert.Equal(t, released, err == nil, "tag %q: %s", tag, output)
	}
}

// Renovate updates the versions that the regular expression matches.
func TestVersion_RenovateFindsAllTools(t *testing.T) {
	var renovate struct {
		CustomManagers []struct{ MatchStrings []string }
	}

	require.NoError(t, json.Unmarshal(read(t, ".github/renovate.json"), &renovate))

	makefile := read(t, "Makefile")
	pattern := regexp.MustCompile(renovate.CustomManagers[0].MatchStrings[0])
	versions := regexp.MustCompile(`(?m)^\w+_VERSION \?= v`)

	got, want := len(pattern.FindAll(makefile, -1)), len(versions.FindAll(makefile, -1))
	assert.Equal(t, want, got)
	assert.NotEqual(t, 0, want)
}

// The chart is released with talos-ccm, and its default image is the image of the release.
func TestVersion_ChartHasManifestVersion(t *testing.T) {
	version := withVariables(t, "vars.yaml", platform("x86_64"))["VERSION"]

	var (
		chart struct {
			Version    string
			AppVersion string `yaml:"appVersion"`
		}
		values struct{ Image string }
	)

	// Both have more keys.
	for path, into := range map[string]any{"packaging/chart/Chart.yaml": &chart, "packaging/chart/values.yaml": &values} {
		require.NoError(t, yaml.Unmarshal(read(t, path), into))
	}

	assert.Equal(t, []string{version, version}, []string{chart.Version, chart.AppVersion})
	assert.True(t, strings.HasSuffix(values.Image, ":v"+version), values.Image)
}

func TestVersion_DescribesSources(t *testing.T) {
	dir := t.TempDir()
	vars := filepath.Join(dir, "vars.yaml")
	require.NoError(t, errors.Join(os.WriteFile(filepath.Join(dir, "Makefile"), read(t, "Makefile"), 0o600), os.WriteFile(vars, nil, 0o600)))

	requireTag := func(situation, want string) {
		t.Helper()

		// Ignore the variables of a make that runs this test.
		cmd := exec.CommandContext(t.Context(), "env", "-u", "TAG", "-u", "MAKEFLAGS", "make", "--silent", "--directory="+dir, "release-tag")

		output, err := cmd.CombinedOutput()
		assert.Error(t, err)
		assert.Regexp(t, `tag is `+want+`, but`, string(output), situation)
	}

	git(t, dir, "init", "--quiet")
	git(t, dir, "add", ".")
	git(t, dir, "commit", "--quiet", "--message", "first")
	requireTag("no tag", `v0\.0\.0-g[0-9a-f]{12}`)
	git(t, dir, "tag", "v0.1.0")
	requireTag("tag", `v0\.1\.0`)
	git(t, dir, "commit", "--quiet", "--allow-empty", "--message", "second")
	requireTag("commit after tag", `v0\.1\.0-1-g[0-9a-f]{12}`)
	require.NoError(t, os.WriteFile(vars, []byte("\n"), 0o600))
	requireTag("changes after tag", `v0\.1\.0-1-g[0-9a-f]{12}-dirty`)
	git(t, dir, "tag", "--delete", "v0.1.0")
	requireTag("changes without tag", `v0\.0\.0-g[0-9a-f]{12}-dirty`)
}
