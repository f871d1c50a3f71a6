//go:build e2e

package imager_test

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"maps"
	"slices"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/match"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/partial"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"github.com/talos-ccm/talos-ccm/packaging/image"
)

// open reads the index of an OCI layout.
func open(t *testing.T, folder string) v1.ImageIndex {
	t.Helper()

	index, err := image.ReadLayout(folder)
	if err != nil {
		t.Fatal(err)
	}

	return index
}

// unpackImage returns a folder with what the image for one architecture holds.
func unpackImage(t *testing.T, index v1.ImageIndex, arch string) string {
	t.Helper()

	images, err := partial.FindImages(index, match.Platforms(v1.Platform{OS: "linux", Architecture: arch}))
	if err != nil || len(images) != 1 {
		t.Fatalf("%d images for %s, %v", len(images), arch, err)
	}

	files, err := image.Unpack(images[0])
	if err != nil {
		t.Fatal(err)
	}

	folder := t.TempDir()
	if err := image.Write(folder, files); err != nil {
		t.Fatal(err)
	}

	return folder
}

// pack makes an OCI layout with an image for one architecture; names of folders end with a slash.
func pack(t *testing.T, arch string, files map[string]string) string {
	t.Helper()

	var archive bytes.Buffer

	writer := tar.NewWriter(&archive)

	for _, name := range slices.Sorted(maps.Keys(files)) {
		header := &tar.Header{Name: name, Mode: 0o644, Size: int64(len(files[name]))}
		if strings.HasSuffix(name, "/") {
			header.Mode = 0o755
		}

		if err := errors.Join(writer.WriteHeader(header), writeString(writer, files[name])); err != nil {
			t.Fatal(err)
		}
	}

	if err := writer.Close(); err != nil {
		t.Fatal(err)
	}

	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(archive.Bytes())), nil })
	if err != nil {
		t.Fatal(err)
	}

	packed, err := mutate.AppendLayers(empty.Image, layer)
	if err != nil {
		t.Fatal(err)
	}

	folder, err := layout.Write(t.TempDir(), empty.Index)
	if err != nil {
		t.Fatal(err)
	}

	if err := folder.AppendImage(packed, layout.WithPlatform(v1.Platform{OS: "linux", Architecture: arch})); err != nil {
		t.Fatal(err)
	}

	return string(folder)
}

func writeString(w io.Writer, s string) error {
	_, err := io.WriteString(w, s)

	return err
}
