package image_test

import (
	"archive/tar"
	"bytes"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-containerregistry/pkg/crane"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/validate"
	"github.com/siderolabs/talos/pkg/machinery/constants"
	"github.com/siderolabs/talos/pkg/machinery/extensions"
	"github.com/siderolabs/talos/pkg/machinery/extensions/services"
	spdxjson "github.com/spdx/tools-golang/json"
	"go.yaml.in/yaml/v4"

	"github.com/talos-ccm/talos-ccm/packaging/image"
)

// maxCompressed bounds the size of an image in bytes. To find the cause of an increase, run go tool nm -size on an
// unstripped binary.
const maxCompressed = 25_000_000

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

// Talos does not create parent directories when it unpacks, and refuses other files. By default an archive contains the
// owner and the modification time of files.
func TestImage_LayerHasExactFiles(t *testing.T) {
	for name, pack := range map[string]func(image.Release, map[string][]byte) (v1.ImageIndex, error){
		"extension": image.ExtensionIndex, "pod": image.PodIndex,
	} {
		index, err := pack(release(t), map[string][]byte{"amd64": []byte("program"), "arm64": []byte("program")})
		if err != nil {
			t.Fatal(err)
		}

		eachImage(t, index, func(t *testing.T, _ string, img v1.Image) {
			var (
				listing     = "\n"
				r           = tar.NewReader(bytes.NewReader(layer(t, img)))
				header, err = r.Next()
			)

			for ; err == nil; header, err = r.Next() {
				listing += fmt.Sprintf("%c %s %d:%d %s%s\n", header.Typeflag, header.FileInfo().Mode(), header.Uid, header.Gid, header.Name, header.Linkname)

				if header.Format != tar.FormatUSTAR || header.Uname+header.Gname != "" || header.ModTime.Unix() != created {
					t.Errorf("unexpected header %+v", header)
				}
			}

			if diff := cmp.Diff(listings[name], listing); diff != "" || !errors.Is(err, io.EOF) {
				t.Errorf("%s (-want +got), error %v\n%s", name, err, diff)
			}
		})
	}
}

// layer returns the archive of an image.
func layer(t *testing.T, img v1.Image) []byte {
	t.Helper()

	layers, err := img.Layers()
	if err != nil || len(layers) != 1 {
		t.Fatalf("got %d layers, error %v", len(layers), err)
	}

	content, err := layers[0].Uncompressed()
	if err != nil {
		t.Fatal(err)
	}

	archive, err := io.ReadAll(content)
	if err != nil || !bytes.HasSuffix(archive, make([]byte, 1024)) {
		t.Errorf("archive has no end, error %v", err)
	}

	return archive
}

// These checks are stricter than those of Talos: unknown keys, dependencies, and a root file system without libraries.
func TestImage_ExtensionIsValid(t *testing.T) {
	eachImage(t, read(t, makeOnce(t)["extension"]), func(t *testing.T, arch string, img v1.Image) {
		files, err := image.Unpack(img)
		if err != nil {
			t.Fatal(err)
		}

		checkManifest(t, files[0].Content)
		checkSpec(t, files[1].Content)
		checkBinary(t, files[2].Content, arch)

		bill, err := spdxjson.Read(bytes.NewReader(files[3].Content))
		if err != nil || len(bill.Packages) != 1 || bill.Packages[0].PackageName != "talos-ccm" || bill.Packages[0].PackageVersion != version {
			t.Errorf("got SBOM %+v, error %v", bill, err)
		}
	})
}

func checkManifest(t *testing.T, content []byte) {
	t.Helper()

	var manifest extensions.Manifest
	if err := yaml.Load(content, &manifest, yaml.WithKnownFields()); err != nil {
		t.Error(err)
	}

	if m := manifest.Metadata; m.Name != "talos-ccm" || m.Version != version || m.Author == "" || m.Description == "" {
		t.Errorf("got metadata %+v", m)
	}
}

// Talos waits for every extension service at boot, and reboots if one does not start. The only allowed dependency is
// therefore machine.sock, which always exists. A mount of /var would prevent Talos from unmounting it at shutdown.
func checkSpec(t *testing.T, content []byte) {
	t.Helper()

	var spec services.Spec
	if err := yaml.Load(content, &spec, yaml.WithKnownFields()); err != nil {
		t.Error(err)
	}

	if err := spec.Validate(); err != nil {
		t.Error(err)
	}

	if spec.Name != "talos-ccm" || spec.Container.Entrypoint != "./talos-ccm" || spec.Container.EnvironmentFile != "" {
		t.Errorf("got name %q, entrypoint %q, environment file %q", spec.Name, spec.Container.Entrypoint, spec.Container.EnvironmentFile)
	}

	if diff := cmp.Diff([]services.Dependency{{Path: constants.MachineSocketPath}}, spec.Depends); diff != "" {
		t.Errorf("dependencies (-want +got)\n%s", diff)
	}

	if spec.Restart != services.RestartAlways {
		t.Errorf("got restart policy %s; talos-ccm exits when it loses the lease", spec.Restart)
	}

	for _, mount := range spec.Container.Mounts {
		if !strings.HasPrefix(mount.Source, "/run/") && !strings.HasPrefix(mount.Source, "/system/run/") {
			t.Errorf("unexpected mount of %s", mount.Source)
		}
	}
}

func checkBinary(t *testing.T, content []byte, arch string) {
	t.Helper()

	file, err := elf.NewFile(bytes.NewReader(content))
	if err != nil {
		t.Fatal(err)
	}

	if want := map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}[arch]; file.Machine != want {
		t.Errorf("binary for %s is for %s", arch, file.Machine)
	}

	for _, program := range file.Progs {
		if program.Type == elf.PT_INTERP || program.Type == elf.PT_DYNAMIC {
			t.Errorf("binary is not linked statically: %s", program.Type)
		}
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

		if _, err := image.ExtensionIndex(r, map[string][]byte{"amd64": nil}); (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
			t.Errorf("version %q, manifest %q: got error %v, want %q", test.version, test.manifest, err, test.want)
		}
	}
}

func TestImage_HasLabelsAndBoundedSize(t *testing.T) {
	for _, dir := range makeOnce(t) {
		eachImage(t, read(t, dir), func(t *testing.T, arch string, img v1.Image) {
			manifest, err := img.Manifest()
			if err != nil {
				t.Fatal(err)
			}

			if size := manifest.Layers[0].Size; size > maxCompressed {
				t.Errorf("layer has %d bytes, want at most %d", size, maxCompressed)
			}

			config := configOf(t, img)
			if config.OS != "linux" || config.Architecture != arch || config.Created.Unix() != created || config.History[0].Created.Unix() != created {
				t.Errorf("got configuration %+v", config)
			}

			for _, labels := range []map[string]string{config.Config.Labels, manifest.Annotations} {
				for label, want := range map[string]string{
					"title": "talos-ccm", "version": version, "revision": revision,
					"created": "2023-11-14T22:13:20Z", "licenses": "Apache-2.0", "source": "https://github.com/talos-ccm/talos-ccm",
				} {
					if got := labels["org.opencontainers.image."+label]; got != want {
						t.Errorf("%s is %q, want %q", label, got, want)
					}
				}
			}
		})
	}
}

func configOf(t *testing.T, img v1.Image) *v1.ConfigFile {
	t.Helper()

	config, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}

	return config
}

func TestImage_PodImageRunsAsNobody(t *testing.T) {
	eachImage(t, read(t, makeOnce(t)["pod"]), func(t *testing.T, arch string, img v1.Image) {
		config := configOf(t, img).Config
		if !slices.Equal(config.Entrypoint, []string{"/talos-ccm"}) || config.User != "65532:65532" {
			t.Errorf("got entrypoint %q, user %q", config.Entrypoint, config.User)
		}

		// Only the binary for the host architecture can run.
		if arch != runtime.GOARCH {
			return
		}

		files, err := image.Unpack(img)
		if err != nil {
			t.Fatal(err)
		}

		output, err := exec.CommandContext(t.Context(), filepath.Join(layOut(t, files), "talos-ccm"), "--version").CombinedOutput()
		if err != nil || string(output) != "talos-ccm v"+version+"\n" {
			t.Errorf("got output %q, error %v", output, err)
		}
	})
}

func TestImage_IsReproducible(t *testing.T) {
	first := makeOnce(t)
	elsewhere := filepath.Join(t.TempDir(), "talos-ccm")

	// Another directory without git but within a Go workspace, and with other timestamps, modes, umask, locale, time
	// zone and Go settings.
	if err := errors.Join(os.Mkdir(elsewhere, 0o755), os.WriteFile(filepath.Join(elsewhere, "../go.work"), []byte("go 1.26\n"), 0o600)); err != nil {
		t.Fatal(err)
	}

	copied := exec.CommandContext(t.Context(), "sh", "-c", `git ls-files -coz --exclude-standard | tar -c --null --ignore-failed-read -T - |
		(umask 077 && exec tar -x --touch --no-same-permissions -C "$0")`, elsewhere)
	copied.Dir = root

	if output, err := copied.CombinedOutput(); err != nil {
		t.Fatalf("copy sources: %v\n%s", err, output)
	}

	second, err := makeImage(elsewhere, filepath.Join(elsewhere, "else", "where"), "077", "TZ=Pacific/Kiritimati", "LC_ALL=C", "LANG=tr_TR.UTF-8",
		"GOFLAGS=-tags=else,where", "GOWORK=", "GOAMD64=v3", "GOARM64=v9.0", "GOFIPS140=latest", "GOEXPERIMENT=nodwarf5")
	if err != nil {
		t.Fatal(err)
	}

	for name := range first {
		if a, b := digest(t, first[name]), digest(t, second[name]); a != b {
			t.Errorf("%s has digest %s, and %s in the other environment", name, a, b)
		}
	}

	bills := []string{filepath.Join(first["pod"], "../talos-ccm.spdx.json"), filepath.Join(second["pod"], "../talos-ccm.spdx.json")}
	if output, err := exec.CommandContext(t.Context(), "diff", bills[0], bills[1]).CombinedOutput(); err != nil {
		t.Errorf("SBOM differs in the other environment: %v\n%s", err, output)
	}
}

func TestWrite_IgnoresUmask(t *testing.T) {
	defer syscall.Umask(syscall.Umask(0o077))

	folder := layOut(t, []image.File{{Path: "usr/bin/program", Mode: 0o755}, {Path: "usr/text", Mode: 0o644}})

	for name, want := range map[string]fs.FileMode{"usr": fs.ModeDir | 0o755, "usr/bin": fs.ModeDir | 0o755, "usr/bin/program": 0o755, "usr/text": 0o644} {
		if info, err := os.Stat(filepath.Join(folder, name)); err != nil || info.Mode() != want {
			t.Errorf("%s: got %v, error %v, want mode %s", name, info, err, want)
		}
	}
}

func TestWriteLayout_ReplacesExistingLayout(t *testing.T) {
	l := makeOnce(t)
	dir := filepath.Join(t.TempDir(), "new", "oci")

	for _, from := range []string{l["pod"], l["extension"]} {
		if err := image.WriteLayout(dir, read(t, from)); err != nil {
			t.Fatal(err)
		}
	}

	// Blobs of the former layout would be visible.
	if output, err := exec.CommandContext(t.Context(), "diff", "-r", l["extension"], dir).CombinedOutput(); err != nil {
		t.Errorf("layouts differ: %v\n%s", err, output)
	}
}

func TestWriteLayout_RefusesOtherDirectory(t *testing.T) {
	dir := t.TempDir()
	precious := filepath.Join(dir, "precious")

	if err := os.WriteFile(precious, nil, 0o600); err != nil {
		t.Fatal(err)
	}

	for _, dir := range []string{dir, precious} {
		if err := image.WriteLayout(dir, read(t, makeOnce(t)["extension"])); err == nil || !strings.Contains(err.Error(), dir) {
			t.Errorf("got error %v, want one about %s", err, dir)
		}
	}

	if _, err := os.Stat(precious); err != nil {
		t.Error(err)
	}
}

func TestPush_KeepsDigest(t *testing.T) {
	server := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	t.Cleanup(server.Close)

	repository := strings.TrimPrefix(server.URL, "http://") + "/talos-ccm"
	want := digest(t, makeOnce(t)["extension"])

	pushed, err := image.Push(t.Context(), makeOnce(t)["extension"], repository+":v"+version)
	if err != nil || pushed != repository+"@"+want {
		t.Errorf("pushed %s, error %v, want %s", pushed, err, want)
	}

	if got, err := crane.Digest(repository + ":v" + version); got != want {
		t.Errorf("got digest %s, error %v, want %s", got, err, want)
	}

	// An index that lacks an image could be neither pulled nor validated.
	tag, err := name.NewTag(repository + ":v" + version)
	if err != nil {
		t.Fatal(err)
	}

	pulled, err := remote.Index(tag)
	if err != nil {
		t.Fatal(err)
	}

	if err := validate.Index(pulled); err != nil {
		t.Error(err)
	}
}

func TestPush_ReportsErrors(t *testing.T) {
	l := makeOnce(t)

	closed := httptest.NewServer(registry.New())
	closed.Close()

	unreachable := strings.TrimPrefix(closed.URL, "http://") + "/talos-ccm:v1"

	for mention, push := range map[string]struct{ dir, reference string }{
		"want host/repository:tag": {l["extension"], "talos-ccm:not a tag"},
		"reference \"talos-ccm\"":  {l["extension"], "talos-ccm"},
		"make image":               {t.TempDir(), unreachable},
		unreachable:                {l["extension"], unreachable},
	} {
		if _, err := image.Push(t.Context(), push.dir, push.reference); err == nil || !strings.Contains(err.Error(), mention) {
			t.Errorf("push %s to %s: got %v, want %q", push.dir, push.reference, err, mention)
		}
	}
}
