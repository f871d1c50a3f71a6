package release_test

import (
	"encoding/json"
	"fmt"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/blang/semver/v4"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/talos-ccm/talos-ccm/extension"
	"github.com/talos-ccm/talos-ccm/packaging/image"
)

// entry is the draft for the extensions catalog of Sidero Labs.
const entry = "docs/catalog/talos-ccm"

// fill returns a file with the values of its variables.
func fill(t *testing.T, path string) string {
	t.Helper()

	module := firstMatch(t, `(?m)^module (\S+)$`, read(t, "go.mod"))

	return strings.NewReplacer("{{ .VERSION }}", version(t), "{{ .MODULE }}", module, "[{{ .TIER }}] ", "").Replace(read(t, path))
}

var (
	buildCommand = `go build (?:-C \S+ )?(-trimpath .*?)\s+-o`
	installs     = regexp.MustCompile(`(?m)^ +install -D -m (\d+) \S+ /(\S+)$`)
)

// The recipes of bldr, ours and the draft for the catalog, build the binary and the image of the Makefile.
func TestRecipes_BuildWhatTheMakefileBuilds(t *testing.T) {
	makefile := read(t, "Makefile")
	makefile = strings.NewReplacer("$(LDFLAGS)", firstMatch(t, `(?m)^LDFLAGS := (.*)$`, makefile), "$(GO)", "go").Replace(makefile)
	wantBuild := strings.ReplaceAll(firstMatch(t, buildCommand, makefile), "$(TAG)", "v"+version(t))

	files, err := image.Extension(image.Release{Version: "v1.2.3", Manifest: []byte(read(t, "manifest.yaml"))}, nil)
	require.NoError(t, err)

	wantFiles := map[string]string{}
	for _, file := range files {
		wantFiles[file.Path] = fmt.Sprintf("%04o", file.Mode)
	}

	for _, path := range []string{"pkg.yaml", entry + "/pkg.yaml.draft"} {
		text := fill(t, path)
		assert.Equal(t, wantBuild, firstMatch(t, buildCommand, strings.Join(strings.Fields(strings.ReplaceAll(text, "\\\n", "")), " ")), path)

		gotFiles := map[string]string{"manifest.yaml": "0644", firstMatch(t, `outputPath: /(\S+)`, text): "0644"}
		for _, match := range installs.FindAllStringSubmatch(text, -1) {
			gotFiles[match[2]] = match[1]
		}

		assert.Equal(t, wantFiles, gotFiles, path)

		for _, want := range []string{`CGO_ENABLED: "0"`, `version: "` + version(t) + `"`} {
			assert.Contains(t, text, want, path)
		}

		var recipe struct {
			Steps []struct{ Prepare, Build, Install, Test []string }
		}

		load(t, strings.ReplaceAll(strings.ReplaceAll(text, "{{", "("), "}}", ")"), &recipe)

		for _, step := range recipe.Steps {
			for _, script := range append(append(append(step.Prepare, step.Build...), step.Install...), step.Test...) {
				output, err := exec.CommandContext(t.Context(), "bash", "-n", "-c", script).CombinedOutput()
				assert.NoError(t, err, "%s: %s", script, output)
			}
		}
	}
}

// The catalog builds without network access, and from the checksums of the source.
func TestCatalog_MatchesExtension(t *testing.T) {
	recipe := fill(t, entry+"/pkg.yaml.draft")
	assert.Regexp(t, `(?s)sha256: \S.*sha512: \S.*network: default\n.*go mod download\n.*network: none\n    cachePaths:\n      - /.cache/go-build\n    build:\n`, recipe)
	assert.Contains(t, recipe, `talos-ccm --version) == "talos-ccm v`+version(t)+`" ]]`)
	assert.NotRegexp(t, "cpes|purl", recipe, "no dictionary has talos-ccm")
	assert.Regexp(t, `(?m)^TALOS_CCM_SHA256: "[0-9a-f]{64}"\nTALOS_CCM_SHA512: "[0-9a-f]{128}"$`, read(t, "docs/catalog/vars.yaml.draft"))
	assert.Equal(t, string(extension.Spec), read(t, entry+"/talos-ccm.yaml"))

	var want, got struct {
		Version  string
		Metadata map[string]any
	}

	load(t, read(t, "manifest.yaml"), &want)
	load(t, fill(t, entry+"/manifest.yaml.tmpl.draft"), &got)

	delete(want.Metadata, "description")
	delete(got.Metadata, "description")
	assert.Equal(t, want, got)
}

func TestVersion_IsTheSameInAllFiles(t *testing.T) {
	want := version(t)

	for path, pattern := range map[string]string{
		"manifest.yaml":                `\n  version: (\S+)\n`,
		"packaging/chart/Chart.yaml":   `\nversion: (\S+)\n`,
		"docs/catalog/vars.yaml.draft": `\nTALOS_CCM_VERSION: (\S+)\n`,
	} {
		assert.Equal(t, want, firstMatch(t, pattern, "\n"+read(t, path)), path)
	}

	assert.Equal(t, want, firstMatch(t, `\nappVersion: "?([^"\s]+)`, read(t, "packaging/chart/Chart.yaml")))
}

// Tools that Renovate does not update have no comment that its regular expression matches.
func TestVersion_RenovateFindsAllTools(t *testing.T) {
	var renovate struct {
		CustomManagers []struct{ MatchStrings []string }
	}

	require.NoError(t, json.Unmarshal([]byte(read(t, ".github/renovate.json")), &renovate))

	makefile := read(t, "Makefile")
	got := regexp.MustCompile(renovate.CustomManagers[0].MatchStrings[0]).FindAllString(makefile, -1)
	assert.Len(t, got, len(regexp.MustCompile(`(?m)^\w+_VERSION \?= v`).FindAllString(makefile, -1)))
	assert.NotEmpty(t, got)
}

// A release has installer images for each minor version of Talos that the image accepts.
func TestInstallers_ListSupportedTalosVersions(t *testing.T) {
	versions := regexp.MustCompile(`(?m)^v\d.*$`).FindAllString(read(t, "packaging/talos-versions.txt"), -1)
	assert.True(t, slices.IsSortedFunc(versions, func(a, b string) int { return semver.MustParse(a[1:]).Compare(semver.MustParse(b[1:])) }))

	var listed []string
	for _, version := range versions {
		listed = append(listed, root+"/packaging/image/talos/"+version[:strings.LastIndex(version, ".")]+".mod")
	}

	accepted, err := filepath.Glob(root + "/packaging/image/talos/v*.mod")
	require.NoError(t, err)
	assert.Equal(t, accepted, slices.Compact(listed))
}

var makeTargets = regexp.MustCompile(`\bmake (?:--\S+ )*([a-z-]+)`)

// checkScript checks that a step contains no expressions, which others can influence, and runs existing make targets.
func checkScript(t *testing.T, job, script string) {
	t.Helper()

	assert.NotContains(t, script, "${{", job)

	for _, match := range makeTargets.FindAllStringSubmatch(script, -1) {
		assert.Contains(t, read(t, "Makefile"), "\n"+match[1]+":", job)
	}
}

// actionlint does not know these policies. A write permission, a mutable tag, an untrusted trigger or a cache that other
// jobs can write would let others change a release. Images are reproducible only with one version of Go.
func TestWorkflows_AreSafe(t *testing.T) {
	paths, err := filepath.Glob(root + "/.github/workflows/*")
	require.NoError(t, err)

	// Jobs with write permissions.
	writers := map[string][]string{
		"boot.yaml": nil, "ci.yaml": nil, "build.yaml": {"publish", "installers"},
		"codeql.yaml": {"analyze"}, "release.yaml": {"build", "release"}, "scorecard.yaml": {"scorecard"},
	}
	require.Len(t, paths, len(writers))

	versions := map[string]bool{}

	for _, path := range paths {
		var workflow struct {
			Permissions map[string]string
			Jobs        map[string]struct {
				Permissions map[string]string
				Timeout     int `yaml:"timeout-minutes"`
				Uses        string
				Steps       []struct{ Run string }
			}
		}

		text := read(t, ".github/workflows/"+filepath.Base(path))
		load(t, text, &workflow)

		assert.NotRegexp(t, `pull_request_target|workflow_run|issue_comment|actions/cache@`, text)
		assert.Equal(t, strings.Count(text, "actions/setup-go@"), strings.Count(text, "cache: false\n"), path)
		assert.True(t, workflow.Permissions != nil && len(workflow.Permissions) == 0, path)

		for _, use := range regexp.MustCompile(`(?m)uses: .*$`).FindAllString(text, -1) {
			assert.Regexp(t, `^uses: (\./.*|[\w-]+/[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+)$`, use)
		}

		for _, match := range regexp.MustCompile(`go-version: (\S+)`).FindAllStringSubmatch(text, -1) {
			versions[match[1]] = true
		}

		for name, job := range workflow.Jobs {
			writes := strings.Contains(fmt.Sprint(job.Permissions), "write")
			assert.Equal(t, slices.Contains(writers[filepath.Base(path)], name), writes, name)
			assert.True(t, len(job.Permissions) > 0 && (job.Timeout > 0 || job.Uses != ""), name)

			for _, step := range job.Steps {
				checkScript(t, name, step.Run)
			}
		}
	}

	assert.Len(t, versions, 1)
}

// Provenance of SLSA Build Level 3 requires that the code that builds cannot sign.
func TestBuild_CannotSign(t *testing.T) {
	var workflow struct {
		Jobs map[string]struct {
			Permissions map[string]string
			Steps       []struct{ Run string }
		}
	}

	load(t, read(t, ".github/workflows/build.yaml"), &workflow)
	assert.Equal(t, map[string]string{"contents": "read"}, workflow.Jobs["build"].Permissions)

	for _, step := range workflow.Jobs["publish"].Steps {
		for _, match := range makeTargets.FindAllStringSubmatch(step.Run, -1) {
			assert.Equal(t, "push", match[1], step.Run)
		}
	}
}
