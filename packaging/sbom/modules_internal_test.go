package sbom

import (
	"os"
	"path/filepath"
	"runtime/debug"
	"testing"
)

func TestModules_UsesReplacements(t *testing.T) {
	got := modules(&debug.BuildInfo{Deps: []*debug.Module{
		{Path: "example.org/z", Version: "v1.0.0", Replace: &debug.Module{Path: "example.org/fork", Version: "v1.0.1", Sum: "h1:x"}},
		{Path: "example.org/a", Version: "v2.0.0"},
	}})

	if len(got) != 2 || got[0].Path != "example.org/a" || got[1].Path != "example.org/fork" || got[1].Version != "v1.0.1" {
		t.Errorf("got %+v", got)
	}
}

func TestIdentifier_IsValidAndUnique(t *testing.T) {
	seen := map[string]string{}

	for _, path := range []string{"example.org/a-b", "example.org/a/2d/b", "example.org/a/b", "example.org/a_b", "example.org/A/b"} {
		id := identifier(path)
		if other, taken := seen[id]; taken {
			t.Errorf("%s and %s have the same identifier %s", other, path, id)
		}

		seen[id] = path
	}

	if got, want := identifier("go4.org/a_b"), "go4.org-2fa-5fb"; got != want {
		t.Errorf("got identifier %s, want %s", got, want)
	}
}

func TestModulePath_EscapesCapitals(t *testing.T) {
	installed := goInstallation{modules: "/cache"}
	if got, want := installed.module("github.com/Masterminds/semver/v3", "v3.3.0"), "/cache/github.com/!masterminds/semver/v3@v3.3.0"; got != want {
		t.Errorf("got directory %s, want %s", got, want)
	}
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
	if err != nil {
		t.Fatal(err)
	}

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
		"source file of the same name": {map[string]string{"LICENSE": isc, "license.go": "package license"}, "ISC"},
	} {
		t.Run(name, func(t *testing.T) {
			folder := t.TempDir()

			for file, text := range test.files {
				if err := os.WriteFile(filepath.Join(folder, file), []byte(text), 0o644); err != nil {
					t.Fatal(err)
				}
			}

			got, err := licenseOf(folder)
			if err != nil || got != test.want {
				t.Errorf("got %q, %v; want %q", got, err, test.want)
			}
		})
	}
}
