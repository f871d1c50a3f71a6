package image_test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/talos-ccm/talos-ccm/packaging/image"
	"github.com/talos-ccm/talos-ccm/test/builder"
)

// TestTalos_EachSupportedVersionAcceptsExtension validates with the machinery of each version; see talos/main.go.
func TestTalos_EachSupportedVersionAcceptsExtension(t *testing.T) {
	modules, err := filepath.Glob("talos/v*.mod")
	require.NoError(t, err)
	require.NotEmpty(t, modules)

	index, err := image.ExtensionIndex(release(t), map[string][]byte{"amd64": nil})
	require.NoError(t, err)

	valid, unknownKey := unpack(t, index, "amd64"), unpack(t, index, "amd64")

	spec, err := os.OpenFile(filepath.Join(unknownKey, specPath), os.O_APPEND|os.O_WRONLY, 0)
	require.NoError(t, err)

	_, err = spec.WriteString("user: 50\n")
	require.NoError(t, errors.Join(err, spec.Close()))

	for _, module := range modules {
		minor := strings.TrimSuffix(strings.TrimPrefix(filepath.Base(module), "v"), ".mod")

		t.Run("v"+minor, func(t *testing.T) {
			validator := filepath.Join(t.TempDir(), "talos")

			require.NoError(t, builder.Executable(".", validator, "-C=talos", "-mod=readonly", "-modfile="+filepath.Base(module)))

			for _, test := range []struct{ dir, talos, want string }{
				{valid, minor + ".0", ""},
				{valid, minor + ".0-rc.1", ""},
				{valid, minor + ".99", ""},
				{valid, "1.11.99", "version constraint"},
				{unknownKey, minor + ".0", "user"},
			} {
				output, err := exec.CommandContext(t.Context(), validator, test.dir, test.talos).CombinedOutput()
				assert.Equal(t, test.want == "", err == nil, "Talos %s: %s", test.talos, output)
				assert.Contains(t, string(output), test.want, test.talos)
			}
		})
	}
}
