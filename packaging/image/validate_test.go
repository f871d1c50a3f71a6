package image_test

import (
	"archive/tar"
	"bytes"
	"debug/elf"
	"encoding/binary"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"github.com/talos-ccm/talos-ccm/packaging/image"
)

// Paths of the extension files.
const (
	manifestPath = "manifest.yaml"
	binaryPath   = "rootfs/usr/local/lib/containers/talos-ccm/talos-ccm"
	specPath     = "rootfs/usr/local/etc/containers/talos-ccm.yaml"
	billPath     = "rootfs/usr/local/share/spdx/talos-ccm.spdx.json"
)

// program returns the header of a Linux executable with program headers of the given types.
func program(t *testing.T, machine elf.Machine, types ...elf.ProgType) []byte {
	t.Helper()

	const headerSize, programSize = 64, 56

	header := elf.Header64{
		Ident:   [elf.EI_NIDENT]byte{0x7f, 'E', 'L', 'F', byte(elf.ELFCLASS64), byte(elf.ELFDATA2LSB), byte(elf.EV_CURRENT)},
		Type:    uint16(elf.ET_EXEC),
		Machine: uint16(machine),
		Version: uint32(elf.EV_CURRENT),
		Phoff:   headerSize, Ehsize: headerSize, Phentsize: programSize, Phnum: uint16(len(types)),
	}

	var content bytes.Buffer

	if err := binary.Write(&content, binary.LittleEndian, header); err != nil {
		t.Fatal(err)
	}

	for _, kind := range types {
		if err := binary.Write(&content, binary.LittleEndian, elf.Prog64{Type: uint32(kind)}); err != nil {
			t.Fatal(err)
		}
	}

	return content.Bytes()
}

// release returns a release with the manifest of the sources and another version.
func release(t *testing.T) image.Release {
	t.Helper()

	content, err := os.ReadFile(filepath.Join(root, manifestPath))
	if err != nil {
		t.Fatal(err)
	}

	return image.Release{Version: "v" + version, Created: time.Unix(created, 0), Manifest: content}
}

// extensionFiles returns the files of the extension for amd64, with an empty program.
func extensionFiles(t *testing.T) []image.File {
	t.Helper()

	files, err := image.Extension(release(t), program(t, elf.EM_X86_64, elf.PT_LOAD))
	if err != nil {
		t.Fatal(err)
	}

	return files
}

// mutation modifies the files.
type mutation func(t *testing.T, files []image.File) []image.File

// change edits one file.
func change(name string, edit func(file *image.File)) mutation {
	return func(t *testing.T, files []image.File) []image.File {
		t.Helper()

		i := slices.IndexFunc(files, func(f image.File) bool { return f.Path == name })
		if i < 0 {
			t.Fatalf("file %s not found", name)
		}

		edit(&files[i])

		return files
	}
}

// replace replaces text, which must exist.
func replace(name, old, with string) mutation {
	return func(t *testing.T, files []image.File) []image.File {
		t.Helper()

		return change(name, func(file *image.File) {
			if !bytes.Contains(file.Content, []byte(old)) {
				t.Fatalf("%s does not contain %q", name, old)
			}

			file.Content = bytes.Replace(file.Content, []byte(old), []byte(with), 1)
		})(t, files)
	}
}

func mode(name string, mode fs.FileMode) mutation {
	return change(name, func(file *image.File) { file.Mode = mode })
}

func appendTo(name, text string) mutation {
	return change(name, func(file *image.File) { file.Content = append(slices.Clone(file.Content), text...) })
}

func content(name string, content []byte) mutation {
	return change(name, func(file *image.File) { file.Content = content })
}

func move(name, to string) mutation {
	return change(name, func(file *image.File) { file.Path = to })
}

func remove(name string) mutation {
	return func(_ *testing.T, files []image.File) []image.File {
		return slices.DeleteFunc(files, func(f image.File) bool { return f.Path == name })
	}
}

func add(file image.File) mutation {
	return func(_ *testing.T, files []image.File) []image.File { return append(files, file) }
}

func TestValidate_AcceptsExtension(t *testing.T) {
	if err := image.ValidateFiles(extensionFiles(t), "amd64"); err != nil {
		t.Error(err)
	}
}

// Each case introduces one error.
func TestValidate_RefusesBrokenExtension(t *testing.T) {
	const (
		depends  = "  - path: /system/run/machined/machine.sock\n"
		mounts   = "  mounts:\n"
		versions = "version: " + version
	)

	for _, test := range []struct {
		broken string
		by     mutation
		want   string
	}{
		{"no manifest", remove(manifestPath), "manifest.yaml is missing"},
		{"no binary", remove(binaryPath), "is missing"},
		{"no service spec", remove(specPath), "is missing"},
		{"no SBOM", remove(billPath), "is missing"},
		{"file in the root of the image", add(image.File{Path: "README.md", Mode: 0o644}), `unexpected file "README.md"`},
		{"file where Talos allows none", add(image.File{Path: "rootfs/etc/passwd", Mode: 0o644}), `"/etc/passwd" is not allowed`},
		{"unexpected file", add(image.File{Path: "rootfs/usr/local/bin/sh", Mode: 0o755}), "unexpected file"},
		{"second service", add(image.File{Path: path.Dir(specPath) + "/other.yaml", Mode: 0o644}), "unexpected file"},

		{"binary that is not executable", mode(binaryPath, 0o644), "mode 644"},
		{"world-writable binary", mode(binaryPath, 0o777), "mode 777"},
		{"binary with the setuid bit", mode(binaryPath, 0o755|fs.ModeSetuid), "mode"},
		{"world-writable spec", mode(specPath, 0o666), "mode 666"},
		{"manifest that is executable", mode(manifestPath, 0o755), "mode 755"},
		{"SBOM that is a symbolic link", mode(billPath, 0o644|fs.ModeSymlink), "mode"},

		{"another architecture", content(binaryPath, program(t, elf.EM_AARCH64, elf.PT_LOAD)), "EM_AARCH64"},
		{"binary with an interpreter", content(binaryPath, program(t, elf.EM_X86_64, elf.PT_INTERP, elf.PT_LOAD)), "statically"},
		{"binary with dynamic libraries", content(binaryPath, program(t, elf.EM_X86_64, elf.PT_LOAD, elf.PT_DYNAMIC)), "statically"},
		{"script", content(binaryPath, []byte("#!/bin/sh\n")), "ELF"},
		{"empty binary", content(binaryPath, nil), "ELF"},

		{"manifest of another version", replace(manifestPath, "v1alpha1", "v1beta1"), "v1beta1"},
		{"manifest is not YAML", content(manifestPath, []byte("{")), manifestPath},
		{"unknown key in the manifest", appendTo(manifestPath, "annotations: {}\n"), "annotations"},
		{"other extension name", replace(manifestPath, "name: talos-ccm", "name: talos-mcc"), `"talos-mcc"`},
		{"empty author", replace(manifestPath, "author: The talos-ccm authors", `author: ""`), "author"},
		{"version with a v", replace(manifestPath, versions, "version: v1.2.3"), `"v1.2.3"`},
		{"version with build metadata", replace(manifestPath, versions, "version: 1.2.3+4"), `"1.2.3+4"`},
		{"version with two numbers", replace(manifestPath, versions, `version: "1.2"`), `"1.2"`},
		{"version that ends in a dot", replace(manifestPath, versions, "version: 1.2.3-rc."), `version "1.2.3-rc." is not`},
		{"version too long for a label", replace(manifestPath, versions, "version: 1.2.3-"+strings.Repeat("a", 60)), "63 characters"},
		{"version differs from SBOM", replace(manifestPath, versions, "version: 1.2.4"), "want talos-ccm 1.2.4"},
		{"excludes Talos 1.12", replace(manifestPath, ">= 1.12.0", ">= 1.13.0"), "Talos 1.12"},
		{"excludes Talos 1.14", replace(manifestPath, ">= 1.12.0", ">= 1.12.0 < 1.14.0"), "Talos 1.14"},
		{"allows Talos before 1.12", replace(manifestPath, ">= 1.12.0", ">= 1.10.0"), "1.11"},
		{"no version constraint", replace(manifestPath, ">= 1.12.0", ""), "1.11"},
		{"invalid version constraint", replace(manifestPath, ">= 1.12.0", "1.12 or later"), "constraint"},

		{"unknown key in the spec", appendTo(specPath, "user: 50\n"), "user"},
		{"unknown key in the container", replace(specPath, mounts, "  capabilities: []\n"+mounts), "capabilities"},
		{"unknown key in a mount", replace(specPath, "      type: bind\n", "      type: bind\n      readonly: true\n"), "readonly"},
		{"spec is not YAML", content(specPath, []byte("name: [")), specPath},
		{"two documents in the spec", appendTo(specPath, "---\nname: other\n"), specPath},
		{"another service", replace(specPath, "name: talos-ccm", "name: ccm"), `"ccm"`},
		{"name that Talos refuses", replace(specPath, "name: talos-ccm", "name: Talos CCM"), `"Talos CCM"`},
		{"entrypoint that is not there", replace(specPath, "./talos-ccm", "./ccm"), `"./ccm"`},
		{"other spec name", move(specPath, path.Dir(specPath)+"/ccm.yaml"), "is missing"},
		{"other container directory", move(binaryPath, "rootfs/usr/local/lib/containers/ccm/talos-ccm"), "is missing"},
		{"restart policy untilSuccess", replace(specPath, "restart: always", "restart: untilSuccess"), "untilSuccess"},
		{"unknown restart policy", replace(specPath, "restart: always", "restart: often"), "often"},
		{"no dependency", replace(specPath, depends, "  []\n"), "depends"},
		{"depends on network", replace(specPath, depends, depends+"  - network: [connectivity]\n"), "connectivity"},
		{"depends on time", replace(specPath, depends, "  - time: true\n"), "depends"},
		{"depends on configuration", replace(specPath, depends, depends+"  - configuration: true\n"), "depends"},
		{"depends on another service", replace(specPath, depends, depends+"  - service: cri\n"), "cri"},
		{"depends on another path", replace(specPath, depends, "  - path: /var/lib\n"), "/var/lib"},
		{"depends on environment file", replace(specPath, mounts, "  environmentFile: /var/talos-ccm.env\n"+mounts), "environment file"},
		{"mount of /var", replace(specPath, "source: /run/talos-ccm-state", "source: /var/lib/talos-ccm"), "/var/lib/talos-ccm"},
		{"mount of /", replace(specPath, "source: /run/talos-ccm-state", "source: /"), "mount"},

		{"SBOM is not JSON", content(billPath, []byte("{")), billPath},
		{"empty SBOM", content(billPath, []byte(`{"spdxVersion": "SPDX-2.3"}`)), "0 packages"},
		{"SBOM of another package", replace(billPath, `"name": "talos-ccm",`, `"name": "talos",`), "SBOM package is talos "},
		{"SBOM of another version", replace(billPath, `"versionInfo": "`+version+`"`, `"versionInfo": "1.2.2"`), "SBOM package is talos-ccm 1.2.2"},
		{"SBOM with two packages", replace(billPath, `"packages": [`, `"packages": [{"name": "golang.org/x/net", "SPDXID": "SPDXRef-net", "downloadLocation": "NOASSERTION"},`), "2 packages"},
	} {
		t.Run(test.broken, func(t *testing.T) {
			err := image.ValidateFiles(test.by(t, extensionFiles(t)), "amd64")
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got error %v, want %q", err, test.want)
			}
		})
	}
}

// entry returns an archive header.
func entry(name string, kind byte, edit func(*tar.Header)) *tar.Header {
	header := &tar.Header{Name: name, Typeflag: kind, Mode: 0o755}
	if edit != nil {
		edit(header)
	}

	return header
}

func imageOf(t *testing.T, headers ...*tar.Header) v1.Image {
	t.Helper()

	var archive bytes.Buffer

	w := tar.NewWriter(&archive)

	for _, header := range headers {
		if err := w.WriteHeader(header); err != nil {
			t.Fatal(err)
		}
	}

	if err := w.Close(); err != nil {
		t.Fatal(err)
	}

	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(archive.Bytes())), nil })
	if err != nil {
		t.Fatal(err)
	}

	img, err := mutate.AppendLayers(empty.Image, layer)
	if err != nil {
		t.Fatal(err)
	}

	return img
}

func TestUnpack_RefusesInvalidArchive(t *testing.T) {
	folder := entry("rootfs/", tar.TypeDir, nil)

	for _, test := range []struct {
		broken  string
		entries []*tar.Header
		want    string
	}{
		{"file before its directory", []*tar.Header{entry("rootfs/a", tar.TypeReg, nil), folder}, "parent directory does not precede it"},
		{"file of another user", []*tar.Header{folder, entry("rootfs/a", tar.TypeReg, func(h *tar.Header) { h.Uid = 1000 })}, "1000:0"},
		{"file of another group", []*tar.Header{folder, entry("rootfs/a", tar.TypeReg, func(h *tar.Header) { h.Gid = 50 })}, "0:50"},
		{"world-writable directory", []*tar.Header{entry("rootfs/", tar.TypeDir, func(h *tar.Header) { h.Mode = 0o777 })}, "mode 777"},
		{"directory with the sticky bit", []*tar.Header{entry("rootfs/", tar.TypeDir, func(h *tar.Header) { h.Mode = 0o1755 })}, "mode 1755"},
		{"device", []*tar.Header{folder, entry("rootfs/a", tar.TypeChar, nil)}, "neither a regular file nor a directory"},
		{"hard link", []*tar.Header{folder, entry("rootfs/a", tar.TypeLink, func(h *tar.Header) { h.Linkname = "rootfs/b" })}, "neither a regular file nor a directory"},
		{"symbolic link", []*tar.Header{folder, entry("rootfs/a", tar.TypeSymlink, func(h *tar.Header) { h.Linkname = "/etc" })}, "neither a regular file nor a directory"},
		{"pipe", []*tar.Header{folder, entry("rootfs/a", tar.TypeFifo, nil)}, "neither a regular file nor a directory"},
		{"same file twice", []*tar.Header{folder, entry("rootfs/a", tar.TypeReg, nil), entry("rootfs/a", tar.TypeReg, nil)}, "duplicate file"},
		{"path outside the root", []*tar.Header{folder, entry("../a", tar.TypeReg, nil)}, "../a"},
	} {
		t.Run(test.broken, func(t *testing.T) {
			if _, err := image.Unpack(imageOf(t, test.entries...)); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got error %v, want %q", err, test.want)
			}
		})
	}
}

func TestValidate_RefusesInvalidIndex(t *testing.T) {
	packed, err := image.ExtensionIndex(release(t), map[string][]byte{"amd64": program(t, elf.EM_X86_64, elf.PT_LOAD)})
	if err != nil {
		t.Fatal(err)
	}

	twice, err := mutate.AppendLayers(imageOf(t, entry("rootfs/", tar.TypeDir, nil)), layers(t, imageOf(t, entry("a/", tar.TypeDir, nil)))...)
	if err != nil {
		t.Fatal(err)
	}

	amd64 := v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: "amd64"}}

	for _, test := range []struct {
		broken string
		index  v1.ImageIndex
		want   string
	}{
		{"no image", empty.Index, "no image"},
		{"no platform", mutate.AppendManifests(empty.Index, mutate.IndexAddendum{Add: empty.Image}), "no platform"},
		{"no layer", mutate.AppendManifests(empty.Index, mutate.IndexAddendum{Add: empty.Image, Descriptor: amd64}), "0 layers"},
		{"two layers", mutate.AppendManifests(empty.Index, mutate.IndexAddendum{Add: twice, Descriptor: amd64}), "2 layers"},
		{"nested index", mutate.AppendManifests(empty.Index, mutate.IndexAddendum{Add: packed, Descriptor: amd64}), "read image"},
	} {
		t.Run(test.broken, func(t *testing.T) {
			if err := image.Validate(test.index); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got error %v, want %q", err, test.want)
			}
		})
	}

	if err := image.Validate(packed); err != nil {
		t.Errorf("valid index: got error %v", err)
	}
}

func layers(t *testing.T, img v1.Image) []v1.Layer {
	t.Helper()

	list, err := img.Layers()
	if err != nil {
		t.Fatal(err)
	}

	return list
}
