package sbom

import (
	"os"
	"path/filepath"
	"runtime/debug"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestModules_UsesReplacements(t *testing.T) {
	got := modules(&debug.BuildInfo{Deps: []*debug.Module{
		{Path: "example.org/z", Version: "v1.0.0", Replace: &debug.Module{Path: "example.org/fork", Version: "v1.0.1", Sum: "h1:x"}},
		{Path: "example.org/a", Version: "v2.0.0"},
	}})

	require.Len(t, got, 2)
	assert.Equal(t, "example.org/a", got[0].Path)
	assert.Equal(t, "example.org/fork v1.0.1", got[1].Path+" "+got[1].Version)
}

func TestIdentifier_IsValidAndUnique(t *testing.T) {
	seen := map[string]string{}

	for _, path := range []string{"example.org/a-b", "example.org/a/2d/b", "example.org/a/b", "example.org/a_b", "example.org/A/b"} {
		id := identifier(path)
		assert.NotContains(t, seen, id)

		seen[id] = path
	}

	assert.Equal(t, "go4.org-2fa-5fb", identifier("go4.org/a_b"))
}

func TestModulePath_EscapesCapitals(t *testing.T) {
	installed := goInstallation{modules: "/cache"}
	assert.Equal(t, "/cache/github.com/!masterminds/semver/v3@v3.3.0", installed.module("github.com/Masterminds/semver/v3", "v3.3.0"))
}

const isc = `Permission to use, copy, modify, and/or distribute this software for any purpose with or without fee is hereby granted,
provided that the above copyright notice and this permission notice appear in all copies.

THE SOFTWARE IS PROVIDED "AS IS" AND THE AUTHOR DISCLAIMS ALL WARRANTIES WITH REGARD TO THIS SOFTWARE INCLUDING ALL IMPLIED WARRANTIES OF
MERCHANTABILITY AND FITNESS. IN NO EVENT SHALL THE AUTHOR BE LIABLE FOR ANY SPECIAL, DIRECT, INDIRECT, OR CONSEQUENTIAL DAMAGES OR ANY
DAMAGES WHATSOEVER RESULTING FROM LOSS OF USE, DATA OR PROFITS, WHETHER IN AN ACTION OF CONTRACT, NEGLIGENCE OR OTHER TORTIOUS ACTION,
ARISING OUT OF OR IN CONNECTION WITH THE USE OR PERFORMANCE OF THIS SOFTWARE.
`

func TestLicenseOf(t *testing.T) {
	apache, err := os.ReadFile("../../LICENSE")
	require.NoError(t, err)

	for name, test := range map[string]struct {
		files map[string]string
		want  string
	}{
		"one file":                     {map[string]string{"COPYING": isc, "readme": isc}, "ISC"},
		"several files":                {map[string]string{"LICENSE.MIT": isc, "LICENSE-2": string(apache)}, "Apache-2.0 AND ISC"},
		"two texts in a file":          {map[string]string{"license.txt": isc + string(apache)}, "Apache-2.0 AND ISC"},
		"same license twice":           {map[string]string{"LICENSE": isc, "LICENSE.md": isc}, "ISC"},
		"no file":                      {map[string]string{"README": "Do as you like."}, noAssertion},
		"unknown text":                 {map[string]string{"LICENSE": "You may use this on Sundays only."}, noAssertion},
		"one of two texts is unknown":  {map[string]string{"LICENSE": isc, "LICENSE.extra": "Not on Sundays."}, noAssertion},
		"reference to a license":       {map[string]string{"LICENSE": "See https://www.apache.org/licenses/LICENSE-2.0"}, noAssertion},
		"license of documentation":     {map[string]string{"LICENSE": isc, "LICENSE.docs": string(apache)}, "ISC"},
		"source file of the same name": {map[string]string{"LICENSE": isc, "license.go": "package license"}, "ISC"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()

			for file, text := range test.files {
				require.NoError(t, os.WriteFile(filepath.Join(dir, file), []byte(text), 0o644))
			}

			got, err := licenseOf(dir)
			assert.NoError(t, err)
			assert.Equal(t, test.want, got)
		})
	}
}
