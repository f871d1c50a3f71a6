package docs_test

import (
	"regexp"
	"strings"
	"testing"
)

// TestVersions_AreThoseOfE2E checks that the pages call exactly the versions supported that `make e2e` boots.
func TestVersions_AreThoseOfE2E(t *testing.T) {
	for _, c := range []struct{ component, module, file string }{
		{"Talos", "github.com/siderolabs/talos", "test/talos/machined/go.mod"},
		{"Kubernetes", "k8s.io/kubernetes", "test/kube/components/go.mod"},
	} {
		match := regexp.MustCompile(`(?m)^\s+` + regexp.QuoteMeta(c.module) + ` (v\S+)$`).FindStringSubmatch(read(t, c.file))
		if match == nil {
			t.Fatalf("%s does not require %s", c.file, c.module)
		}

		for _, page := range []string{"README.md", "docs/reference/talos-versions.md"} {
			if row := "| " + c.component + " | " + match[1] + " |"; !strings.Contains(read(t, page), row) {
				t.Errorf("%s: no row %q, the version in %s", page, row, c.file)
			}
		}
	}
}
