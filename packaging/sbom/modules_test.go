package sbom_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/talos-ccm/talos-ccm/packaging/sbom"
	"github.com/talos-ccm/talos-ccm/test/builder"
)

// dir contains the binary for the tests of this package.
var dir string

func TestMain(m *testing.M) {
	var err error
	if dir, err = os.MkdirTemp("", "sbom-"); err != nil {
		panic(err)
	}

	code := m.Run()
	_ = os.RemoveAll(dir)

	os.Exit(code)
}

// built builds talos-ccm once.
var built = sync.OnceValues(func() (string, error) {
	binary := filepath.Join(dir, "talos-ccm")

	return binary, builder.Executable("../../cmd/talos-ccm", binary)
})

func binary(t *testing.T) string {
	t.Helper()

	path, err := built()
	require.NoError(t, err)

	return path
}

func modules(t *testing.T) []byte {
	t.Helper()

	content, err := sbom.Modules(binary(t), "v1.2.3", created)
	require.NoError(t, err)

	return content
}

func command(t *testing.T, args ...string) []string {
	t.Helper()

	c := exec.CommandContext(t.Context(), "go", args...)
	c.Stderr = os.Stderr

	output, err := c.Output()
	require.NoError(t, err, c)

	return strings.Split(strings.TrimSpace(string(output)), "\n")
}

func TestModules_ListsEveryModule(t *testing.T) {
	var want []string

	for _, line := range command(t, "version", "-m", binary(t)) {
		if fields := strings.Fields(line); fields[0] == "dep" {
			want = append(want, fields[1]+" "+fields[2]+" go.sum "+fields[3])
		}
	}

	var got []string

	for _, p := range read(t, modules(t)).Packages[2:] {
		got = append(got, p.PackageName+" "+p.PackageVersion+" "+p.PackageComment)
	}

	slices.Sort(want)
	assert.Equal(t, want, got)
}

func TestModules_ListsStandardLibrary(t *testing.T) {
	library := read(t, modules(t)).Packages[1]

	version := strings.TrimPrefix(command(t, "env", "GOVERSION")[0], "go")
	assert.Equal(t, "stdlib", library.PackageName)
	assert.Equal(t, version, library.PackageVersion)

	var names []string
	for _, reference := range library.PackageExternalReferences {
		names = append(names, reference.RefType+" "+reference.Locator)
	}

	want := []string{"purl pkg:golang/stdlib@" + version, "cpe23Type cpe:2.3:a:golang:go:" + version + ":-:*:*:*:*:*:*"}
	assert.Equal(t, want, names)
}

func TestModules_TalosCCMDependsOnAllOthers(t *testing.T) {
	doc := read(t, modules(t))

	depended := map[string]bool{}

	for _, r := range doc.Relationships {
		if r.RefA.ElementRefID == "Package-talos-ccm" && r.Relationship == "DEPENDS_ON" {
			depended[string(r.RefB.ElementRefID)] = true
		}
	}

	assert.Len(t, depended, len(doc.Packages)-1)
}

// allowed has the licenses that are compatible with an Apache-2.0 binary.
var allowed = []string{"Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "ISC", "MIT", "MPL-2.0"}

func TestModules_LicensesAreCompatible(t *testing.T) {
	counts := map[string]int{}

	for _, p := range read(t, modules(t)).Packages {
		counts[p.PackageLicenseDeclared]++

		for license := range strings.SplitSeq(p.PackageLicenseDeclared, " AND ") {
			assert.Contains(t, allowed, license, p.PackageName)
		}
	}

	t.Log(counts)
}

func TestModules_RefusesFileNotBuiltByGo(t *testing.T) {
	path := filepath.Join(t.TempDir(), "script")
	require.NoError(t, os.WriteFile(path, []byte("#!/bin/sh\n"), 0o755))

	_, err := sbom.Modules(path, "v1.2.3", created)
	assert.ErrorContains(t, err, path)
}

func TestModules_RefusesModuleMissingFromCache(t *testing.T) {
	path := binary(t)

	t.Setenv("GOMODCACHE", t.TempDir())

	_, err := sbom.Modules(path, "v1.2.3", created)
	assert.ErrorContains(t, err, "cel.dev/expr")
}
