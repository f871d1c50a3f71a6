//go:build e2e

package boot_test

import (
	"crypto/sha256"
	"fmt"
	"io"
	"log"
	"net/http/httptest"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/siderolabs/talos/pkg/machinery/extensions"
	"github.com/stretchr/testify/require"

	"github.com/talos-ccm/talos-ccm/packaging/image"
	"github.com/talos-ccm/talos-ccm/test/builder"
	"github.com/talos-ccm/talos-ccm/test/talos"
)

// kernelArguments are for all images. Interfaces have their kernel names, so that the address can be an argument. Mitigations,
// including page table isolation (Talos's pti=on), only slow down an emulated processor. SELinux is not the default of Debian's
// kernel.
var kernelArguments = []string{
	"console=ttyS0", "pti=off", "mitigations=off", "net.ifnames=0", "talos.dashboard.disabled=1", "security=selinux",
	fmt.Sprintf("ip=%s::%s:255.255.255.0::eth0:off", machineAddress, hostAddress),
}

// release is a release of Talos with a version of the extension.
type release struct {
	talos talos.Release
	// extension is the directory with the extension's image in the output of make boot-test; empty for the current version.
	extension string
}

// current has the newest release of Talos. An upgrade from previous to next replaces Talos and the extension.
var (
	releases = talos.Releases()
	current  = release{talos: releases[len(releases)-1]}
	previous = release{talos: releases[len(releases)-2]}
	next     = release{talos: current.talos, extension: "next"}
)

// layout returns the OCI layout of the extension.
func (r release) layout(t *testing.T) string {
	t.Helper()

	return filepath.Join(getenv(t, "TALOS_CCM_ARTIFACTS"), r.extension, "oci")
}

// version returns the version of the extension, without "v".
func (r release) version(t *testing.T) string {
	t.Helper()

	index, err := layout.ImageIndexFromPath(r.layout(t))
	require.NoError(t, err)

	dir := t.TempDir()
	require.NoError(t, image.Unpack(index, "amd64", dir))

	loaded, err := extensions.Load(dir)
	require.NoError(t, err)

	return loaded.Manifest.Metadata.Version
}

// assets returns the directory with the output of assemble, and with the imager in bin.
func (r release) assets(t *testing.T) string {
	t.Helper()

	bed, err := talos.Assets(t.Context(), r.talos.Minor, os.Stdout)
	require.NoError(t, err)

	preinit := filepath.Join(getenv(t, "TALOS_CCM_ARTIFACTS"), "preinit")
	sum := sha256.New()
	fmt.Fprintln(sum, filepath.Base(bed)) // named after the hash of its inputs

	for _, path := range []string{"assemble", preinit} {
		content, err := os.ReadFile(path)
		require.NoError(t, err)

		sum.Write(content)
	}

	dir, err := builder.Cached(t.Context(), "boot", fmt.Sprintf("%x", sum.Sum(nil))[:16], os.Stdout, func(dir string) error {
		bin := filepath.Join(dir, "bin")
		if _, err := talos.Imager(t.Context(), r.talos.Minor, bin, os.Stdout); err != nil {
			return err
		}

		_, err := builder.Output(exec.Command("./assemble", filepath.Join(bed, "rootfs"), bin, preinit, dir))

		return err
	})
	require.NoError(t, err)

	return dir
}

// build builds an image with the imager and kernel arguments, and returns the path of the file. kind and output are the
// imager's output kind and file name.
func (r release) build(t *testing.T, kind, output string, arguments ...string) string {
	t.Helper()

	dir, assets := t.TempDir(), r.assets(t)

	installer, err := singleLayer(filepath.Join(assets, "installer-base.tar"))
	require.NoError(t, err)

	base, err := layout.Write(filepath.Join(dir, "installer-base"), empty.Index)
	require.NoError(t, err)
	require.NoError(t, base.AppendImage(installer, layout.WithPlatform(v1.Platform{OS: "linux", Architecture: "amd64"})))

	profile := fmt.Sprintf(`
arch: amd64
platform: metal
secureboot: false
customization:
  extraKernelArgs: ["%s"]
input:
  kernel: {path: %[2]s/vmlinuz}
  initramfs: {path: %[2]s/initramfs}
  sdStub: {path: %[2]s/stub.efi}
  sdBoot: {path: %[2]s/boot.efi}
  baseInstaller: {imageRef: "registry.example.com/installer-base:latest", ociPath: %[3]s}
  systemExtensions:
    - ociPath: %[4]s
output:
  kind: %[5]s
  outFormat: raw
`, strings.Join(slices.Concat(kernelArguments, arguments), `", "`), assets, base, r.layout(t), kind)
	if kind == "image" {
		profile += "  imageOptions: {diskSize: 4294967296, diskFormat: raw, bootloader: sd-boot}\n"
	}

	squashfs, err := filepath.Abs("../imager/squashfs-tools-4.5")
	require.NoError(t, err)

	cmd := exec.CommandContext(t.Context(), filepath.Join(assets, "bin/imager"), "-", "--output", dir)
	cmd.Stdin = strings.NewReader(profile)
	cmd.Env = []string{"PATH=" + squashfs + string(os.PathListSeparator) + os.Getenv("PATH"), "HOME=" + dir, "TMPDIR=" + dir}

	start := time.Now()

	message, err := cmd.CombinedOutput()
	require.NoError(t, err, string(message))
	t.Logf("%4.0f s for %s", time.Since(start).Seconds(), kind)

	return filepath.Join(dir, output)
}

// startRegistry starts the registry that mirrors all registries for the machine.
func (m *vm) startRegistry() {
	server := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	m.t.Cleanup(server.Close)

	m.registry = netip.MustParseAddrPort(server.Listener.Addr().String())
}

// push pushes an image to the registry. It returns the name that the machine pulls.
func (m *vm) push(img v1.Image, repository string) string {
	m.t.Helper()

	ref, err := name.ParseReference(m.registry.String()+"/"+repository, name.Insecure)
	require.NoError(m.t, err)
	require.NoError(m.t, remote.Write(ref, img, remote.WithContext(m.t.Context())))

	return "registry.example.com/" + repository
}

// singleLayer returns an image with the files of an archive, and the entry point of the installer.
func singleLayer(archive string) (v1.Image, error) {
	config, err := mutate.ConfigFile(empty.Image, &v1.ConfigFile{
		OS: "linux", Architecture: "amd64", RootFS: v1.RootFS{Type: "layers"}, Config: v1.Config{Entrypoint: []string{"/bin/installer"}},
	})
	if err != nil {
		return nil, err
	}

	layer, err := tarball.LayerFromFile(archive)
	if err != nil {
		return nil, err
	}

	return mutate.AppendLayers(config, layer)
}
