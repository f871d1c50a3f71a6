package talos

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/client"
	clientconfig "github.com/siderolabs/talos/pkg/machinery/client/config"
	"google.golang.org/grpc"

	"github.com/talos-ccm/talos-ccm/test/netns"
)

const (
	// diskSize bounds what a machine may store: images, logs, etcd. It is memory.
	diskSize = "2g"
	// unusedNameserver refuses queries immediately. It is not a loopback address, where the host DNS of Talos listens.
	unusedNameserver = "10.77.0.1"
)

// LinkState says whether a machine's cable is plugged in.
type LinkState string

// The states of a cable.
const (
	LinkUp   LinkState = "up"
	LinkDown LinkState = "down"
)

// Machine is one Talos machine of a bed.
type Machine struct {
	name        string
	address     netip.Addr
	network     *netns.Namespace
	bridge      *bridge
	cgroup      cgroup
	console     *Console
	log         *os.File
	chassis     *chassis
	talosconfig *clientconfig.Config
	// base are the layers of the root file system below the extension's, topmost first.
	base []string
}

// machinePlan is what it takes to build a machine.
type machinePlan struct {
	name     string
	address  netip.Addr
	userData string
	// extension is the folder that Options.Extension describes.
	extension string
	// limits is how runc and Talos are helped where root lacks rights.
	limits limits
}

// limits of this machine's root, which a Talos machine does not have.
type limits struct {
	noOOMScore, noControllers bool
}

// Name is the machine's host name, and its Node's name.
func (m *Machine) Name() string { return m.name }

// Address is the machine's address on the bridge.
func (m *Machine) Address() netip.Addr { return m.address }

// Console is what the machine has printed since the bed was made.
func (m *Machine) Console() *Console { return m.console }

// Root is a path to the machine's root file system, as the machine sees it; it is valid until the machine is switched off.
func (m *Machine) Root() string {
	state, _ := m.chassis.state()

	return fmt.Sprintf("/proc/%d/root", state.pid)
}

// PowerOn switches the machine on and returns at once. A machine that is on stays on.
func (m *Machine) PowerOn(ctx context.Context) error {
	if err := m.chassis.command(ctx, "on", func(p power) bool { return p.pid != 0 }); err != nil {
		return m.named("switch on", err)
	}

	// The console may report the boot later than the chassis. Wait for it, so that callers do not read the output of the
	// previous boot.
	state, _ := m.chassis.state()

	return m.named("switch on", m.console.booted(ctx, state.boots))
}

// PowerOff switches the machine off without a shutdown. Its disk is kept: identity, configuration, etcd, images.
func (m *Machine) PowerOff(ctx context.Context) error {
	return m.named("switch off", m.chassis.command(ctx, "off", func(p power) bool { return p.pid == 0 }))
}

// PowerCycle switches the machine off without a shutdown, and on again.
func (m *Machine) PowerCycle(ctx context.Context) error {
	if err := m.PowerOff(ctx); err != nil {
		return err
	}

	return m.PowerOn(ctx)
}

// Shutdown ends Talos in order (services are stopped and get their SIGTERM) and returns when the machine is off. Talos in
// a container refuses the shutdown call of its API, so this is the power button.
func (m *Machine) Shutdown(ctx context.Context) error {
	return m.named("shut down", m.chassis.command(ctx, "shutdown", func(p power) bool { return p.pid == 0 }))
}

// Reboot shuts the machine down and switches it on again as soon as it is off. Addresses that were added to the machine's
// links stay. Talos in a container refuses the reboot call of its API, so the machine's stage is that of a shutdown.
func (m *Machine) Reboot(ctx context.Context) error {
	if err := m.Shutdown(ctx); err != nil {
		return err
	}

	return m.PowerOn(ctx)
}

// Reset calls the reset of the machine's API and returns when the machine is off. Talos in a container wipes nothing: see
// Wipe.
func (m *Machine) Reset(ctx context.Context) error {
	c, err := m.TalosClient(ctx)
	if err != nil {
		return err
	}
	defer c.Close() //nolint:errcheck // nothing is lost

	if err := c.Reset(ctx, false, false); err != nil {
		return m.named("reset", err)
	}

	return m.named("reset", m.chassis.wait(ctx, func(p power) bool { return p.pid == 0 }))
}

// Wipe switches the machine off and empties its disk: the next boot is a first one, with a new identity.
func (m *Machine) Wipe(ctx context.Context) error {
	if err := m.PowerOff(ctx); err != nil {
		return err
	}

	return m.named("wipe", os.RemoveAll(m.chassis.disk()))
}

// Install puts an extension, as Options.Extension describes it, in the place of the machine's, from its next boot on. That is what an upgrade does
// before it reboots; Talos in a container refuses the upgrade call of its API.
func (m *Machine) Install(extension string) error {
	layers, err := extensionLayers(extension, filepath.Dir(m.chassis.spec.Dir))
	if err != nil {
		return m.named("install extension", err)
	}

	return m.named("install extension", m.chassis.layer(append(layers, m.base...)))
}

// SetLink sets the bridge's end of the machine's veth pair up or down. The machine keeps its addresses but loses the
// carrier.
func (m *Machine) SetLink(ctx context.Context, state LinkState) error {
	return m.named("set link", m.bridge.IP(ctx, []string{"link", "set", port(m.name), string(state)}))
}

// AddAddress gives one of the machine's links another address, as a platform would. The machine's own link is eth0.
func (m *Machine) AddAddress(ctx context.Context, link string, prefix netip.Prefix) error {
	return m.named("add address", m.network.IP(ctx, []string{"address", "add", prefix.String(), "dev", link}))
}

// DelAddress takes an address away again.
func (m *Machine) DelAddress(ctx context.Context, link string, prefix netip.Prefix) error {
	return m.named("remove address", m.network.IP(ctx, []string{"address", "del", prefix.String(), "dev", link}))
}

// TalosClient connects to the machine's own apid, as admin. It works without the cable: the connection is made from within the
// machine's network namespace. The caller closes it.
func (m *Machine) TalosClient(ctx context.Context) (*client.Client, error) {
	c, err := client.New(ctx,
		client.WithConfig(m.talosconfig),
		client.WithEndpoints(m.address.String()),
		client.WithGRPCDialOptions(grpc.WithNoProxy(), grpc.WithContextDialer(func(ctx context.Context, address string) (net.Conn, error) {
			return m.network.Dial(ctx, "tcp", address)
		})),
	)
	if err != nil {
		return nil, m.named("connect to apid", err)
	}

	return c, nil
}

// DialContext connects from within the machine's own network, whose loopback is the machine's. Addresses are literals.
func (m *Machine) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	return m.network.Dial(ctx, network, address)
}

func (m *Machine) named(attempt string, err error) error {
	if err != nil {
		return fmt.Errorf("%s: machine %s: %w", attempt, m.name, err)
	}

	return nil
}

// close ends the machine and removes what it had.
func (m *Machine) close(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()

	var errs []error

	if m.chassis != nil {
		errs = append(errs, m.chassis.close(ctx))
	}

	if m.cgroup != "" {
		errs = append(errs, m.cgroup.remove(ctx))
	}

	if m.network != nil {
		errs = append(errs, m.network.Close())
	}

	if m.log != nil {
		errs = append(errs, m.log.Close())
	}

	return m.named("close", errors.Join(errs...))
}

// newMachine builds a machine that is switched off. What it made before an error is closed by the caller, with the machine.
func (b *Bed) newMachine(ctx context.Context, plan machinePlan) (*Machine, error) {
	m := &Machine{name: plan.name, address: plan.address, bridge: b.bridge, talosconfig: b.configs.talosconfig}
	b.machines = append(b.machines, m)

	if err := b.openConsole(m); err != nil {
		return nil, err
	}

	var err error

	if m.network, err = b.bridge.plug(ctx, plan.name, plan.address); err != nil {
		return nil, err
	}

	if m.cgroup, err = newCgroup(b.id + "-" + plan.name); err != nil {
		return nil, err
	}

	dir := filepath.Join(b.dir, plan.name)
	if err := os.Mkdir(dir, 0o755); err != nil {
		return nil, fmt.Errorf("make folder of machine: %w", err)
	}

	plan.limits.noControllers = m.cgroup.limited()
	m.base = b.baseLayers(plan.limits)

	layers, err := extensionLayers(plan.extension, b.dir)
	if err != nil {
		return nil, err
	}

	m.chassis, err = startChassis(b.chassisCommand(plan.limits), chassisSpec{
		Name:       plan.name,
		Dir:        dir,
		DiskSize:   diskSize,
		Layers:     append(layers, m.base...),
		Cgroup:     string(m.cgroup),
		Nameserver: unusedNameserver,
		UserData:   plan.userData,
	}, m.network, m.console)

	return m, err
}

func (b *Bed) openConsole(m *Machine) error {
	dir := b.options.LogDir
	if dir == "" {
		dir = b.dir
	}

	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("make folder for logs: %w", err)
	}

	var err error

	if m.log, err = os.Create(filepath.Join(dir, m.name+".console.log")); err != nil {
		return fmt.Errorf("make console log: %w", err)
	}

	m.console = newConsole(m.log)

	return nil
}

// chassisCommand runs the chassis below the shim that answers for OOM scores, where that is needed.
func (b *Bed) chassisCommand(l limits) []string {
	if l.noOOMScore {
		return []string{b.assets.tool("shims"), "oom", b.assets.tool("chassis")}
	}

	return []string{b.assets.tool("chassis")}
}

func (b *Bed) baseLayers(l limits) []string {
	if l.noOOMScore || l.noControllers {
		return []string{b.assets.limited(), b.assets.rootfs()}
	}

	return []string{b.assets.rootfs()}
}
