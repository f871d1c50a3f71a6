//go:build e2e

package imager_test

import (
	"fmt"
	"io"
	"log"
	"maps"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/siderolabs/talos/pkg/machinery/extensions"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// initramfsName is the format of the file name that the imager gives to an initramfs. The argument is the architecture.
const initramfsName = "initramfs-metal-%s.xz"

// source is the source of an extension: a key of ContainerAsset in Talos's pkg/imager/profile, and its value.
type source struct {
	key, value string
}

// runImager adds an extension to the initramfs base with Talos's imager, and returns the path of the new initramfs and the
// output of the imager.
func runImager(t *testing.T, arch, base string, from source) (initramfs, output string, err error) {
	t.Helper()

	dir := t.TempDir()
	profile := fmt.Sprintf(`
arch: %s
platform: metal
input:
  initramfs:
    path: %s
  systemExtensions:
    - %s: %s
output:
  kind: initramfs
  outFormat: raw
`, arch, base, from.key, from.value)

	cmd := exec.CommandContext(t.Context(), getenv(t, "TALOS_CCM_IMAGER"), "-", "--output", dir)
	cmd.Stdin = strings.NewReader(profile)
	// Use no registry credentials of the user, and only temporary directories of the test.
	cmd.Env = []string{"PATH=" + searchPath(t), "HOME=" + dir, "TMPDIR=" + t.TempDir()}

	out, err := cmd.CombinedOutput()

	return filepath.Join(dir, fmt.Sprintf(initramfsName, arch)), string(out), err
}

// getenv returns a required environment variable, which make imager-test sets.
func getenv(t *testing.T, key string) string {
	t.Helper()

	value := os.Getenv(key)
	require.NotEmpty(t, value, "%s is not set; run make imager-test", key)

	return value
}

// searchPath returns a PATH with a mksquashfs that supports the options of the imager.
func searchPath(t *testing.T) string {
	t.Helper()

	path := os.Getenv("PATH")
	probe := exec.CommandContext(t.Context(), "mksquashfs", t.TempDir(), filepath.Join(t.TempDir(), "probe"), "-no-progress", "-xattrs-exclude", ".*")

	if err := probe.Run(); err == nil {
		return path
	}

	wrapper, err := filepath.Abs("squashfs-tools-4.5")
	require.NoError(t, err)

	return wrapper + string(os.PathListSeparator) + path
}

// startRegistry starts a registry on the loopback interface, and returns its address.
func startRegistry(t *testing.T) string {
	t.Helper()

	server := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	t.Cleanup(server.Close)

	return strings.TrimPrefix(server.URL, "http://")
}

// push pushes an image to a new registry, and returns its reference by digest.
func push(t *testing.T, layout string) source {
	t.Helper()

	index := open(t, layout)

	digest, err := index.Digest()
	require.NoError(t, err)

	ref, err := name.NewDigest(startRegistry(t) + "/talos-ccm@" + digest.String())
	require.NoError(t, err)

	require.NoError(t, remote.WriteIndex(ref, index, remote.WithContext(t.Context())))

	return source{"imageRef", ref.String()}
}

func TestImager_AddsExtensionToInitramfs(t *testing.T) {
	layout := getenv(t, "TALOS_CCM_LAYOUT")

	for title, test := range map[string]struct {
		arch string
		from source
	}{
		"amd64, from a directory": {"amd64", source{"ociPath", layout}},
		"arm64, from a directory": {"arm64", source{"ociPath", layout}},
		"amd64, from a registry":  {"amd64", push(t, layout)},
	} {
		t.Run(title, func(t *testing.T) {
			base := baseInitramfs(t)

			initramfs, output, err := runImager(t, test.arch, base, test.from)
			require.NoError(t, err, output)
			assert.Contains(t, output, "initramfs ready")

			t.Logf("size of the initramfs: %.1f MB", float64(len(readFile(t, initramfs)))/1e6)
			assert.Empty(t, requireExtension(t, unpackImage(t, open(t, layout), test.arch), unpack(t, initramfs, base), test.arch))
		})
	}
}

// requireExtension requires that the first extension in the files that were added to an initramfs is that in an unpacked
// image, and returns the others.
func requireExtension(t *testing.T, image, added, arch string) (others []*extensions.Layer) {
	t.Helper()

	manifest := decode[extensions.Manifest](t, readFile(t, filepath.Join(image, "manifest.yaml")))
	layers := decode[extensions.Config](t, readFile(t, filepath.Join(added, extensionsConfig))).Layers

	require.NotEmpty(t, layers, extensionsConfig)
	assert.Equal(t, &extensions.Layer{Image: squashfs, Metadata: manifest.Metadata}, layers[0], extensionsConfig)

	files := []string{".", extensionsConfig}
	for _, layer := range layers {
		files = append(files, layer.Image)
	}

	require.ElementsMatch(t, files, slices.Collect(maps.Keys(tree(t, added))), "files in the initramfs")

	rootfs := unsquash(t, filepath.Join(added, squashfs))
	assert.Equal(t, tree(t, filepath.Join(image, "rootfs")), tree(t, rootfs), squashfs)

	if arch == runtime.GOARCH {
		binary := filepath.Join(rootfs, "usr/local/lib/containers/talos-ccm/talos-ccm")
		assert.Equal(t, "talos-ccm v"+manifest.Metadata.Version+"\n", string(run(t, nil, binary, "--version")))
	}

	return layers[1:]
}

func TestImager_RefusesExtensionForLaterTalos(t *testing.T) {
	const manifest = `version: v1alpha1
metadata:
  name: talos-ccm
  version: 0.1.0
  compatibility:
    talos:
      version: ">= 99.0.0"
`

	layout := pack(t, "amd64", map[string]string{"manifest.yaml": manifest, "rootfs/": ""})

	_, output, err := runImager(t, "amd64", baseInitramfs(t), source{"ociPath", layout})
	require.Error(t, err)
	assert.Contains(t, output, "version constraint >= 99.0.0 can't be satisfied")
}

// dockerScript replaces docker. It runs the imager of the tests, and changes the profile to an initramfs, because an
// installer requires images of Talos.
const dockerScript = `#!/bin/sh
sed -e "s|ociPath: /out/oci|ociPath: $LAYOUT|" -e 's|kind: installer|kind: initramfs|' -e "s|^input:|input:\n  initramfs:\n    path: $BASE|" |
  "$IMAGER" - --output "$ARTIFACTS"
`

func TestImager_AcceptsProfileOfMakeInstaller(t *testing.T) {
	layout, base, dir, bin := getenv(t, "TALOS_CCM_LAYOUT"), baseInitramfs(t), t.TempDir(), t.TempDir()

	require.NoError(t, os.WriteFile(filepath.Join(bin, "docker"), []byte(dockerScript), 0o755))

	cmd := exec.CommandContext(t.Context(), "../../packaging/installer")
	cmd.Env = []string{
		"PATH=" + bin + string(os.PathListSeparator) + searchPath(t), "HOME=" + dir, "TMPDIR=" + t.TempDir(),
		"ARTIFACTS=" + dir, "ARCHES=amd64", "TALOS=v1.13.5", "TALOS_REGISTRY=ghcr.io/siderolabs", "PLATFORM=metal", "EXTENSIONS=", "INSTALLER=",
		"IMAGER=" + getenv(t, "TALOS_CCM_IMAGER"), "LAYOUT=" + layout, "BASE=" + base,
	}

	output, err := cmd.CombinedOutput()
	require.NoError(t, err, string(output))

	initramfs := filepath.Join(dir, fmt.Sprintf(initramfsName, "amd64"))
	assert.Empty(t, requireExtension(t, unpackImage(t, open(t, layout), "amd64"), unpack(t, initramfs, base), "amd64"))
}
