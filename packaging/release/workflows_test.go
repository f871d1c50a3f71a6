package release_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

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
	if err != nil {
		t.Fatal(err)
	}

	all := map[string]workflow{}

	for _, path := range paths {
		content, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}

		var w workflow
		if err := yaml.Unmarshal(content, &w); err != nil {
			t.Fatal(path, err)
		}

		all[filepath.Base(path)] = w
	}

	if len(all) != 2 {
		t.Fatalf("got %d workflows, want 2", len(all))
	}

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
		if w.Permissions == nil || len(w.Permissions) > 0 {
			t.Errorf("%s grants all jobs %v, want an empty map", name, w.Permissions)
		}
	}

	jobs(t, func(name string, j job) {
		for right, level := range j.Permissions {
			if level == "write" && name != "release.yaml: release" && name != "release.yaml: installers" {
				t.Errorf("%s has write permission for %s", name, right)
			}
		}

		if len(j.Permissions) == 0 {
			t.Errorf("%s has no permissions and cannot check out the code", name)
		}

		if j.Timeout == 0 && j.Uses == "" {
			t.Errorf("%s has no timeout", name)
		}
	})
}

// Pull requests from forks must not run with write permissions or secrets.
func TestWorkflows_UntrustedCodeHasNoPrivileges(t *testing.T) {
	for name, w := range workflows(t) {
		text, err := yaml.Marshal(&w.On)
		if err != nil {
			t.Fatal(err)
		}

		if regexp.MustCompile(`pull_request_target|workflow_run|issue_comment`).Match(text) {
			t.Errorf("%s is triggered by untrusted events:\n%s", name, text)
		}
	}
}

// Tags are mutable.
func TestWorkflows_ActionsArePinned(t *testing.T) {
	pinned := regexp.MustCompile(`^\s*-?\s*uses: (\./.*|[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+)$`)

	for name := range workflows(t) {
		for line := range strings.Lines(string(read(t, ".github/workflows/"+name))) {
			if line = strings.TrimRight(line, "\n"); strings.Contains(line, "uses:") && !pinned.MatchString(line) {
				t.Errorf("%s: %s", name, line)
			}
		}
	}
}

func TestWorkflows_StepsAreSafe(t *testing.T) {
	makefile := string(read(t, "Makefile"))
	versions := map[string]string{} // of Go, with the last job that has it

	jobs(t, func(name string, j job) {
		for _, s := range j.Steps {
			if strings.Contains(s.Run, "${{") {
				t.Errorf("%s allows code injection by an expression in\n%s", name, s.Run)
			}

			for _, match := range regexp.MustCompile(`\bmake (?:--\S+ )*([a-z-]+)`).FindAllStringSubmatch(s.Run, -1) {
				if !strings.Contains(makefile, "\n"+match[1]+":") {
					t.Errorf("%s uses missing make target %s", name, match[1])
				}
			}

			// Signed artifacts must not depend on a cache that other jobs can write.
			if strings.HasPrefix(s.Uses, "actions/cache@") || strings.HasPrefix(s.Uses, "actions/setup-go@") && s.With["cache"] != "false" {
				t.Errorf("%s uses a cache", name)
			}

			if version, found := s.With["go-version"]; found {
				versions[version] = name
			}
		}
	})

	// Images are reproducible only with the same version of Go, which includes gzip.
	if len(versions) != 1 {
		t.Errorf("jobs use several versions of Go: %v", versions)
	}
}
