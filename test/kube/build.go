package kube

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
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
func buildFlags(version string) []string {
	const versionPackage = "k8s.io/component-base/version"

	parts := strings.Split(strings.TrimPrefix(version, "v"), ".")
	ldflags := []string{"-s", "-w"}

	for _, variable := range []string{
		versionPackage + ".gitVersion=" + version,
		versionPackage + ".gitMajor=" + parts[0],
		versionPackage + ".gitMinor=" + parts[1],
		versionPackage + ".gitTreeState=clean",
		versionPackage + ".buildDate=1970-01-01T00:00:00Z",
		"k8s.io/client-go/pkg/version.gitVersion=" + version,
	} {
		ldflags = append(ldflags, "-X", variable)
	}

	return []string{"-trimpath", "-ldflags=" + strings.Join(ldflags, " ")}
}

// follows matches modules whose API changes with the versions of Kubernetes.
var follows = regexp.MustCompile(`k8s\.io/|github\.com/google/cadvisor|github\.com/opencontainers/cgroups`)

// module returns the components' go.mod with the version of s. Modules that follow the version of Kubernetes and are only
// required indirectly are left to go: it adds what that version requires.
func (s source) module() (string, error) {
	content, err := os.ReadFile(filepath.Join(s.folder, "go.mod"))
	if err != nil {
		return "", err
	}

	var lines strings.Builder

	for line := range strings.Lines(string(content)) {
		if follows.MatchString(line) {
			if strings.Contains(line, "// indirect") {
				continue
			}

			// The staging modules of v1.36.3 are v0.36.3.
			line = strings.ReplaceAll(line, strings.TrimPrefix(KubernetesVersion, "v1"), strings.TrimPrefix(s.version, "v1"))
		}

		lines.WriteString(line)
	}

	return lines.String(), nil
}

// writeModfile writes module and the components' go.sum to the folder.
func (s source) writeModfile(folder string) error {
	content, err := s.module()
	if err != nil {
		return err
	}

	sums, err := os.ReadFile(filepath.Join(s.folder, "go.sum"))
	if err != nil {
		return err
	}

	if err := os.WriteFile(filepath.Join(folder, modfile), []byte(content), 0o644); err != nil {
		return err
	}

	return os.WriteFile(filepath.Join(folder, sumfile), sums, 0o644)
}

// compile builds the multi-call binary in the folder, with the modfile there.
func (s source) compile(ctx context.Context, folder string, progress io.Writer) error {
	bar := newBar(progress, "Building the Kubernetes "+s.version+" components (once)")
	defer bar.finish()

	flags := append(buildFlags(s.version), "-modfile="+filepath.Join(folder, modfile))

	total, err := s.stalePackages(ctx, flags, bar)
	if err != nil {
		return err
	}

	bar.setTotal(total)

	args := append([]string{"build", "-v", "-o", filepath.Join(folder, multiCall)}, flags...)

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
func (s source) stalePackages(ctx context.Context, flags []string, bar *bar) (int, error) {
	args := append([]string{"list", "-deps", "-f", "{{if .Stale}}{{.ImportPath}}{{end}}"}, flags...)

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
