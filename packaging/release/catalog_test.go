package release_test

import (
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/siderolabs/talos/pkg/machinery/extensions"

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
	if diff := cmp.Diff(string(extension.Spec), string(read(t, entry+"/talos-ccm.yaml"))); diff != "" {
		t.Errorf("(-ours +proposed)\n%s", diff)
	}
}

func TestCatalog_RecipeInstallsSameFiles(t *testing.T) {
	if diff := cmp.Diff(installed(ours(t, "x86_64")), installed(proposed(t))); diff != "" {
		t.Errorf("(-ours +proposed)\n%s", diff)
	}
}

// bldr accepts only hexadecimal checksums, and update-checksums updates only those.
func TestCatalog_SourceHasChecksums(t *testing.T) {
	hex := regexp.MustCompile(`^[0-9a-f]+$`)

	for _, s := range proposed(t).Steps {
		for _, source := range s.Sources {
			if !hex.MatchString(source.SHA256+source.SHA512) || len(source.SHA256) != 64 || len(source.SHA512) != 128 {
				t.Errorf("got checksums %q and %q of %s", source.SHA256, source.SHA512, source.URL)
			}
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

		if s.Network != "none" || !downloads {
			t.Errorf("got network %q, modules downloaded before: %t", s.Network, downloads)
		}

		// The modules are in the image of the previous step, not in a cache that may be deleted before this step.
		if slices.Contains(s.CachePaths, "/tmp/go/pkg") {
			t.Error("modules are read from a cache")
		}
	}
}

func TestCatalog_ChecksVersionAndListsCPE(t *testing.T) {
	last := proposed(t).Steps[len(proposed(t).Steps)-1]
	version := proposedVariables(t)["VERSION"]

	if want := `talos-ccm --version) == "talos-ccm v` + version + `" ]]`; !strings.Contains(strings.Join(last.Test, ""), want) {
		t.Errorf("tests do not contain %s:\n%s", want, last.Test)
	}

	if diff := cmp.Diff([]string{"cpe:2.3:a:talos-ccm:talos-ccm:" + version + ":*:*:*:*:*:*:*"}, last.SBOM.CPEs); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
}

// Talos accepts our manifest, see packaging/image.
func TestCatalog_ManifestMatches(t *testing.T) {
	var want, got extensions.Manifest

	decode(t, read(t, "manifest.yaml"), &want)
	decode(t, render(t, read(t, entry+"/manifest.yaml.tmpl.draft"), proposedVariables(t)), &got)

	// Descriptions in the catalog start with the tier.
	if !strings.HasPrefix(got.Metadata.Description, "[contrib] ") {
		t.Errorf("got description %q, want prefix [contrib]", got.Metadata.Description)
	}

	got.Metadata.Description = want.Metadata.Description

	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-ours +proposed)\n%s", diff)
	}
}

// bldr reads all files with these names in all directories.
func TestBldr_NoOtherFileIsRead(t *testing.T) {
	var found []string

	for path := range strings.FieldsSeq(git(t, root, "ls-files", "--cached", "--others", "--exclude-standard")) {
		if name := filepath.Base(path); name == "pkg.yaml" || name == "vars.yaml" || filepath.Ext(name) == ".tmpl" {
			found = append(found, path)
		}
	}

	if diff := cmp.Diff([]string{"pkg.yaml", "vars.yaml"}, found); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
}
