package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	talosmachine "github.com/siderolabs/talos/pkg/machinery/config/machine"
	"github.com/siderolabs/talos/pkg/machinery/resources/hardware"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"

	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

const (
	// slowness is the response time of the slow machine. The late machine gets its platform metadata when lateness has
	// passed after an Event about its Node.
	slowness = 2 * time.Second
	lateness = 3 * time.Second

	linkPhysical = "eth0"
)

// The indexes of machines that differ from the others; a small fleet has only the first ones.
const (
	controlPlaneIndex = iota
	lateIndex
	slowIndex
	changingIndex
	resetIndex
)

var remarks = map[int]string{controlPlaneIndex: " (control plane)", lateIndex: " (late)", slowIndex: " (slow)", resetIndex: " (reset)"}

// member is one machine of the fleet.
type member struct {
	name    string
	title   string     // with a remark
	private netip.Addr // the IPv6 node IP; the IPv4 one is the loopback address where the machine is reached
	public  talostest.Address
	spec    talostest.MachineSpec
	machine *talostest.Machine // nil until it runs
}

// platforms are assigned to machines in turn.
var platforms = []string{"metal", "aws", "hcloud", "nocloud", "gcp"}

// newFleet plans n machines.
func newFleet(n int) []*member {
	fleet := make([]*member, n)

	for i := range fleet {
		platform := platforms[i%len(platforms)]
		m := &member{
			name:    fmt.Sprintf("%s-%0*d", platform, len(fmt.Sprint(n)), i+1),
			private: netip.MustParseAddr(fmt.Sprintf("fd00:7a10:5::%x", i+1)),
			public:  on(talostest.LinkExternal, publicAddress(i)),
		}
		m.title = m.name + remarks[i]
		m.spec = talostest.MachineSpec{
			Nodename: m.name, Platform: metadata(platform, i), PlatformPending: i == lateIndex, Addresses: []talostest.Address{on(linkPhysical, m.private)},
		}

		switch platform {
		case "metal":
			m.spec.SystemInformation = &hardware.SystemInformationSpec{UUID: m.spec.Platform.InstanceID}
			m.public.Link = linkPhysical // such platforms publish no addresses
		case "nocloud":
			m.public.Link = linkPhysical
		}

		if !m.spec.PlatformPending { // the public address is known from the metadata
			m.spec.Addresses = append(m.spec.Addresses, m.public)

			if m.public.Link != linkPhysical { // not translated
				m.spec.Addresses = append(m.spec.Addresses, on(linkPhysical, m.public.Prefix.Addr()))
			}
		}

		fleet[i] = m
	}

	return fleet
}

// metadata returns platform metadata as Talos's driver of the platform publishes it.
func metadata(platform string, index int) runtime.PlatformMetadataSpec {
	const zones = 3

	var (
		turn   = index / len(platforms) % zones // among the machines of a platform
		letter = string(rune('a' + turn))
		spec   = runtime.PlatformMetadataSpec{Platform: platform, InstanceID: fmt.Sprint(100 + index)}
	)

	switch platform {
	case "metal":
		spec.InstanceID = fmt.Sprintf("4c4c4544-0042-3510-8047-%012x", 0xb9c04f000000+index)
	case "aws":
		spec.Region, spec.Zone, spec.InstanceType, spec.Spot = "eu-central-1", "eu-central-1"+letter, "m7i.large", true
		spec.InstanceID = fmt.Sprintf("i-0%016x", 0x5e1f0c0000000+index)
		spec.ProviderID = "aws:///" + spec.Zone + "/" + spec.InstanceID
		spec.Hostname = fmt.Sprintf("ip-10-0-%d-%d.eu-central-1.compute.internal", index>>8, index&0xff)
		spec.InternalDNS = spec.Hostname
	case "hcloud":
		spec.InstanceID = fmt.Sprint(48_150_000 + index)
		spec.Region, spec.Zone = "eu-central", [zones]string{"fsn1-dc14", "nbg1-dc3", "hel1-dc2"}[turn]
		spec.ProviderID = "hcloud://" + spec.InstanceID
	case "nocloud":
		spec.Region, spec.Zone, spec.InstanceType = "homelab", fmt.Sprintf("pve-%d", 1+turn), "4vcpu-8gb"
	case "gcp":
		spec.InstanceID = fmt.Sprint(7_214_483_017_395_000_000 + index)
		spec.Region, spec.Zone, spec.InstanceType = "europe-west3", "europe-west3-"+letter, "n2-standard-4"
		spec.ProviderID = fmt.Sprintf("gce://demo-project/%s/talos-%d", spec.Zone, index+1)
		spec.Hostname = fmt.Sprintf("talos-%d.%s.c.demo-project.internal", index+1, spec.Zone)
	}

	return spec
}

// boot starts the machine. The control-plane machine has the kubeconfig of the administrator.
func (m *member) boot(ctx context.Context, talos *talostest.Cluster, index int, kubeconfig []byte) (err error) {
	if index == controlPlaneIndex {
		m.spec.Type = talosmachine.TypeControlPlane
		m.spec.ServeSocket = true
		m.spec.LocalhostAdminKubeconfig = string(kubeconfig)
		m.spec.Controllers = []string{"-node-ipam-controller"} // talos-ccm allocates pod CIDRs
	}

	if m.machine, err = talos.AddMachine(m.spec); err != nil {
		return err
	}

	switch index {
	case lateIndex:
		printf("Machine %s gets its platform metadata %s after an Event says that its Node waits for it", m.title, lateness)
	case slowIndex:
		printf("Machine %s responds to every call after %s", m.title, slowness)
		m.machine.SlowDown(slowness)
	case resetIndex:
		// It announces the reset before it is switched off.
		err = m.machine.SetStage(ctx, runtime.MachineStageResetting)
	}

	return errors.Join(err, m.machine.SetNodeIPs(ctx, m.machine.Address(), m.private))
}

// register registers the Node as its kubelet does.
func (m *member) register(ctx context.Context, cluster *kube.Cluster) error {
	nodeIPs := []netip.Addr{m.machine.Address(), m.private}
	_, err := cluster.RegisterNode(ctx, kube.NodeSpec{Name: m.name, NodeIPs: nodeIPs, ControlPlane: m.spec.ServeSocket})

	return err
}

// resolve publishes the metadata of the late machine, with its public address.
func (m *member) resolve(ctx context.Context) error {
	return errors.Join(m.machine.AddAddress(ctx, linkPhysical, m.public.Prefix), m.machine.AddAddress(ctx, m.public.Link, m.public.Prefix), m.machine.ResolvePlatform(ctx))
}

func on(link string, addr netip.Addr) talostest.Address {
	return talostest.Address{Link: link, Prefix: netip.PrefixFrom(addr, addr.BitLen())}
}

// publicAddress is in a range for documentation: IPv4 (RFC 5737), or IPv6 (RFC 3849) for the later machines of a large
// fleet.
func publicAddress(index int) netip.Addr {
	const most = 199 // the other addresses are for changes

	if index < most {
		return netip.AddrFrom4([4]byte{203, 0, 113, byte(1 + index)})
	}

	return netip.MustParseAddr(fmt.Sprintf("2001:db8:ccc::%x", index+1))
}
