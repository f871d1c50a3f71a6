// Package sbom creates SBOMs as SPDX 2.3 JSON: of the extension for its image, and of the Go modules in a binary for
// a release. The result is reproducible. Licenses are read from the Go module cache; no network access is required.
package sbom

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"
	"time"

	spdxjson "github.com/spdx/tools-golang/json"
	"github.com/spdx/tools-golang/spdx/v2/common"
	"github.com/spdx/tools-golang/spdx/v2/v2_3"

	"github.com/talos-ccm/talos-ccm/extension"
)

const (
	module = "github.com/talos-ccm/talos-ccm"
	// Website is the home of talos-ccm, also in the labels of its images.
	Website = "https://" + module

	// License is the license of talos-ccm as an SPDX expression.
	License = "Apache-2.0"

	noAssertion = "NOASSERTION"
)

// Extension returns the SBOM for /usr/local/share/spdx of the extension image. It has exactly one package: Talos
// identifies packages by name across the host and all extensions, so Go modules of talos-ccm would replace those of
// Talos (internal/app/machined/pkg/controllers/runtime/sbom_item.go, Talos v1.13.5). The leading v of version is
// optional.
func Extension(version string, created time.Time) ([]byte, error) {
	return encode(document(extension.Name+"-extension", []*v2_3.Package{product(version)}, created))
}

// product returns the package of talos-ccm. Its version has no leading v, like in the manifest of the extension; the
// version of the Go module has one.
func product(version string) *v2_3.Package {
	version = strings.TrimPrefix(version, "v")
	p := library(module, "v"+version, License)
	p.PackageName, p.PackageSPDXIdentifier, p.PackageVersion = extension.Name, "Package-"+extension.Name, version
	p.PackageDownloadLocation, p.PackageHomePage = "git+"+Website, Website
	p.PackageLicenseConcluded, p.PrimaryPackagePurpose = License, "APPLICATION"

	return p
}

// document returns a document that describes the first package, which depends on all others.
func document(name string, packages []*v2_3.Package, created time.Time) *v2_3.Document {
	main := packages[0].PackageSPDXIdentifier

	relationships := []*v2_3.Relationship{relationship("DOCUMENT", common.TypeRelationshipDescribe, main)}
	for _, p := range packages[1:] {
		relationships = append(relationships, relationship(main, common.TypeRelationshipDependsOn, p.PackageSPDXIdentifier))
	}

	return &v2_3.Document{
		SPDXVersion:    v2_3.Version,
		DataLicense:    v2_3.DataLicense,
		SPDXIdentifier: "DOCUMENT",
		DocumentName:   name,
		CreationInfo: &v2_3.CreationInfo{
			Creators: []common.Creator{{CreatorType: "Tool", Creator: extension.Name + "-sbom"}},
			Created:  created.UTC().Format(time.RFC3339),
		},
		Packages:      packages,
		Relationships: relationships,
	}
}

func relationship(from common.ElementID, kind string, to common.ElementID) *v2_3.Relationship {
	return &v2_3.Relationship{RefA: common.DocElementID{ElementRefID: from}, RefB: common.DocElementID{ElementRefID: to}, Relationship: kind}
}

// purl returns the package URL of a Go module.
func purl(path, version string) *v2_3.PackageExternalReference {
	return &v2_3.PackageExternalReference{
		Category: common.CategoryPackageManager,
		RefType:  common.TypePackageManagerPURL,
		Locator:  "pkg:golang/" + path + "@" + strings.ReplaceAll(version, "+", "%2B"),
	}
}

// encode sets the namespace, which must be unique, to a hash of the document, and encodes it.
func encode(doc *v2_3.Document) ([]byte, error) {
	unnamed, err := write(doc)
	if err != nil {
		return nil, err
	}

	sum := sha256.Sum256(unnamed)
	doc.DocumentNamespace = Website + "/spdx/" + doc.DocumentName + "-" + hex.EncodeToString(sum[:])

	return write(doc)
}

func write(doc *v2_3.Document) ([]byte, error) {
	var buffer bytes.Buffer

	if err := spdxjson.Write(doc, &buffer, spdxjson.Indent("  "), spdxjson.EscapeHTML(false)); err != nil {
		return nil, fmt.Errorf("encode SBOM %s: %w", doc.DocumentName, err)
	}

	return buffer.Bytes(), nil
}
