package main

import (
	"context"
	"fmt"
	"io"
	"net/netip"
	"net/rpc"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cosi-project/runtime/pkg/resource"
	talosmachine "github.com/siderolabs/talos/pkg/machinery/config/machine"
	"github.com/siderolabs/talos/pkg/machinery/nethelpers"
	"github.com/siderolabs/talos/pkg/machinery/resources/network"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/siderolabs/talos/pkg/machinery/role"

	"github.com/talos-ccm/talos-ccm/extension"
	"github.com/talos-ccm/talos-ccm/pkg/settings"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
)

// controlPlanes is how many machines of a fleet belong to the control plane. They come first.
const controlPlanes = 2

// Machine is a simulated machine, as the process of the benchmark sees it.
type Machine struct {
	Nodename string
	// Address is where apid listens. It is the IPv4 node IP; no CSR may contain it, because it is a loopback address.
	Address netip.Addr
	// Private is the IPv6 node IP.
	Private netip.Addr
	Socket  string // machine.sock of a control-plane machine
}

func (m Machine) nodeIPs() []netip.Addr { return []netip.Addr{m.Address, m.Private} }

// The platform of all machines.
const region, zone, instanceType = "region-1", "zone-1", "large"

func (m Machine) providerID() string { return "aws:///" + zone + "/" + m.Nodename }

// Plan describes a fleet.
type Plan struct {
	Machines   int
	Kubeconfig []byte // on control-plane machines
}

// Started is the reply to a Plan.
type Started struct {
	Machines    []Machine
	Talosconfig []byte // with the role os:reader
}

// Fleet is the RPC server of the process that simulates the machines.
type Fleet struct {
	cluster *talostest.Cluster
	clock   *shiftedClock
	public  sync.Map // address of a machine that an order has set, by nodename
}

// Order changes machines.
type Order struct {
	Action    string // see Fleet.act
	Nodenames []string

	Public     map[string]netip.Addr // by nodename
	Kubeconfig []byte
}

const (
	// absurd and sane are actions.
	absurd, sane = "become absurd", "become sane"
	// An absurd machine has so many addresses, and so many bytes of a tag.
	absurdAddresses, absurdTag = 10_000, 1 << 20
)

func (f *Fleet) act(ctx context.Context, m *talostest.Machine, order Order) error {
	switch order.Action {
	case "stop":
		return m.Stop(ctx)
	case "start":
		m.Start()
	case "reboot":
		return m.Reboot(ctx)
	case "black-hole":
		return m.BlackHole()
	case "reconnect":
		m.Reconnect()
	case "break connections":
		m.BreakConnections()
	case "set kubeconfig":
		return m.SetLocalhostAdminKubeconfig(ctx, order.Kubeconfig)
	case "add public address":
		return m.AddAddress(ctx, talostest.LinkExternal, host(order.Public[m.Nodename()]))
	case "set public address":
		return f.setPublic(ctx, m, order.Public[m.Nodename()])
	case absurd, sane:
		return setAbsurdity(ctx, m, order.Action)
	default:
		return fmt.Errorf("unknown action %q", order.Action)
	}

	return nil
}

// setPublic replaces the public address that an order has set.
func (f *Fleet) setPublic(ctx context.Context, m *talostest.Machine, addr netip.Addr) error {
	if old, known := f.public.Swap(m.Nodename(), addr); known {
		former, _ := old.(netip.Addr)
		if err := m.RemoveAddress(ctx, talostest.LinkExternal, host(former)); err != nil {
			return err
		}
	}

	return m.AddAddress(ctx, talostest.LinkExternal, host(addr))
}

// setAbsurdity makes a machine absurd or sane.
func setAbsurdity(ctx context.Context, m *talostest.Machine, action string) error {
	change := func(r resource.Resource) error { return m.State().Destroy(ctx, r.Metadata()) }

	var tags map[string]string

	if action == absurd {
		change = func(r resource.Resource) error { return m.State().Create(ctx, r) }
		tags = map[string]string{"absurd": strings.Repeat("x", absurdTag)}
	}

	for i := range absurdAddresses {
		if err := change(absurdAddress(i)); err != nil {
			return err
		}
	}

	return m.UpdatePlatform(ctx, func(spec *runtime.PlatformMetadataSpec) { spec.Tags = tags })
}

func absurdAddress(i int) *network.AddressStatus {
	prefix := host(netip.AddrFrom4([4]byte{10, 48, byte(i / 250), byte(i%250 + 1)}))
	status := network.NewAddressStatus(network.NamespaceName, network.AddressID("eth1", prefix))
	status.TypedSpec().Address, status.TypedSpec().LinkName, status.TypedSpec().Family = prefix, "eth1", nethelpers.FamilyInet4

	return status
}

func host(addr netip.Addr) netip.Prefix { return netip.PrefixFrom(addr, addr.BitLen()) }

// Do executes an order on all of its machines at once, and returns when each of them began to change, by nodename.
func (f *Fleet) Do(order Order, began *map[string]time.Time) error {
	var mu sync.Mutex

	*began = make(map[string]time.Time)

	return inParallel(order.Nodenames, func(nodename string) error {
		mu.Lock()
		(*began)[nodename] = time.Now()
		mu.Unlock()

		return f.act(context.Background(), f.cluster.Machine(nodename), order)
	})
}

// RotateCA replaces the Talos CA.
func (f *Fleet) RotateCA(old talostest.OldCA, _ *struct{}) error {
	return f.cluster.RotateCA(context.Background(), old)
}

// ShiftClock sets the difference between the clock of all machines and the real time.
func (f *Fleet) ShiftClock(shift time.Duration, _ *struct{}) error { //nolint:unparam // net/rpc requires the error
	f.clock.shift.Store(int64(shift))

	return nil
}

// shiftedClock is wrong by a duration.
type shiftedClock struct{ shift atomic.Int64 }

// Now implements clock.PassiveClock.
func (c *shiftedClock) Now() time.Time { return time.Now().Add(time.Duration(c.shift.Load())) }

// Since implements clock.PassiveClock.
func (c *shiftedClock) Since(t time.Time) time.Duration { return c.Now().Sub(t) }

// Start boots the machines.
func (f *Fleet) Start(plan Plan, reply *Started) error {
	for i := range plan.Machines {
		m, err := f.boot(i, plan.Kubeconfig)
		if err != nil {
			return err
		}

		reply.Machines = append(reply.Machines, m)
	}

	var members []netip.Addr
	for _, m := range reply.Machines[:controlPlanes] {
		members = append(members, m.Address)
	}

	f.cluster.SetEtcdMembers(members...)

	config, err := f.cluster.Talosconfig(string(role.Reader))
	if err != nil {
		return err
	}

	reply.Talosconfig, err = config.Bytes()

	return err
}

func (f *Fleet) boot(i int, kubeconfig []byte) (Machine, error) {
	m := Machine{Nodename: fmt.Sprintf("m-%05d", i), Private: netip.MustParseAddr(fmt.Sprintf("fd00:20::%x", i+1))}
	spec := talostest.MachineSpec{
		Nodename:  m.Nodename,
		Addresses: []talostest.Address{{Link: "eth0", Prefix: host(m.Private)}},
		Platform: runtime.PlatformMetadataSpec{
			Platform: "aws", Hostname: m.Nodename, Region: region, Zone: zone, InstanceType: instanceType,
			InstanceID: m.Nodename, ProviderID: m.providerID(),
		},
	}

	if i < controlPlanes {
		spec.Type = talosmachine.TypeControlPlane
		spec.ServeSocket = true
		spec.LocalhostAdminKubeconfig = string(kubeconfig)
		spec.Controllers = []string{"-node-ipam-controller"}
	}

	simulated, err := f.cluster.AddMachine(spec)
	if err != nil {
		return m, err
	}

	m.Address, m.Socket = simulated.Address(), simulated.Socket()

	return m, simulated.SetNodeIPs(context.Background(), m.nodeIPs()...)
}

// Configure replaces the configuration of talos-ccm on the first machine.
func (f *Fleet) Configure(content string, _ *struct{}) error {
	file := runtime.ExtensionServiceConfigFile{Content: content, MountPath: settings.MountPath}

	return f.cluster.Machines()[0].SetExtensionServiceConfig(context.Background(), extension.Name, file)
}

// Calls returns how many requests the machines have received, open watches included.
func (f *Fleet) Calls(_ struct{}, reply *uint64) error { //nolint:unparam // net/rpc requires the error
	*reply = f.cluster.CallCount()

	return nil
}

// serveFleet serves a Fleet to the parent process until that closes the standard input.
func serveFleet() error {
	shifted := &shiftedClock{}

	cluster, err := talostest.New(talostest.Options{Clock: shifted})
	if err != nil {
		return err
	}
	defer cluster.Close()

	if err := rpc.Register(&Fleet{cluster: cluster, clock: shifted}); err != nil {
		return err
	}

	rpc.ServeConn(stdio{os.Stdin, os.Stdout})

	return nil
}

// stdio is the connection between the processes.
type stdio struct {
	io.ReadCloser
	io.WriteCloser
}

// Close implements io.Closer.
func (s stdio) Close() error {
	_ = s.ReadCloser.Close()

	return s.WriteCloser.Close()
}
