package sbom

import (
	"cmp"
	"debug/buildinfo"
	"fmt"
	"regexp"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/spdx/tools-golang/spdx/v2/common"
	"github.com/spdx/tools-golang/spdx/v2/v2_3"

	"github.com/talos-ccm/talos-ccm/extension"
)

// Modules returns the SBOM of a binary: talos-ccm, the Go modules in the binary and the standard library, with
// versions, licenses and the checksums of go.sum. The leading v of version is optional. The SBOM does not depend on
// the architecture.
//
// The license of a module is NOASSERTION if it is unknown. Modules returns an error if the binary was not built by Go
// or if one of its modules is missing from the module cache.
func Modules(binary, version string, created time.Time) ([]byte, error) {
	info, err := buildinfo.ReadFile(binary)
	if err != nil {
		return nil, fmt.Errorf("read build information of %s: %w", binary, err)
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

// modules returns the modules in a binary, sorted by path. Replaced modules are listed as their replacements.
func modules(info *debug.BuildInfo) []*debug.Module {
	var list []*debug.Module
	for _, m := range info.Deps {
		list = append(list, cmp.Or(m.Replace, m))
	}

	slices.SortFunc(list, func(a, b *debug.Module) int { return cmp.Compare(a.Path, b.Path) })

	return list
}

func dependency(m *debug.Module, installed goInstallation) (*v2_3.Package, error) {
	license, err := licenseOf(installed.module(m.Path, m.Version))
	if err != nil {
		return nil, fmt.Errorf("read license of module %s %s: %w", m.Path, m.Version, err)
	}

	p := library(m.Path, m.Version, license)
	p.PackageDownloadLocation = noAssertion
	p.PackageComment = "go.sum " + m.Sum

	return p, nil
}

// standardLibrary uses the names of the standard library in vulnerability databases. Go versions have no leading v.
func standardLibrary(goVersion string, installed goInstallation) (*v2_3.Package, error) {
	license, err := licenseOf(installed.root)
	if err != nil {
		return nil, fmt.Errorf("read license of Go: %w", err)
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

// identifier returns a unique SPDX identifier for a path. Characters that are not allowed, and dashes, are escaped as
// a dash and the code point.
func identifier(path string) string {
	return regexp.MustCompile(`[^a-zA-Z0-9.]`).ReplaceAllStringFunc(path, func(c string) string { return fmt.Sprintf("-%02x", c) })
}
