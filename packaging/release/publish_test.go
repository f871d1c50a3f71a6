package release_test

import (
	"io"
	"log"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/crane"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/talos-ccm/talos-ccm/packaging/image"
)

// runStep runs a step of the release workflow and returns its output.
func runStep(t *testing.T, name string, environment ...string) string {
	t.Helper()

	jobs := workflows(t)["release.yaml"].Jobs
	steps := slices.Concat(jobs["release"].Steps, jobs["installers"].Steps)

	i := slices.IndexFunc(steps, func(s workflowStep) bool { return s.Name == name })
	require.GreaterOrEqual(t, i, 0, "release workflow has no step %q", name)

	cmd := exec.CommandContext(t.Context(), "bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", steps[i].Run)
	cmd.Dir = root
	// Ignore the flags of a make that runs this test.
	cmd.Env = append(append(os.Environ(), "MAKEFLAGS="), environment...)
	cmd.Stderr = os.Stderr

	output, err := cmd.Output()
	require.NoError(t, err, "%s: %s", name, output)

	return string(output)
}

// startRegistry starts a registry and returns its address.
func startRegistry(t *testing.T) string {
	t.Helper()

	server := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	t.Cleanup(server.Close)

	return strings.TrimPrefix(server.URL, "http://")
}

// writeLayout writes an image with empty binaries and returns its digest.
func writeLayout(t *testing.T, dir string, index func(image.Release, map[string][]byte) (v1.ImageIndex, error)) string {
	t.Helper()

	made, err := index(image.Release{Version: "v1.2.3", Manifest: read(t, "manifest.yaml")}, map[string][]byte{"amd64": nil, "arm64": nil})
	require.NoError(t, err)

	_, err = layout.Write(dir, made)
	require.NoError(t, err)

	digest, err := made.Digest()
	require.NoError(t, err)

	return digest.String()
}

func TestRelease_PushesBuiltImages(t *testing.T) {
	host := startRegistry(t)
	repository, charts := host+"/talos-ccm/talos-ccm", host+"/talos-ccm/charts"
	artifacts := t.TempDir()
	outputs := filepath.Join(t.TempDir(), "outputs")

	want := "extension=" + writeLayout(t, artifacts+"/oci", image.ExtensionIndex) + "\npod=" + writeLayout(t, artifacts+"/oci-pod", image.PodIndex) + "\n"

	output, err := exec.CommandContext(t.Context(), "make", "--directory="+root, "chart", "ARTIFACTS="+artifacts).CombinedOutput()
	require.NoError(t, err, string(output))

	runStep(t, "Push", "TAG=v1.2.3", "EXTENSION="+repository, "POD="+repository+"-pod", "CHARTS="+charts, "HELM_FLAGS=--plain-http",
		"ARTIFACTS="+artifacts, "GITHUB_OUTPUT="+outputs)

	got, err := os.ReadFile(outputs)
	require.NoError(t, err)

	version := withVariables(t, "vars.yaml", platform("x86_64"))["VERSION"]

	digest, err := crane.Digest(charts + "/talos-ccm:" + version)
	require.NoError(t, err)

	want += "chart=" + digest + "\n"
	assert.Equal(t, want, string(got))
}

// crane would push to Docker Hub.
func TestPush_RefusesReferenceWithoutHostOrTag(t *testing.T) {
	for _, ref := range []string{"talos-ccm", "talos-ccm:v1", "talos-ccm/talos-ccm:v1", "registry.example.com/talos-ccm", "registry.example.com:v1"} {
		for _, variable := range []string{"REF", "POD_REF"} {
			output, err := exec.CommandContext(t.Context(), "make", "--directory="+root, "push", variable+"="+ref, "GO=false").CombinedOutput()
			assert.Error(t, err)
			assert.Contains(t, string(output), ref+": want host/repository:tag\n")
		}
	}
}

func TestPush_RefusesMissingLayout(t *testing.T) {
	for variable, layout := range map[string]string{"REF": "oci", "POD_REF": "oci-pod"} {
		artifacts := t.TempDir()

		output, err := exec.CommandContext(t.Context(), "make", "--directory="+root, "push", variable+"=registry.example.com/a:v1", "GO=false", "ARTIFACTS="+artifacts).CombinedOutput()
		assert.Error(t, err)
		assert.Contains(t, string(output), "No image in "+filepath.Join(artifacts, layout)+", run make image\n")
	}
}

// ghArguments returns the arguments that the workflow passes to gh.
func ghArguments(t *testing.T, tag string) []string {
	t.Helper()

	programs := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(programs, "gh"), []byte("#!/bin/sh\nprintf '%s\\000' \"$@\"\n"), 0o755))

	return strings.Split(runStep(t, "Draft the release", "PATH="+programs+":"+os.Getenv("PATH"), "TAG="+tag,
		"EXTENSION=registry.example.com/a", "EXTENSION_DIGEST=sha256:1", "POD=registry.example.com/b", "POD_DIGEST=sha256:2",
		"CHARTS=registry.example.com/c", "CHART_DIGEST=sha256:3", "INSTALLER=registry.example.com/d"), "\x00")
}

func TestRelease_DraftListsImages(t *testing.T) {
	args := ghArguments(t, "v1.2.3")

	assert.Subset(t, args, []string{"--draft", "--verify-tag", "v1.2.3"})

	notes := args[slices.Index(args, "--notes")+1]
	for _, want := range []string{
		"registry.example.com/a:v1.2.3@sha256:1", "registry.example.com/b:v1.2.3@sha256:2",
		"oci://registry.example.com/c/talos-ccm:1.2.3@sha256:3", "registry.example.com/d:TALOS-VERSION-v1.2.3",
	} {
		assert.Contains(t, notes, want)
	}
}

func TestRelease_MarksPrerelease(t *testing.T) {
	for tag, want := range map[string]bool{"v1.2.3": false, "v1.2.3-rc.1": true} {
		assert.Equal(t, want, slices.Contains(ghArguments(t, tag), "--prerelease"), tag)
	}
}
