package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"time"
)

// process is a running child. The kernel kills it when this process dies, however that happens.
type process struct {
	cmd *exec.Cmd
	// done is closed after the child has ended; err is set before that.
	done chan struct{}
	err  error
}

// startProcess starts cmd in a process group of its own, so that a Ctrl-C at the terminal reaches only this process, which then stops its
// children in order.
func startProcess(cmd *exec.Cmd) (*process, error) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}

	p := &process{cmd: cmd, done: make(chan struct{})}
	started := make(chan error)

	go p.run(started)

	if err := <-started; err != nil {
		return nil, fmt.Errorf("start %s: %w", cmd.Path, err)
	}

	return p, nil
}

// run starts the child and reaps it. Pdeathsig is sent when the *thread* that started the child ends, so this goroutine keeps its thread
// for as long as the child lives.
func (p *process) run(started chan<- error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()

	err := p.cmd.Start()
	started <- err

	if err != nil {
		return
	}

	p.err = p.cmd.Wait()
	close(p.done)
}

func (p *process) pid() int { return p.cmd.Process.Pid }

// wait returns how the child ended. When ctx ends first, it stops the child.
func (p *process) wait(ctx context.Context, grace time.Duration) error {
	select {
	case <-p.done:
		return p.err
	case <-ctx.Done():
		p.stop(syscall.SIGINT, grace)

		return ctx.Err()
	}
}

// stop asks the child to end by a signal, kills it after grace, and returns once it has ended. It returns false if it had to be killed.
func (p *process) stop(signal os.Signal, grace time.Duration) bool {
	_ = p.cmd.Process.Signal(signal) //nolint:errcheck // it fails only if the child has ended

	timer := time.NewTimer(grace)
	defer timer.Stop()

	select {
	case <-p.done:
		return true
	case <-timer.C:
	}

	_ = p.cmd.Process.Kill() //nolint:errcheck // as above
	<-p.done

	return false
}

// logTail is the end of a log file: its last lines.
func logTail(path string, lines int) string {
	const bytesPerLine = 400

	file, err := os.Open(path)
	if err != nil {
		return fmt.Sprintf("(no log: %v)", err)
	}
	defer file.Close() //nolint:errcheck // only read

	info, err := file.Stat()
	if err != nil {
		return fmt.Sprintf("(no log: %v)", err)
	}

	size := min(info.Size(), int64(lines*bytesPerLine))

	content, err := io.ReadAll(io.NewSectionReader(file, info.Size()-size, size))
	if err != nil {
		return fmt.Sprintf("(no log: %v)", err)
	}

	all := strings.Split(strings.TrimRight(string(content), "\n"), "\n")

	return strings.Join(all[max(0, len(all)-lines):], "\n")
}
