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

// SupportedTalos are the versions of Talos that the extension is validated for: the first of each minor version. Here one version of machinery's
// validators speaks for all; a test asks each minor version's own.
var SupportedTalos = []string{"1.12.0", "1.13.0", "1.14.0"}

// unsupportedTalos must be refused by the manifest: nothing was tested with it.
const unsupportedTalos = "1.11.99"

// versionForm is what Talos can label Nodes with: no v, no +build, and a letter or digit at the end.
var versionForm = regexp.MustCompile(`^\d+\.\d+\.\d+(-[0-9A-Za-z.-]*[0-9A-Za-z])?$`)

// longestVersion is that of a label's value, in bytes.
const longestVersion = 63

// Validate says everything that is wrong with an index of extension images: what Talos itself would refuse, and what it would find out too late.
func Validate(index v1.ImageIndex) error {
	manifest, err := index.IndexManifest()
	if err != nil {
		return fmt.Errorf("read the index: %w", err)
	}

	if len(manifest.Manifests) == 0 {
		return errors.New("the index has no image")
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

// Unpack reads an image's only layer. What is not root's, in no order that Talos can unpack, or neither file nor folder is an error.
func Unpack(img v1.Image) ([]File, error) {
	layers, err := img.Layers()
	if err != nil {
		return nil, err
	}

	if len(layers) != 1 {
		return nil, fmt.Errorf("there are %d layers, want 1", len(layers))
	}

	content, err := layers[0].Uncompressed()
	if err != nil {
		return nil, err
	}
	defer content.Close() //nolint:errcheck // it was only read

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
			return nil, fmt.Errorf("read the layer: %w", err)
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
			errs = append(errs, fmt.Errorf("%s: it is there twice", header.Name))
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
		return fmt.Errorf("type %q is neither a file nor a folder", header.Typeflag)
	case header.Typeflag == tar.TypeDir && header.Mode != executable:
		return fmt.Errorf("a folder with mode %o, want %o", header.Mode, executable)
	case header.Uid != 0, header.Gid != 0:
		return fmt.Errorf("it belongs to %d:%d, want root", header.Uid, header.Gid)
	case !hasParent:
		return errors.New("its folder does not come before it")
	}

	return nil
}

// ValidateFiles says everything that is wrong with the files of one extension image.
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

// checkNamesAndModes is for what Talos does not look at: modes, and what is there beside the four files.
func checkNamesAndModes(files []File) error {
	var errs []error

	for _, f := range files {
		want := fs.FileMode(readable)

		switch f.Path {
		case binaryPath:
			want = executable
		case manifestPath, specPath, sbomPath:
		default:
			errs = append(errs, fmt.Errorf("%s: nobody asked for it", f.Path))
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
		return errors.New("author or description is missing")
	case !versionForm.MatchString(metadata.Version), len(metadata.Version) > longestVersion:
		return fmt.Errorf("version %q is not x.y.z or x.y.z-pre of at most %d characters", metadata.Version, longestVersion)
	}

	return nil
}

// machines are what binaries for Go's architectures are built for.
var machines = map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}

// checkBinary wants a static executable: a service's root file system has nothing but it.
func checkBinary(content []byte, arch string) error {
	file, err := elf.NewFile(bytes.NewReader(content))
	if err != nil {
		return fmt.Errorf("read it as an ELF file: %w", err)
	}

	if want, ok := machines[arch]; !ok || file.Machine != want {
		return fmt.Errorf("it is for %s, not for %s", file.Machine, arch)
	}

	if slices.ContainsFunc(file.Progs, func(p *elf.Prog) bool { return p.Type == elf.PT_INTERP || p.Type == elf.PT_DYNAMIC }) {
		return errors.New("it is not linked statically")
	}

	return nil
}

// checkSpec is Talos's validation, and what it does without: unknown keys, names that must agree, and dependencies. Talos's boot waits for every
// extension service, and ends in a reboot if one never starts, so that ours may wait for nothing but the socket, which is there from the start.
func checkSpec(content []byte) error {
	var spec services.Spec

	if err := yaml.Load(content, &spec, yaml.WithKnownFields()); err != nil {
		return err
	}

	errs := []error{spec.Validate()}

	if spec.Name != extension.Name {
		errs = append(errs, fmt.Errorf("name %q, want that of the file and of the container's folder, %q", spec.Name, extension.Name))
	}

	if want := "./" + path.Base(binaryPath); spec.Container.Entrypoint != want {
		errs = append(errs, fmt.Errorf("entrypoint %q, want %q", spec.Container.Entrypoint, want))
	}

	if len(spec.Depends) != 1 || fmt.Sprint(spec.Depends[0]) != fmt.Sprint(services.Dependency{Path: constants.MachineSocketPath}) {
		errs = append(errs, fmt.Errorf("it depends on %+v, want the path %s and nothing else", spec.Depends, constants.MachineSocketPath))
	}

	if spec.Container.EnvironmentFile != "" {
		errs = append(errs, fmt.Errorf("it waits for environment file %s", spec.Container.EnvironmentFile))
	}

	if spec.Restart != services.RestartAlways {
		errs = append(errs, fmt.Errorf("restart %s: after a lost lease nobody would start it again", spec.Restart))
	}

	for _, mount := range spec.Container.Mounts {
		if mount.Source == "/" || mount.Source == "/var" || strings.HasPrefix(mount.Source, "/var/") {
			errs = append(errs, fmt.Errorf("mount of %s: Talos could not unmount /var when the machine goes down", mount.Source))
		}
	}

	return errors.Join(errs...)
}

// checkBill wants exactly one package, the extension in the manifest's version. A bill that cannot be read fails a controller of Talos's.
func checkBill(content []byte, files []File) error {
	document, err := spdxjson.Read(bytes.NewReader(content))
	if err != nil {
		return err
	}

	if len(document.Packages) != 1 {
		return fmt.Errorf("it has %d packages, want 1: Talos would take those of its own that have the same name for ours", len(document.Packages))
	}

	var manifest extensions.Manifest

	for _, f := range files {
		if f.Path == manifestPath {
			_ = yaml.Load(f.Content, &manifest) // checkManifest says what is wrong with it
		}
	}

	if p := document.Packages[0]; p.PackageName != extension.Name || p.PackageVersion != manifest.Metadata.Version {
		return fmt.Errorf("its package is %s %s, want %s %s", p.PackageName, p.PackageVersion, extension.Name, manifest.Metadata.Version)
	}

	return nil
}

// checkAsTalos has Talos's own code load and validate the extension, for each supported version.
func checkAsTalos(files []File) error {
	dir, err := os.MkdirTemp("", "talos-ccm-image-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir) //nolint:errcheck // a temporary folder

	if err := Write(dir, files); err != nil {
		return err
	}

	loaded, err := extensions.Load(dir)
	if err != nil {
		return fmt.Errorf("not loaded by Talos: %w", err)
	}

	var errs []error

	for _, version := range SupportedTalos {
		talos := semver.MustParse(version)

		err := loaded.Validate(extensions.WithValidateConstraints(), extensions.WithValidateContents(), extensions.WithTalosVersion(&talos))
		if err != nil {
			errs = append(errs, fmt.Errorf("not accepted by Talos %s: %w", version, err))
		}
	}

	talos := semver.MustParse(unsupportedTalos)
	if loaded.Validate(extensions.WithValidateConstraints(), extensions.WithTalosVersion(&talos)) == nil {
		errs = append(errs, fmt.Errorf("accepted by Talos %s, which is not supported", talos))
	}

	return errors.Join(errs...)
}
