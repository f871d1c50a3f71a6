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
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/layout"
	"k8s.io/client-go/kubernetes"

	"github.com/talos-ccm/talos-ccm/packaging/image"
	"github.com/talos-ccm/talos-ccm/test/talos"
)

// service is the name of talos-ccm's Talos service.
const service = "ext-talos-ccm"

// The versions of talos-ccm that are built. The machines boot with version; TestUpgrade upgrades them to nextVersion.
const (
	version     = "v0.1.0"
	nextVersion = "v0.1.1"
)

// controllerManagerArgs disable kube-controller-manager's node-ipam-controller, as in docs/explanation/pod-cidrs.md. They
// reduce the time after which a Node whose kubelet does not renew its lease becomes unreachable from 50 s to 20 s. Kubelets
// renew their leases every 10 s.
var controllerManagerArgs = map[string]string{"controllers": "-node-ipam-controller", "node-monitor-grace-period": "20s"}

// bed and client are shared by all tests because booting is slow.
var (
	bed    *talos.Bed
	client kubernetes.Interface
	// controlPlane and worker are the first machines of the bed.
	controlPlane, worker *talos.Machine
	// workDir contains all build results. It is removed after the tests.
	workDir string
)

// artifactsDir returns the directory with the artifacts of make image for a version.
func artifactsDir(version string) string { return filepath.Join(workDir, version) }

// extensionDir returns the directory with the unpacked extension image of a version.
func extensionDir(version string) string { return filepath.Join(artifactsDir(version), "extension") }

// binaryPath returns the path of the talos-ccm binary that the machines boot with.
func binaryPath() string {
	return filepath.Join(artifactsDir(version), "talos-ccm-linux-"+runtime.GOARCH)
}

func TestMain(m *testing.M) {
	os.Exit(run(m))
}

func run(m *testing.M) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()

	var err error

	if workDir, err = os.MkdirTemp("", "talos-ccm-e2e-"); err != nil {
		return fail(err)
	}

	defer os.RemoveAll(workDir) //nolint:errcheck // a temporary directory

	if err := errors.Join(buildImages(ctx, version), buildImages(ctx, nextVersion)); err != nil {
		return fail(err)
	}

	// Requests to a machine without power fail after four seconds instead of 45.
	if err := errors.Join(os.Setenv("HTTP2_READ_IDLE_TIMEOUT_SECONDS", "2"), os.Setenv("HTTP2_PING_TIMEOUT_SECONDS", "2")); err != nil {
		return fail(err)
	}

	if err := bringUp(ctx, talos.Options{Extension: extensionDir(version)}); err != nil {
		return fail(err)
	}

	// By default, Ctrl-C ends a test binary without cleanup.
	defer context.AfterFunc(ctx, func() {
		if err := bed.Down(); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}

		os.Exit(130)
	})()

	code := m.Run()

	if err := errors.Join(bed.Down(), checkNoLeftovers(bed.ID())); err != nil {
		return fail(err)
	}

	return code
}

// bringUp brings up the bed with one worker.
func bringUp(ctx context.Context, options talos.Options) (err error) {
	options.ControlPlanes, options.Workers = controlPlanes, 1
	options.LogDir, options.ControllerManagerArgs = os.Getenv("TALOS_CCM_LOGS"), controllerManagerArgs

	if bed, err = talos.Up(ctx, options); err == nil {
		client = bed.Kubernetes()
		controlPlane, worker = bed.ControlPlanes[0], bed.Workers[0]
	}

	return err
}

// fail prints an error and returns the exit code.
func fail(err error) int {
	fmt.Fprintln(os.Stderr, err)

	return 1
}

// buildImages runs make image for this architecture, and unpacks the extension image.
func buildImages(ctx context.Context, version string) error {
	err := runMake(ctx, "image", "ARTIFACTS="+artifactsDir(version), "ARCHES="+runtime.GOARCH, "TAG="+version,
		"SOURCE_DATE_EPOCH="+strconv.FormatInt(time.Now().Unix(), 10))
	if err != nil {
		return err
	}

	index, err := layout.ImageIndexFromPath(filepath.Join(artifactsDir(version), "oci"))
	if err != nil {
		return err
	}

	return image.Unpack(index, runtime.GOARCH, extensionDir(version))
}

// runMake runs make in the root directory of the repository.
func runMake(ctx context.Context, args ...string) error {
	cmd := exec.CommandContext(ctx, "make", append([]string{"--directory=../.."}, args...)...)
	// Do not inherit the flags of the make that runs this test.
	cmd.Env = append(os.Environ(), "MAKEFLAGS=")

	if output, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("make %s: %w\n%s", strings.Join(args, " "), err, output)
	}

	return nil
}
