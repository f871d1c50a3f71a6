// Package image packs talos-ccm as a Talos system extension and as an image for pods. The result is reproducible: it
// depends only on the input, and not on the time, the host or the umask.
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

// Paths where Talos expects the files; see https://github.com/siderolabs/extensions.
const (
	manifestPath = "manifest.yaml"
	rootfs       = "rootfs"
	binaryPath   = rootfs + "/usr/local/lib/containers/" + extension.Name + "/" + extension.Name
	specPath     = rootfs + "/usr/local/etc/containers/" + extension.Name + ".yaml"
	sbomPath     = rootfs + "/usr/local/share/spdx/" + extension.Name + ".spdx.json"

	executable = 0o755
	readable   = 0o644
)

// Release describes the release to pack.
type Release struct {
	// Version of talos-ccm, such as v1.2.3. The v is optional.
	Version string
	// Revision is the commit of the binary; empty if unknown.
	Revision string
	// Created is the timestamp of the image and of all files.
	Created time.Time
	// Manifest is the manifest.yaml of the extension. Its version is replaced.
	Manifest []byte
}

// version returns the version without the leading v, as in manifests and labels.
func (r Release) version() string { return strings.TrimPrefix(r.Version, "v") }

// File is a file of an image. Path is relative and slash-separated.
type File struct {
	Path    string
	Mode    fs.FileMode
	Content []byte
}

// Extension returns the files of the extension image, sorted by path.
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

// Pod returns the files of the image for pods. It contains no CA bundle; the credentials contain the CAs.
func Pod(binary []byte) []File { return []File{{extension.Name, executable, binary}} }

// manifest returns the manifest of the extension with the version of the release.
func (r Release) manifest() ([]byte, error) {
	var manifest extensions.Manifest

	if err := yaml.Load(r.Manifest, &manifest, yaml.WithKnownFields()); err != nil {
		return nil, fmt.Errorf("parse extension manifest: %w", err)
	}

	manifest.Metadata.Version = r.version()

	encoded, err := yaml.Dump(manifest, yaml.WithIndent(2))
	if err != nil {
		return nil, fmt.Errorf("encode extension manifest: %w", err)
	}

	return encoded, nil
}

// Write writes files to an existing directory, with the same modes as in the image. It keeps other files.
func Write(dir string, files []File) error {
	for _, folder := range folders(files) {
		name := filepath.Join(dir, filepath.FromSlash(folder))

		if err := errors.Join(os.MkdirAll(name, executable), os.Chmod(name, executable)); err != nil {
			return fmt.Errorf("write image files: %w", err)
		}
	}

	for _, f := range files {
		name := filepath.Join(dir, filepath.FromSlash(f.Path))

		if err := errors.Join(os.WriteFile(name, f.Content, f.Mode), os.Chmod(name, f.Mode)); err != nil {
			return fmt.Errorf("write image files: %w", err)
		}
	}

	return nil
}

// folders returns the directories of files. Parents precede their children.
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
