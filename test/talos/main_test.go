//go:build e2e

package talos_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/talos-ccm/talos-ccm/test/talos"
)

// victim in the environment makes this binary bring up a bed and wait to be killed.
const victim = "TALOS_CCM_TEST_VICTIM"

// bed is shared by all tests: it takes longer to make than they take together. Its extension is the probe.
var bed *talos.Bed

func TestMain(m *testing.M) {
	os.Exit(run(m))
}

func run(m *testing.M) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()

	options := talos.Options{
		Progress:      os.Stdout,
		LogDir:        os.Getenv("TALOS_CCM_LOGS"),
		ConfigPatches: []string{probeConfig},
	}
	if os.Getenv(victim) != "" {
		options.LogDir = ""
	}

	var err error
	if bed, err = talos.Up(ctx, options); err != nil {
		return fail(err)
	}

	// A test binary that gets Ctrl-C would just die, and leave files to the next run's sweep.
	defer context.AfterFunc(ctx, func() {
		fail(bed.Down())
		os.Exit(130)
	})()

	code := m.Run()

	for _, phase := range bed.Phases() {
		fmt.Printf("%-40s %6.1f s\n", phase.Name, phase.Took.Seconds())
	}

	start := time.Now()

	if err := errors.Join(bed.Down(), leftovers(bed.ID())); err != nil {
		return fail(err)
	}

	fmt.Printf("%-40s %6.1f s\n", "take down", time.Since(start).Seconds())

	return code
}

func fail(err error) int {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	}

	return 1
}

// leftovers finds what a bed has left on this machine: processes, cgroups, mounts, files.
func leftovers(id string) error {
	var left []error

	commands, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		return err
	}

	for _, file := range append(commands, "/proc/self/mountinfo") {
		if names(file, id) {
			left = append(left, fmt.Errorf("%s names %s", file, id))
		}
	}

	for _, root := range []string{"/sys/fs/cgroup", filepath.Dir(bed.Dir())} {
		err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
			if err == nil && entry.IsDir() && strings.Contains(entry.Name(), id) {
				left = append(left, fmt.Errorf("%s is left", path))
			}

			return nil
		})
		left = append(left, err)
	}

	return errors.Join(left...)
}
