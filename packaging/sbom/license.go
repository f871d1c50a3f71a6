package sbom

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"unicode"

	"github.com/google/licensecheck"
)

// enough is how much of a file, in percent of its words, must be known license text: the rest is names and years.
const enough = 75

// licenseFile is how projects call the file with their license, in the root of a module.
var licenseFile = regexp.MustCompile(`(?i)^(licen[cs]e|copying|unlicense)([._-].*)?$`)

// licenseOf is the SPDX expression for the license texts in the root of a folder: all of them hold at once, because a file that leaves the
// choice says so in words that no scanner understands. Without a text, or with one that is unknown, it is NOASSERTION.
func licenseOf(folder string) (string, error) {
	entries, err := os.ReadDir(folder)
	if err != nil {
		return "", err
	}

	var licenses []string

	for _, entry := range entries {
		name := entry.Name()
		if !entry.Type().IsRegular() || !licenseFile.MatchString(name) || filepath.Ext(name) == ".go" {
			continue
		}

		text, err := os.ReadFile(filepath.Join(folder, name))
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

// detect is the licenses that a text consists of; none if too much of it is something else.
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

// goInstallation is where Go keeps its own files and those of modules.
type goInstallation struct{ root, modules string }

func installedGo() (goInstallation, error) {
	output, err := exec.CommandContext(context.Background(), "go", "env", "-json", "GOROOT", "GOMODCACHE").Output()
	if err != nil {
		return goInstallation{}, fmt.Errorf("ask go for its folders: %w", err)
	}

	var env struct{ GOROOT, GOMODCACHE string }
	if err := json.Unmarshal(output, &env); err != nil {
		return goInstallation{}, fmt.Errorf("read go's folders: %w", err)
	}

	return goInstallation{root: env.GOROOT, modules: env.GOMODCACHE}, nil
}

// module is the folder of a module in the cache, where a capital is an exclamation mark and the small letter
// (https://go.dev/ref/mod#module-cache).
func (g goInstallation) module(path, version string) string {
	var escaped strings.Builder

	for _, r := range path + "@" + version {
		if unicode.IsUpper(r) {
			escaped.WriteByte('!')
		}

		escaped.WriteRune(unicode.ToLower(r))
	}

	return filepath.Join(g.modules, escaped.String())
}
