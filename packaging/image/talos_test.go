package image_test

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/talos-ccm/talos-ccm/packaging/image"
)

// TestTalos_EachSupportedVersionAcceptsExtension validates with the machinery of each version; see talos/main.go.
func TestTalos_EachSupportedVersionAcceptsExtension(t *testing.T) {
	modules, err := filepath.Glob("talos/v*.mod")
	require.NoError(t, err)
	require.NotEmpty(t, modules)

	files, err := image.Extension(release(t), nil)
	require.NoError(t, err)

	valid := layOut(t, files)
	files[1].Content = append(bytes.Clone(files[1].Content), "user: 50\n"...)
	unknownKey := layOut(t, files)

	for _, module := range modules {
		minor := strings.TrimSuffix(strings.TrimPrefix(filepath.Base(module), "v"), ".mod")

		t.Run("v"+minor, func(t *testing.T) {
			validator := filepath.Join(t.TempDir(), "talos")

			build := exec.CommandContext(t.Context(), "go", "build", "-modfile="+filepath.Base(module), "-o", validator, ".")
			build.Dir = "talos"
			build.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=")

			output, err := build.CombinedOutput()
			require.NoError(t, err, string(output))

			for _, test := range []struct{ folder, talos, want string }{
				{valid, minor + ".0", ""},
				{valid, minor + ".0-rc.1", ""},
				{valid, minor + ".99", ""},
				{valid, "1.11.99", "version constraint"},
				{unknownKey, minor + ".0", "user"},
			} {
				output, err := exec.CommandContext(t.Context(), validator, test.folder, test.talos).CombinedOutput()
				assert.Equal(t, test.want == "", err == nil, "Talos %s: %s", test.talos, output)
				assert.Contains(t, string(output), test.want, test.talos)
			}
		})
	}
}
