// Package image packs talos-ccm: as a Talos system extension, and as a plain image for pods. The same input gives the same bytes, wherever, whenever and
// under whatever umask. It never builds the binary, and never asks for the time.
package image

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/extensions"
	"go.yaml.in/yaml/v4"

	"github.com/talos-ccm/talos-ccm/extension"
	"github.com/talos-ccm/talos-ccm/packaging/sbom"
)

// Where Talos expects what. https://github.com/siderolabs/extensions describes the layout.
const (
	manifestPath = "manifest.yaml"
	rootfs       = "rootfs"
	binaryPath   = rootfs + "/usr/local/lib/containers/" + extension.Name + "/" + extension.Name
	specPath     = rootfs + "/usr/local/etc/containers/" + extension.Name + ".yaml"
	sbomPath     = rootfs + "/usr/local/share/spdx/" + extension.Name + ".spdx.json"

	executable = 0o755
	readable   = 0o644
)

// Release is what is packed, but for the binary.
type Release struct {
	// Version is that of talos-ccm, such as v1.2.3; the v may be missing.
	Version string
	// Revision is the commit that it was built from; empty if not known.
	Revision string
	// Created is when everything is said to be made.
	Created time.Time
	// Manifest is the extension's manifest.yaml; its version is replaced.
	Manifest []byte
}

// version is the release's without a v, as manifests and labels have it.
func (r Release) version() string { return strings.TrimPrefix(r.Version, "v") }

// File is one file of an image. Its path is relative and has slashes.
type File struct {
	Path    string
	Mode    fs.FileMode
	Content []byte
}

// Extension is everything in the extension's image, sorted by path.
func Extension(r Release, binary []byte) ([]File, error) {
	manifest, err := r.manifest()
	if err != nil {
		return nil, err
	}

	bill, err := sbom.Extension(r.Version, r.Created)
	if err != nil {
		return nil, err
	}

	files := []File{
		{manifestPath, readable, manifest},
		{binaryPath, executable, binary},
		{specPath, readable, extension.Spec},
		{sbomPath, readable, bill},
	}
	slices.SortFunc(files, func(a, b File) int { return strings.Compare(a.Path, b.Path) })

	return files, nil
}

// Pod is everything in the image for pods. It needs no certificates of authorities: those of the cluster come with its credentials.
func Pod(binary []byte) []File { return []File{{extension.Name, executable, binary}} }

// manifest is the extension's, with the release's version.
func (r Release) manifest() ([]byte, error) {
	var manifest extensions.Manifest

	if err := yaml.Load(r.Manifest, &manifest, yaml.WithKnownFields()); err != nil {
		return nil, fmt.Errorf("read the extension's manifest: %w", err)
	}

	manifest.Metadata.Version = r.version()

	encoded, err := yaml.Dump(manifest, yaml.WithIndent(2))
	if err != nil {
		return nil, fmt.Errorf("write the extension's manifest: %w", err)
	}

	return encoded, nil
}

// Write lays files out in a folder that exists, as unpacking the image does and whatever the umask. What else is there stays.
func Write(dir string, files []File) error {
	for _, folder := range folders(files) {
		name := filepath.Join(dir, filepath.FromSlash(folder))

		if err := errors.Join(os.MkdirAll(name, executable), os.Chmod(name, executable)); err != nil {
			return fmt.Errorf("lay out the image: %w", err)
		}
	}

	for _, f := range files {
		name := filepath.Join(dir, filepath.FromSlash(f.Path))

		if err := errors.Join(os.WriteFile(name, f.Content, f.Mode), os.Chmod(name, f.Mode)); err != nil {
			return fmt.Errorf("lay out the image: %w", err)
		}
	}

	return nil
}

// folders are those of files, each after the one that it is in.
func folders(files []File) []string {
	var list []string

	for _, f := range files {
		for dir := path.Dir(f.Path); dir != "."; dir = path.Dir(dir) {
			list = append(list, dir)
		}
	}

	slices.Sort(list)

	return slices.Compact(list)
}
