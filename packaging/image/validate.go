package image

import (
	"archive/tar"
	"bytes"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"regexp"
	"slices"
	"strings"

	"github.com/blang/semver/v4"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/siderolabs/talos/pkg/machinery/constants"
	"github.com/siderolabs/talos/pkg/machinery/extensions"
	"github.com/siderolabs/talos/pkg/machinery/extensions/services"
	spdxjson "github.com/spdx/tools-golang/json"
	"go.yaml.in/yaml/v4"

	"github.com/talos-ccm/talos-ccm/extension"
)

// SupportedTalos has the first release of each supported minor version of Talos. Validate uses one version of the
// machinery for all of them; a test uses the machinery of each.
var SupportedTalos = []string{"1.12.0", "1.13.0", "1.14.0"}

// unsupportedTalos is a version that the manifest must exclude.
const unsupportedTalos = "1.11.99"

// versionForm matches versions that are valid label values: no leading v, no build metadata, and a letter or digit at
// the end.
var versionForm = regexp.MustCompile(`^\d+\.\d+\.\d+(-[0-9A-Za-z.-]*[0-9A-Za-z])?$`)

// longestVersion is the maximum length of a label value in bytes.
const longestVersion = 63

// Validate returns all errors in an index of extension images, including those that Talos would detect only at runtime.
func Validate(index v1.ImageIndex) error {
	manifest, err := index.IndexManifest()
	if err != nil {
		return fmt.Errorf("read index: %w", err)
	}

	if len(manifest.Manifests) == 0 {
		return errors.New("index has no image")
	}

	var errs []error

	for _, descriptor := range manifest.Manifests {
		if descriptor.Platform == nil {
			errs = append(errs, fmt.Errorf("image %s has no platform", descriptor.Digest))

			continue
		}

		img, err := index.Image(descriptor.Digest)
		if err != nil {
			errs = append(errs, fmt.Errorf("read image %s: %w", descriptor.Digest, err))

			continue
		}

		files, err := Unpack(img)
		if err == nil {
			err = ValidateFiles(files, descriptor.Platform.Architecture)
		}

		if err != nil {
			errs = append(errs, fmt.Errorf("image for %s: %w", descriptor.Platform, err))
		}
	}

	return errors.Join(errs...)
}

// Unpack returns the files of an image with one layer. It returns an error for files that do not belong to root,
// special files, and directories that follow their files, which Talos cannot unpack.
func Unpack(img v1.Image) ([]File, error) {
	layers, err := img.Layers()
	if err != nil {
		return nil, err
	}

	if len(layers) != 1 {
		return nil, fmt.Errorf("image has %d layers, want 1", len(layers))
	}

	content, err := layers[0].Uncompressed()
	if err != nil {
		return nil, err
	}
	defer content.Close() //nolint:errcheck // read-only

	var (
		files []File
		known = map[string]bool{".": true}
		errs  []error
	)

	for r := tar.NewReader(content); ; {
		header, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files, errors.Join(errs...)
		}

		if err != nil {
			return nil, fmt.Errorf("read layer: %w", err)
		}

		name := path.Clean(header.Name)
		if err := checkHeader(header, known[path.Dir(name)]); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", header.Name, err))
		}

		if header.Typeflag == tar.TypeDir {
			known[name] = true

			continue
		}

		if slices.ContainsFunc(files, func(f File) bool { return f.Path == name }) {
			errs = append(errs, fmt.Errorf("%s: duplicate file", header.Name))
		}

		content, err := io.ReadAll(r)
		if err != nil {
			return nil, fmt.Errorf("read %s: %w", header.Name, err)
		}

		files = append(files, File{name, header.FileInfo().Mode(), content})
	}
}

func checkHeader(header *tar.Header, hasParent bool) error {
	switch {
	case header.Typeflag != tar.TypeDir && header.Typeflag != tar.TypeReg:
		return fmt.Errorf("type %q is neither a regular file nor a directory", header.Typeflag)
	case header.Typeflag == tar.TypeDir && header.Mode != executable:
		return fmt.Errorf("directory has mode %o, want %o", header.Mode, executable)
	case header.Uid != 0, header.Gid != 0:
		return fmt.Errorf("owner is %d:%d, want root", header.Uid, header.Gid)
	case !hasParent:
		return errors.New("parent directory does not precede it")
	}

	return nil
}

// ValidateFiles returns all errors in the files of an extension image.
func ValidateFiles(files []File, arch string) error {
	var (
		errs   = []error{checkNamesAndModes(files)}
		checks = map[string]func([]byte) error{
			manifestPath: checkManifest,
			binaryPath:   func(content []byte) error { return checkBinary(content, arch) },
			specPath:     checkSpec,
			sbomPath:     func(content []byte) error { return checkBill(content, files) },
		}
	)

	for _, name := range []string{manifestPath, binaryPath, specPath, sbomPath} {
		i := slices.IndexFunc(files, func(f File) bool { return f.Path == name })
		if i < 0 {
			errs = append(errs, fmt.Errorf("%s is missing", name))
		} else if err := checks[name](files[i].Content); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", name, err))
		}
	}

	return errors.Join(append(errs, checkAsTalos(files))...)
}

// checkNamesAndModes checks what Talos does not: the modes, and that there are no other files.
func checkNamesAndModes(files []File) error {
	var errs []error

	for _, f := range files {
		want := fs.FileMode(readable)

		switch f.Path {
		case binaryPath:
			want = executable
		case manifestPath, specPath, sbomPath:
		default:
			errs = append(errs, fmt.Errorf("%s: unexpected file", f.Path))
		}

		if f.Mode != want {
			errs = append(errs, fmt.Errorf("%s: mode %o, want %o", f.Path, f.Mode, want))
		}
	}

	return errors.Join(errs...)
}

func checkManifest(content []byte) error {
	var manifest extensions.Manifest

	if err := yaml.Load(content, &manifest, yaml.WithKnownFields()); err != nil {
		return err
	}

	switch metadata := manifest.Metadata; {
	case metadata.Name != extension.Name:
		return fmt.Errorf("name %q, want %q", metadata.Name, extension.Name)
	case metadata.Author == "" || metadata.Description == "":
		return errors.New("author and description are required")
	case !versionForm.MatchString(metadata.Version), len(metadata.Version) > longestVersion:
		return fmt.Errorf("version %q is not of the form x.y.z or x.y.z-pre with at most %d characters", metadata.Version, longestVersion)
	}

	return nil
}

// machines maps GOARCH to the ELF machine.
var machines = map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}

// checkBinary checks that the binary is a static executable; the root file system of the service has no libraries.
func checkBinary(content []byte, arch string) error {
	file, err := elf.NewFile(bytes.NewReader(content))
	if err != nil {
		return fmt.Errorf("parse ELF file: %w", err)
	}

	if want, ok := machines[arch]; !ok || file.Machine != want {
		return fmt.Errorf("binary is for %s, want %s", file.Machine, arch)
	}

	if slices.ContainsFunc(file.Progs, func(p *elf.Prog) bool { return p.Type == elf.PT_INTERP || p.Type == elf.PT_DYNAMIC }) {
		return errors.New("binary is not linked statically")
	}

	return nil
}

// checkSpec runs the validation of Talos and checks what it does not: unknown keys, matching names, and dependencies.
// The boot of Talos waits for every extension service, and Talos reboots if one does not start. The only allowed
// dependency is therefore machine.sock, which always exists.
func checkSpec(content []byte) error {
	var spec services.Spec

	if err := yaml.Load(content, &spec, yaml.WithKnownFields()); err != nil {
		return err
	}

	errs := []error{spec.Validate()}

	if spec.Name != extension.Name {
		errs = append(errs, fmt.Errorf("name %q, want %q like the file and the directory of the container", spec.Name, extension.Name))
	}

	if want := "./" + path.Base(binaryPath); spec.Container.Entrypoint != want {
		errs = append(errs, fmt.Errorf("entrypoint %q, want %q", spec.Container.Entrypoint, want))
	}

	if len(spec.Depends) != 1 || fmt.Sprint(spec.Depends[0]) != fmt.Sprint(services.Dependency{Path: constants.MachineSocketPath}) {
		errs = append(errs, fmt.Errorf("depends on %+v, want only the path %s", spec.Depends, constants.MachineSocketPath))
	}

	if spec.Container.EnvironmentFile != "" {
		errs = append(errs, fmt.Errorf("depends on environment file %s", spec.Container.EnvironmentFile))
	}

	if spec.Restart != services.RestartAlways {
		errs = append(errs, fmt.Errorf("restart %q, want %q: talos-ccm exits when it loses the lease", spec.Restart, services.RestartAlways))
	}

	for _, mount := range spec.Container.Mounts {
		if mount.Source == "/" || mount.Source == "/var" || strings.HasPrefix(mount.Source, "/var/") {
			errs = append(errs, fmt.Errorf("mount of %s prevents Talos from unmounting /var at shutdown", mount.Source))
		}
	}

	return errors.Join(errs...)
}

// checkBill checks that the SBOM has one package, the extension with the version of the manifest. A controller of
// Talos fails on an SBOM that it cannot parse.
func checkBill(content []byte, files []File) error {
	document, err := spdxjson.Read(bytes.NewReader(content))
	if err != nil {
		return err
	}

	if len(document.Packages) != 1 {
		return fmt.Errorf("SBOM has %d packages, want 1: others would replace packages of Talos with the same name", len(document.Packages))
	}

	var manifest extensions.Manifest

	for _, f := range files {
		if f.Path == manifestPath {
			_ = yaml.Load(f.Content, &manifest) // checkManifest reports the error
		}
	}

	if p := document.Packages[0]; p.PackageName != extension.Name || p.PackageVersion != manifest.Metadata.Version {
		return fmt.Errorf("SBOM package is %s %s, want %s %s", p.PackageName, p.PackageVersion, extension.Name, manifest.Metadata.Version)
	}

	return nil
}

// checkAsTalos loads and validates the extension with the code of Talos, for each supported version.
func checkAsTalos(files []File) error {
	dir, err := os.MkdirTemp("", "talos-ccm-image-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir) //nolint:errcheck // temporary directory

	if err := Write(dir, files); err != nil {
		return err
	}

	loaded, err := extensions.Load(dir)
	if err != nil {
		return fmt.Errorf("load extension: %w", err)
	}

	var errs []error

	for _, version := range SupportedTalos {
		talos := semver.MustParse(version)

		err := loaded.Validate(extensions.WithValidateConstraints(), extensions.WithValidateContents(), extensions.WithTalosVersion(&talos))
		if err != nil {
			errs = append(errs, fmt.Errorf("validate extension for Talos %s: %w", version, err))
		}
	}

	talos := semver.MustParse(unsupportedTalos)
	if loaded.Validate(extensions.WithValidateConstraints(), extensions.WithTalosVersion(&talos)) == nil {
		errs = append(errs, fmt.Errorf("manifest allows Talos %s, which is not supported", talos))
	}

	return errors.Join(errs...)
}
