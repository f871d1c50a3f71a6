package builder

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/talos-ccm/talos-ccm/test/screen"
)

const (
	// buildLine is the interval between lines of progress where there is no terminal.
	buildLine = 10 * time.Second
	// messageLines is the number of lines of go's output in an error.
	messageLines = 20
)

// Packages runs build, a `go build -v`, and shows its progress: the number of compiled packages, and the number of
// packages that list, a `go list -deps`, prints. A nil writer discards it.
func Packages(out io.Writer, title string, list, build *exec.Cmd) error {
	var (
		total, compiled atomic.Int64
		showing         sync.WaitGroup
		done            = make(chan struct{})
		started         = time.Now()
	)

	if out == nil {
		out = io.Discard
	}

	showing.Go(func() {
		screen.Show(done, out, buildLine, func() []string {
			state := title
			if total.Load() > 0 {
				state = screen.Bar(out, title, int(compiled.Load()), int(total.Load())) + " packages at most"
			}

			return []string{fmt.Sprintf("%s, %s", state, time.Since(started).Round(time.Second))}
		})
	})

	defer showing.Wait()
	defer close(done)

	packages, err := Output(list)
	if err != nil {
		return err
	}

	total.Store(int64(bytes.Count(packages, []byte{'\n'})))

	return compile(build, &compiled)
}

// compile runs a `go build -v`, which prints each package, and counts them. An error contains the last other messages.
func compile(build *exec.Cmd, compiled *atomic.Int64) error {
	// The signal is sent when the thread ends that started the build. Interrupted, go removes its temporary files.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()

	build.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGINT}

	stderr, err := build.StderrPipe()
	if err != nil {
		return err
	}

	if err := build.Start(); err != nil {
		return err
	}

	var messages []string

	for scanner := bufio.NewScanner(stderr); scanner.Scan(); {
		if line := scanner.Text(); strings.ContainsAny(line, " :\t#") {
			messages = append(messages, line)
		} else {
			compiled.Add(1)
		}
	}

	if err := build.Wait(); err != nil {
		return fmt.Errorf("go build in %s: %w\n%s", build.Dir, err, strings.Join(messages[max(0, len(messages)-messageLines):], "\n"))
	}

	return nil
}

// Output returns the standard output of a command. An error contains its standard error.
func Output(cmd *exec.Cmd) ([]byte, error) {
	output, err := cmd.Output()

	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		err = fmt.Errorf("%w: %s", err, bytes.TrimSpace(exit.Stderr))
	}

	if err != nil {
		return nil, fmt.Errorf("%s %s in %q: %w", cmd.Args[0], cmd.Args[1], cmd.Dir, err)
	}

	return output, nil
}

// Executable builds the static executable of a main package, with flags of `go run`. Go caches the executables of
// `go run`, but not those of `go build`.
func Executable(pkg, path string, flags ...string) error {
	cmd := exec.Command("go", slices.Concat([]string{"run"}, flags, []string{"-exec", "cp", pkg, path})...)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")

	_, err := Output(cmd)

	return err
}
