// Command chassis is the metal of one Talos machine of the test bed: it holds what a machine keeps when it is switched off (its
// disk), and starts and stops the machine itself, a Talos in container mode that is PID 1 of its own namespaces.
//
// Standard input takes one command per line: "on", "off" (the plug is pulled) and "shutdown" (the power button: Talos is asked to
// end in order). Standard output tells what became of it: "on PID", with the PID of
// the machine's init as seen from here, and "off REASON" (off, reboot, halt or crash). A machine that reboots itself is switched
// on again, as metal would. When standard input ends, the machine is switched off and the chassis exits; when the chassis is
// killed, the kernel kills the machine. Standard error is the machine's console; the chassis marks there where a boot begins.
//
// It never touches mounts, sysctls or the host name of the machine that it runs on: it expects a mount namespace of its own.
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// initFlag makes this program the first process of a machine, which turns into Talos's init.
const initFlag = "-init"

// powerOnMarker begins every boot on the console.
const powerOnMarker = "chassis: power on"

// Spec describes one machine. The test bed writes it as JSON.
type Spec struct {
	// Name is the machine's host name until Talos sets its own.
	Name string `json:"name"`
	// Dir is an empty folder of this machine; a file system in memory is mounted there.
	Dir string `json:"dir"`
	// DiskSize bounds that file system, as the size option of tmpfs.
	DiskSize string `json:"diskSize"`
	// Layers are the folders that make up the root file system, topmost first; at least two.
	Layers []string `json:"layers"`
	// Cgroup is the machine's cgroup v2 folder.
	Cgroup string `json:"cgroup"`
	// Nameserver goes into resolv.conf.
	Nameserver string `json:"nameserver"`
	// UserData is the machine configuration, in base64.
	UserData string `json:"userData"`
}

func init() {
	// Mount namespaces and parent death signals belong to a thread: everything here happens on the first one.
	runtime.LockOSThread()
}

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "chassis:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) == 2 && args[0] == initFlag {
		spec, err := load(args[1])
		if err != nil {
			return err
		}

		return boot(spec)
	}

	if len(args) != 1 {
		return errors.New("usage: chassis SPEC")
	}

	spec, err := load(args[0])
	if err != nil {
		return err
	}

	if err := insertDisk(spec); err != nil {
		return err
	}

	return (&chassis{spec: spec, path: args[0], events: os.Stdout}).serve(lines(os.Stdin))
}

func load(path string) (Spec, error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return Spec{}, fmt.Errorf("read machine spec: %w", err)
	}

	var spec Spec
	if err := json.Unmarshal(raw, &spec); err != nil {
		return Spec{}, fmt.Errorf("decode machine spec %s: %w", path, err)
	}

	return spec, nil
}

// insertDisk mounts the file system that outlives the machine's boots.
func insertDisk(spec Spec) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}

	if err := unix.Mount("tmpfs", spec.Dir, "tmpfs", 0, "mode=0755,size="+spec.DiskSize); err != nil {
		return fmt.Errorf("mount disk of %s: %w", spec.Name, err)
	}

	return nil
}

func lines(input io.Reader) <-chan string {
	out := make(chan string)

	go func() {
		defer close(out)

		for scanner := bufio.NewScanner(input); scanner.Scan(); {
			out <- strings.TrimSpace(scanner.Text())
		}
	}()

	return out
}

type chassis struct {
	spec   Spec
	path   string
	events io.Writer

	machine *exec.Cmd
	ended   chan string
}

// serve obeys commands until there are no more.
func (c *chassis) serve(commands <-chan string) error {
	for {
		select {
		case command, ok := <-commands:
			if !ok {
				return c.off()
			}

			if err := c.obey(command); err != nil {
				return err
			}
		case reason := <-c.ended:
			c.machine, c.ended = nil, nil
			c.tell("off " + reason)

			if reason == "reboot" {
				if err := c.on(); err != nil {
					return err
				}
			}
		}
	}
}

func (c *chassis) obey(command string) error {
	switch command {
	case "on":
		return c.on()
	case "off":
		return c.off()
	case "shutdown":
		return c.shutdown()
	default:
		return fmt.Errorf("unknown command %q", command)
	}
}

func (c *chassis) tell(event string) { fmt.Fprintln(c.events, event) }

func (c *chassis) on() error {
	if c.machine != nil {
		return nil
	}

	cgroup, err := freshCgroup(c.spec.Cgroup)
	if err != nil {
		return fmt.Errorf("renew cgroup of %s: %w", c.spec.Name, err)
	}
	defer cgroup.Close() //nolint:errcheck // a folder

	cmd := exec.Command("/proc/self/exe", initFlag, c.path)
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  unix.CLONE_NEWNS | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC | unix.CLONE_NEWPID,
		Pdeathsig:   syscall.SIGKILL,
		UseCgroupFD: true,
		CgroupFD:    int(cgroup.Fd()),
		Setsid:      true,
	}

	// On the console, to separate one boot from the next.
	fmt.Fprintln(os.Stderr, powerOnMarker)

	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start machine %s: %w", c.spec.Name, err)
	}

	ended := make(chan string, 1)
	c.machine, c.ended = cmd, ended

	go func() { ended <- reason(cmd.Wait()) }()

	c.tell(fmt.Sprintf("on %d", cmd.Process.Pid))

	return nil
}

// freshCgroup replaces the cgroup that the last boot left: Talos hands its controllers down, and the kernel starts no process in
// a cgroup that has done so.
func freshCgroup(dir string) (*os.File, error) {
	var dirs []string

	if err := filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err == nil && entry.IsDir() {
			dirs = append(dirs, path)
		}

		return err
	}); err != nil {
		return nil, err
	}

	for _, left := range slices.Backward(dirs) {
		if err := os.Remove(left); err != nil {
			return nil, err
		}
	}

	if err := os.Mkdir(dir, 0o755); err != nil {
		return nil, err
	}

	return os.Open(dir)
}

// off pulls the plug: the kernel kills everything that runs on the machine, and off returns when all is gone.
func (c *chassis) off() error {
	if c.machine == nil {
		return nil
	}

	if err := c.machine.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("kill machine %s: %w", c.spec.Name, err)
	}

	<-c.ended
	c.machine, c.ended = nil, nil
	c.tell("off off")

	return nil
}

// shutdown asks Talos to end, and does not wait for it.
func (c *chassis) shutdown() error {
	if c.machine == nil {
		return nil
	}

	if err := c.machine.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("shut down machine %s: %w", c.spec.Name, err)
	}

	return nil
}

// reason tells why an init ended. Where init calls reboot(2) in a PID namespace, the kernel ends it with SIGHUP for a restart
// and SIGINT for a halt (pid_namespaces(7)).
func reason(err error) string {
	var exit *exec.ExitError
	if !errors.As(err, &exit) {
		return "crash"
	}

	status, ok := exit.Sys().(syscall.WaitStatus)

	switch {
	case ok && status.Signaled() && status.Signal() == syscall.SIGHUP:
		return "reboot"
	case ok && status.Signaled() && status.Signal() == syscall.SIGINT:
		return "halt"
	default:
		return "crash"
	}
}
