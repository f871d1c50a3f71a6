package builder

import (
	"bytes"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"syscall"
)

// progress is also used by the Makefile, before any Go code is compiled.
//
//go:embed progress
var progress string

// Packages runs a `go build` and writes its progress to out. A nil writer discards it. The file to write is given as -o=file.
func Packages(out io.Writer, title string, build *exec.Cmd) error {
	var messages bytes.Buffer

	build.Path, build.Args = "/bin/bash", slices.Concat([]string{"bash", "-c", progress, "progress", title}, build.Args)
	build.Stdout, build.Stderr = out, &messages

	// The signal is sent when the thread ends that started the build.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()

	build.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM}

	if err := build.Run(); err != nil {
		return fmt.Errorf("go build in %s: %w\n%s", build.Dir, err, bytes.TrimSpace(messages.Bytes()))
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
