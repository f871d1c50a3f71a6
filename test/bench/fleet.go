package main

import (
	"fmt"
	"net/netip"
	"sync/atomic"
	"time"

	talosmachine "github.com/siderolabs/talos/pkg/machinery/config/machine"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"golang.org/x/sync/errgroup"

	"github.com/talos-ccm/talos-ccm/extension"
	"github.com/talos-ccm/talos-ccm/pkg/settings"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

// controlPlanes is how many machines of a fleet belong to the control plane. They come first.
const controlPlanes = 2

// The platform of all machines.
const region, zone, instanceType = "region-1", "zone-1", "large"

func providerID(nodename string) string { return "aws:///" + zone + "/" + nodename }

func platform(nodename string) *runtime.PlatformMetadataSpec {
	return &runtime.PlatformMetadataSpec{
		Platform: "aws", Hostname: nodename, Region: region, Zone: zone, InstanceType: instanceType,
		InstanceID: nodename, ProviderID: providerID(nodename),
	}
}

// machine is a simulated machine.
type machine struct {
	*talostest.Machine

	// private is the IPv6 node IP. The IPv4 one is the address of apid; no CSR may contain it, because it is a loopback
	// address. The upstream Talos CCM accepts only one per family.
	private netip.Addr
}

func (m machine) nodeIPs() []netip.Addr { return []netip.Addr{m.Address(), m.private} }

// startFleet starts the machines.
func (b *bed) startFleet(machines int) (err error) {
	if b.talos, err = talostest.New(talostest.Options{Clock: &b.clock}); err != nil {
		return err
	}

	for i := range machines {
		if err := b.boot(i); err != nil {
			return err
		}
	}

	b.talos.SetEtcdMembers(b.machines[0].Address(), b.machines[controlPlanes-1].Address())

	return nil
}

func (b *bed) boot(i int) (err error) {
	name := fmt.Sprintf("m-%05d", i)
	m := machine{private: netip.MustParseAddr(fmt.Sprintf("fd00:20::%x", i+1))}
	spec := talostest.MachineSpec{
		Nodename:  name,
		Addresses: []talostest.Address{{Link: "eth0", Prefix: host(m.private)}},
		Platform:  *platform(name),
	}

	if i < controlPlanes {
		spec.Type = talosmachine.TypeControlPlane
		spec.ServeSocket = true
		spec.LocalhostAdminKubeconfig = string(b.cluster.Kubeconfig())
		spec.Controllers = []string{"-node-ipam-controller"}
	}

	if m.Machine, err = b.talos.AddMachine(spec); err != nil {
		return err
	}

	b.machines = append(b.machines, m)

	return m.SetNodeIPs(b.ctx, m.nodeIPs()...)
}

// configure replaces the configuration of the instance of talos-ccm on the first machine.
func (b *bed) configure(content string) {
	file := runtime.ExtensionServiceConfigFile{Content: content, MountPath: settings.MountPath}

	b.try(func() error { return b.machines[0].SetExtensionServiceConfig(b.ctx, extension.Name, file) })
}

func host(addr netip.Addr) netip.Prefix { return netip.PrefixFrom(addr, addr.BitLen()) }

// shiftedClock is the system clock plus an offset.
type shiftedClock struct{ shift atomic.Int64 }

// Now implements clock.PassiveClock.
func (c *shiftedClock) Now() time.Time { return time.Now().Add(time.Duration(c.shift.Load())) }

// Since implements clock.PassiveClock.
func (c *shiftedClock) Since(t time.Time) time.Duration { return c.Now().Sub(t) }

// each calls do for all machines concurrently.
func (b *bed) each(machines []machine, do func(m machine) error) {
	b.try(func() error { return inParallel(machines, do) })
}

// all calls do for each machine.
func all(machines []machine, do func(m machine)) {
	for _, m := range machines {
		do(m)
	}
}

// inParallel calls do for each item, for up to 64 at a time, and returns the first error.
func inParallel[T any](items []T, do func(T) error) error {
	var group errgroup.Group

	group.SetLimit(64)

	for _, item := range items {
		group.Go(func() error { return do(item) })
	}

	return group.Wait()
}

// register registers the Node of a machine, as its kubelet does.
func (b *bed) register(m machine) error {
	_, err := b.cluster.RegisterNode(b.ctx, kube.NodeSpec{Name: m.Nodename(), NodeIPs: m.nodeIPs(), ControlPlane: m.Type().IsControlPlane()})

	return err
}
