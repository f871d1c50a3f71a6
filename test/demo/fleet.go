package main

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"time"

	talosmachine "github.com/siderolabs/talos/pkg/machinery/config/machine"
	"github.com/siderolabs/talos/pkg/machinery/resources/hardware"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"

	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

const (
	// slowness is how long the slow machine takes for every answer, lateness how long after talos-ccm has said that its Node waits the late
	// machine learns its metadata.
	slowness = 2 * time.Second
	lateness = 3 * time.Second

	// Event reasons.
	reasonPending = "MetadataPending"
	reasonRenamed = "NodeRenamed"
	reasonGone    = "NodeGone"

	linkPhysical = "eth0"
)

// loopback is where the simulated machines can be reached.
var loopback = netip.MustParsePrefix("127.0.0.0/8")

// The machines that are not like the others, by index; a small fleet has the first of them.
const (
	controlPlaneIndex = 0
	lateIndex         = 1
	slowIndex         = 2
	changingIndex     = 3
	resetIndex        = 4
)

var remarks = map[int]string{controlPlaneIndex: "control plane", lateIndex: "late", slowIndex: "slow"}

// At most a tenth of all Nodes is deleted in ten minutes, but at least one: a smaller fleet has no machine that is reset. In one of two
// machines, the one that could be renamed changes.
const (
	minReset  = 20
	minRename = 3
)

// member is one machine of the fleet, and what its Node should look like.
type member struct {
	name string
	// private is the machine's address in its own network, which its Node is to have.
	private netip.Addr
	// remark says what sets the machine apart; empty for most.
	remark string
	origin origin
	// pending: the metadata comes late.
	pending bool
	machine *talostest.Machine // nil until it is up
	// expected is complete once the machine is up.
	expected expectation
}

// fleet is all machines of the demo, the control plane first.
type fleet struct {
	members []*member
	// changing is the one that changes after all are initialized.
	changing *member
	// intruder asks for a certificate for the names and addresses of the control plane; nil: there is only one machine.
	intruder *member
}

// newFleet plans n machines; platforms take turns.
func newFleet(n int) *fleet {
	f := &fleet{members: make([]*member, n)}

	for i := range f.members {
		o := origins[i%platforms](i)
		f.members[i] = &member{
			name:    fmt.Sprintf("%s-%0*d", o.platform.Platform, len(fmt.Sprint(n)), i+1),
			private: privateAddress(i), remark: remarks[i], origin: o, pending: i == lateIndex,
		}
	}

	f.changing = f.members[min(changingIndex, n-1)]

	if n > 1 {
		f.intruder = f.members[n-1]
	}

	return f
}

// title is the machine's name with the remark.
func (m *member) title() string {
	if m.remark == "" {
		return m.name
	}

	return m.name + " (" + m.remark + ")"
}

func (f *fleet) has(index int) bool { return index < len(f.members) }

// scenario says how the late and the slow machine behave; empty if the fleet has neither.
func (f *fleet) scenario() string {
	var parts []string

	if f.has(slowIndex) {
		parts = append(parts, fmt.Sprintf("%s (slow) responds to every call after %.0f s", f.members[slowIndex].name, slowness.Seconds()))
	}

	if f.has(lateIndex) {
		parts = append(parts, fmt.Sprintf("%s (late) gets its platform metadata %.0f s after an Event says that its Node waits for it",
			f.members[lateIndex].name, lateness.Seconds()))
	}

	return strings.Join(parts, "; ")
}

// controlPlane is the machine on which talos-ccm runs.
func (f *fleet) controlPlane() *member { return f.members[controlPlaneIndex] }

// boot brings the machine up. The kubeconfig is the administrator's, for the control plane alone.
func (f *fleet) boot(talos *talostest.Cluster, index int, kubeconfig []byte) error {
	m := f.members[index]

	spec := talostest.MachineSpec{
		Nodename:          m.name,
		Platform:          m.origin.platform,
		PlatformPending:   m.pending,
		SystemInformation: m.origin.system,
		NodeIPs:           m.nodeIPs(),
		Addresses:         on(linkPhysical, m.private),
		ExcludedSubnets:   []netip.Prefix{loopback},
	}

	if !m.pending { // the public address is known from the metadata
		spec.Addresses = append(spec.Addresses, m.origin.addresses...)
	}

	if index == controlPlaneIndex {
		spec.Type = talosmachine.TypeControlPlane
		spec.ServeSocket = true
		spec.LocalhostAdminKubeconfig = string(kubeconfig)
		spec.Controllers = []string{"-node-ipam-controller"} // it is talos-ccm that gives pod CIDRs
	}

	machine, err := talos.AddMachine(spec)
	if err != nil {
		return err
	}

	if index == slowIndex {
		machine.SlowDown(slowness)
	}

	m.machine = machine
	m.expected = m.expectation()

	return nil
}

// nodeIPs are the addresses that Talos gives the machine's kubelet.
func (m *member) nodeIPs() []netip.Addr {
	return append([]netip.Addr{m.private}, m.origin.nodeIPs...)
}

// register registers the machine's Node, as its kubelet would but for its first address: that is the one on loopback, where the simulated
// machine can be reached. Talos says that no node IP is of there, so it is not the Node's for long.
func (m *member) register(ctx context.Context, cluster *kube.Cluster) error {
	_, err := cluster.RegisterNode(ctx, kube.NodeSpec{Name: m.name, NodeIPs: append([]netip.Addr{m.machine.Address()}, m.nodeIPs()...)})

	return err
}

// resolve is the answer of the late machine's metadata service.
func (m *member) resolve(ctx context.Context) error {
	for _, address := range m.origin.addresses {
		if err := m.machine.AddAddress(ctx, address.Link, address.Prefix); err != nil {
			return err
		}
	}

	return m.machine.ResolvePlatform(ctx)
}

// origin is where a machine comes from: what its platform says of it, and what of that a Node should show.
type origin struct {
	platform  runtime.PlatformMetadataSpec
	system    *hardware.SystemInformationSpec
	addresses []talostest.Address
	// nodeIPs are those besides the private address.
	nodeIPs []netip.Addr
	// providerID and external are what the Node should show.
	providerID string
	external   []netip.Addr
}

// platforms is how many platforms there are.
const platforms = 5

// origins make the machine of an index, each of another platform. Metadata has the form that Talos's platform drivers give it.
var origins = [platforms]func(index int) origin{fromMetal, fromAWS, fromHcloud, fromNoCloud, fromGCP}

func fromMetal(index int) origin {
	var (
		uuid    = fmt.Sprintf("4c4c4544-0042-3510-8047-%012x", 0xb9c04f000000+index)
		private = netip.MustParseAddr(fmt.Sprintf("fd00:7a10:5::%x", index+1))
		v4      = publicIPv4(index)
		v6      = publicIPv6(index)
	)

	return origin{
		platform:   runtime.PlatformMetadataSpec{Platform: "metal", InstanceID: uuid},
		system:     &hardware.SystemInformationSpec{Manufacturer: "Dell Inc.", ProductName: "PowerEdge R650", UUID: uuid},
		addresses:  append(on(linkPhysical, private, v6), on(linkPhysical, v4...)...),
		nodeIPs:    []netip.Addr{private},
		providerID: "talos://metal/" + uuid,
		external:   append(v4, v6),
	}
}

func fromAWS(index int) origin {
	var (
		id     = fmt.Sprintf("i-0%016x", 0x5e1f0c0000000+index)
		zone   = "eu-central-1" + string(rune('a'+turn(index, 3)))
		public = publicAddress(index)
	)

	return origin{
		platform: runtime.PlatformMetadataSpec{
			Platform: "aws", Region: "eu-central-1", Zone: zone, InstanceType: "m7i.large", InstanceID: id, Spot: true,
			ProviderID:  "aws:///" + zone + "/" + id,
			Hostname:    fmt.Sprintf("ip-10-0-%d-%d.eu-central-1.compute.internal", index>>8, index&0xff),
			InternalDNS: fmt.Sprintf("ip-10-0-%d-%d.eu-central-1.compute.internal", index>>8, index&0xff),
		},
		addresses:  on(talostest.LinkExternal, public),
		providerID: "aws:///" + zone + "/" + id,
		external:   []netip.Addr{public},
	}
}

func fromHcloud(index int) origin {
	var (
		id     = fmt.Sprint(48_150_000 + index)
		zones  = []string{"fsn1-dc14", "nbg1-dc3", "hel1-dc2"}
		public = publicAddress(index)
	)

	return origin{
		platform: runtime.PlatformMetadataSpec{
			Platform: "hcloud", Region: "eu-central", Zone: zones[turn(index, len(zones))], InstanceID: id, ProviderID: "hcloud://" + id,
		},
		addresses:  on(talostest.LinkExternal, public),
		providerID: "hcloud://" + id,
		external:   []netip.Addr{public},
	}
}

func fromNoCloud(index int) origin {
	var (
		id     = fmt.Sprint(100 + index)
		public = publicAddress(index)
	)

	return origin{
		platform: runtime.PlatformMetadataSpec{
			Platform: "nocloud", Region: "homelab", Zone: fmt.Sprintf("pve-%d", 1+turn(index, 3)), InstanceType: "4vcpu-8gb", InstanceID: id,
		},
		addresses:  on(linkPhysical, public),
		providerID: "talos://nocloud/" + id,
		external:   []netip.Addr{public},
	}
}

func fromGCP(index int) origin {
	var (
		zone   = "europe-west3-" + string(rune('a'+turn(index, 3)))
		id     = fmt.Sprintf("gce://demo-project/%s/talos-%d", zone, index+1)
		public = publicAddress(index)
	)

	return origin{
		platform: runtime.PlatformMetadataSpec{
			Platform: "gcp", Region: "europe-west3", Zone: zone, InstanceType: "n2-standard-4",
			InstanceID: fmt.Sprint(7_214_483_017_395_000_000 + index), ProviderID: id,
			Hostname: fmt.Sprintf("talos-%d.%s.c.demo-project.internal", index+1, zone),
		},
		addresses:  on(talostest.LinkExternal, public),
		providerID: id,
		external:   []netip.Addr{public},
	}
}

// turn is which of several choices the machine of an index gets, among those of its platform.
func turn(index, choices int) int { return index / platforms % choices }

func on(link string, addrs ...netip.Addr) []talostest.Address {
	addresses := make([]talostest.Address, len(addrs))
	for i, addr := range addrs {
		addresses[i] = talostest.Address{Link: link, Prefix: netip.PrefixFrom(addr, addr.BitLen())}
	}

	return addresses
}

// privateAddress is of the range for benchmarks (RFC 2544), which no network routes: dialing it gets no answer.
func privateAddress(index int) netip.Addr {
	const perByte = 250

	return netip.AddrFrom4([4]byte{198, 18, byte(index / perByte), byte(1 + index%perByte)})
}

// publicIPv4 is the machine's own address of the ranges that are set apart for documentation (RFC 5737); they are small, so that the
// machines of a large fleet have none. The addresses from 200 on are for changes.
func publicIPv4(index int) []netip.Addr {
	const perRange = 199

	ranges := [][4]byte{{203, 0, 113}, {198, 51, 100}, {192, 0, 2}}
	if index >= len(ranges)*perRange {
		return nil
	}

	bytes := ranges[index/perRange]
	bytes[3] = byte(1 + index%perRange)

	return []netip.Addr{netip.AddrFrom4(bytes)}
}

// publicIPv6 is of the range for documentation (RFC 3849).
func publicIPv6(index int) netip.Addr {
	return netip.MustParseAddr(fmt.Sprintf("2001:db8:ccc::%x", index+1))
}

// publicAddress is the machine's IPv4 address, or its IPv6 address if it has no other.
func publicAddress(index int) netip.Addr {
	return append(publicIPv4(index), publicIPv6(index))[0]
}
