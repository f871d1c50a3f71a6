//go:build e2e

package e2e_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/layout"
	"k8s.io/client-go/kubernetes"

	"github.com/talos-ccm/talos-ccm/packaging/image"
	"github.com/talos-ccm/talos-ccm/test/talos"
)

// service is talos-ccm's, as Talos calls it.
const service = "ext-talos-ccm"

// The versions of talos-ccm that are built. The machines boot with the first; TestUpgrade goes on to the other.
const (
	version     = "v0.1.0"
	nextVersion = "v0.1.1"
)

// victim in the environment is the directory of the extension that this binary brings up a bed with, to be killed.
const victim = "TALOS_CCM_TEST_VICTIM"

// quickPatch has Kubernetes notice after 20 s, not 50 s, that a kubelet no longer renews its lease, which it does every 10 s.
const quickPatch = `cluster: {controllerManager: {extraArgs: {node-monitor-grace-period: 20s}}}`

// bed and client are shared by all tests: it takes longer to boot than they take together.
var (
	bed    *talos.Bed
	client kubernetes.Interface
	// workDir is where everything is built; it is gone when the tests end.
	workDir string
)

// artifacts is what make image has written of a version.
func artifacts(version string) string { return filepath.Join(workDir, version) }

// unpacked is where the extension's image of a version is unpacked.
func unpacked(version string) string { return filepath.Join(artifacts(version), "extension") }

// binary is the talos-ccm that the machines booted with.
func binary() string { return filepath.Join(artifacts(version), "talos-ccm-linux-"+runtime.GOARCH) }

func TestMain(m *testing.M) {
	os.Exit(run(m))
}

func run(m *testing.M) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()

	options := talos.Options{
		Extension:           os.Getenv(victim),
		ControlPlanePatches: []string{noAllocatorPatch, quickPatch},
	}

	if options.Extension == "" {
		var err error

		if workDir, err = os.MkdirTemp("", "talos-ccm-e2e-"); err != nil {
			return failed(err)
		}

		defer os.RemoveAll(workDir) //nolint:errcheck // a temporary directory

		if err := errors.Join(makeImage(ctx, version), makeImage(ctx, nextVersion)); err != nil {
			return failed(err)
		}

		options.Extension, options.LogDir = unpacked(version), os.Getenv("TALOS_CCM_LOGS")
	}

	var err error
	if bed, err = talos.Up(ctx, options); err != nil {
		return failed(err)
	}

	// A test binary that gets Ctrl-C would just die, and leave files to the next run's sweep.
	defer context.AfterFunc(ctx, func() {
		if err := bed.Down(); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}

		os.Exit(130)
	})()

	client = bed.Kubernetes()
	code := m.Run()

	if err := errors.Join(bed.Down(), leftovers(bed.ID())); err != nil {
		return failed(err)
	}

	return code
}

func failed(err error) int {
	fmt.Fprintln(os.Stderr, err)

	return 1
}

// makeImage builds the images as users do, for this architecture, and unpacks the extension image.
func makeImage(ctx context.Context, version string) error {
	cmd := exec.CommandContext(ctx, "make", "--directory=../..", "image", "ARTIFACTS="+artifacts(version), "ARCHES="+runtime.GOARCH, "TAG="+version,
		"SOURCE_DATE_EPOCH="+strconv.FormatInt(time.Now().Unix(), 10))
	// Drop the flags of the make that runs this test.
	cmd.Env = append(os.Environ(), "MAKEFLAGS=")

	if output, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("make image of %s: %w\n%s", version, err, output)
	}

	index, err := layout.ImageIndexFromPath(filepath.Join(artifacts(version), "oci"))
	if err != nil {
		return err
	}

	return image.Unpack(index, runtime.GOARCH, unpacked(version))
}
