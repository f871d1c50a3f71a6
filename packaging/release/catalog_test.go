package release_test

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/blang/semver/v4"
	"github.com/google/go-cmp/cmp"
	"github.com/siderolabs/talos/pkg/machinery/extensions"

	"github.com/talos-ccm/talos-ccm/extension"
	"github.com/talos-ccm/talos-ccm/packaging/image"
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

// load loads an extension with the given manifest with the code of Talos.
func load(t *testing.T, manifest []byte) *extensions.Extension {
	t.Helper()

	files, err := image.Extension(image.Release{Version: "v1.2.3", Manifest: manifest}, nil)
	if err != nil {
		t.Fatal(err)
	}

	folder := t.TempDir()
	if err := image.Write(folder, files); err != nil {
		t.Fatal(err)
	}

	// image.Extension has replaced the version.
	if err := os.WriteFile(filepath.Join(folder, "manifest.yaml"), manifest, 0o644); err != nil {
		t.Fatal(err)
	}

	loaded, err := extensions.Load(folder)
	if err != nil {
		t.Fatal(err)
	}

	return loaded
}

func TestCatalog_ManifestIsAcceptedByTalos(t *testing.T) {
	proposed := load(t, render(t, read(t, entry+"/manifest.yaml.tmpl.draft"), proposedVariables(t)))

	for version, accepted := range map[string]bool{"1.11.9": false, "1.12.0": true, "1.13.5": true, "1.14.0": true} {
		talos := semver.MustParse(version)

		err := proposed.Validate(extensions.WithValidateConstraints(), extensions.WithValidateContents(), extensions.WithTalosVersion(&talos))
		if (err == nil) != accepted {
			t.Errorf("accepted by Talos %s: %t, want %t (%v)", version, err == nil, accepted, err)
		}
	}
}

func TestCatalog_ManifestMatches(t *testing.T) {
	want := load(t, read(t, "manifest.yaml")).Manifest
	got := load(t, render(t, read(t, entry+"/manifest.yaml.tmpl.draft"), proposedVariables(t))).Manifest

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
