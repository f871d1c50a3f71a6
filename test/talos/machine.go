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
	"strings"
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
	// diskSize is the size of a machine's disk, which is in memory. The disk contains images, logs and etcd.
	diskSize = "2g"
	// extensionImage is the file name that Talos's imager gives to the first extension. Talos reports it in ExtensionStatus.
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
	// init is PID 1 of the current or the last boot. ended is closed when init has ended.
	init  *os.Process
	ended chan struct{}
}

// bootSpec is the input of the machine shim. The disk is mounted at Dir, in the mount namespaces of the machine and its
// thread. Layers are the directories of the root file system, topmost first.
type bootSpec struct {
	Name, Dir, UserData, Platform, Serial string
	Layers                                []string
}

// thread is an OS thread in a machine's network namespace and in a mount namespace with its disk. Pdeathsig kills the
// machine when the thread ends, even if this process is killed.
type thread chan func()

func (t thread) serve() {
	runtime.LockOSThread() // without unlocking, so that the thread ends with the goroutine

	for do := range t {
		do()
	}
}

func (t thread) run(do func() error) error {
	result := make(chan error)
	t <- func() { result <- do() }

	return <-result
}

// newMachine creates a machine that is switched off. Down removes it.
func (b *Bed) newMachine(ctx context.Context, name string, address netip.Addr, kind machine.Type) (*Machine, error) {
	m := &Machine{name: name, address: address, bed: b, thread: make(thread)}

	config, err := b.configs.Serialize(encoder.CommentsDisabled, kind)
	if err != nil {
		return nil, m.wrap("encode configuration", err)
	}

	m.boot = bootSpec{Name: name, Dir: filepath.Join(b.dir, name), Platform: "container", UserData: base64.StdEncoding.EncodeToString(config)}

	log, err := os.Create(filepath.Join(b.options.LogDir, name+".console.log"))
	if err != nil {
		return nil, m.wrap("create console log", err)
	}

	b.cleanup(log.Close)

	m.console = &console{log: log}

	if m.network, err = b.plug(ctx, name, address); err != nil {
		return nil, m.wrap("connect to bridge", err)
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
		return nil, m.wrap("create", err)
	}

	b.cleanup(func() error { return m.PowerOff(context.Background()) })

	return m, nil
}

// mountDisk mounts the machine's disk, which survives reboots, in a new mount namespace of the calling thread.
func (m *Machine) mountDisk() error {
	if err := errors.Join(m.network.Enter(), unix.Unshare(unix.CLONE_NEWNS)); err != nil {
		return err
	}

	// Do not propagate the mount to other namespaces.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}

	return unix.Mount("tmpfs", m.boot.Dir, "tmpfs", 0, "mode=0755,size="+diskSize)
}

// Name returns the machine's host name, which is also the name of its Node.
func (m *Machine) Name() string { return m.name }

// Address returns the machine's address on the bridge.
func (m *Machine) Address() netip.Addr { return m.address }

// Root returns a path to the machine's root file system, which is valid until the machine is switched off.
func (m *Machine) Root() string { return fmt.Sprintf("/proc/%d/root", m.init.Pid) }

// Console returns the output of the current boot. If the machine is off, Console returns the output of the last boot.
func (m *Machine) Console() string {
	var output strings.Builder

	for _, line := range m.console.after(m.console.boot) {
		fmt.Fprintln(&output, line)
	}

	return output.String()
}

// PowerOn switches the machine on and does not wait for the boot. The machine must be off.
func (m *Machine) PowerOn() error {
	group, err := m.cgroup.recreate()
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
		// Unshare when the process is in its cgroup, which becomes the root of the namespace.
		Unshareflags: unix.CLONE_NEWCGROUP,
		Pdeathsig:    syscall.SIGKILL,
		UseCgroupFD:  true,
		CgroupFD:     int(group.Fd()),
		// Send Ctrl-C only to this process, which then switches the machines off.
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

// signalAndWait sends a signal to the machine's init, and waits until the machine is off. The machine may already be off.
func (m *Machine) signalAndWait(ctx context.Context, signal os.Signal) error {
	if m.init == nil {
		return nil
	}

	if err := m.init.Signal(signal); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}

	return m.awaitOff(ctx)
}

// awaitOff waits until the machine is off, and removes the virtual address, which another machine gets.
func (m *Machine) awaitOff(ctx context.Context) error {
	select {
	case <-m.ended:
		return m.network.IP(ctx, "address flush dev "+netns.Link+" to "+virtualAddress.String())
	case <-ctx.Done():
		return fmt.Errorf("wait until the machine is off: %w", context.Cause(ctx))
	}
}

// PowerOff switches the machine off without a shutdown. It keeps the disk with identity, configuration, etcd and images.
func (m *Machine) PowerOff(ctx context.Context) error {
	return m.wrap("switch off", m.signalAndWait(ctx, syscall.SIGKILL))
}

// PowerCycle switches the machine off, without a shutdown, and on again.
func (m *Machine) PowerCycle(ctx context.Context) error {
	if err := m.PowerOff(ctx); err != nil {
		return err
	}

	return m.PowerOn()
}

// Shutdown shuts the machine down gracefully, and returns when it is off. Talos stops its services with SIGTERM. Shutdown
// sends a signal, because Talos in a container rejects the Shutdown call of its API.
func (m *Machine) Shutdown(ctx context.Context) error {
	return m.wrap("shut down", m.signalAndWait(ctx, syscall.SIGTERM))
}

// Reboot shuts the machine down and switches it on again. The machine keeps addresses from AddAddress. Its stage is that
// of a shutdown, because Talos in a container rejects the Reboot call of its API.
func (m *Machine) Reboot(ctx context.Context) error {
	if err := m.Shutdown(ctx); err != nil {
		return err
	}

	return m.PowerOn()
}

// Reset calls Reset of the machine's API and returns when the machine is off. Talos in a container does not wipe the disk:
// use Wipe.
func (m *Machine) Reset(ctx context.Context) error {
	c, err := m.TalosClient(ctx)
	if err != nil {
		return err
	}
	defer c.Close() //nolint:errcheck // all calls have ended

	if err := c.Reset(ctx, false, false); err != nil {
		return m.wrap("reset", err)
	}

	return m.wrap("reset", m.awaitOff(ctx))
}

// Wipe switches the machine off and wipes its disk. The next boot installs the machine with a new identity.
func (m *Machine) Wipe(ctx context.Context) error {
	if err := m.PowerOff(ctx); err != nil {
		return err
	}

	return m.wrap("wipe", m.thread.run(func() error { return os.RemoveAll(filepath.Join(m.boot.Dir, "disk")) }))
}

// Install sets the machine's extension for the next boot, as an upgrade does; Talos in a container rejects upgrades through
// its API. The format of the directory is that of Options.Extension. Install also writes criConfig and, as Talos's imager
// does, the list of extensions. A container engine would provide the other files with bind mounts, which the /etc overlay of
// Talos 1.14 hides.
func (m *Machine) Install(extension string) error {
	etc, err := os.MkdirTemp(m.bed.dir, "etc-")
	if err != nil {
		return m.wrap("install extension", err)
	}

	provided := tree{files: map[string]string{
		"etc/cri/conf.d/10-cgroups.part": criConfig,
		"etc/hostname":                   m.name + "\n",
		"etc/hosts":                      "127.0.0.1 localhost\n",
		// The bridge rejects DNS queries immediately. On a loopback address, Talos's host DNS would respond.
		"etc/resolv.conf": "nameserver " + bridgeAddress.String() + "\n",
	}}

	// The top layer also sets the mode of the root directory.
	if err := errors.Join(os.Chmod(etc, 0o755), provided.write(etc)); err != nil {
		return m.wrap("install extension", err)
	}

	m.boot.Layers = []string{etc, m.bed.assets.rootfs()}

	if extension == "" {
		return nil
	}

	loaded, err := extensions.Load(extension)
	if err != nil {
		return m.wrap("load extension", err)
	}

	m.boot.Layers = []string{etc, loaded.RootfsPath(), m.bed.assets.rootfs()}
	installed := extensions.Config{Layers: []*extensions.Layer{{Image: extensionImage, Metadata: loaded.Manifest.Metadata}}}

	return m.wrap("install extension", installed.Write(filepath.Join(etc, constants.ExtensionsRuntimeConfigFile)))
}

// SetLink sets the bridge's end of the machine's veth pair "up" or "down". While it is down, the machine keeps its
// addresses and has no carrier.
func (m *Machine) SetLink(ctx context.Context, state string) error {
	return m.wrap("set link", m.bed.bridge.IP(ctx, "link set "+port(m.name)+" "+state))
}

// AddAddress adds an address to the machine's interface.
func (m *Machine) AddAddress(ctx context.Context, prefix netip.Prefix) error {
	return m.wrap("add address", m.network.IP(ctx, "address add "+prefix.String()+" dev "+netns.Link))
}

// RemoveAddress removes an address from the machine's interface.
func (m *Machine) RemoveAddress(ctx context.Context, prefix netip.Prefix) error {
	return m.wrap("remove address", m.network.IP(ctx, "address del "+prefix.String()+" dev "+netns.Link))
}

// TalosClient returns an admin client for the machine's apid. It connects from the machine's network namespace, and works
// while the link is down. The caller must close it.
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

// DialContext connects from the machine's network namespace, which has the machine's loopback interface. The address must
// be an IP address and a port.
func (m *Machine) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	return m.network.Dial(ctx, network, address)
}

func (m *Machine) wrap(attempt string, err error) error {
	if err != nil {
		return fmt.Errorf("%s: machine %s: %w", attempt, m.name, err)
	}

	return nil
}
