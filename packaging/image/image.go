package image

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"maps"
	"slices"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/talos-ccm/talos-ccm/extension"
	"github.com/talos-ccm/talos-ccm/packaging/sbom"
)

// nonRoot is the default user of the image for pods.
const nonRoot = "65532:65532"

// ExtensionIndex returns the extension image for the architectures of binaries, which are keyed by GOARCH.
func ExtensionIndex(r Release, binaries map[string][]byte) (v1.ImageIndex, error) {
	const description = "Talos system extension: a cloud controller manager for Talos Linux"

	return index(r, description, binaries, v1.Config{}, func(binary []byte) ([]File, error) { return Extension(r, binary) })
}

// PodIndex returns the image for pods for the architectures of binaries, which are keyed by GOARCH.
func PodIndex(r Release, binaries map[string][]byte) (v1.ImageIndex, error) {
	config := v1.Config{Entrypoint: []string{"/" + extension.Name}, User: nonRoot, WorkingDir: "/"}

	// It contains no CA bundle; the credentials contain the CAs.
	return index(r, "A cloud controller manager for Talos Linux", binaries, config, func(binary []byte) ([]File, error) {
		return []File{{extension.Name, executable, binary}}, nil
	})
}

func index(r Release, description string, binaries map[string][]byte, config v1.Config, files func(binary []byte) ([]File, error)) (v1.ImageIndex, error) {
	labels := r.labels(description)
	config.Labels = labels

	result := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)

	for _, arch := range slices.Sorted(maps.Keys(binaries)) {
		list, err := files(binaries[arch])
		if err != nil {
			return nil, err
		}

		platform := v1.Platform{OS: "linux", Architecture: arch}

		img, err := pack(list, platform, config, r.Created)
		if err != nil {
			return nil, fmt.Errorf("pack image for %s: %w", platform, err)
		}

		img = mutate.Annotations(img, labels).(v1.Image) //nolint:errcheck,forcetypeassert // returns the type of its argument
		result = mutate.AppendManifests(result, mutate.IndexAddendum{Add: img, Descriptor: v1.Descriptor{Platform: &platform}})
	}

	return mutate.Annotations(result, labels).(v1.ImageIndex), nil //nolint:errcheck,forcetypeassert // returns the type of its argument
}

// labels returns the standard labels and annotations (image-spec, annotations.md).
func (r Release) labels(description string) map[string]string {
	labels := map[string]string{
		"org.opencontainers.image.title":       extension.Name,
		"org.opencontainers.image.description": description,
		"org.opencontainers.image.version":     r.version(),
		"org.opencontainers.image.created":     r.Created.UTC().Format(time.RFC3339),
		"org.opencontainers.image.licenses":    sbom.License,
		"org.opencontainers.image.source":      sbom.Website,
		"org.opencontainers.image.url":         sbom.Website,
		"org.opencontainers.image.vendor":      "The talos-ccm authors",
	}

	if r.Revision != "" {
		labels["org.opencontainers.image.revision"] = r.Revision
	}

	return labels
}

// pack returns an image with one layer. Reproducing it requires the same version of Go, whose gzip implementation it
// uses.
func pack(files []File, platform v1.Platform, config v1.Config, created time.Time) (v1.Image, error) {
	content, err := archive(files, created)
	if err != nil {
		return nil, err
	}

	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(content)), nil },
		tarball.WithMediaType(types.OCILayer), tarball.WithCompressionLevel(gzip.DefaultCompression), tarball.WithCompressedCaching)
	if err != nil {
		return nil, err
	}

	at := v1.Time{Time: created.UTC()}

	img, err := mutate.ConfigFile(mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON), &v1.ConfigFile{
		OS: platform.OS, Architecture: platform.Architecture, Created: at, Config: config, RootFS: v1.RootFS{Type: "layers"},
	})
	if err != nil {
		return nil, err
	}

	return mutate.Append(img, mutate.Addendum{Layer: layer, History: v1.History{Created: at, CreatedBy: "make image"}})
}

// archive returns a tar archive. All files belong to root.
func archive(files []File, created time.Time) ([]byte, error) {
	var buffer bytes.Buffer

	w := tar.NewWriter(&buffer)

	for _, f := range withDirectories(files) {
		header := tar.Header{
			Typeflag: tar.TypeReg, Name: f.Path, Mode: int64(f.Mode.Perm()), Size: int64(len(f.Content)), ModTime: created.UTC(), Format: tar.FormatUSTAR,
		}
		if f.Mode.IsDir() {
			header.Typeflag, header.Name = tar.TypeDir, f.Path+"/"
		}

		if err := w.WriteHeader(&header); err != nil {
			return nil, fmt.Errorf("archive %s: %w", f.Path, err)
		}

		if _, err := w.Write(f.Content); err != nil {
			return nil, fmt.Errorf("archive %s: %w", f.Path, err)
		}
	}

	err := w.Close() // writes the end of the archive

	return buffer.Bytes(), err
}
