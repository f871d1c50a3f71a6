package release_test

import (
	"fmt"
	"io"
	"log"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/crane"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/talos-ccm/talos-ccm/packaging/image"
)

// startRegistry starts a registry and returns its address.
func startRegistry(t *testing.T) string {
	t.Helper()

	server := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	t.Cleanup(server.Close)

	return strings.TrimPrefix(server.URL, "http://")
}

// Signatures are of the digests that make prints, whatever the tags in the registry refer to.
func TestPush_PrintsDigestsOfBuiltImages(t *testing.T) {
	host, artifacts := startRegistry(t), t.TempDir()

	for variable, pushed := range map[string]struct {
		layout string
		index  func(image.Release, map[string][]byte) (v1.ImageIndex, error)
	}{"REF": {"oci", image.ExtensionIndex}, "POD_REF": {"oci-pod", image.PodIndex}} {
		index, err := pushed.index(image.Release{Version: "v1.2.3", Manifest: []byte(read(t, "manifest.yaml"))}, map[string][]byte{"amd64": nil, "arm64": nil})
		require.NoError(t, err)

		_, err = layout.Write(filepath.Join(artifacts, pushed.layout), index)
		require.NoError(t, err)

		digest, err := index.Digest()
		require.NoError(t, err)

		output, err := runMake(t, "push", variable+"="+host+"/a/b:v1", "ARTIFACTS="+artifacts)
		require.NoError(t, err, output)
		assert.True(t, strings.HasSuffix(output, "@"+digest.String()), output)
	}
}

// crane would push to Docker Hub.
func TestPush_RefusesReferenceWithoutHostOrTag(t *testing.T) {
	for _, ref := range []string{"talos-ccm", "talos-ccm:v1", "talos-ccm/talos-ccm:v1", "registry.example.com/talos-ccm", "registry.example.com:v1"} {
		for _, variable := range []string{"REF", "POD_REF"} {
			output, err := runMake(t, "push", variable+"="+ref, "GO=false")
			assert.Error(t, err)
			assert.Contains(t, output, ref+": want host/repository:tag\n")
		}
	}
}

func TestPush_RefusesMissingLayout(t *testing.T) {
	for variable, layout := range map[string]string{"REF": "oci", "POD_REF": "oci-pod"} {
		artifacts := t.TempDir()

		output, err := runMake(t, "push", variable+"=registry.example.com/a:v1", "GO=false", "ARTIFACTS="+artifacts)
		assert.Error(t, err)
		assert.Contains(t, output, "No image in "+filepath.Join(artifacts, layout)+", run make image\n")
	}
}

func TestReleaseTag_MustMatchVersion(t *testing.T) {
	v := version(t)

	for tag, released := range map[string]bool{"v" + v: true, v: false, "v" + v + "-rc.1": false, "v" + v + "-dirty": false, "": false} {
		output, err := runMake(t, "release-tag", "TAG="+tag)
		assert.Equal(t, released, err == nil, "tag %q: %s", tag, output)
	}
}

func TestTag_DescribesSources(t *testing.T) {
	dir := t.TempDir()
	vars := filepath.Join(dir, "vars.yaml")
	require.NoError(t, os.WriteFile(filepath.Join(dir, "Makefile"), []byte(read(t, "Makefile")), 0o600))
	require.NoError(t, os.WriteFile(vars, nil, 0o600))

	requireTag := func(situation, want string) {
		t.Helper()

		output, err := run(t, nil, "make", "--silent", "--directory="+dir, "release-tag")
		assert.Error(t, err)
		assert.Regexp(t, `tag is `+want+`, but`, output, situation)
	}

	git(t, dir, "init", "--quiet")
	git(t, dir, "add", ".")
	git(t, dir, "commit", "--quiet", "--message", "first")
	requireTag("no tag", `v0\.0\.0-g[0-9a-f]{12}`)
	git(t, dir, "tag", "v0.1.0")
	requireTag("tag", `v0\.1\.0`)
	git(t, dir, "commit", "--quiet", "--allow-empty", "--message", "second")
	requireTag("commit after tag", `v0\.1\.0-1-g[0-9a-f]{12}`)
	require.NoError(t, os.WriteFile(vars, []byte("\n"), 0o600))
	requireTag("changes after tag", `v0\.1\.0-1-g[0-9a-f]{12}-dirty`)
	git(t, dir, "tag", "--delete", "v0.1.0")
	requireTag("changes without tag", `v0\.0\.0-g[0-9a-f]{12}-dirty`)
}

// fakeDocker records the arguments and the input of docker, and copies the files of the directory $MADE to the volume.
const fakeDocker = `#!/bin/sh
{ printf '%s ' "$@"; echo; cat; } >>"$RECORD"
for last; do case $last in *:/out) out=${last%:/out} ;; esac; done
cp "$MADE"/* "$out"
echo progress
`

func TestInstallers_AreBuiltAndPushed(t *testing.T) {
	var (
		installer = startRegistry(t) + "/talos-ccm/talos-ccm-installer:v1.13.5-v1.2.3"
		dir       = t.TempDir()
		record    = filepath.Join(dir, "record")
		made      = t.TempDir()
		artifacts = t.TempDir()
		want      strings.Builder
	)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "docker"), []byte(fakeDocker), 0o755))

	for _, arch := range []string{"amd64", "arm64"} {
		img, err := mutate.ConfigFile(empty.Image, &v1.ConfigFile{Architecture: arch, OS: "linux"})
		require.NoError(t, err)
		require.NoError(t, tarball.WriteToFile(filepath.Join(made, "installer-"+arch+".tar"), name.MustParseReference("installer"), img))

		fmt.Fprintf(&want, `run --rm --interactive --volume %s:/out ghcr.io/siderolabs/imager:v1.13.5 - 
arch: %s
platform: metal
secureboot: false
version: v1.13.5
input:
  baseInstaller:
    imageRef: ghcr.io/siderolabs/installer-base:v1.13.5
  systemExtensions:
    - ociPath: /out/oci
    - imageRef: example.com/a:v1
    - imageRef: example.com/b:v1
output:
  kind: installer
  outFormat: raw
`, artifacts, arch)
	}

	output, err := run(t, []string{"PATH=" + dir + ":" + os.Getenv("PATH"), "RECORD=" + record, "MADE=" + made},
		"make", "--silent", "--directory="+root, "--assume-old=image", "installer", "INSTALLER="+installer, "TALOS=v1.13.5",
		"EXTENSIONS=example.com/a:v1 example.com/b:v1", "ARTIFACTS="+artifacts)
	require.NoError(t, err, output)
	assert.Contains(t, output, "Building for Talos v1.13.5, platform metal, extensions example.com/a:v1 example.com/b:v1, no SecureBoot\n")

	recorded, err := os.ReadFile(record)
	require.NoError(t, err)
	assert.Equal(t, want.String(), string(recorded))

	for _, arch := range []string{"amd64", "arm64"} {
		pushed, err := crane.Config(installer, crane.WithPlatform(&v1.Platform{OS: "linux", Architecture: arch}))
		assert.NoError(t, err)
		assert.Contains(t, string(pushed), arch)
	}

	digest, err := crane.Digest(installer)
	require.NoError(t, err)
	assert.True(t, strings.HasSuffix(output, "@"+digest), output)
}
