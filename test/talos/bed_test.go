//go:build e2e

package talos_test

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"testing"
	"time"

	"github.com/talos-ccm/talos-ccm/test/talos"
)

// bed is shared by all tests: it takes longer to make than they take together.
var bed *talos.Bed

func TestMain(m *testing.M) {
	os.Exit(run(m))
}

func run(m *testing.M) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()

	var err error

	bed, err = talos.Up(ctx, talos.Options{Progress: os.Stdout, LogDir: os.Getenv("TALOS_CCM_LOGS")})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)

		return 1
	}

	// A test binary that gets Ctrl-C would just die, and leave files to the next run's sweep.
	defer context.AfterFunc(ctx, func() {
		if err := bed.Down(); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}

		os.Exit(130)
	})()

	code := m.Run()

	for _, phase := range bed.Phases() {
		fmt.Printf("%-40s %6.1f s\n", phase.Name, phase.Took.Seconds())
	}

	start := time.Now()

	if err := bed.Down(); err != nil {
		fmt.Fprintln(os.Stderr, err)

		return 1
	}

	fmt.Printf("%-40s %6.1f s\n", "take down", time.Since(start).Seconds())

	return code
}

func TestBedIsUp(t *testing.T) {}
