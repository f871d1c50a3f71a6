package sbom_test

import (
	"bytes"
	"encoding/json"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	spdxjson "github.com/spdx/tools-golang/json"
	"github.com/spdx/tools-golang/spdx"
	"github.com/spdx/tools-golang/spdxlib"

	"github.com/talos-ccm/talos-ccm/packaging/sbom"
)

var created = time.Date(2026, time.November, 21, 10, 0, 0, 0, time.UTC)

// read reads a document as others do, and validates it.
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
		t.Errorf("describes %v, want talos-ccm alone", described)
	}

	return doc
}

// item is what Talos makes of a package.
type item struct {
	Name         string `json:"name"`
	Version      string `json:"versionInfo"`
	License      string `json:"licenseDeclared"`
	ExternalRefs []struct {
		Type    string `json:"referenceType"`
		Locator string `json:"referenceLocator"`
	} `json:"externalRefs"`
}

// The fields are those that Talos v1.13.5 reads (internal/app/machined/pkg/controllers/runtime/sbom_item.go).
func TestExtension_HasOnePackage(t *testing.T) {
	content, err := sbom.Extension("v1.2.3-rc.1", created)
	if err != nil {
		t.Fatal(err)
	}

	var doc struct {
		Packages []item `json:"packages"`
	}

	if err := json.Unmarshal(content, &doc); err != nil {
		t.Fatal(err)
	}

	if len(doc.Packages) != 1 {
		t.Fatalf("%d packages, want one: the name of any other could be one of Talos's own", len(doc.Packages))
	}

	got := doc.Packages[0]
	if got.Name != "talos-ccm" || got.Version != "1.2.3-rc.1" || got.License != "Apache-2.0" {
		t.Errorf("Talos sees %+v", got)
	}

	const purl = "pkg:golang/github.com/talos-ccm/talos-ccm@v1.2.3-rc.1"

	if len(got.ExternalRefs) != 1 || got.ExternalRefs[0].Type != "purl" || got.ExternalRefs[0].Locator != purl {
		t.Errorf("references %+v, want the purl %s", got.ExternalRefs, purl)
	}
}

func TestExtension_IsValid(t *testing.T) {
	content, err := sbom.Extension("v1.2.3", created)
	if err != nil {
		t.Fatal(err)
	}

	if doc := read(t, content); doc.CreationInfo.Created != "2026-11-21T10:00:00Z" {
		t.Errorf("created %s", doc.CreationInfo.Created)
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

// SPDX 2.3, clause 6.5: a namespace is unique to a document.
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
		t.Errorf("%d namespaces for 4 documents", len(seen))
	}
}
