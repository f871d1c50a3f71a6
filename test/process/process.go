// Package process runs components of tests and of the demo as child processes, which end with this process.
package process

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
)

const (
	// Grace is the default time between SIGTERM and SIGKILL.
	Grace = 5 * time.Second
	// readyTimeout bounds the wait for one component; a loaded two-core machine needs a few seconds.
	readyTimeout = 90 * time.Second
	readyPoll    = 50 * time.Millisecond

	logTailLines = 25
)

// Command describes a process.
type Command struct {
	Name, Path string
	Args, Env  []string
	// Log is the file to which the output is appended.
	Log string
	// Grace is the time between SIGTERM and SIGKILL; the default is the constant Grace.
	Grace time.Duration
	// Namespaces starts the process in a new user namespace, in which the caller's IDs are root's, and a new mount
	// namespace.
	Namespaces bool
}

// Process is a running child. The kernel kills it when this process dies.
type Process struct {
	Name, Log string
	cmd       *exec.Cmd
	grace     time.Duration
	done      chan struct{} // closed after the process has ended and was reaped
}

// Start starts a command in its own process group, so that Ctrl-C at the terminal reaches only this process, which then
// stops its children in order.
func Start(c Command) (*Process, error) {
	output, err := os.OpenFile(c.Log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", c.Name, err)
	}
	defer output.Close() //nolint:errcheck // the child holds its own descriptor

	cmd := exec.Command(c.Path, c.Args...)
	cmd.Stdout, cmd.Stderr = output, output
	// No other variables: etcd, for example, reads settings from its environment.
	cmd.Env = append([]string{"PATH=" + os.Getenv("PATH"), "TMPDIR=" + os.TempDir()}, c.Env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}

	if c.Namespaces {
		cmd.SysProcAttr.Cloneflags = syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}}
	}

	p := &Process{Name: c.Name, Log: c.Log, cmd: cmd, grace: c.Grace, done: make(chan struct{})}
	if p.grace == 0 {
		p.grace = Grace
	}

	started := make(chan error)

	go p.run(started)

	if err := <-started; err != nil {
		return nil, fmt.Errorf("start %s: %w", c.Name, err)
	}

	return p, nil
}

// run starts the process and reaps it. Pdeathsig is sent when the thread that started the child ends, so this goroutine
// keeps its thread as long as the child lives.
func (p *Process) run(started chan<- error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()

	err := p.cmd.Start()
	started <- err

	if err != nil {
		return
	}

	_ = p.cmd.Wait()
	close(p.done)
}

// PID returns the process ID.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Done returns a channel that is closed after the process has ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// Stop sends SIGTERM, and SIGKILL after the grace period or when ctx is done. It returns once the process was reaped. A
// nil or ended process is allowed.
func (p *Process) Stop(ctx context.Context) {
	if p == nil {
		return
	}

	p.Terminate()

	timer := time.NewTimer(p.grace)
	defer timer.Stop()

	select {
	case <-p.done:
		return
	case <-timer.C:
	case <-ctx.Done():
	}

	_ = p.cmd.Process.Kill()
	<-p.done
}

// Terminate sends SIGTERM and does not wait. A nil process is allowed.
func (p *Process) Terminate() {
	if p != nil {
		_ = p.cmd.Process.Signal(syscall.SIGTERM)
	}
}

// WaitReady returns when check succeeds. It fails with the end of the log if the process ends, or is not ready in time.
func (p *Process) WaitReady(ctx context.Context, check func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()

	var last error

	err := wait.PollUntilContextCancel(ctx, readyPoll, true, func(ctx context.Context) (bool, error) {
		if err := p.Ended(); err != nil {
			return false, err
		}

		last = check(ctx)

		return last == nil, nil
	})
	if err == nil {
		return nil
	}

	if last != nil {
		err = fmt.Errorf("%w (last check: %w)", err, last)
	}

	return fmt.Errorf("wait for %s: %w\n%s", p.Name, err, p.LogTail())
}

// Ended returns nil while the process runs, and an error with its exit status afterwards.
func (p *Process) Ended() error {
	select {
	case <-p.done:
		return fmt.Errorf("%s exited: %s", p.Name, p.cmd.ProcessState)
	default:
		return nil
	}
}

// LogTail returns the name and the last lines of the log.
func (p *Process) LogTail() string {
	content, err := os.ReadFile(p.Log)
	if err != nil {
		return fmt.Sprintf("(no log: %v)", err)
	}

	lines := strings.Split(strings.TrimRight(string(content), "\n"), "\n")

	return fmt.Sprintf("--- end of %s ---\n%s", filepath.Base(p.Log), strings.Join(lines[max(0, len(lines)-logTailLines):], "\n"))
}
