//go:build e2e

package imager_test

import (
	"archive/tar"
	"bytes"
	"io"
	"maps"
	"slices"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/stretchr/testify/require"

	"github.com/talos-ccm/talos-ccm/packaging/image"
)

// open returns the index of the OCI layout in a directory.
func open(t *testing.T, dir string) v1.ImageIndex {
	t.Helper()

	index, err := layout.ImageIndexFromPath(dir)
	require.NoError(t, err)

	return index
}

// unpackImage returns a directory with the contents of the image for an architecture.
func unpackImage(t *testing.T, index v1.ImageIndex, arch string) string {
	t.Helper()

	dir := t.TempDir()
	require.NoError(t, image.Unpack(index, arch, dir))

	return dir
}

// pack returns an OCI layout with an image for one architecture.
func pack(t *testing.T, arch string, files map[string]string) string {
	t.Helper()

	dir, err := layout.Write(t.TempDir(), empty.Index)
	require.NoError(t, err)

	require.NoError(t, dir.AppendImage(newImage(t, arch, files), layout.WithPlatform(v1.Platform{OS: "linux", Architecture: arch})))

	return string(dir)
}

// newImage returns an image for an architecture. Names of directories in files end with a slash.
func newImage(t *testing.T, arch string, files map[string]string) v1.Image {
	t.Helper()

	var archive bytes.Buffer

	writer := tar.NewWriter(&archive)

	for _, name := range slices.Sorted(maps.Keys(files)) {
		header := &tar.Header{Name: name, Mode: 0o644, Size: int64(len(files[name]))}
		if strings.HasSuffix(name, "/") {
			header.Mode = 0o755
		}

		require.NoError(t, writer.WriteHeader(header))

		_, err := io.WriteString(writer, files[name])
		require.NoError(t, err)
	}

	require.NoError(t, writer.Close())

	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(archive.Bytes())), nil })
	require.NoError(t, err)

	img, err := mutate.ConfigFile(empty.Image, &v1.ConfigFile{OS: "linux", Architecture: arch})
	require.NoError(t, err)

	img, err = mutate.AppendLayers(img, layer)
	require.NoError(t, err)

	return img
}
