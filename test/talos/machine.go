package talos

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"

	"github.com/siderolabs/talos/pkg/machinery/client"
	"github.com/siderolabs/talos/pkg/machinery/config/encoder"
	"github.com/siderolabs/talos/pkg/machinery/config/machine"
	"github.com/siderolabs/talos/pkg/machinery/constants"
	"github.com/siderolabs/talos/pkg/machinery/extensions"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	"github.com/talos-ccm/talos-ccm/test/netns"
)

const (
	// diskSize bounds what a machine may store: images, logs, etcd. It is memory.
	diskSize = "2g"
	// extensionImage is what Talos's imager calls the file system of the first extension. The name is that of its
	// ExtensionStatus, too.
	extensionImage = "0.sqsh"
)

// Machine is one Talos machine of a bed.
type Machine struct {
	name    string
	address netip.Addr
	bed     *Bed
	network *netns.Namespace
	cgroup  cgroup
	console *console
	thread  thread
	boot    bootSpec
	// init is the first process of the current or the last boot, and ended is closed when it has ended.
	init  *os.Process
	ended chan struct{}
}

// bootSpec is the input of the shim that becomes a machine. Its disk is mounted at Dir; only the machine and its thread
// see that. The layers of the root file system are named topmost first.
type bootSpec struct {
	Name, Dir, UserData string
	Layers              []string
}

// thread is an OS thread in a machine's network namespace, and a mount namespace with its disk. Pdeathsig kills the
// machine when the thread ends, even if this process is killed.
type thread chan func()

func (t thread) serve() {
	runtime.LockOSThread() // and never unlock: that ends the thread

	for do := range t {
		do()
	}
}

func (t thread) run(do func() error) error {
	result := make(chan error)
	t <- func() { result <- do() }

	return <-result
}

// newMachine builds a machine that is switched off. Bed.Down closes it.
func (b *Bed) newMachine(ctx context.Context, name string, address netip.Addr, kind machine.Type) (*Machine, error) {
	m := &Machine{name: name, address: address, bed: b, thread: make(thread)}

	config, err := b.configs.Serialize(encoder.CommentsDisabled, kind)
	if err != nil {
		return nil, m.wrap("encode configuration", err)
	}

	m.boot = bootSpec{Name: name, Dir: filepath.Join(b.dir, name), UserData: base64.StdEncoding.EncodeToString(config)}

	log, err := os.Create(filepath.Join(b.options.LogDir, name+".console.log"))
	if err != nil {
		return nil, m.wrap("create console log", err)
	}

	b.cleanup(log.Close)

	m.console = &console{log: log}

	if m.network, err = b.plug(ctx, name, address); err != nil {
		return nil, m.wrap("plug in", err)
	}

	if m.cgroup, err = cgroupOf(b.ID(), name); err != nil {
		return nil, err
	}

	b.cleanup(m.cgroup.remove)

	go m.thread.serve()

	b.cleanup(func() error {
		close(m.thread)

		return nil
	})

	if err := errors.Join(m.Install(b.options.Extension), os.Mkdir(m.boot.Dir, 0o755), m.thread.run(m.mountDisk)); err != nil {
		return nil, m.wrap("build", err)
	}

	return m, nil
}

// mountDisk mounts the file system that outlives the machine's boots.
func (m *Machine) mountDisk() error {
	if err := errors.Join(m.network.Enter(), unix.Unshare(unix.CLONE_NEWNS)); err != nil {
		return err
	}

	// Otherwise the disk might be mounted for all processes.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}

	return unix.Mount("tmpfs", m.boot.Dir, "tmpfs", 0, "mode=0755,size="+diskSize)
}

// Name returns the machine's host name, and its Node's name.
func (m *Machine) Name() string { return m.name }

// Address returns the machine's address on the bridge.
func (m *Machine) Address() netip.Addr { return m.address }

// Root returns a path to the machine's root file system, as the machine sees it; it is valid until the machine is
// switched off.
func (m *Machine) Root() string { return fmt.Sprintf("/proc/%d/root", m.init.Pid) }

// PowerOn switches on a machine that is off, and does not wait for the boot.
func (m *Machine) PowerOn() error {
	group, err := m.cgroup.renew()
	if err != nil {
		return m.wrap("switch on", err)
	}
	defer group.Close() //nolint:errcheck // a directory

	spec, err := json.Marshal(m.boot)
	if err != nil {
		return m.wrap("switch on", err)
	}

	cmd := exec.Command(m.bed.assets.shims(), "machine")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(spec), m.console, m.console
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC | unix.CLONE_NEWPID,
		// Unshare after the process is in its cgroup, so that this is the root of the namespace.
		Unshareflags: unix.CLONE_NEWCGROUP,
		Pdeathsig:    syscall.SIGKILL,
		UseCgroupFD:  true,
		CgroupFD:     int(group.Fd()),
		// Ctrl-C is for this process, which then switches the machines off.
		Setsid: true,
	}

	m.console.powerOn()

	if err := m.thread.run(cmd.Start); err != nil {
		return m.wrap("switch on", err)
	}

	ended := make(chan struct{})
	m.init, m.ended = cmd.Process, ended

	go func() {
		defer close(ended)

		cmd.Wait() //nolint:errcheck // it is killed, or calls reboot(2)
	}()

	return nil
}

// signalAndWait sends a signal to the first process, and waits until all have ended. The machine may be off.
func (m *Machine) signalAndWait(ctx context.Context, signal os.Signal) error {
	if m.init == nil {
		return nil
	}

	if err := m.init.Signal(signal); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}

	return m.awaitOff(ctx)
}

func (m *Machine) awaitOff(ctx context.Context) error {
	select {
	case <-m.ended:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait until it is off: %w", context.Cause(ctx))
	}
}

// PowerOff switches the machine off without a shutdown. Its disk is kept: identity, configuration, etcd, images.
func (m *Machine) PowerOff(ctx context.Context) error {
	return m.wrap("switch off", m.signalAndWait(ctx, syscall.SIGKILL))
}

// PowerCycle switches the machine off without a shutdown, and on again.
func (m *Machine) PowerCycle(ctx context.Context) error {
	if err := m.PowerOff(ctx); err != nil {
		return err
	}

	return m.PowerOn()
}

// Shutdown ends Talos in order (services are stopped and get their SIGTERM) and returns when the machine is off. Talos
// in a container refuses the shutdown call of its API, so this is the power button.
func (m *Machine) Shutdown(ctx context.Context) error {
	return m.wrap("shut down", m.signalAndWait(ctx, syscall.SIGTERM))
}

// Reboot shuts the machine down and switches it on again as soon as it is off. Addresses that were added to the
// machine's links stay. Talos in a container refuses the reboot call of its API, so the machine's stage is that of a
// shutdown.
func (m *Machine) Reboot(ctx context.Context) error {
	if err := m.Shutdown(ctx); err != nil {
		return err
	}

	return m.PowerOn()
}

// Reset calls the reset of the machine's API and returns when the machine is off. Talos in a container wipes nothing:
// see Wipe.
func (m *Machine) Reset(ctx context.Context) error {
	c, err := m.TalosClient(ctx)
	if err != nil {
		return err
	}
	defer c.Close() //nolint:errcheck // nothing is lost

	if err := c.Reset(ctx, false, false); err != nil {
		return m.wrap("reset", err)
	}

	return m.wrap("reset", m.awaitOff(ctx))
}

// Wipe switches the machine off and empties its disk: the next boot is a first one, with a new identity.
func (m *Machine) Wipe(ctx context.Context) error {
	if err := m.PowerOff(ctx); err != nil {
		return err
	}

	return m.wrap("wipe", m.thread.run(func() error { return os.RemoveAll(filepath.Join(m.boot.Dir, "disk")) }))
}

// Install replaces the machine's extension from the next boot on, as an upgrade does before it reboots; in a container,
// Talos rejects upgrades through its API. The directory extension is as in Options. It also adds the list of
// extensions, as Talos's imager does, and the files that a container engine provides: Talos 1.14 mounts an overlay over
// /etc, which hides bind mounts there.
func (m *Machine) Install(extension string) error {
	loaded, err := extensions.Load(extension)
	if err != nil {
		return m.wrap("load extension", err)
	}

	etc, err := os.MkdirTemp(m.bed.dir, "etc-")
	if err != nil {
		return m.wrap("install extension", err)
	}

	list := filepath.Join(etc, constants.ExtensionsRuntimeConfigFile)
	installed := extensions.Config{Layers: []*extensions.Layer{{Image: extensionImage, Metadata: loaded.Manifest.Metadata}}}
	provided := tree{files: map[string]string{
		"etc/hostname": m.name + "\n",
		"etc/hosts":    "127.0.0.1 localhost\n",
		// The bridge refuses DNS queries immediately. On a loopback address, Talos's host DNS would answer.
		"etc/resolv.conf": "nameserver " + bridgeAddress.String() + "\n",
	}}

	m.boot.Layers = []string{etc, loaded.RootfsPath(), m.bed.assets.rootfs()}

	// The top layer also sets the mode of the root directory.
	return m.wrap("install extension", errors.Join(os.Chmod(etc, 0o755), provided.write(etc), installed.Write(list)))
}

// SetLink sets the bridge's end of the machine's veth pair "up" or "down". The machine keeps its addresses but loses
// the carrier.
func (m *Machine) SetLink(ctx context.Context, state string) error {
	return m.wrap("set link", m.bed.bridge.IP(ctx, "link set "+port(m.name)+" "+state))
}

// AddAddress gives the machine another address, as a platform would.
func (m *Machine) AddAddress(ctx context.Context, prefix netip.Prefix) error {
	return m.wrap("add address", m.network.IP(ctx, "address add "+prefix.String()+" dev "+netns.Link))
}

// RemoveAddress removes an address.
func (m *Machine) RemoveAddress(ctx context.Context, prefix netip.Prefix) error {
	return m.wrap("remove address", m.network.IP(ctx, "address del "+prefix.String()+" dev "+netns.Link))
}

// TalosClient connects to the machine's own apid, as admin. It works while the link is down, because it dials from the
// machine's network namespace. The caller closes it.
func (m *Machine) TalosClient(ctx context.Context) (*client.Client, error) {
	c, err := client.New(ctx,
		client.WithConfig(m.bed.configs.TalosConfig()),
		client.WithEndpoints(m.address.String()),
		client.WithGRPCDialOptions(grpc.WithNoProxy(), grpc.WithContextDialer(func(ctx context.Context, address string) (net.Conn, error) {
			return m.network.Dial(ctx, "tcp", address)
		})),
	)

	return c, m.wrap("connect to apid", err)
}

// DialContext connects from within the machine's own network, whose loopback is the machine's. Addresses are literals.
func (m *Machine) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	return m.network.Dial(ctx, network, address)
}

func (m *Machine) wrap(attempt string, err error) error {
	if err != nil {
		return fmt.Errorf("%s: machine %s: %w", attempt, m.name, err)
	}

	return nil
}
