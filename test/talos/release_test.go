package talos_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/talos-ccm/talos-ccm/test/talos"
)

func TestAssets_RejectUnusableRelease(t *testing.T) {
	other := checkout(t, "v1.11.6\n")

	for _, test := range []struct {
		name, release, source, want string
	}{
		{"unknown release", "1.11", "", "TALOS=1.11 is not supported; supported: 1.12, 1.13, 1.14"},
		{"full version", "v1.14.1", "", "TALOS=v1.14.1 is not supported; supported: 1.12, 1.13, 1.14"},
		{
			"checkout required", "1.12", "",
			"TALOS=1.12 needs TALOS_SOURCE, the directory of a checkout of Talos v1.12.11, because the module proxy lacks github.com/siderolabs/talos v1.12.11",
		},
		{"no checkout", "1.12", "/nowhere", "TALOS_SOURCE=/nowhere is no checkout of Talos: it has no pkg/machinery/gendata/data/tag"},
		{"checkout of another release", "1.12", other, "TALOS_SOURCE=" + other + " is a checkout of Talos v1.11.6; TALOS=1.12 needs v1.12.11"},
		{"checkout of another release than the default", "", other, "TALOS_SOURCE=" + other + " is a checkout of Talos v1.11.6; TALOS=1.14 needs v1.14.1"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Setenv("TALOS", test.release)
			t.Setenv("TALOS_SOURCE", test.source)

			_, err := talos.Assets(t.Context(), "", nil)
			assert.ErrorContains(t, err, test.want)
		})
	}
}

// checkout returns a directory with the tag file of a Talos checkout.
func checkout(t *testing.T, version string) string {
	t.Helper()

	dir := t.TempDir()
	file := filepath.Join(dir, "pkg/machinery/gendata/data/tag")

	require.NoError(t, os.MkdirAll(filepath.Dir(file), 0o755))
	require.NoError(t, os.WriteFile(file, []byte(version), 0o644))

	return dir
}
