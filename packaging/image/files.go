// Package image packs talos-ccm as a Talos system extension and as an image for pods. The result is reproducible: it
// depends only on the input, and not on the time, the host or the umask.
//
// go-containerregistry writes the image, without docker. The image has one layer. Its files are sorted, belong to root
// and have the date of the commit, so that the same sources give the same digest on every machine.
//
// The tests unpack the result of `make image` and check it with the validators of all accepted Talos versions. They
// also check modes, unknown keys of the service spec, and that the binary is static, because imager does not. The
// version in the manifest is that of the tag. Its lower bound is the lowest tested version. The bill of materials in
// the image has one package, because Talos merges the packages of the host and of extensions by name.
package image

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"regexp"
	"slices"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/match"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/partial"
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

// versionForm matches versions that are valid label values, which Talos makes of them: no leading v, no build metadata,
// a letter or digit at the end, and at most 63 bytes.
var versionForm = regexp.MustCompile(`^\d+\.\d+\.\d+(-[0-9A-Za-z.-]*[0-9A-Za-z])?$`)

const longestVersion = 63

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

	return []File{
		{manifestPath, readable, manifest},
		{specPath, readable, extension.Spec},
		{binaryPath, executable, binary},
		{sbomPath, readable, bill},
	}, nil
}

// manifest returns the manifest of the extension with the version of the release.
func (r Release) manifest() ([]byte, error) {
	if !versionForm.MatchString(r.version()) || len(r.version()) > longestVersion {
		return nil, fmt.Errorf("version %q is not of the form x.y.z or x.y.z-pre with at most %d characters", r.Version, longestVersion)
	}

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

// withDirectories returns the directories of files, then files. Parents precede their children, because Talos does not
// create parents when it unpacks.
func withDirectories(files []File) []File {
	var directories []string

	for _, f := range files {
		for dir := path.Dir(f.Path); dir != "."; dir = path.Dir(dir) {
			directories = append(directories, dir)
		}
	}

	slices.Sort(directories)

	var all []File
	for _, dir := range slices.Compact(directories) {
		all = append(all, File{dir, fs.ModeDir | executable, nil})
	}

	return append(all, files...)
}

// Unpack unpacks the only image for an architecture into a directory, with the modes of its files.
func Unpack(index v1.ImageIndex, arch, dir string) error {
	images, err := partial.FindImages(index, match.Platforms(v1.Platform{OS: "linux", Architecture: arch}))
	if err != nil {
		return fmt.Errorf("find image for %s: %w", arch, err)
	}

	if len(images) != 1 {
		return fmt.Errorf("find image for %s: there are %d", arch, len(images))
	}

	if err := os.MkdirAll(dir, executable); err != nil {
		return fmt.Errorf("unpack image: %w", err)
	}

	content := mutate.Extract(images[0])
	defer content.Close() //nolint:errcheck // read-only

	cmd := exec.CommandContext(context.Background(), "tar", "-xp", "-C", dir)
	cmd.Stdin = content

	if output, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("unpack image: %w\n%s", err, output)
	}

	return nil
}
