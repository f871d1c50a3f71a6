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
	// Address is where apid listens; Private is the node IP.
	Address, Private netip.Addr
	Socket           string // machine.sock of a control-plane machine
}

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

// Change adds a public address to each of some machines at the same time.
type Change struct {
	Addresses map[string]netip.Addr // by nodename
}

// Fleet is the RPC server of the process that simulates the machines.
type Fleet struct {
	cluster *talostest.Cluster
	clock   *shiftedClock
	public  sync.Map // address of a machine that an order has set, by nodename
}

// Order changes machines.
type Order struct {
	Action    string // a key of actions
	Nodenames []string

	Public     map[string]netip.Addr // by nodename
	Kubeconfig []byte
}

// absurd is how many addresses and how many bytes of a tag an absurd machine has.
const absurdAddresses, absurdTag = 10_000, 1 << 20

var actions = map[string]func(context.Context, *Fleet, *talostest.Machine, Order) error{
	"stop":   func(ctx context.Context, _ *Fleet, m *talostest.Machine, _ Order) error { return m.Stop(ctx) },
	"reboot": func(ctx context.Context, _ *Fleet, m *talostest.Machine, _ Order) error { return m.Reboot(ctx) },
	"start": func(_ context.Context, _ *Fleet, m *talostest.Machine, _ Order) error {
		m.Start()

		return nil
	},
	"black-hole": func(_ context.Context, _ *Fleet, m *talostest.Machine, _ Order) error { return m.BlackHole() },
	"reconnect": func(_ context.Context, _ *Fleet, m *talostest.Machine, _ Order) error {
		m.Reconnect()

		return nil
	},
	"break connections": func(_ context.Context, _ *Fleet, m *talostest.Machine, _ Order) error {
		m.BreakConnections()

		return nil
	},
	"set kubeconfig": func(ctx context.Context, _ *Fleet, m *talostest.Machine, order Order) error {
		return m.SetLocalhostAdminKubeconfig(ctx, order.Kubeconfig)
	},
	"set public address": func(ctx context.Context, f *Fleet, m *talostest.Machine, order Order) error {
		addr := order.Public[m.Nodename()]

		if old, known := f.public.Swap(m.Nodename(), addr); known {
			former, _ := old.(netip.Addr)
			if err := m.RemoveAddress(ctx, talostest.LinkExternal, netip.PrefixFrom(former, former.BitLen())); err != nil {
				return err
			}
		}

		return m.AddAddress(ctx, talostest.LinkExternal, netip.PrefixFrom(addr, addr.BitLen()))
	},
	"become absurd": func(ctx context.Context, _ *Fleet, m *talostest.Machine, _ Order) error {
		for i := range absurdAddresses {
			if err := m.State().Create(ctx, absurdAddress(i)); err != nil {
				return err
			}
		}

		return m.UpdatePlatform(ctx, func(spec *runtime.PlatformMetadataSpec) {
			spec.Tags = map[string]string{"absurd": strings.Repeat("x", absurdTag)}
		})
	},
	"become sane": func(ctx context.Context, _ *Fleet, m *talostest.Machine, _ Order) error {
		for i := range absurdAddresses {
			if err := m.State().Destroy(ctx, absurdAddress(i).Metadata()); err != nil {
				return err
			}
		}

		return m.UpdatePlatform(ctx, func(spec *runtime.PlatformMetadataSpec) { spec.Tags = nil })
	},
}

func absurdAddress(i int) *network.AddressStatus {
	prefix := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 48, byte(i / 250), byte(i%250 + 1)}), 32)
	status := network.NewAddressStatus(network.NamespaceName, network.AddressID("eth1", prefix))
	status.TypedSpec().Address, status.TypedSpec().LinkName, status.TypedSpec().Family = prefix, "eth1", nethelpers.FamilyInet4

	return status
}

// Do executes an order on all of its machines at once.
func (f *Fleet) Do(order Order, _ *struct{}) error {
	return inParallel(order.Nodenames, func(nodename string) error {
		return actions[order.Action](context.Background(), f, f.cluster.Machine(nodename), order)
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
	m := Machine{Nodename: fmt.Sprintf("m-%05d", i), Private: netip.AddrFrom4([4]byte{10, 32, byte(i / 250), byte(i%250 + 1)})}
	spec := talostest.MachineSpec{
		Nodename: m.Nodename,
		NodeIPs:  []netip.Addr{m.Private},
		Addresses: []talostest.Address{
			{Link: "eth0", Prefix: netip.PrefixFrom(m.Private, m.Private.BitLen())},
		},
		ExcludedSubnets: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")},
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

	m.Address = simulated.Address()
	m.Socket = simulated.Socket()

	return m, nil
}

// Change returns when each machine has changed, by nodename.
func (f *Fleet) Change(change Change, reply *map[string]time.Time) error {
	var (
		group sync.WaitGroup
		mu    sync.Mutex
		err   error
	)

	*reply = make(map[string]time.Time)

	for nodename, addr := range change.Addresses {
		group.Go(func() {
			at := time.Now()
			prefix := netip.PrefixFrom(addr, addr.BitLen())
			addErr := f.cluster.Machine(nodename).AddAddress(context.Background(), "external", prefix)

			mu.Lock()
			defer mu.Unlock()

			(*reply)[nodename] = at

			if addErr != nil {
				err = addErr
			}
		})
	}

	group.Wait()

	return err
}

// Configure replaces the configuration of talos-ccm on the first machine.
func (f *Fleet) Configure(content string, _ *struct{}) error {
	file := runtime.ExtensionServiceConfigFile{Content: content, MountPath: settings.MountPath}

	return f.cluster.Machines()[0].SetExtensionServiceConfig(context.Background(), extension.Name, file)
}

// Calls returns how many requests the machines have received, open watches included.
func (f *Fleet) Calls(_ struct{}, reply *uint64) error { //nolint:unparam // net/rpc requires the error
	for _, n := range f.cluster.CallCounts() {
		*reply += n
	}

	for _, m := range f.cluster.Machines() {
		*reply += uint64(m.OpenStreams()) //nolint:gosec // not negative
	}

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
