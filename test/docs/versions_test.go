package docs_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/talos-ccm/talos-ccm/test/talos"
)

// TestVersions_AreThoseOfE2E checks that the pages call exactly the versions supported that `make e2e` boots.
func TestVersions_AreThoseOfE2E(t *testing.T) {
	const matrix = "docs/reference/talos-versions.md"

	var talosVersions, kubernetesVersions []string

	for _, release := range talos.Releases() {
		talosVersions = append(talosVersions, release.Talos)
		kubernetesVersions = append(kubernetesVersions, release.Kubernetes)

		if row := fmt.Sprintf("\n| %s | %s |", release.Talos, release.Kubernetes); !strings.Contains(read(t, matrix), row) {
			t.Errorf("%s: no row %q of a release in test/talos", matrix, row)
		}
	}

	for component, versions := range map[string][]string{"Talos": talosVersions, "Kubernetes": kubernetesVersions} {
		if row := "| " + component + " | " + strings.Join(versions, ", ") + " |"; !strings.Contains(read(t, "README.md"), row) {
			t.Errorf("README.md: no row %q of the releases in test/talos", row)
		}
	}
}
