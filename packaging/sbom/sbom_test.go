package sbom_test

import (
	"bytes"
	"testing"
	"time"

	spdxjson "github.com/spdx/tools-golang/json"
	"github.com/spdx/tools-golang/spdx"
	"github.com/spdx/tools-golang/spdxlib"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/talos-ccm/talos-ccm/packaging/sbom"
)

var created = time.Date(2026, time.November, 21, 10, 0, 0, 0, time.UTC)

// read parses and validates a document.
func read(t *testing.T, content []byte) *spdx.Document {
	t.Helper()

	doc, err := spdxjson.Read(bytes.NewReader(content))
	require.NoError(t, err)
	require.NoError(t, spdxlib.ValidateDocument(doc))

	described, err := spdxlib.GetDescribedPackageIDs(doc)
	require.NoError(t, err)
	assert.Equal(t, []spdx.ElementID{"Package-talos-ccm"}, described)

	return doc
}

// Talos replaces its packages by those of extensions with the same name; see
// internal/app/machined/pkg/controllers/runtime/sbom_item.go of Talos v1.13.5.
func TestExtension_HasOnePackage(t *testing.T) {
	content, err := sbom.Extension("v1.2.3-rc.1", created)
	require.NoError(t, err)

	doc := read(t, content)
	require.Len(t, doc.Packages, 1)
	require.Equal(t, "2026-11-21T10:00:00Z", doc.CreationInfo.Created)

	got := doc.Packages[0]
	assert.Equal(t, "talos-ccm", got.PackageName)
	assert.Equal(t, "1.2.3-rc.1", got.PackageVersion)
	assert.Equal(t, "Apache-2.0", got.PackageLicenseDeclared)

	const purl = "pkg:golang/github.com/talos-ccm/talos-ccm@v1.2.3-rc.1"

	refs := got.PackageExternalReferences
	require.Len(t, refs, 1)
	assert.Equal(t, "purl", refs[0].RefType)
	assert.Equal(t, purl, refs[0].Locator)
}

func TestExtension_IgnoresLeadingV(t *testing.T) {
	with, err := sbom.Extension("v1.2.3", created)
	require.NoError(t, err)

	without, err := sbom.Extension("1.2.3", created.In(time.FixedZone("elsewhere", 3600)))
	require.NoError(t, err)
	assert.Equal(t, string(with), string(without))
}

// SPDX 2.3, clause 6.5: the namespace is unique.
func TestExtension_NamespaceIsUnique(t *testing.T) {
	seen := map[string]bool{}

	for _, version := range []string{"v1.2.3", "v1.2.4"} {
		for _, at := range []time.Time{created, created.Add(time.Second)} {
			content, err := sbom.Extension(version, at)
			require.NoError(t, err)

			seen[read(t, content).DocumentNamespace] = true
		}
	}

	assert.Len(t, seen, 4)
}
