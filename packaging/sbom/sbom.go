// Package sbom writes bills of materials as SPDX 2.3 JSON: of the extension, for its image, and of all Go modules of a built binary,
// for a release. The same input gives the same bytes, wherever and whenever. It never asks the network: licenses are read from Go's
// module cache, which a build has just filled.
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
	module  = "github.com/talos-ccm/talos-ccm"
	website = "https://" + module

	// License is that of talos-ccm, as an SPDX expression.
	License = "Apache-2.0"

	noAssertion = "NOASSERTION"
)

// Extension is the bill of materials that the extension's image carries in /usr/local/share/spdx. It has exactly one package: Talos
// knows the items of a machine by name alone, across the host and all extensions, so the Go modules of ours would replace those of Talos
// (internal/app/machined/pkg/controllers/runtime/sbom_item.go, Talos v1.13.5). The version may have a leading v.
func Extension(version string, created time.Time) ([]byte, error) {
	return encode(document(extension.Name+"-extension", []*v2_3.Package{product(version)}, created))
}

// product is talos-ccm itself. Its version is the one of the extension's manifest, without a v; Go's has one.
func product(version string) *v2_3.Package {
	version = strings.TrimPrefix(version, "v")

	return &v2_3.Package{
		PackageName:               extension.Name,
		PackageSPDXIdentifier:     "Package-" + extension.Name,
		PackageVersion:            version,
		PackageSupplier:           &common.Supplier{Supplier: noAssertion},
		PackageDownloadLocation:   "git+" + website,
		PackageHomePage:           website,
		PackageLicenseConcluded:   License,
		PackageLicenseDeclared:    License,
		PackageCopyrightText:      noAssertion,
		PrimaryPackagePurpose:     "APPLICATION",
		PackageExternalReferences: []*v2_3.PackageExternalReference{purl(module, "v"+version)},
	}
}

// document describes the first package, which depends on all others.
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
	return &v2_3.Relationship{
		RefA:         common.DocElementID{ElementRefID: from},
		RefB:         common.DocElementID{ElementRefID: to},
		Relationship: kind,
	}
}

// purl is how scanners know a Go module.
func purl(path, version string) *v2_3.PackageExternalReference {
	return &v2_3.PackageExternalReference{
		Category: common.CategoryPackageManager,
		RefType:  common.TypePackageManagerPURL,
		Locator:  "pkg:golang/" + path + "@" + strings.ReplaceAll(version, "+", "%2B"),
	}
}

// encode names the document after its content, because a namespace must be unique to it, and writes it.
func encode(doc *v2_3.Document) ([]byte, error) {
	unnamed, err := write(doc)
	if err != nil {
		return nil, err
	}

	sum := sha256.Sum256(unnamed)
	doc.DocumentNamespace = website + "/spdx/" + doc.DocumentName + "-" + hex.EncodeToString(sum[:])

	return write(doc)
}

func write(doc *v2_3.Document) ([]byte, error) {
	var buffer bytes.Buffer

	if err := spdxjson.Write(doc, &buffer, spdxjson.Indent("  "), spdxjson.EscapeHTML(false)); err != nil {
		return nil, fmt.Errorf("encode the bill of materials %s: %w", doc.DocumentName, err)
	}

	return buffer.Bytes(), nil
}
