package kube

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
	// stopGrace is how long a process has between SIGTERM and SIGKILL.
	stopGrace = 5 * time.Second
	// readyTimeout bounds the wait for one component; a loaded two-core machine needs a few seconds.
	readyTimeout = 90 * time.Second
	readyPoll    = 50 * time.Millisecond

	logTailLines = 25
	logTailBytes = 8 << 10
)

// process is one running component. It is killed by the kernel when this process dies, however that happens.
type process struct {
	name string
	log  string
	cmd  *exec.Cmd
	// done is closed after the process has ended and was reaped.
	done chan struct{}
}

// command says what to start and where its output goes.
type command struct {
	name string
	path string
	args []string
	env  []string
	log  string
	// namespaces, if set, are made for the process.
	namespaces *namespaces
}

// namespaces asks for a user namespace, in which the caller's ids are root's, together with a mount namespace.
type namespaces struct{}

// startProcess starts the command with its output appended to its log.
func startProcess(c command) (*process, error) {
	output, err := os.OpenFile(c.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", c.name, err)
	}
	defer output.Close() //nolint:errcheck // the child holds its own descriptor

	cmd := exec.Command(c.path, c.args...)
	cmd.Stdout, cmd.Stderr = output, output
	// Nothing else of the environment: etcd, for one, takes settings from it.
	cmd.Env = append([]string{"PATH=" + os.Getenv("PATH"), "TMPDIR=" + os.TempDir()}, c.env...)
	cmd.SysProcAttr = c.namespaces.attributes()

	p := &process{name: c.name, log: c.log, cmd: cmd, done: make(chan struct{})}
	started := make(chan error)

	go p.run(started)

	if err := <-started; err != nil {
		return nil, fmt.Errorf("start %s: %w", c.name, err)
	}

	return p, nil
}

// attributes are those of a child in its own process group, so that a Ctrl-C at the terminal reaches only this process, which then
// stops its children in order.
func (n *namespaces) attributes() *syscall.SysProcAttr {
	attr := &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if n != nil {
		attr.Cloneflags = syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS
		attr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}}
		attr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}}
	}

	return attr
}

// run starts the process and reaps it. Pdeathsig is sent when the *thread* that started the child ends, so this goroutine keeps its
// thread for as long as the child lives.
func (p *process) run(started chan<- error) {
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

func (p *process) pid() int {
	return p.cmd.Process.Pid
}

// stop ends the process: SIGTERM, and SIGKILL after stopGrace or when ctx is done. It returns once the process was reaped. A nil or
// ended process is fine.
func (p *process) stop(ctx context.Context) {
	if p == nil {
		return
	}

	p.terminate()

	timer := time.NewTimer(stopGrace)
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

// terminate asks the process to end and does not wait.
func (p *process) terminate() {
	if p != nil {
		_ = p.cmd.Process.Signal(syscall.SIGTERM)
	}
}

// waitReady returns when check succeeds. It fails with the end of the log if the process ends or takes longer than readyTimeout.
func (p *process) waitReady(ctx context.Context, check func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()

	var last error

	err := wait.PollUntilContextCancel(ctx, readyPoll, true, func(ctx context.Context) (bool, error) {
		if err := p.ended(); err != nil {
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

	return fmt.Errorf("wait for %s: %w\n%s", p.name, err, logTail(p.log))
}

// ended is nil while the process runs, and how it ended afterwards.
func (p *process) ended() error {
	select {
	case <-p.done:
		return fmt.Errorf("%s ended: %s", p.name, p.cmd.ProcessState)
	default:
		return nil
	}
}

// logTail is the end of a log, introduced by its name.
func logTail(path string) string {
	content, err := readEnd(path, logTailBytes)
	if err != nil {
		return fmt.Sprintf("(no log: %v)", err)
	}

	lines := strings.Split(strings.TrimRight(content, "\n"), "\n")
	if len(lines) > logTailLines {
		lines = lines[len(lines)-logTailLines:]
	}

	return fmt.Sprintf("--- end of %s ---\n%s", filepath.Base(path), strings.Join(lines, "\n"))
}

func readEnd(path string, size int64) (string, error) {
	file, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer file.Close() //nolint:errcheck // only read

	info, err := file.Stat()
	if err != nil {
		return "", err
	}

	buffer := make([]byte, min(size, info.Size()))
	n, err := file.ReadAt(buffer, info.Size()-int64(len(buffer)))

	if n < len(buffer) {
		return "", err
	}

	return string(buffer), nil
}
