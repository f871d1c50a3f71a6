package main

import (
	"context"
	"fmt"
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

// ending is how a child is asked to end, and how long it may take.
type ending struct {
	signal syscall.Signal
	grace  time.Duration
}

// startProcess starts a command in a process group of its own, so that a Ctrl-C at the terminal reaches only this process, which then stops
// its children in order. When ctx ends the child gets a signal, and after grace it is killed. prepare completes the command.
func startProcess(ctx context.Context, end ending, prepare func(*exec.Cmd), name string, args ...string) (*process, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	// Its children are asked, too: go waits for the compilers and linkers that it has started, and a process that is killed before that leaves
	// them behind.
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, end.signal) }
	cmd.WaitDelay = end.grace
	prepare(cmd)

	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}

	p := &process{cmd: cmd, done: make(chan struct{})}
	started := make(chan error)

	go p.run(started)

	if err := <-started; err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
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

// killed tells whether a child that has ended was killed.
func (p *process) killed() bool {
	status, ok := p.cmd.ProcessState.Sys().(syscall.WaitStatus)

	return ok && status.Signaled() && status.Signal() == syscall.SIGKILL
}

// logTail is the end of a log file: its last lines.
func logTail(path string, lines int) string {
	content, err := os.ReadFile(path)
	if err != nil {
		return fmt.Sprintf("(no log: %v)", err)
	}

	all := strings.Split(strings.TrimRight(string(content), "\n"), "\n")

	return strings.Join(all[max(0, len(all)-lines):], "\n")
}
