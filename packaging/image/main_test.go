package image_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/talos-ccm/talos-ccm/packaging/image"
)

const (
	root    = "../.."
	version = "1.2.3-test.1"

	revision = "0123456789abcdef0123456789abcdef01234567"
	created  = 1_700_000_000
)

// workDir is deleted when the tests end.
var workDir string

func TestMain(m *testing.M) {
	var err error
	if workDir, err = os.MkdirTemp("", "talos-ccm-image-test-"); err != nil {
		panic(err)
	}

	code := m.Run()
	_ = os.RemoveAll(workDir)

	os.Exit(code)
}

// layouts has the directories that make image writes.
type layouts = map[string]string

// made returns the images that `make image` builds for users. It builds them once for all tests.
var made = sync.OnceValues(func() (layouts, error) { return makeImage(root, filepath.Join(workDir, "out"), "022") })

// makeImage runs make image in a checkout.
func makeImage(checkout, out, umask string, environ ...string) (layouts, error) {
	cmd := exec.Command("sh", "-c", `umask "$0" && exec "$@"`, umask, "make", "-C", checkout, "image",
		"ARTIFACTS="+out, "ARCHES=amd64 arm64", "TAG=v"+version, "REVISION="+revision, "SOURCE_DATE_EPOCH="+strconv.Itoa(created))
	// Ignore the flags of a make that runs this test.
	cmd.Env = append(append(os.Environ(), "MAKEFLAGS="), environ...)

	if output, err := cmd.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("make image in %s: %w\n%s", checkout, err, output)
	}

	return layouts{"extension": filepath.Join(out, "oci"), "pod": filepath.Join(out, "oci-pod")}, nil
}

func makeOnce(t *testing.T) layouts {
	t.Helper()

	l, err := made()
	require.NoError(t, err)

	return l
}

func read(t *testing.T, dir string) v1.ImageIndex {
	t.Helper()

	index, err := layout.ImageIndexFromPath(dir)
	require.NoError(t, err)

	return index
}

// release returns a release with the manifest of the sources and another version.
func release(t *testing.T) image.Release {
	t.Helper()

	content, err := os.ReadFile(filepath.Join(root, "manifest.yaml"))
	require.NoError(t, err)

	return image.Release{Version: "v" + version, Created: time.Unix(created, 0), Manifest: content}
}

// unpack returns a directory with the files of the image for an architecture.
func unpack(t *testing.T, index v1.ImageIndex, arch string) string {
	t.Helper()

	dir := t.TempDir()
	require.NoError(t, image.Unpack(index, arch, dir))

	return dir
}

// eachImage calls check with every image of an index.
func eachImage(t *testing.T, index v1.ImageIndex, check func(t *testing.T, arch string, img v1.Image)) {
	t.Helper()

	manifest, err := index.IndexManifest()
	require.NoError(t, err)

	var archs []string

	for _, descriptor := range manifest.Manifests {
		img, err := index.Image(descriptor.Digest)
		require.NoError(t, err)

		archs = append(archs, descriptor.Platform.String())

		t.Run(descriptor.Platform.Architecture, func(t *testing.T) { check(t, descriptor.Platform.Architecture, img) })
	}

	assert.Equal(t, "linux/amd64 linux/arm64", strings.Join(archs, " "))
}
