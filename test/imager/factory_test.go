//go:build e2e

package imager_test

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"debug/pe"
	"encoding/binary"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/siderolabs/talos/pkg/machinery/constants"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/talos-ccm/talos-ccm/test/kube"
	"github.com/talos-ccm/talos-ccm/test/process"
)

const (
	guide = "../../docs/guides/installer-images.md"
	// The guide names these hosts and this version of Talos.
	guideRegistry, guideFactory, guideTalos = "registry.example.com", "https://factory.example.com", "v1.14.1"
	// kernel is the content of the file in the images that replace Talos's.
	kernel = "kernel"
	// unsigned and untrusted are versions of Talos with an unsigned list of extensions and with one of another key.
	unsigned, untrusted = "v1.14.0", "v1.13.9"
)

// factoryConfig completes the configuration of Image Factory in the guide. The arguments are the addresses of the factory
// and of the registry, and the file with the key for the factory's own images.
const factoryConfig = `
http: {httpListenAddr: "%[1]s", externalURL: "http://%[1]s"}
metrics: {addr: ""}
containerSignature: {subjectRegExp: ""}
artifacts:
  schematic: {registry: "%[2]s", namespace: factory, repository: schematics}
  installer: {internal: {registry: "%[2]s", namespace: factory}}
cache:
  oci: {registry: "%[2]s", namespace: factory, repository: cache}
  signingKeyPath: %[3]s
`

// imageFactory is an Image Factory that follows the guide.
type imageFactory struct {
	registry, address, dir string
	// blocks has the blocks of code in the guide, by their language.
	blocks map[string][]string
	// extension is the reference of the extension that the guide copies, and initramfs the path of that in imager.
	extension, initramfs string
}

var fenced = regexp.MustCompile("(?ms)^ *```(\\w+)\n(.*?)^ *```$")

// newImageFactory reads the guide and starts a registry with images that replace those of Talos.
func newImageFactory(t *testing.T) *imageFactory {
	t.Helper()

	port, err := kube.ReservePort()
	require.NoError(t, err)
	port.Release()

	f := &imageFactory{
		registry: startRegistry(t), address: port.Address(), dir: t.TempDir(), blocks: map[string][]string{},
		extension: push(t, getenv(t, "TALOS_CCM_LAYOUT")).value, initramfs: baseInitramfs(t),
	}

	_, section, ok := strings.Cut(string(readFile(t, guide)), "\n## Self-hosted Image Factory\n")
	require.True(t, ok, guide)

	section, _, _ = strings.Cut(section, "\n## ")

	for _, match := range fenced.FindAllStringSubmatch(section, -1) {
		text := strings.ReplaceAll("\n"+match[2], "\n   ", "\n")
		text = strings.NewReplacer(guideRegistry, f.registry, guideFactory, "http://"+f.address).Replace(text)
		f.blocks[match[1]] = append(f.blocks[match[1]], text)
	}

	require.Len(t, f.blocks["sh"], 2, "commands in the guide")
	require.Len(t, f.blocks["yaml"], 1, "configuration in the guide")

	artifacts := map[string]string{}

	for _, arch := range []string{"amd64", "arm64"} {
		dir := "usr/install/" + arch + "/"
		artifacts[dir+"vmlinuz"], artifacts[dir+"initramfs.xz"] = kernel, string(readFile(t, f.initramfs))
		artifacts[dir+"systemd-stub.efi"], artifacts[dir+"systemd-boot.efi"] = efiStub(t), "systemd-boot"
	}

	f.publish(t, "siderolabs/installer-base:"+guideTalos, map[string]string{"usr/bin/installer": "installer"})

	for _, version := range []string{guideTalos, unsigned, untrusted} {
		artifacts["version"] = version
		f.publish(t, "siderolabs/imager:"+version, artifacts)
		f.publish(t, "siderolabs/extensions:"+version, map[string]string{
			"image-digests":     fmt.Sprintf("registry.example.com/siderolabs/example:%s@sha256:%064d\n", version, 0),
			"descriptions.yaml": "{}\n",
		})
	}

	return f
}

// publish pushes an image with the same files for each architecture.
func (f *imageFactory) publish(t *testing.T, ref string, files map[string]string) {
	t.Helper()

	var index v1.ImageIndex = empty.Index

	for _, arch := range []string{"amd64", "arm64"} {
		img := newImage(t, arch, files)
		platform := &v1.Platform{OS: "linux", Architecture: arch}
		index = mutate.AppendManifests(index, mutate.IndexAddendum{Add: img, Descriptor: v1.Descriptor{Platform: platform}})
	}

	tag, err := name.NewTag(f.registry + "/" + ref)
	require.NoError(t, err)
	require.NoError(t, remote.WriteIndex(tag, index, remote.WithContext(t.Context())))
}

// run runs commands of the guide in the directory dir, and returns their standard output. cosign does not ask for a
// password, and does not use Sigstore's public log.
func (f *imageFactory) run(t *testing.T, dir, script string) []byte {
	t.Helper()

	var stderr bytes.Buffer

	cmd := exec.CommandContext(t.Context(), "bash", "-euo", "pipefail", "-c", script)
	cmd.Dir, cmd.Stderr = dir, &stderr
	cmd.Env = []string{
		"PATH=" + getenv(t, "TALOS_CCM_FACTORY") + string(os.PathListSeparator) + os.Getenv("PATH"), "HOME=" + dir, "TMPDIR=" + dir,
		"EXTENSION=" + f.extension, "REGISTRY=" + f.registry,
		"COSIGN_PASSWORD=", "COSIGN_USE_SIGNING_CONFIG=false", "COSIGN_TLOG_UPLOAD=false",
	}

	output, err := cmd.Output()
	require.NoError(t, err, "%s\n%s", script, &stderr)

	return output
}

// start starts Image Factory, and returns the path of its log.
func (f *imageFactory) start(t *testing.T) string {
	t.Helper()

	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)

	encoded, err := x509.MarshalPKCS8PrivateKey(key)
	require.NoError(t, err)

	keyFile := write(t, "cache.key", pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: encoded}))
	config := write(t, "guide.yaml", []byte(strings.ReplaceAll(f.blocks["yaml"][0], "cosign.pub", filepath.Join(f.dir, "cosign.pub"))))
	rest := write(t, "test.yaml", fmt.Appendf(nil, factoryConfig, f.address, f.registry, keyFile))

	p, err := process.Start(process.Command{
		Name: "image-factory", Path: filepath.Join(getenv(t, "TALOS_CCM_FACTORY"), "image-factory"),
		Args: []string{"--config", config, "--config", rest}, Log: filepath.Join(f.dir, "image-factory.log"),
		Env: []string{"PATH=" + searchPath(t), "HOME=" + f.dir, "TMPDIR=" + t.TempDir()},
	})
	require.NoError(t, err)
	t.Cleanup(func() { p.Stop(context.WithoutCancel(t.Context())) })

	require.NoError(t, p.WaitReady(t.Context(), func(context.Context) error {
		_, status := f.get(t, "/readyz")
		if status != http.StatusOK {
			return fmt.Errorf("status %d", status)
		}

		return nil
	}))

	return p.Log
}

// get returns the response of the factory for a path, and its status, which is zero without a response.
func (f *imageFactory) get(t *testing.T, path string) (body []byte, status int) {
	t.Helper()

	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+f.address+path, nil)
	require.NoError(t, err)

	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return nil, 0
	}
	defer response.Body.Close() //nolint:errcheck // only read

	body, err = io.ReadAll(response.Body)
	require.NoError(t, err)

	return body, response.StatusCode
}

// efiStub returns an executable without code that has the section that the imager requires of systemd-stub.
func efiStub(t *testing.T) string {
	t.Helper()

	const alignment = 512

	var out bytes.Buffer

	dos, sbat := make([]byte, 64), make([]byte, alignment)
	copy(dos, "MZ")
	dos[60] = byte(len(dos)) // offset of the next header

	optional := pe.OptionalHeader64{Magic: 0x20b, SectionAlignment: alignment, FileAlignment: alignment, NumberOfRvaAndSizes: 16}
	header := pe.FileHeader{
		Machine: pe.IMAGE_FILE_MACHINE_AMD64, NumberOfSections: 1, SizeOfOptionalHeader: uint16(binary.Size(optional)),
	}
	section := pe.SectionHeader32{
		Name: [8]uint8([]byte(".sbat\x00\x00\x00")), VirtualSize: alignment, VirtualAddress: alignment,
		SizeOfRawData: alignment, PointerToRawData: alignment, Characteristics: pe.IMAGE_SCN_CNT_INITIALIZED_DATA,
	}

	for _, part := range []any{dos, []byte("PE\x00\x00"), header, optional, section} {
		require.NoError(t, binary.Write(&out, binary.LittleEndian, part))
	}

	out.Write(make([]byte, alignment-out.Len()))
	out.Write(sbat)

	return out.String()
}

// initrd returns a file with the initramfs of the unified kernel image at path.
func initrd(t *testing.T, path string) string {
	t.Helper()

	kernel, err := pe.Open(path)
	require.NoError(t, err)

	defer kernel.Close() //nolint:errcheck // only read

	section := kernel.Section(".initrd")
	require.NotNil(t, section)

	content, err := section.Data()
	require.NoError(t, err)

	return write(t, constants.InitramfsAsset, content[:section.VirtualSize])
}

// unifiedKernel returns the path of the unified kernel image on the first partition of a disk image.
func unifiedKernel(t *testing.T, disk string) string {
	t.Helper()

	const blockSize = 512

	f, err := os.Open(disk)
	require.NoError(t, err)

	defer f.Close() //nolint:errcheck // only read

	// The partition table begins in the third block. Its first entry is that of the EFI system partition.
	var entry struct {
		Type, ID [16]byte
		First    uint64
	}

	require.NoError(t, binary.Read(io.NewSectionReader(f, 2*blockSize, blockSize), binary.LittleEndian, &entry))

	dir := t.TempDir()
	run(t, nil, "mcopy", "-i", fmt.Sprintf("%s@@%d", disk, entry.First*blockSize), "::EFI/Linux/*", dir)

	files, err := filepath.Glob(filepath.Join(dir, "*"))
	require.NoError(t, err)
	require.Len(t, files, 1)

	return files[0]
}

// write writes a file to a temporary directory, and returns its path.
func write(t *testing.T, name string, content []byte) string {
	t.Helper()

	path := filepath.Join(t.TempDir(), name)
	require.NoError(t, os.WriteFile(path, content, 0o600))

	return path
}

func TestFactory_FollowsGuide(t *testing.T) {
	f := newImageFactory(t)
	commands := f.blocks["sh"][0]

	f.run(t, f.dir, commands)
	f.run(t, f.dir, `for image in imager installer-base; do
  cosign sign --key cosign.key "$REGISTRY/siderolabs/$image@$(crane digest "$REGISTRY/siderolabs/$image:`+guideTalos+`")"
done`)

	// The same commands for other versions of Talos: without signatures, and with another key.
	untilKeys, _, ok := strings.Cut(commands, "cosign ")
	require.True(t, ok)
	f.run(t, t.TempDir(), strings.ReplaceAll(untilKeys, guideTalos, unsigned))
	f.run(t, t.TempDir(), strings.ReplaceAll(commands, guideTalos, untrusted))

	log := f.start(t)

	t.Run("trusted list", func(t *testing.T) {
		list, status := f.get(t, "/version/"+guideTalos+"/extensions/official")
		require.Equal(t, http.StatusOK, status, string(list))
		assert.Contains(t, string(list), `"name":"talos-ccm/talos-ccm"`)
	})

	for title, version := range map[string]string{"unsigned list": unsigned, "list of another key": untrusted} {
		t.Run(title, func(t *testing.T) {
			path := "/version/" + version + "/extensions/official"
			body, status := f.get(t, path)
			assert.Equal(t, http.StatusInternalServerError, status)

			message := regexp.MustCompile(regexp.QuoteMeta(path) + `.*"error":"(.*?)"`).FindSubmatch(readFile(t, log))
			require.NotNil(t, message)
			t.Logf("%s", message[1])

			const reason = "failed to verify image signature"
			assert.Contains(t, string(message[1]), reason+" for "+f.registry+"/factory/extensions@")

			for _, text := range []string{strings.TrimSpace(string(body)), reason} {
				assert.Contains(t, string(readFile(t, guide)), "`"+text+"`", guide)
			}
		})
	}

	var schematic struct{ ID string }
	require.NoError(t, json.Unmarshal(f.run(t, f.dir, f.blocks["sh"][1]), &schematic))

	index := open(t, getenv(t, "TALOS_CCM_LAYOUT"))

	requireSchematic := func(t *testing.T, arch, initramfs string) {
		t.Helper()

		added := unpack(t, initramfs, f.initramfs)
		layers := requireExtension(t, unpackImage(t, index, arch), added, arch)
		require.Len(t, layers, 1, "other extensions")
		assert.Equal(t, []string{"schematic", schematic.ID}, []string{layers[0].Metadata.Name, layers[0].Metadata.Version})
		assert.Contains(t, layers[0].Metadata.ExtraInfo, "talos-ccm/talos-ccm")
		assert.FileExists(t, filepath.Join(unsquash(t, filepath.Join(added, layers[0].Image)), "usr/local/share/schematic", schematic.ID))
	}

	asset := func(t *testing.T, name string) []byte {
		t.Helper()

		content, status := f.get(t, "/image/"+schematic.ID+"/"+guideTalos+"/"+name)
		require.Equal(t, http.StatusOK, status, string(content[:min(200, len(content))]))

		return content
	}

	t.Run("kernel", func(t *testing.T) { assert.Equal(t, kernel, string(asset(t, "kernel-amd64"))) })

	t.Run("initramfs", func(t *testing.T) {
		requireSchematic(t, "amd64", write(t, constants.InitramfsAsset, asset(t, "initramfs-amd64.xz")))
	})

	// A disk image for amd64 also has GRUB by default, whose grub-mkimage is part of the real imager.
	t.Run("disk image", func(t *testing.T) {
		disk := write(t, "nocloud-arm64.raw.xz", asset(t, "nocloud-arm64.raw.xz"))
		run(t, nil, "xz", "--decompress", disk)
		requireSchematic(t, "arm64", initrd(t, unifiedKernel(t, strings.TrimSuffix(disk, ".xz"))))
	})

	tag, err := name.NewTag(f.address + "/metal-installer/" + schematic.ID + ":" + guideTalos)
	require.NoError(t, err)

	installer, err := remote.Index(tag, remote.WithContext(t.Context()))
	require.NoError(t, err)

	for _, arch := range []string{"amd64", "arm64"} {
		t.Run("installer for "+arch, func(t *testing.T) {
			requireSchematic(t, arch, initrd(t, filepath.Join(unpackImage(t, installer, arch), fmt.Sprintf(constants.UKIAssetPath, arch))))
		})
	}
}
