package docs_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/talos-ccm/talos-ccm/test/talos"
)

// TestVersions_AreThoseOfE2E checks that the pages call exactly the versions supported that `make e2e` boots.
func TestVersions_AreThoseOfE2E(t *testing.T) {
	const matrix = "docs/reference/talos-versions.md"

	var talosVersions, kubernetesVersions []string

	for _, release := range talos.Releases() {
		talosVersions = append(talosVersions, release.Talos)
		kubernetesVersions = append(kubernetesVersions, release.Kubernetes)
		assert.Contains(t, read(t, matrix), fmt.Sprintf("\n| %s | %s |", release.Talos, release.Kubernetes), matrix)
	}

	assert.Equal(t, len(talosVersions), strings.Count(read(t, matrix), "\n| v"), matrix)

	for component, versions := range map[string][]string{"Talos": talosVersions, "Kubernetes": kubernetesVersions} {
		assert.Contains(t, read(t, "README.md"), "| "+component+" | "+strings.Join(versions, ", ")+" |")
	}
}
