package talos

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/talos-ccm/talos-ccm/test/netns"
)

// chassisSpec is the input of tools/chassis; it reads the layers at every boot.
type chassisSpec struct {
	Name       string   `json:"name"`
	Dir        string   `json:"dir"`
	DiskSize   string   `json:"diskSize"`
	Layers     []string `json:"layers"`
	Cgroup     string   `json:"cgroup"`
	Nameserver string   `json:"nameserver"`
	UserData   string   `json:"userData"`
}

// file is where the spec is written, beside the machine's folder: what is in there, only the chassis sees.
func (s chassisSpec) file() string { return filepath.Join(filepath.Dir(s.Dir), s.Name+".json") }

func (s chassisSpec) write() error {
	raw, err := json.Marshal(s)
	if err != nil {
		return fmt.Errorf("encode spec of machine %s: %w", s.Name, err)
	}

	if err := os.WriteFile(s.file(), raw, 0o600); err != nil {
		return fmt.Errorf("write spec of machine %s: %w", s.Name, err)
	}

	return nil
}

// power is what a chassis last said.
type power struct {
	// boots counts how often the machine was started.
	boots int
	// pid of the machine's init, or 0 while it is off.
	pid int
	// gone is true once the chassis itself has ended.
	gone bool
}

// chassis is the process that holds a machine (tools/chassis).
type chassis struct {
	spec     chassisSpec
	process  *exec.Cmd
	commands io.WriteCloser

	mu      sync.Mutex
	power   power
	changed chan struct{}
	// exit is the chassis's end; valid once power.gone.
	exit error
}

// startChassis runs a chassis in a network namespace. It dies with this process, whatever kills that.
func startChassis(argv []string, spec chassisSpec, ns *netns.Namespace, console *Console) (*chassis, error) {
	if err := spec.write(); err != nil {
		return nil, err
	}

	cmd := exec.Command(argv[0], append(argv[1:], spec.file())...)
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWNS,
		Pdeathsig:  syscall.SIGKILL,
		// Ctrl-C is for this process, which then switches the machines off.
		Setpgid: true,
	}

	pipes, err := newPipes(cmd)
	if err != nil {
		return nil, fmt.Errorf("start chassis of %s: %w", spec.Name, err)
	}

	c := &chassis{spec: spec, process: cmd, commands: pipes.in, changed: make(chan struct{})}
	started := make(chan error)

	go c.hold(ns, started, func() {
		var readers sync.WaitGroup

		readers.Go(func() { console.read(pipes.err) })
		readers.Go(func() { c.follow(pipes.out) })
		readers.Wait()
	})

	if err := <-started; err != nil {
		return nil, fmt.Errorf("start chassis of %s: %w", spec.Name, err)
	}

	return c, nil
}

type pipes struct {
	in       io.WriteCloser
	out, err io.ReadCloser
}

func newPipes(cmd *exec.Cmd) (p pipes, err error) {
	if p.in, err = cmd.StdinPipe(); err != nil {
		return p, err
	}

	if p.out, err = cmd.StdoutPipe(); err != nil {
		return p, err
	}

	p.err, err = cmd.StderrPipe()

	return p, err
}

// hold starts the process, reads what it says, and waits for its end, all on one thread: the process is killed when the thread
// that started it ends.
func (c *chassis) hold(ns *netns.Namespace, started chan<- error, read func()) {
	runtime.LockOSThread()

	err := ns.Enter()
	if err == nil {
		err = c.process.Start()
	}

	started <- err

	if err != nil {
		return
	}

	read()

	err = c.process.Wait()

	c.update(func(p *power) {
		*p = power{boots: p.boots, gone: true}
		c.exit = err
	})
}

// follow keeps the power state up to date with what the chassis tells.
func (c *chassis) follow(events io.Reader) {
	for scanner := bufio.NewScanner(events); scanner.Scan(); {
		verb, detail, _ := strings.Cut(scanner.Text(), " ")

		switch verb {
		case "on":
			pid, err := strconv.Atoi(detail)
			if err != nil {
				continue
			}

			c.update(func(p *power) { p.boots, p.pid = p.boots+1, pid })
		case "off":
			c.update(func(p *power) { p.pid = 0 })
		}
	}
}

func (c *chassis) update(change func(*power)) {
	c.mu.Lock()
	defer c.mu.Unlock()

	change(&c.power)
	close(c.changed)
	c.changed = make(chan struct{})
}

func (c *chassis) state() (power, <-chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()

	return c.power, c.changed
}

// command sends a line and waits until the power state is as wanted.
func (c *chassis) command(ctx context.Context, line string, wanted func(power) bool) error {
	if _, err := io.WriteString(c.commands, line+"\n"); err != nil {
		return fmt.Errorf("command %q: %w", line, err)
	}

	return c.wait(ctx, wanted)
}

func (c *chassis) wait(ctx context.Context, wanted func(power) bool) error {
	for {
		state, changed := c.state()
		if wanted(state) {
			return nil
		}

		if state.gone {
			return fmt.Errorf("the chassis has ended: %w", c.exit)
		}

		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("wait for power state: %w", context.Cause(ctx))
		}
	}
}

// layer changes what the root file system is made of, from the next boot on.
func (c *chassis) layer(layers []string) error {
	c.spec.Layers = layers

	return c.spec.write()
}

// disk is a path to what the machine has stored, in the mount namespace of the chassis.
func (c *chassis) disk() string {
	return filepath.Join(fmt.Sprintf("/proc/%d/root", c.process.Process.Pid), c.spec.Dir, "disk")
}

// close switches the machine off and ends the chassis.
func (c *chassis) close(ctx context.Context) error {
	// Where the chassis has ended on its own, the pipe is closed already.
	if err := c.commands.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
		return fmt.Errorf("end chassis: %w", err)
	}

	return c.wait(ctx, func(p power) bool { return p.gone })
}
