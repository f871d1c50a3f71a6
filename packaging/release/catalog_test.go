package release_test

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/siderolabs/talos/pkg/machinery/extensions"
	"github.com/stretchr/testify/assert"

	"github.com/talos-ccm/talos-ccm/extension"
)

// catalog is the draft for the extensions catalog of Sidero Labs, and entry is the directory of the extension there.
const (
	catalog = "docs/catalog"
	entry   = catalog + "/talos-ccm"
)

func proposedVariables(t *testing.T) map[string]string {
	t.Helper()

	return withVariables(t, entry+"/vars.yaml.draft", withVariables(t, catalog+"/vars.yaml.draft", platform("x86_64")))
}

func TestCatalog_ServiceMatches(t *testing.T) {
	assert.Equal(t, string(extension.Spec), string(read(t, entry+"/talos-ccm.yaml")))
}

func TestCatalog_RecipeInstallsSameFiles(t *testing.T) {
	assert.Equal(t, installed(ours(t, "x86_64")), installed(proposed(t)))
}

// bldr accepts only hexadecimal checksums, and update-checksums updates only those.
func TestCatalog_SourceHasChecksums(t *testing.T) {
	for _, s := range proposed(t).Steps {
		for _, source := range s.Sources {
			assert.Regexp(t, `^[0-9a-f]{64} [0-9a-f]{128}$`, source.SHA256+" "+source.SHA512)
		}
	}
}

// Builds in the catalog are reproducible only without network access.
func TestCatalog_BuildsOffline(t *testing.T) {
	downloads := false

	for _, s := range proposed(t).Steps {
		if len(s.Build) == 0 {
			downloads = downloads || s.Network == "default" && strings.Contains(strings.Join(s.Prepare, ""), "go mod download")

			continue
		}

		assert.Equal(t, "none", s.Network)
		assert.True(t, downloads)

		// The modules are in the image of the previous step, not in a cache that may be deleted before this step.
		assert.NotContains(t, s.CachePaths, "/tmp/go/pkg")
	}
}

func TestCatalog_ChecksVersionAndListsCPE(t *testing.T) {
	last := proposed(t).Steps[len(proposed(t).Steps)-1]
	version := proposedVariables(t)["VERSION"]
	assert.Contains(t, strings.Join(last.Test, ""), `talos-ccm --version) == "talos-ccm v`+version+`" ]]`)
	assert.Equal(t, []string{"cpe:2.3:a:talos-ccm:talos-ccm:" + version + ":*:*:*:*:*:*:*"}, last.SBOM.CPEs)
}

// Talos accepts our manifest, see packaging/image.
func TestCatalog_ManifestMatches(t *testing.T) {
	var want, got extensions.Manifest

	decode(t, read(t, "manifest.yaml"), &want)
	decode(t, render(t, read(t, entry+"/manifest.yaml.tmpl.draft"), proposedVariables(t)), &got)

	// Descriptions in the catalog start with the tier.
	assert.True(t, strings.HasPrefix(got.Metadata.Description, "[contrib] "), got.Metadata.Description)

	got.Metadata.Description = want.Metadata.Description
	assert.Equal(t, want, got)
}

// bldr reads all files with these names in all directories.
func TestBldr_NoOtherFileIsRead(t *testing.T) {
	var found []string

	for path := range strings.FieldsSeq(git(t, root, "ls-files", "--cached", "--others", "--exclude-standard")) {
		if name := filepath.Base(path); name == "pkg.yaml" || name == "vars.yaml" || filepath.Ext(name) == ".tmpl" {
			found = append(found, path)
		}
	}

	assert.Equal(t, []string{"pkg.yaml", "vars.yaml"}, found)
}
