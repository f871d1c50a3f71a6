package sbom

import (
	"cmp"
	"debug/buildinfo"
	"fmt"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/spdx/tools-golang/spdx/v2/common"
	"github.com/spdx/tools-golang/spdx/v2/v2_3"

	"github.com/talos-ccm/talos-ccm/extension"
)

// Modules is the bill of materials of a built binary: talos-ccm, every Go module that is linked in, and Go's standard library, with
// versions, licenses and the checksums of go.sum. The version is talos-ccm's, with or without its v. It does not name the architecture:
// all builds of one version consist of the same modules, and so have one document.
//
// A module whose license text is not a known one is listed with NOASSERTION. A binary that is not Go's, or whose modules are not in the
// module cache, is an error.
func Modules(binary, version string, created time.Time) ([]byte, error) {
	info, err := buildinfo.ReadFile(binary)
	if err != nil {
		return nil, fmt.Errorf("read what %s was built of: %w", binary, err)
	}

	installed, err := installedGo()
	if err != nil {
		return nil, err
	}

	library, err := standardLibrary(info.GoVersion, installed)
	if err != nil {
		return nil, err
	}

	packages := []*v2_3.Package{product(version), library}

	for _, m := range modules(info) {
		p, err := dependency(m, installed)
		if err != nil {
			return nil, err
		}

		packages = append(packages, p)
	}

	return encode(document(extension.Name, packages, created))
}

// modules are those that were linked in, replacements in the place of what they replace, by path.
func modules(info *debug.BuildInfo) []*debug.Module {
	list := make([]*debug.Module, 0, len(info.Deps))

	for _, m := range info.Deps {
		if m.Replace != nil {
			m = m.Replace
		}

		list = append(list, m)
	}

	slices.SortFunc(list, func(a, b *debug.Module) int { return cmp.Compare(a.Path, b.Path) })

	return list
}

func dependency(m *debug.Module, installed goInstallation) (*v2_3.Package, error) {
	license, err := licenseOf(installed.module(m.Path, m.Version))
	if err != nil {
		return nil, fmt.Errorf("read the license of module %s %s: %w", m.Path, m.Version, err)
	}

	p := library(m.Path, m.Version, license)
	p.PackageDownloadLocation = noAssertion
	p.PackageComment = "go.sum " + m.Sum

	return p, nil
}

// standardLibrary goes by the names that vulnerability databases know it by. Its releases have no v.
func standardLibrary(goVersion string, installed goInstallation) (*v2_3.Package, error) {
	license, err := licenseOf(installed.root)
	if err != nil {
		return nil, fmt.Errorf("read the license of Go: %w", err)
	}

	p := library("stdlib", strings.TrimPrefix(goVersion, "go"), license)
	p.PackageDownloadLocation = "git+https://go.googlesource.com/go@" + goVersion
	p.PackageExternalReferences = append(p.PackageExternalReferences, &v2_3.PackageExternalReference{
		Category: common.CategorySecurity,
		RefType:  common.TypeSecurityCPE23Type,
		Locator:  "cpe:2.3:a:golang:go:" + p.PackageVersion + ":-:*:*:*:*:*:*",
	})

	return p, nil
}

func library(path, version, license string) *v2_3.Package {
	return &v2_3.Package{
		PackageName:               path,
		PackageSPDXIdentifier:     common.ElementID("Package-" + identifier(path)),
		PackageVersion:            version,
		PackageSupplier:           &common.Supplier{Supplier: noAssertion},
		PackageLicenseConcluded:   noAssertion,
		PackageLicenseDeclared:    license,
		PackageCopyrightText:      noAssertion,
		PrimaryPackagePurpose:     "LIBRARY",
		PackageExternalReferences: []*v2_3.PackageExternalReference{purl(path, version)},
	}
}

// identifier is the path with all that SPDX allows in names but not in identifiers as its code point, and the dash that announces it: so two
// paths never share one.
func identifier(path string) string {
	var b strings.Builder

	for _, r := range path {
		switch {
		case r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r >= '0' && r <= '9', r == '.':
			b.WriteRune(r)
		default:
			fmt.Fprintf(&b, "-%02x", r)
		}
	}

	return b.String()
}
