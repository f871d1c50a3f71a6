package release_test

import (
	"fmt"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/talos-ccm/talos-ccm/packaging/image"
)

// entry is the draft for the extensions catalog of Sidero Labs.
const entry = "packaging/catalog/talos-ccm"

// The recipes of bldr, ours and the draft for the catalog, build with the Makefile.
func TestRecipes_InstallFilesOfImage(t *testing.T) {
	files, err := image.Extension(image.Release{Version: "v1.2.3", Manifest: []byte(read(t, "manifest.yaml"))}, nil)
	require.NoError(t, err)

	for _, path := range []string{"pkg.yaml", entry + "/pkg.yaml.draft"} {
		recipe := read(t, path)
		for _, file := range files {
			assert.Contains(t, recipe, "/"+file.Path+"\n", path)
		}
	}
}

func TestCatalog_ManifestEqualsExtension(t *testing.T) {
	var want, got struct{ Metadata map[string]any }

	load(t, read(t, "manifest.yaml"), &want)
	load(t, strings.ReplaceAll(read(t, entry+"/manifest.yaml.tmpl.draft"), "{{ .VERSION }}", version(t)), &got)

	got.Metadata["description"] = want.Metadata["description"]
	assert.Equal(t, want, got)
}

func TestVersion_IsTheSameInAllFiles(t *testing.T) {
	want := version(t)

	for path, pattern := range map[string]string{
		"manifest.yaml":                     `\n  version: (\S+)\n`,
		"packaging/chart/Chart.yaml":        `\nversion: (\S+)\n`,
		"packaging/catalog/vars.yaml.draft": `\nTALOS_CCM_VERSION: (\S+)\n`,
	} {
		assert.Equal(t, want, firstMatch(t, pattern, "\n"+read(t, path)), path)
	}

	assert.Equal(t, want, firstMatch(t, `\nappVersion: "?([^"\s]+)`, read(t, "packaging/chart/Chart.yaml")))
}

// A release has installer images for each minor version of Talos that the image accepts.
func TestInstallers_ListSupportedTalosVersions(t *testing.T) {
	versions := regexp.MustCompile(`(?m)^v\d.*$`).FindAllString(read(t, "packaging/talos-versions.txt"), -1)

	var listed []string
	for _, version := range versions {
		listed = append(listed, root+"/packaging/image/talos/"+version[:strings.LastIndex(version, ".")]+".mod")
	}

	accepted, err := filepath.Glob(root + "/packaging/image/talos/v*.mod")
	require.NoError(t, err)
	assert.Equal(t, accepted, slices.Compact(listed))
}

var makeTargets = regexp.MustCompile(`\bmake (?:--\S+ )*([a-z0-9-]+)`)

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
