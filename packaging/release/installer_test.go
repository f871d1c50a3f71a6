package release_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/blang/semver/v4"
	"github.com/google/go-containerregistry/pkg/crane"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// listedTalos returns the Talos versions that the release workflow builds installer images for.
func listedTalos(t *testing.T) (versions []string) {
	t.Helper()

	outputs := filepath.Join(t.TempDir(), "outputs")
	runStep(t, "List Talos versions", "GITHUB_OUTPUT="+outputs)

	content, err := os.ReadFile(outputs)
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(bytes.TrimPrefix(content, []byte("versions=")), &versions), string(content))

	return versions
}

func TestInstallers_ListSupportedTalosVersions(t *testing.T) {
	var minors []string

	versions := listedTalos(t)

	for i, version := range versions {
		parsed, err := semver.Parse(strings.TrimPrefix(version, "v"))
		require.NoError(t, err)
		require.True(t, strings.HasPrefix(version, "v"))
		require.Empty(t, parsed.Pre)

		assert.True(t, i == 0 || semver.MustParse(versions[i-1][1:]).LT(parsed), "%s does not follow the version before it", version)

		minors = append(minors, fmt.Sprintf("%s/packaging/image/talos/v%d.%d.mod", root, parsed.Major, parsed.Minor))
	}

	supported, err := filepath.Glob(root + "/packaging/image/talos/v*.mod")
	require.NoError(t, err)
	assert.Equal(t, supported, slices.Compact(minors))
}

// fakeDocker records the arguments and the input of docker, and copies the files of the directory $MADE to the volume.
const fakeDocker = `#!/bin/sh
{ printf '%s ' "$@"; echo; cat; } >>"$RECORD"
for last; do case $last in *:/out) out=${last%:/out} ;; esac; done
cp "$MADE"/* "$out"
echo progress
`

// imagerOutput writes installer images as imager does, and returns their directory.
func imagerOutput(t *testing.T) string {
	t.Helper()

	dir := t.TempDir()

	for _, arch := range []string{"amd64", "arm64"} {
		img, err := mutate.ConfigFile(empty.Image, &v1.ConfigFile{Architecture: arch, OS: "linux"})
		require.NoError(t, err)
		require.NoError(t, tarball.WriteToFile(filepath.Join(dir, "installer-"+arch+".tar"), name.MustParseReference("installer"), img))
	}

	return dir
}

func TestInstallers_AreBuiltAndPushed(t *testing.T) {
	var (
		repository = startRegistry(t) + "/talos-ccm/talos-ccm-installer"
		dir        = t.TempDir()
		record     = filepath.Join(dir, "record")
		outputs    = filepath.Join(dir, "outputs")
		artifacts  = t.TempDir()
		programs   = t.TempDir()
	)
	require.NoError(t, os.WriteFile(filepath.Join(programs, "docker"), []byte(fakeDocker), 0o755))

	runStep(t, "Build and push the installer", "PATH="+programs+":"+os.Getenv("PATH"), "RECORD="+record, "MADE="+imagerOutput(t), "ARTIFACTS="+artifacts,
		"TALOS=v1.13.5", "TAG=v1.2.3", "EXTENSIONS=example.com/a:v1 example.com/b:v1", "REPOSITORY="+repository, "GITHUB_OUTPUT="+outputs)

	var want strings.Builder

	for _, arch := range []string{"amd64", "arm64"} {
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

	recorded, err := os.ReadFile(record)
	require.NoError(t, err)
	assert.Equal(t, want.String(), string(recorded))

	for _, arch := range []string{"amd64", "arm64"} {
		pushed, err := crane.Config(repository+":v1.13.5-v1.2.3", crane.WithPlatform(&v1.Platform{OS: "linux", Architecture: arch}))
		assert.NoError(t, err)
		assert.Contains(t, string(pushed), arch)
	}

	digest, err := crane.Digest(repository + ":v1.13.5-v1.2.3")
	require.NoError(t, err)

	got, err := os.ReadFile(outputs)
	assert.NoError(t, err)
	assert.Equal(t, "digest="+digest+"\n", string(got))
}
