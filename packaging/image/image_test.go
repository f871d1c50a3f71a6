package image_test

import (
	"archive/tar"
	"debug/elf"
	"errors"
	"io"
	"io/fs"
	"log"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/talos-ccm/talos-ccm/packaging/image"
)

// maxCompressed bounds the size of an image in bytes. To find the cause of an increase, run go tool nm -size on an
// unstripped binary.
const maxCompressed = 25_000_000

func TestImage_ExtensionIsValid(t *testing.T) {
	if err := image.Validate(read(t, makeOnce(t).extension)); err != nil {
		t.Error(err)
	}
}

func TestImage_CompressedSizeIsBounded(t *testing.T) {
	l := makeOnce(t)

	for _, dir := range []string{l.extension, l.pod} {
		eachImage(t, read(t, dir), func(t *testing.T, _ string, img v1.Image) {
			layers, err := img.Layers()
			if err != nil || len(layers) != 1 {
				t.Fatalf("got %d layers, error %v", len(layers), err)
			}

			size, err := layers[0].Size()
			if err != nil || size > maxCompressed {
				t.Errorf("%s is %d bytes, want at most %d (%v)", dir, size, maxCompressed, err)
			}
		})
	}
}

func TestImage_HasLabels(t *testing.T) {
	l := makeOnce(t)

	for _, dir := range []string{l.extension, l.pod} {
		eachImage(t, read(t, dir), func(t *testing.T, arch string, img v1.Image) {
			config, err := img.ConfigFile()
			if err != nil {
				t.Fatal(err)
			}

			manifest, err := img.Manifest()
			if err != nil {
				t.Fatal(err)
			}

			if config.OS != "linux" || config.Architecture != arch {
				t.Errorf("got platform %s/%s in the configuration", config.OS, config.Architecture)
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

func TestImage_PodImageRunsAsNobody(t *testing.T) {
	eachImage(t, read(t, makeOnce(t).pod), func(t *testing.T, arch string, img v1.Image) {
		config, err := img.ConfigFile()
		if err != nil {
			t.Fatal(err)
		}

		if entrypoint := strings.Join(config.Config.Entrypoint, " "); entrypoint != "/talos-ccm" || config.Config.User != "65532:65532" {
			t.Errorf("got entrypoint %q, user %q", entrypoint, config.Config.User)
		}

		files, err := image.Unpack(img)
		if err != nil || len(files) != 1 || files[0].Path != "talos-ccm" || files[0].Mode != 0o755 {
			t.Fatalf("got %d files, error %v", len(files), err)
		}

		// Only the binary for the host architecture can run.
		if arch == runtime.GOARCH {
			checkVersion(t, filepath.Join(layOut(t, files), "talos-ccm"))
		}
	})
}

func checkVersion(t *testing.T, binary string) {
	t.Helper()

	output, err := exec.CommandContext(t.Context(), binary, "--version").CombinedOutput()
	if err != nil || string(output) != "talos-ccm v"+version+"\n" {
		t.Errorf("got output %q, error %v", output, err)
	}
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

	if a, b := digest(t, first.extension), digest(t, second.extension); a != b {
		t.Errorf("extension has digest %s, and %s in the other environment", a, b)
	}

	if a, b := digest(t, first.pod), digest(t, second.pod); a != b {
		t.Errorf("image for pods has digest %s, and %s in the other environment", a, b)
	}
}

// By default an archive contains the owner and the modification time of files.
func TestImage_ContainsNothingOfBuildHost(t *testing.T) {
	index, err := image.ExtensionIndex(release(t), map[string][]byte{"amd64": program(t, elf.EM_X86_64, elf.PT_LOAD), "arm64": program(t, elf.EM_AARCH64, elf.PT_LOAD)})
	if err != nil {
		t.Fatal(err)
	}

	stamp := time.Unix(created, 0)

	eachImage(t, index, func(t *testing.T, _ string, img v1.Image) {
		config, err := img.ConfigFile()
		if err != nil || len(config.History) != 1 {
			t.Fatalf("got history %+v, error %v", config.History, err)
		}

		if !config.Created.Equal(stamp) || !config.History[0].Created.Equal(stamp) {
			t.Errorf("image was created at %s, its layer at %s", config.Created, config.History[0].Created)
		}

		for _, header := range entries(t, img) {
			if header.Format != tar.FormatUSTAR || header.Uid+header.Gid != 0 || header.Uname+header.Gname != "" || !header.ModTime.Equal(stamp) {
				t.Errorf("unexpected header %+v", header)
			}
		}
	})
}

// entries returns the headers of the archive in an image.
func entries(t *testing.T, img v1.Image) []*tar.Header {
	t.Helper()

	content, err := layers(t, img)[0].Uncompressed()
	if err != nil {
		t.Fatal(err)
	}
	defer content.Close()

	var headers []*tar.Header

	for archive := tar.NewReader(content); ; {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return headers
		}

		if err != nil {
			t.Fatal(err)
		}

		headers = append(headers, header)
	}
}

func TestWrite_IgnoresUmask(t *testing.T) {
	defer syscall.Umask(syscall.Umask(0o077))

	folder := layOut(t, extensionFiles(t))

	for name, want := range map[string]fs.FileMode{binaryPath: 0o755, specPath: 0o644, filepath.Dir(binaryPath): fs.ModeDir | 0o755, "rootfs/usr": fs.ModeDir | 0o755} {
		if info, err := os.Stat(filepath.Join(folder, name)); err != nil || info.Mode() != want {
			t.Errorf("%s: got %v, error %v, want mode %s", name, info, err, want)
		}
	}
}

func TestWriteLayout_ReplacesExistingLayout(t *testing.T) {
	l := makeOnce(t)
	dir := filepath.Join(t.TempDir(), "new", "oci")

	for _, from := range []string{l.pod, l.extension} {
		if err := image.WriteLayout(dir, read(t, from)); err != nil {
			t.Fatal(err)
		}
	}

	if got, want := digest(t, dir), digest(t, l.extension); got != want {
		t.Errorf("got %s, want %s", got, want)
	}

	if got, want := blobs(t, dir), blobs(t, l.extension); got != want {
		t.Errorf("got %d blobs, want %d", got, want)
	}
}

func blobs(t *testing.T, dir string) int {
	t.Helper()

	entries, err := os.ReadDir(filepath.Join(dir, "blobs", "sha256"))
	if err != nil {
		t.Fatal(err)
	}

	return len(entries)
}

func TestWriteLayout_RefusesOtherDirectory(t *testing.T) {
	dir := t.TempDir()
	precious := filepath.Join(dir, "precious")

	if err := os.WriteFile(precious, nil, 0o600); err != nil {
		t.Fatal(err)
	}

	if err := image.WriteLayout(dir, read(t, makeOnce(t).extension)); err == nil || !strings.Contains(err.Error(), dir) {
		t.Errorf("got error %v, want one about %s", err, dir)
	}

	if _, err := os.Stat(precious); err != nil {
		t.Error(err)
	}
}

func TestPush_KeepsDigest(t *testing.T) {
	l := makeOnce(t)

	server := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	t.Cleanup(server.Close)

	host := strings.TrimPrefix(server.URL, "http://")
	want := digest(t, l.extension)

	pushed, err := image.Push(t.Context(), l.extension, host+"/talos-ccm:v"+version)
	if err != nil || pushed != host+"/talos-ccm@"+want {
		t.Errorf("pushed %s, error %v, want %s", pushed, err, want)
	}

	if got := crane(t, "digest", host+"/talos-ccm:v"+version); got != want {
		t.Errorf("crane digest returned %s, want %s", got, want)
	}

	crane(t, "push", "--index", l.extension, host+"/by-crane:latest")

	if got := crane(t, "digest", host+"/by-crane:latest"); got != want {
		t.Errorf("crane pushed %s, want %s", got, want)
	}

	back := filepath.Join(t.TempDir(), "oci")
	crane(t, "pull", "--format", "oci", host+"/talos-ccm:v"+version, back)

	pulled := read(t, back)

	manifest, err := pulled.IndexManifest()
	if err != nil || len(manifest.Manifests) != 1 || manifest.Manifests[0].Digest.String() != want {
		t.Errorf("crane pulled %+v, error %v, want %s", manifest, err, want)
	}
}

func crane(t *testing.T, args ...string) string {
	t.Helper()

	cmd := exec.CommandContext(t.Context(), "go", append([]string{"tool", "crane"}, args...)...)

	output, err := cmd.Output()
	if err != nil {
		t.Fatalf("crane %v: %v", args, err)
	}

	return strings.TrimSpace(string(output))
}

func TestPush_ReportsErrors(t *testing.T) {
	l := makeOnce(t)

	closed := httptest.NewServer(registry.New())
	closed.Close()

	unreachable := strings.TrimPrefix(closed.URL, "http://") + "/talos-ccm:v1"

	for mention, push := range map[string]struct{ dir, reference string }{
		"want host/repository:tag": {l.extension, "talos-ccm:not a tag"},
		"reference \"talos-ccm\"":  {l.extension, "talos-ccm"},
		"make image":               {t.TempDir(), unreachable},
		unreachable:                {l.extension, unreachable},
	} {
		if _, err := image.Push(t.Context(), push.dir, push.reference); err == nil || !strings.Contains(err.Error(), mention) {
			t.Errorf("push %s to %s: got %v, want %q", push.dir, push.reference, err, mention)
		}
	}
}
