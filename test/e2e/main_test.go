//go:build e2e

package e2e_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"k8s.io/client-go/kubernetes"

	"github.com/talos-ccm/talos-ccm/extension"
	"github.com/talos-ccm/talos-ccm/test/talos"
)

// service is talos-ccm's, as Talos calls it.
const service = "ext-talos-ccm"

// bed and client are shared by all tests: it takes longer to boot than they take together.
var (
	bed    *talos.Bed
	client kubernetes.Interface
)

func TestMain(m *testing.M) {
	os.Exit(run(m))
}

func run(m *testing.M) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()

	dir, err := os.MkdirTemp("", "talos-ccm-extension-")
	if err != nil {
		return failed(err)
	}

	defer os.RemoveAll(dir) //nolint:errcheck // a temporary folder

	if err := buildExtension(ctx, dir); err != nil {
		return failed(err)
	}

	bed, err = talos.Up(ctx, talos.Options{Extension: dir, Progress: os.Stdout, LogDir: os.Getenv("TALOS_CCM_LOGS")})
	if err != nil {
		return failed(err)
	}

	defer func() {
		start := time.Now()

		if err := bed.Down(); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}

		fmt.Printf("%-40s %6.1f s\n", "take down", time.Since(start).Seconds())
	}()

	// A test binary that gets Ctrl-C would just die, and leave files to the next run's sweep.
	defer context.AfterFunc(ctx, func() {
		if err := bed.Down(); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}

		os.Exit(130)
	})()

	if client, err = bed.Kubernetes(); err != nil {
		return failed(err)
	}

	code := m.Run()

	for _, phase := range bed.Phases() {
		fmt.Printf("%-40s %6.1f s\n", phase.Name, phase.Took.Seconds())
	}

	return code
}

func failed(err error) int {
	fmt.Fprintln(os.Stderr, err)

	return 1
}

// buildExtension lays talos-ccm out in dir as its image does.
func buildExtension(ctx context.Context, dir string) error {
	build := exec.CommandContext(ctx, "go", "build", "-trimpath", "-ldflags=-s -w",
		"-o", filepath.Join(dir, "usr/local/lib/containers/talos-ccm/talos-ccm"), "github.com/talos-ccm/talos-ccm/cmd/talos-ccm")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	build.Stderr = os.Stderr

	if err := build.Run(); err != nil {
		return fmt.Errorf("build talos-ccm: %w", err)
	}

	spec := filepath.Join(dir, "usr/local/etc/containers/talos-ccm.yaml")
	if err := os.MkdirAll(filepath.Dir(spec), 0o755); err != nil {
		return err
	}

	return os.WriteFile(spec, extension.Spec, 0o644)
}
