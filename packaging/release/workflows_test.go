package release_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v4"
)

type workflow struct {
	On          yaml.Node
	Permissions map[string]string
	Concurrency map[string]string
	Jobs        map[string]job
}

type job struct {
	Permissions map[string]string
	Timeout     int `yaml:"timeout-minutes"`
	Uses        string
	Steps       []workflowStep
}

type workflowStep struct {
	Name, Uses, Run string
	With            map[string]string
}

func workflows(t *testing.T) map[string]workflow {
	t.Helper()

	paths, err := filepath.Glob(filepath.Join(root, ".github/workflows/*"))
	require.NoError(t, err)

	all := map[string]workflow{}

	for _, path := range paths {
		content, err := os.ReadFile(path)
		require.NoError(t, err)

		var w workflow
		require.NoError(t, yaml.Unmarshal(content, &w), path)

		all[filepath.Base(path)] = w
	}

	require.Len(t, all, 2)

	return all
}

// jobs calls f for every job with its full name.
func jobs(t *testing.T, f func(name string, j job)) {
	t.Helper()

	for file, w := range workflows(t) {
		for name, j := range w.Jobs {
			f(file+": "+name, j)
		}
	}
}

func TestWorkflows_PermissionsAreMinimal(t *testing.T) {
	for name, w := range workflows(t) {
		assert.NotNil(t, w.Permissions, name)
		assert.Empty(t, w.Permissions, name)
	}

	jobs(t, func(name string, j job) {
		for right, level := range j.Permissions {
			assert.True(t, level != "write" || name == "release.yaml: release" || name == "release.yaml: installers", "%s has write permission for %s", name, right)
		}

		assert.NotEmpty(t, j.Permissions, "%s has no permissions and cannot check out the code", name)
		assert.True(t, j.Timeout != 0 || j.Uses != "", "%s has no timeout", name)
	})
}

// Pull requests from forks must not run with write permissions or secrets.
func TestWorkflows_UntrustedCodeHasNoPrivileges(t *testing.T) {
	for name, w := range workflows(t) {
		text, err := yaml.Marshal(&w.On)
		require.NoError(t, err)
		assert.False(t, regexp.MustCompile(`pull_request_target|workflow_run|issue_comment`).Match(text), "%s is triggered by untrusted events:\n%s", name, text)
	}
}

// Tags are mutable.
func TestWorkflows_ActionsArePinned(t *testing.T) {
	for name := range workflows(t) {
		for line := range strings.Lines(string(read(t, ".github/workflows/"+name))) {
			if strings.Contains(line, "uses:") {
				assert.Regexp(t, `^\s*-?\s*uses: (\./.*|[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+)\n$`, line, name)
			}
		}
	}
}

func TestWorkflows_StepsAreSafe(t *testing.T) {
	makefile := string(read(t, "Makefile"))
	versions := map[string]string{} // of Go, with the last job that has it

	jobs(t, func(name string, j job) {
		for _, s := range j.Steps {
			assert.NotContains(t, s.Run, "${{", name)

			for _, match := range regexp.MustCompile(`\bmake (?:--\S+ )*([a-z-]+)`).FindAllStringSubmatch(s.Run, -1) {
				assert.True(t, strings.Contains(makefile, "\n"+match[1]+":"), "%s uses missing make target %s", name, match[1])
			}

			// Signed artifacts must not depend on a cache that other jobs can write.
			assert.NotContains(t, s.Uses, "actions/cache@", name)
			assert.True(t, !strings.HasPrefix(s.Uses, "actions/setup-go@") || s.With["cache"] == "false", "%s uses a cache", name)

			if version, found := s.With["go-version"]; found {
				versions[version] = name
			}
		}
	})

	// Images are reproducible only with the same version of Go, which includes gzip.
	assert.Len(t, versions, 1, "jobs use several versions of Go")
}
