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

// The file name of the initramfs as the imager writes it, by architecture.
const output = "initramfs-metal-%s.xz"

// source is where the imager finds an extension: a key of ContainerAsset in Talos's pkg/imager/profile, and its value.
type source struct {
	key, value string
}

// imager asks Talos's imager for an initramfs with an extension, made from the one in base, and returns its path and
// what the imager said.
func imager(t *testing.T, arch, base string, from source) (initramfs, said string, err error) {
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

	cmd := exec.CommandContext(t.Context(), setting(t, "TALOS_CCM_IMAGER"), "-", "--output", dir)
	cmd.Stdin = strings.NewReader(profile)
	// No one's registry credentials, and no leftovers elsewhere.
	cmd.Env = []string{"PATH=" + programs(t), "HOME=" + dir, "TMPDIR=" + t.TempDir()}

	out, err := cmd.CombinedOutput()

	return filepath.Join(dir, fmt.Sprintf(output, arch)), string(out), err
}

// setting is what make imager-test says in the environment.
func setting(t *testing.T, key string) string {
	t.Helper()

	value := os.Getenv(key)
	require.NotEmpty(t, value, "%s is not set: make imager-test does that", key)

	return value
}

// programs is a PATH where mksquashfs understands what the imager says.
func programs(t *testing.T) string {
	t.Helper()

	path := os.Getenv("PATH")
	probe := exec.CommandContext(t.Context(), "mksquashfs", t.TempDir(), filepath.Join(t.TempDir(), "probe"), "-no-progress", "-xattrs-exclude", ".*")

	if err := probe.Run(); err == nil {
		return path
	}

	older, err := filepath.Abs("squashfs-tools-4.5")
	require.NoError(t, err)

	return older + string(os.PathListSeparator) + path
}

// pushed puts an image into a registry on loopback and says how users name it: by digest.
func pushed(t *testing.T, layout string) source {
	t.Helper()

	server := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	t.Cleanup(server.Close)

	index := open(t, layout)

	digest, err := index.Digest()
	require.NoError(t, err)

	ref, err := name.NewDigest(strings.TrimPrefix(server.URL, "http://") + "/talos-ccm@" + digest.String())
	require.NoError(t, err)

	require.NoError(t, remote.WriteIndex(ref, index, remote.WithContext(t.Context())))

	return source{"imageRef", ref.String()}
}

func TestImager_AddsExtensionToInitramfs(t *testing.T) {
	layout := setting(t, "TALOS_CCM_LAYOUT")

	for title, test := range map[string]struct {
		arch string
		from source
	}{
		"amd64, from a directory": {"amd64", source{"ociPath", layout}},
		"arm64, from a directory": {"arm64", source{"ociPath", layout}},
		"amd64, from a registry":  {"amd64", pushed(t, layout)},
	} {
		t.Run(title, func(t *testing.T) {
			base := baseInitramfs(t)

			initramfs, said, err := imager(t, test.arch, base, test.from)
			require.NoError(t, err, said)
			assert.Contains(t, said, "initramfs ready")

			t.Logf("initramfs ready, %.1f MB", float64(len(content(t, initramfs)))/1e6)
			compare(t, unpackImage(t, open(t, layout), test.arch), unpack(t, initramfs, base), test.arch)
		})
	}
}

// compare finds an unpacked image's root file system and manifest in the directory with the files added to an
// initramfs.
func compare(t *testing.T, packed, added, arch string) {
	t.Helper()

	require.Equal(t, []string{".", squashfs, layers}, slices.Sorted(maps.Keys(tree(t, added))), "files in the initramfs")

	manifest := decode[extensions.Manifest](t, content(t, filepath.Join(packed, "manifest.yaml")))
	wantLayers := extensions.Config{Layers: []*extensions.Layer{{Image: squashfs, Metadata: manifest.Metadata}}}

	assert.Equal(t, wantLayers, decode[extensions.Config](t, content(t, filepath.Join(added, layers))), layers)

	rootfs := unsquash(t, filepath.Join(added, squashfs))
	assert.Equal(t, tree(t, filepath.Join(packed, "rootfs")), tree(t, rootfs), squashfs)

	if arch == runtime.GOARCH {
		binary := filepath.Join(rootfs, "usr/local/lib/containers/talos-ccm/talos-ccm")
		assert.Equal(t, "talos-ccm v"+manifest.Metadata.Version+"\n", string(run(t, nil, binary, "--version")))
	}
}

func TestImager_RejectsInvalidImages(t *testing.T) {
	const manifest = `version: v1alpha1
metadata:
  name: talos-ccm
  version: 0.1.0
  compatibility:
    talos:
      version: ">= 1.12.0"
`

	for title, test := range map[string]struct {
		files map[string]string
		arch  string
		says  string
	}{
		"an extension for a later Talos": {
			files: map[string]string{"manifest.yaml": strings.Replace(manifest, "1.12.0", "99.0.0", 1), "rootfs/": ""},
			says:  "version constraint >= 99.0.0 can't be satisfied",
		},
		"an image with more than manifest and rootfs": {
			files: map[string]string{"manifest.yaml": manifest, "rootfs/": "", "README.md": "x"},
			says:  `unexpected file "README.md"`,
		},
		"an image without manifest": {
			files: map[string]string{"rootfs/": ""},
			says:  "extension manifest is missing",
		},
		"an image whose files lack their directories": {
			files: map[string]string{"manifest.yaml": manifest, "rootfs/": "", "rootfs/usr/x": "x"},
			says:  "no such file or directory",
		},
		"an image for another architecture": {
			files: map[string]string{"manifest.yaml": manifest, "rootfs/": ""},
			arch:  "arm64",
			says:  "no OCI image found for amd64",
		},
	} {
		t.Run(title, func(t *testing.T) {
			arch := "amd64"
			if test.arch != "" {
				arch = test.arch
			}

			_, said, err := imager(t, "amd64", baseInitramfs(t), source{"ociPath", pack(t, arch, test.files)})
			require.Error(t, err)
			assert.Contains(t, said, test.says)
		})
	}
}

// runImager is a docker that runs the imager of the tests, for an initramfs instead of an installer, which needs
// Talos's images.
const runImager = `#!/bin/sh
sed -e "s|ociPath: /out/oci|ociPath: $LAYOUT|" -e 's|kind: installer|kind: initramfs|' -e "s|^input:|input:\n  initramfs:\n    path: $BASE|" |
  "$IMAGER" - --output "$ARTIFACTS"
`

func TestImager_AcceptsProfileOfMakeInstaller(t *testing.T) {
	layout, base, dir, docker := setting(t, "TALOS_CCM_LAYOUT"), baseInitramfs(t), t.TempDir(), t.TempDir()

	require.NoError(t, os.WriteFile(filepath.Join(docker, "docker"), []byte(runImager), 0o755))

	cmd := exec.CommandContext(t.Context(), "../../packaging/installer")
	cmd.Env = []string{
		"PATH=" + docker + string(os.PathListSeparator) + programs(t), "HOME=" + dir, "TMPDIR=" + t.TempDir(),
		"ARTIFACTS=" + dir, "ARCHES=amd64", "TALOS=v1.13.5", "TALOS_REGISTRY=ghcr.io/siderolabs", "PLATFORM=metal", "EXTENSIONS=", "INSTALLER=",
		"IMAGER=" + setting(t, "TALOS_CCM_IMAGER"), "LAYOUT=" + layout, "BASE=" + base,
	}

	said, err := cmd.CombinedOutput()
	require.NoError(t, err, string(said))

	compare(t, unpackImage(t, open(t, layout), "amd64"), unpack(t, filepath.Join(dir, fmt.Sprintf(output, "amd64")), base), "amd64")
}
