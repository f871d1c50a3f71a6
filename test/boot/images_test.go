//go:build e2e

package boot_test

import (
	"context"
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
	"sync"
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
	"github.com/stretchr/testify/require"

	"github.com/talos-ccm/talos-ccm/test/builder"
	"github.com/talos-ccm/talos-ccm/test/talos"
)

// kernelArguments are for all images. Interfaces have their kernel names, so that the address can be an argument.
var kernelArguments = []string{
	"console=ttyS0", "net.ifnames=0", "talos.dashboard.disabled=1", "security=selinux", // not the default of Debian's kernel
	fmt.Sprintf("ip=%s::%s:255.255.255.0::eth0:off", machineAddress, hostAddress),
}

// talosAssets returns the directory with the release of Talos.
var talosAssets = sync.OnceValues(func() (string, error) { return talos.Assets(context.Background(), os.Stdout) })

// assets returns the directory with the output of assemble.
var assets = sync.OnceValues(func() (string, error) {
	release, err := talosAssets()
	if err != nil {
		return "", err
	}

	artifacts := os.Getenv("TALOS_CCM_ARTIFACTS")
	sum := sha256.New()
	fmt.Fprintln(sum, filepath.Base(release)) // named after the hash of its inputs

	for _, path := range []string{"assemble", artifacts + "/preinit"} {
		content, err := os.ReadFile(path)
		if err != nil {
			return "", err
		}

		sum.Write(content)
	}

	return builder.Cached(context.Background(), "boot", fmt.Sprintf("%x", sum.Sum(nil))[:16], os.Stdout, func(dir string) error {
		_, err := builder.Output(exec.Command("./assemble", filepath.Join(release, "rootfs"), artifacts+"/imager", artifacts+"/preinit", dir))

		return err
	})
})

// imager builds an image or installer with the extension in an OCI layout and with kernel arguments, and returns the path of the
// file.
func imager(t *testing.T, kind, output, extension string, arguments ...string) string {
	t.Helper()

	dir := t.TempDir()

	assets, err := assets()
	require.NoError(t, err)

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
`, strings.Join(slices.Concat(kernelArguments, arguments), `", "`), assets, base, extension, kind)
	if kind == "image" {
		profile += "  imageOptions: {diskSize: 4294967296, diskFormat: raw, bootloader: sd-boot}\n"
	}

	squashfs, err := filepath.Abs("../imager/squashfs-tools-4.5")
	require.NoError(t, err)

	cmd := exec.CommandContext(t.Context(), filepath.Join(getenv(t, "TALOS_CCM_ARTIFACTS"), "imager/imager"), "-", "--output", dir)
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
func (m *vm) push(image v1.Image, repository string) string {
	m.t.Helper()

	ref, err := name.ParseReference(m.registry.String()+"/"+repository, name.Insecure)
	require.NoError(m.t, err)
	require.NoError(m.t, remote.Write(ref, image, remote.WithContext(m.t.Context())))

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
