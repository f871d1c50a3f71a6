package sbom

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/google/licensecheck"
)

// enough is the percentage of words of a file that must be known license text. The rest is names and years.
const enough = 75

// licenseFile matches the names of license files in the root of a module.
var licenseFile = regexp.MustCompile(`(?i)^(licen[cs]e|copying|unlicense)([._-].*)?$`)

// ignored has the extensions of source files, and of licenses of documentation, which is not in the binary.
var ignored = []string{".go", ".docs"}

// licenseOf returns the SPDX expression for the license texts in a directory. Several licenses are combined with AND,
// because scanners cannot recognize a choice between them. Without a license text, or with an unknown one, it returns
// NOASSERTION.
func licenseOf(dir string) (string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return "", err
	}

	var licenses []string

	for _, entry := range entries {
		name := entry.Name()
		if !entry.Type().IsRegular() || !licenseFile.MatchString(name) || slices.Contains(ignored, filepath.Ext(name)) {
			continue
		}

		text, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			return "", err
		}

		found := detect(text)
		if len(found) == 0 {
			return noAssertion, nil
		}

		licenses = append(licenses, found...)
	}

	if len(licenses) == 0 {
		return noAssertion, nil
	}

	slices.Sort(licenses)

	return strings.Join(slices.Compact(licenses), " AND "), nil
}

// detect returns the licenses in a text, or none if too little of it is known license text.
func detect(text []byte) []string {
	coverage := licensecheck.Scan(text)
	if coverage.Percent < enough {
		return nil
	}

	var found []string

	for _, match := range coverage.Match {
		if !match.IsURL {
			found = append(found, match.ID)
		}
	}

	return found
}

// goInstallation has the directories of the Go installation and of the module cache.
type goInstallation struct{ root, modules string }

func installedGo() (goInstallation, error) {
	output, err := exec.CommandContext(context.Background(), "go", "env", "GOROOT", "GOMODCACHE").Output()
	if err != nil {
		return goInstallation{}, fmt.Errorf("run go env: %w", err)
	}

	root, modules, _ := strings.Cut(strings.TrimSpace(string(output)), "\n")

	return goInstallation{root, modules}, nil
}

var capital = regexp.MustCompile(`[A-Z]`)

// module returns the directory of a module in the cache, where uppercase letters are escaped with an exclamation mark
// (https://go.dev/ref/mod#module-cache).
func (g goInstallation) module(path, version string) string {
	escaped := capital.ReplaceAllStringFunc(path+"@"+version, func(c string) string { return "!" + strings.ToLower(c) })

	return filepath.Join(g.modules, escaped)
}
