package image_test

import (
	"archive/tar"
	"bytes"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/siderolabs/talos/pkg/machinery/constants"
	"github.com/siderolabs/talos/pkg/machinery/extensions"
	"github.com/siderolabs/talos/pkg/machinery/extensions/services"
	spdxjson "github.com/spdx/tools-golang/json"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v4"

	"github.com/talos-ccm/talos-ccm/packaging/image"
)

// maxCompressed bounds the size of an image in bytes: 18.46 MB and three percent. To find the cause of an increase, run go tool nm -size on an
// unstripped binary.
const maxCompressed = 19_000_000

const specPath = "rootfs/usr/local/etc/containers/talos-ccm.yaml"

// listings has a line for every file of an image: type, mode, owner, path and link target.
var listings = map[string]string{"extension": `
5 drwxr-xr-x 0:0 rootfs/
5 drwxr-xr-x 0:0 rootfs/usr/
5 drwxr-xr-x 0:0 rootfs/usr/local/
5 drwxr-xr-x 0:0 rootfs/usr/local/etc/
5 drwxr-xr-x 0:0 rootfs/usr/local/etc/containers/
5 drwxr-xr-x 0:0 rootfs/usr/local/lib/
5 drwxr-xr-x 0:0 rootfs/usr/local/lib/containers/
5 drwxr-xr-x 0:0 rootfs/usr/local/lib/containers/talos-ccm/
5 drwxr-xr-x 0:0 rootfs/usr/local/share/
5 drwxr-xr-x 0:0 rootfs/usr/local/share/spdx/
0 -rw-r--r-- 0:0 manifest.yaml
0 -rw-r--r-- 0:0 rootfs/usr/local/etc/containers/talos-ccm.yaml
0 -rwxr-xr-x 0:0 rootfs/usr/local/lib/containers/talos-ccm/talos-ccm
0 -rw-r--r-- 0:0 rootfs/usr/local/share/spdx/talos-ccm.spdx.json
`, "pod": `
0 -rwxr-xr-x 0:0 talos-ccm
`}

// Talos before 1.14 does not create parent directories when it unpacks, and refuses other files. By default an archive
// contains the owner and the modification time of files.
func TestImage_LayerHasExactFiles(t *testing.T) {
	for name, pack := range map[string]func(image.Release, map[string][]byte) (v1.ImageIndex, error){
		"extension": image.ExtensionIndex, "pod": image.PodIndex,
	} {
		index, err := pack(release(t), map[string][]byte{"amd64": []byte("program"), "arm64": []byte("program")})
		require.NoError(t, err)

		eachImage(t, index, func(t *testing.T, _ string, img v1.Image) {
			listing, r := "\n", tar.NewReader(bytes.NewReader(layer(t, img)))

			header, err := r.Next()
			for ; err == nil; header, err = r.Next() {
				listing += fmt.Sprintf("%c %s %d:%d %s%s\n", header.Typeflag, header.FileInfo().Mode(), header.Uid, header.Gid, header.Name, header.Linkname)
				assert.Equal(t, tar.FormatUSTAR, header.Format)
				assert.Empty(t, header.Uname+header.Gname)
				assert.EqualValues(t, created, header.ModTime.Unix())
			}

			assert.Equal(t, listings[name], listing)
			assert.ErrorIs(t, err, io.EOF)
		})
	}
}

// layer returns the archive of an image.
func layer(t *testing.T, img v1.Image) []byte {
	t.Helper()

	layers, err := img.Layers()
	require.NoError(t, err)
	require.Len(t, layers, 1)

	content, err := layers[0].Uncompressed()
	require.NoError(t, err)

	archive, err := io.ReadAll(content)
	require.NoError(t, err)
	assert.True(t, bytes.HasSuffix(archive, make([]byte, 1024)), "archive has no end")

	return archive
}

// These checks are stricter than those of Talos: unknown keys, dependencies, and a root file system without libraries.
func TestImage_ExtensionIsValid(t *testing.T) {
	index := read(t, makeOnce(t)["extension"])

	eachImage(t, index, func(t *testing.T, arch string, _ v1.Image) {
		dir := unpack(t, index, arch)
		content := func(name string) []byte {
			content, err := os.ReadFile(filepath.Join(dir, name))
			require.NoError(t, err)

			return content
		}

		checkManifest(t, content("manifest.yaml"))
		checkSpec(t, content(specPath))
		checkBinary(t, content("rootfs/usr/local/lib/containers/talos-ccm/talos-ccm"), arch)

		bill, err := spdxjson.Read(bytes.NewReader(content("rootfs/usr/local/share/spdx/talos-ccm.spdx.json")))
		require.NoError(t, err)
		require.Len(t, bill.Packages, 1)
		assert.Equal(t, "talos-ccm "+version, bill.Packages[0].PackageName+" "+bill.Packages[0].PackageVersion)
	})
}

func checkManifest(t *testing.T, content []byte) {
	t.Helper()

	var manifest extensions.Manifest
	assert.NoError(t, yaml.Load(content, &manifest, yaml.WithKnownFields()))

	m := manifest.Metadata
	assert.Equal(t, "talos-ccm "+version, m.Name+" "+m.Version)
	assert.True(t, m.Author != "" && m.Description != "", m)
}

// Talos waits for every extension service at boot, and reboots if one does not start. The only allowed dependency is
// therefore machine.sock, which always exists. A mount of /var would prevent Talos from unmounting it at shutdown.
func checkSpec(t *testing.T, content []byte) {
	t.Helper()

	var spec services.Spec
	assert.NoError(t, yaml.Load(content, &spec, yaml.WithKnownFields()))
	assert.NoError(t, spec.Validate())
	assert.Equal(t, "talos-ccm", spec.Name)
	assert.Equal(t, "./talos-ccm", spec.Container.Entrypoint)
	assert.Empty(t, spec.Container.EnvironmentFile)
	assert.Equal(t, []services.Dependency{{Path: constants.MachineSocketPath}}, spec.Depends)
	assert.Equal(t, services.RestartAlways, spec.Restart)

	for _, mount := range spec.Container.Mounts {
		assert.Regexp(t, "^(/system)?/run/", mount.Source)
	}
}

func checkBinary(t *testing.T, content []byte, arch string) {
	t.Helper()

	file, err := elf.NewFile(bytes.NewReader(content))
	require.NoError(t, err)
	assert.Equal(t, map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}[arch], file.Machine, arch)

	for _, program := range file.Progs {
		assert.NotEqual(t, elf.PT_INTERP, program.Type)
		assert.NotEqual(t, elf.PT_DYNAMIC, program.Type)
	}
}

func TestExtensionIndex_RefusesInvalidRelease(t *testing.T) {
	for _, test := range []struct{ version, manifest, want string }{
		{"v1.2.3", "", ""},
		{"1.2.3-rc.1", "", ""},
		{"v1.2.3-" + strings.Repeat("a", 57), "", ""},
		{"v1.2.3-" + strings.Repeat("a", 58), "", "63 characters"},
		{"v1.2.3+4", "", `"v1.2.3+4"`},
		{"v1.2", "", `"v1.2"`},
		{"v1.2.3-rc.", "", `"v1.2.3-rc."`},
		{"", "", `""`},
		{"v1.2.3", "annotations: {}\n", "annotations"},
		{"v1.2.3", "{", "manifest"},
	} {
		r := release(t)
		r.Version, r.Manifest = test.version, append(r.Manifest, test.manifest...)

		_, err := image.ExtensionIndex(r, map[string][]byte{"amd64": nil})
		if test.want == "" {
			assert.NoError(t, err, test.version)
		} else {
			assert.ErrorContains(t, err, test.want, "version %q, manifest %q", test.version, test.manifest)
		}
	}
}

func TestImage_HasLabelsAndBoundedSize(t *testing.T) {
	for _, dir := range makeOnce(t) {
		eachImage(t, read(t, dir), func(t *testing.T, arch string, img v1.Image) {
			manifest, err := img.Manifest()
			require.NoError(t, err)
			assert.LessOrEqual(t, manifest.Layers[0].Size, int64(maxCompressed))

			config := configOf(t, img)
			assert.Equal(t, "linux/"+arch, config.OS+"/"+config.Architecture)
			assert.Equal(t, []int64{created, created}, []int64{config.Created.Unix(), config.History[0].Created.Unix()})

			for _, labels := range []map[string]string{config.Config.Labels, manifest.Annotations} {
				for label, want := range map[string]string{
					"title": "talos-ccm", "version": version, "revision": revision,
					"created": "2023-11-14T22:13:20Z", "licenses": "Apache-2.0", "source": "https://github.com/talos-ccm/talos-ccm",
				} {
					assert.Equal(t, want, labels["org.opencontainers.image."+label], label)
				}
			}
		})
	}
}

func configOf(t *testing.T, img v1.Image) *v1.ConfigFile {
	t.Helper()

	config, err := img.ConfigFile()
	require.NoError(t, err)

	return config
}

func TestImage_PodImageRunsAsNobody(t *testing.T) {
	index := read(t, makeOnce(t)["pod"])

	eachImage(t, index, func(t *testing.T, arch string, img v1.Image) {
		config := configOf(t, img).Config
		assert.Equal(t, []string{"/talos-ccm"}, config.Entrypoint)
		assert.Equal(t, "65532:65532", config.User)

		// Only the binary for the host architecture can run.
		if arch != runtime.GOARCH {
			return
		}

		output, err := exec.CommandContext(t.Context(), filepath.Join(unpack(t, index, arch), "talos-ccm"), "--version").CombinedOutput()
		assert.NoError(t, err)
		assert.Equal(t, "talos-ccm v"+version+"\n", string(output))
	})
}

func TestWriteLayout_RefusesOtherDirectory(t *testing.T) {
	dir := t.TempDir()
	precious := filepath.Join(dir, "precious")
	require.NoError(t, os.WriteFile(precious, nil, 0o600))

	for _, dir := range []string{dir, precious} {
		assert.ErrorContains(t, image.WriteLayout(dir, empty.Index), dir)
	}

	assert.FileExists(t, precious)
}

func TestImage_IsReproducible(t *testing.T) {
	first := makeOnce(t)
	elsewhere := filepath.Join(t.TempDir(), "talos-ccm")

	// Another directory without git but within a Go workspace, and with other timestamps, modes, umask, locale, time
	// zone and Go settings.
	require.NoError(t, errors.Join(os.Mkdir(elsewhere, 0o755), os.WriteFile(filepath.Join(elsewhere, "../go.work"), []byte("go 1.26\n"), 0o600)))

	copied := exec.CommandContext(t.Context(), "sh", "-c", `git ls-files -coz --exclude-standard | tar -c --null --ignore-failed-read -T - |
		(umask 077 && exec tar -x --touch --no-same-permissions -C "$0")`, elsewhere)
	copied.Dir = root

	output, err := copied.CombinedOutput()
	require.NoError(t, err, string(output))

	// Another image is replaced.
	out := filepath.Join(elsewhere, "else", "where")
	_, err = layout.Write(filepath.Join(out, "oci"), empty.Index)
	require.NoError(t, errors.Join(err, os.WriteFile(filepath.Join(out, "oci", "old"), nil, 0o600)))

	_, err = makeImage(elsewhere, out, "077", "TZ=Pacific/Kiritimati", "LC_ALL=C", "LANG=tr_TR.UTF-8",
		"GOFLAGS=-tags=else,where", "GOWORK=", "GOAMD64=v3", "GOARM64=v9.0", "GOFIPS140=latest", "GOEXPERIMENT=nodwarf5")
	require.NoError(t, err)

	for _, name := range []string{"oci", "oci-pod", "talos-ccm.spdx.json"} {
		output, err = exec.CommandContext(t.Context(), "diff", "-r", filepath.Join(first["pod"], "..", name), filepath.Join(out, name)).CombinedOutput()
		assert.NoError(t, err, string(output))
	}
}

func TestUnpack_IgnoresUmask(t *testing.T) {
	defer syscall.Umask(syscall.Umask(0o077))

	index, err := image.ExtensionIndex(release(t), map[string][]byte{"amd64": nil, "arm64": nil})
	require.NoError(t, err)

	for _, arch := range []string{"amd64", "arm64"} {
		dir := unpack(t, index, arch)

		for name, want := range map[string]fs.FileMode{"rootfs": fs.ModeDir | 0o755, "manifest.yaml": 0o644, "rootfs/usr/local/lib/containers/talos-ccm/talos-ccm": 0o755} {
			info, err := os.Stat(filepath.Join(dir, name))
			require.NoError(t, err)
			assert.Equal(t, want, info.Mode())
		}
	}
}
