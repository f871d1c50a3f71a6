package kube

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/util/wait"
)

const (
	lockPoll = 200 * time.Millisecond
	// errorLines is how much of go's output an error repeats.
	errorLines = 20
)

func buildEnv() []string {
	return []string{"GOFLAGS=-mod=mod -buildvcs=false", "GOTOOLCHAIN=local", "GOWORK=off", "CGO_ENABLED=0"}
}

// buildFlags give the components the version that a release has: a kubelet or an API server of version v0.0.0-master is treated as ancient.
func buildFlags() []string {
	const versionPackage = "k8s.io/component-base/version"

	parts := strings.Split(strings.TrimPrefix(KubernetesVersion, "v"), ".")
	ldflags := []string{"-s", "-w"}

	for _, variable := range []string{
		versionPackage + ".gitVersion=" + KubernetesVersion,
		versionPackage + ".gitMajor=" + parts[0],
		versionPackage + ".gitMinor=" + parts[1],
		versionPackage + ".gitTreeState=clean",
		versionPackage + ".buildDate=1970-01-01T00:00:00Z",
		"k8s.io/client-go/pkg/version.gitVersion=" + KubernetesVersion,
	} {
		ldflags = append(ldflags, "-X", variable)
	}

	return []string{"-trimpath", "-ldflags=" + strings.Join(ldflags, " ")}
}

// compile builds the multi-call binary.
func (s source) compile(ctx context.Context, output string, progress io.Writer) error {
	bar := newBar(progress, "Building the Kubernetes "+KubernetesVersion+" components (once)")
	defer bar.finish()

	total, err := s.stalePackages(ctx, bar)
	if err != nil {
		return err
	}

	bar.setTotal(total)

	args := append([]string{"build", "-v", "-o", output}, buildFlags()...)

	return run(goCommand(ctx, s.folder, append(args, ".")...), io.Discard, func(line string) {
		if isPackage(line) {
			bar.step()
		}
	})
}

// isPackage tells a line by which go build -v names the package it starts on from a message.
func isPackage(line string) bool {
	return !strings.ContainsAny(line, " \t#")
}

// stalePackages is the number of packages that a build has to compile; go downloads the modules for it.
func (s source) stalePackages(ctx context.Context, bar *bar) (int, error) {
	args := append([]string{"list", "-deps", "-f", "{{if .Stale}}{{.ImportPath}}{{end}}"}, buildFlags()...)

	var names strings.Builder

	err := run(goCommand(ctx, s.folder, append(args, ".")...), &names, func(line string) {
		if strings.HasPrefix(line, "go: downloading") {
			bar.note("downloading modules")
		}
	})

	return len(strings.Fields(names.String())), err
}

// run runs a command to its end, passing each line of its stderr on; the last messages among them are in the error.
func run(cmd *exec.Cmd, stdout io.Writer, line func(string)) error {
	// See process.run: the signal is sent when the thread ends.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()

	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGINT}
	cmd.Stdout = stdout

	stderr, err := cmd.StderrPipe()
	if err != nil {
		return err
	}

	if err := cmd.Start(); err != nil {
		return err
	}

	var last []string

	for scanner := bufio.NewScanner(stderr); scanner.Scan(); {
		line(scanner.Text())

		if isPackage(scanner.Text()) {
			continue
		}

		last = append(last, scanner.Text())
		if len(last) > errorLines {
			last = last[1:]
		}
	}

	if err := cmd.Wait(); err != nil {
		return fmt.Errorf("go %s in %s: %w\n%s", cmd.Args[1], cmd.Dir, err, strings.Join(last, "\n"))
	}

	return nil
}

// withStderr adds what a command said to the error of its Output.
func withStderr(err error) error {
	if exit := new(exec.ExitError); errors.As(err, &exit) {
		return fmt.Errorf("%w: %s", err, strings.TrimSpace(string(exit.Stderr)))
	}

	return err
}

// lockFile acquires a lock file across processes and returns the function that releases it. If it is held, waiting is called
// once.
func lockFile(ctx context.Context, path string, waiting func()) (func(), error) {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}

	told := false

	err = wait.PollUntilContextCancel(ctx, lockPoll, true, func(context.Context) (bool, error) {
		err := unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return err == nil, err
		}

		if !told {
			waiting()

			told = true
		}

		return false, nil
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", path, err), file.Close())
	}

	return func() { _ = file.Close() }, nil
}
