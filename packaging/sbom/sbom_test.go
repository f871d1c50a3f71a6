package sbom_test

import (
	"bytes"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	spdxjson "github.com/spdx/tools-golang/json"
	"github.com/spdx/tools-golang/spdx"
	"github.com/spdx/tools-golang/spdxlib"

	"github.com/talos-ccm/talos-ccm/packaging/sbom"
)

var created = time.Date(2026, time.November, 21, 10, 0, 0, 0, time.UTC)

// read parses and validates a document.
func read(t *testing.T, content []byte) *spdx.Document {
	t.Helper()

	doc, err := spdxjson.Read(bytes.NewReader(content))
	if err != nil {
		t.Fatal(err)
	}

	if err := spdxlib.ValidateDocument(doc); err != nil {
		t.Fatal(err)
	}

	described, err := spdxlib.GetDescribedPackageIDs(doc)
	if err != nil {
		t.Fatal(err)
	}

	if len(described) != 1 || described[0] != "Package-talos-ccm" {
		t.Errorf("document describes %v, want only talos-ccm", described)
	}

	return doc
}

// Talos replaces its packages by those of extensions with the same name; see
// internal/app/machined/pkg/controllers/runtime/sbom_item.go of Talos v1.13.5.
func TestExtension_HasOnePackage(t *testing.T) {
	content, err := sbom.Extension("v1.2.3-rc.1", created)
	if err != nil {
		t.Fatal(err)
	}

	doc := read(t, content)
	if len(doc.Packages) != 1 || doc.CreationInfo.Created != "2026-11-21T10:00:00Z" {
		t.Fatalf("got %d packages, creation time %s", len(doc.Packages), doc.CreationInfo.Created)
	}

	got := doc.Packages[0]
	if got.PackageName != "talos-ccm" || got.PackageVersion != "1.2.3-rc.1" || got.PackageLicenseDeclared != "Apache-2.0" {
		t.Errorf("unexpected package %+v", got)
	}

	const purl = "pkg:golang/github.com/talos-ccm/talos-ccm@v1.2.3-rc.1"
	if refs := got.PackageExternalReferences; len(refs) != 1 || refs[0].RefType != "purl" || refs[0].Locator != purl {
		t.Errorf("got references %+v, want purl %s", refs, purl)
	}
}

func TestExtension_IgnoresLeadingV(t *testing.T) {
	with, err := sbom.Extension("v1.2.3", created)
	if err != nil {
		t.Fatal(err)
	}

	without, err := sbom.Extension("1.2.3", created.In(time.FixedZone("elsewhere", 3600)))
	if err != nil {
		t.Fatal(err)
	}

	if diff := cmp.Diff(string(with), string(without)); diff != "" {
		t.Error(diff)
	}
}

// SPDX 2.3, clause 6.5: the namespace is unique.
func TestExtension_NamespaceIsUnique(t *testing.T) {
	seen := map[string]bool{}

	for _, version := range []string{"v1.2.3", "v1.2.4"} {
		for _, at := range []time.Time{created, created.Add(time.Second)} {
			content, err := sbom.Extension(version, at)
			if err != nil {
				t.Fatal(err)
			}

			seen[read(t, content).DocumentNamespace] = true
		}
	}

	if len(seen) != 4 {
		t.Errorf("got %d namespaces for 4 documents", len(seen))
	}
}
