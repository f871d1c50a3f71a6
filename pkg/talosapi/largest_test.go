package talosapi_test

import (
	"encoding/base64"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cosi-project/runtime/api/v1alpha1"
	"github.com/cosi-project/runtime/pkg/resource"
	"github.com/cosi-project/runtime/pkg/resource/protobuf"
	"github.com/siderolabs/talos/pkg/machinery/nethelpers"
	"github.com/siderolabs/talos/pkg/machinery/resources/block"
	"github.com/siderolabs/talos/pkg/machinery/resources/cluster"
	"github.com/siderolabs/talos/pkg/machinery/resources/hardware"
	"github.com/siderolabs/talos/pkg/machinery/resources/network"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"k8s.io/utils/clock"
)

func specified[R interface{ TypedSpec() *S }, S any](r R, spec S) R {
	*r.TypedSpec() = spec

	return r
}

func numbered(n int, newResource func(i int) resource.Resource) (list []resource.Resource) {
	for i := range n {
		list = append(list, newResource(i))
	}

	return list
}

// largest are the largest lists of real machines, with the fields that Talos fills. The test repeats the first of more than
// 1,000 resources, because YAML takes long.
var largest = map[string][]resource.Resource{
	"200 veths, 4 NICs, KubeSpan with 1,000 machines": append(append(numbered(200, veth), numbered(4, nic)...), kubeSpan(1000)),
	"1,200 routes": numbered(1, func(i int) resource.Resource {
		destination := netip.PrefixFrom(numberedIPv6(i), 128)

		return specified(network.NewRouteStatus(network.NamespaceName, fmt.Sprintf("lxc%013x/inet6/%s/%s/1024", i, destination.Addr(), destination)), network.RouteStatusSpec{
			Family: nethelpers.FamilyInet6, Destination: destination, Source: destination.Addr(), Gateway: destination.Addr(), OutLinkIndex: 123,
			OutLinkName: fmt.Sprintf("lxc%013x", i), Table: nethelpers.TableMain, Priority: 1024, Protocol: nethelpers.ProtocolBoot, Type: nethelpers.TypeUnicast, MTU: 1450,
		})
	}),
	"500 volumes": numbered(500, func(i int) resource.Resource {
		const uuid = "4c4c4544-0042-4410-8034-b1c04f333432"

		name := fmt.Sprintf("nvme%dn1p12", i)

		return specified(block.NewDiscoveredVolume(block.NamespaceName, name), block.DiscoveredVolumeSpec{
			DevPath: "/dev/" + name, DevicePath: "/sys/devices/pci0000:00/0000:00:1d.0/0000:03:00.0/nvme/nvme0/nvme0n1/" + name, Type: "partition",
			Parent: "nvme0n1", ParentDevPath: "/dev/nvme0n1", Offset: 1 << 40, Size: 1 << 40, PrettySize: "1.1 TB", SectorSize: 4096, IOSize: 4096,
			Name: "xfs", UUID: uuid, Label: "EPHEMERAL", BlockSize: 4096, FilesystemBlockSize: 4096, ProbedSize: 1 << 40,
			PartitionUUID: uuid, PartitionType: uuid, PartitionLabel: "EPHEMERAL", PartitionIndex: 12,
		})
	}),
	"600 PCI devices": numbered(600, func(i int) resource.Resource {
		return specified(hardware.NewPCIDeviceInfo(fmt.Sprintf("0000:%02x:%02x.%d", i/256, i/8%32, i%8)), hardware.PCIDeviceSpec{
			Class: "Network controller", Subclass: "Ethernet controller", Vendor: "Mellanox Technologies", Driver: "mlx5_core",
			Product: "MT28908 Family [ConnectX-6 Virtual Function]", ClassID: "0x02", SubclassID: "0x00", VendorID: "0x15b3", ProductID: "0x101c",
		})
	}),
	"20 META keys with 256 KiB": numbered(20, func(i int) resource.Resource {
		value := strings.Repeat("    addresses: 10.0.0.1/24\n", 256<<10/20/28)

		return specified(runtime.NewMetaKey(runtime.NamespaceName, fmt.Sprintf("0x%02x", i)), runtime.MetaKeySpec{Value: value})
	}),
	"50 tags": numbered(1, func(int) resource.Resource {
		spec := runtime.PlatformMetadataSpec{Platform: "aws", Tags: map[string]string{}}
		for i := range 50 {
			spec.Tags[fmt.Sprintf("%0128d", i)] = strings.Repeat("x", 256)
		}

		return specified(runtime.NewPlatformMetadataSpec(runtime.NamespaceName, runtime.PlatformMetadataID), spec)
	}),
	"10,000 addresses": numbered(1, func(i int) resource.Resource {
		prefix := netip.PrefixFrom(numberedIPv6(i), 128)

		return specified(network.NewAddressStatus(network.NamespaceName, network.AddressID("kube-ipvs0", prefix)), network.AddressStatusSpec{
			Address: prefix, Local: prefix.Addr(), LinkIndex: 12, LinkName: "kube-ipvs0", Family: nethelpers.FamilyInet6,
			Scope: nethelpers.ScopeGlobal, Flags: nethelpers.AddressFlags(nethelpers.AddressPermanent),
		})
	}),
	"10,000 members": numbered(1, func(i int) resource.Resource {
		hostname := fmt.Sprintf("ip-10-0-%d-%d.eu-central-1.compute.internal", i/256, i%256)

		return specified(cluster.NewMember(cluster.NamespaceName, hostname), cluster.MemberSpec{
			NodeID: "MkCGQyIjIKmxBDyOVRaZKsRbFXYTo0gqwBMeQ5HCFNl", Hostname: hostname, MachineType: 3, OperatingSystem: "Talos (v1.14.1)",
			Addresses: []netip.Addr{netip.AddrFrom4([4]byte{10, 0, byte(i / 256), byte(i)}), numberedIPv6(i)},
		})
	}),
}

var mac = nethelpers.HardwareAddr{0xaa, 0xbb, 0xcc, 0xdd, 0xee, 0xff}

func numberedIPv6(i int) netip.Addr {
	return netip.AddrFrom16([16]byte{0xfd, 0, 0x12, 0x34, 0x56, 0x78, 0x9a, 0xbc, 0xde, 0xf0, 0x12, 0x34, 0x56, 0x78, byte(i >> 8), byte(i)})
}

func veth(i int) resource.Resource {
	return specified(network.NewLinkStatus(network.NamespaceName, fmt.Sprintf("lxc%013x", i)), network.LinkStatusSpec{
		Index: 123, Type: nethelpers.LinkEther, LinkIndex: 122, Flags: 0x11043, HardwareAddr: mac, PermanentAddr: mac, BroadcastAddr: mac, MTU: 1500,
		QueueDisc: "noqueue", MasterIndex: 7, OperationalState: nethelpers.OperStateUp, Kind: "veth", SlaveKind: "bridge", Driver: "veth", DriverVersion: "1.0",
		LinkState: true, SpeedMegabits: 10000, Port: nethelpers.TwistedPair, Duplex: nethelpers.Full,
	})
}

func nic(i int) resource.Resource {
	return specified(network.NewLinkStatus(network.NamespaceName, fmt.Sprintf("enp1s0f%d", i)), network.LinkStatusSpec{
		Index: 2, Type: nethelpers.LinkEther, Flags: 0x11043, HardwareAddr: mac, PermanentAddr: mac, BroadcastAddr: mac, MTU: 9000, QueueDisc: "mq",
		AltNames: []string{"eno1np0", "enxaabbccddeeff"}, OperationalState: nethelpers.OperStateUp, BusPath: "0000:01:00.0", PCIID: "8086:1572",
		Driver: "i40e", DriverVersion: "6.18.1-talos", FirmwareVersion: "8.30 0x8000a49d 1.2926.0", ProductID: "0x1572", VendorID: "0x8086",
		Product: "Ethernet Controller X710 for 10GbE SFP+", Vendor: "Intel Corporation", LinkState: true, SpeedMegabits: 10000,
	})
}

func kubeSpan(machines int) resource.Resource {
	key := base64.StdEncoding.EncodeToString(make([]byte, 32))
	spec := network.LinkStatusSpec{Index: 9, Kind: "wireguard", MTU: 1420, Wireguard: network.WireguardSpec{PublicKey: key, ListenPort: 51820}}

	for i := range machines {
		addr := netip.AddrFrom4([4]byte{10, 0, byte(i / 256), byte(i)})
		spec.Wireguard.Peers = append(spec.Wireguard.Peers, network.WireguardPeer{
			PublicKey: key, PresharedKey: key, Endpoint: netip.AddrPortFrom(addr, 51820).String(), PersistentKeepaliveInterval: 25 * time.Second,
			AllowedIPs: []netip.Prefix{
				netip.PrefixFrom(addr, 32), netip.PrefixFrom(numberedIPv6(i), 128),
				netip.MustParsePrefix("10.244.12.0/24"), netip.MustParsePrefix("10.244.12.1/32"),
			},
		})
	}

	return specified(network.NewLinkStatus(network.NamespaceName, "kubespan"), spec)
}

func TestDial_AcceptsLargestRealLists(t *testing.T) {
	s := newSite(t, clock.RealClock{})
	st := dial(t, s.reader(t), s.worker)

	for name, resources := range largest {
		t.Run(name, func(t *testing.T) {
			var (
				messages       []*v1alpha1.Resource
				total, maximum int
			)

			for _, r := range resources {
				messages = append(messages, marshaled(t, r))
			}

			if count, _ := strconv.Atoi(strings.ReplaceAll(strings.Fields(name)[0], ",", "")); count > 1000 {
				messages = repeated(count, messages[0])
			}

			for _, message := range messages {
				total, maximum = total+proto.Size(message), max(maximum, proto.Size(message))
			}

			s.worker.Lie(sending(messages...))

			first := resources[0].Metadata()
			kind := resource.NewMetadata(first.Namespace(), first.Type(), "", resource.VersionUndefined)

			list, err := st.List(t.Context(), kind)
			require.NoError(t, err)
			require.GreaterOrEqual(t, len(list.Items), len(messages))

			if kind.Type() == network.AddressStatusType || kind.Type() == runtime.PlatformMetadataType {
				require.NoError(t, watchErrOf(t, st, kind)) // the other kinds are not watched
			}

			t.Logf("%s: %d KiB, largest resource %d bytes", kind.Type(), total>>10, maximum)
		})
	}
}

// An update contains the previous version.
func TestDial_AcceptsLargestRealUpdate(t *testing.T) {
	s := newSite(t, clock.RealClock{})
	st := dial(t, s.reader(t), s.worker)
	metadata := marshaled(t, largest["50 tags"][0])
	kind := resource.NewMetadata(runtime.NamespaceName, runtime.PlatformMetadataType, "", resource.VersionUndefined)

	s.worker.Lie(sendingEvents(
		&v1alpha1.Event{EventType: v1alpha1.EventType_UPDATED, Resource: metadata, Old: metadata},
		&v1alpha1.Event{EventType: v1alpha1.EventType_BOOTSTRAPPED},
	))
	require.NoError(t, watchErrOf(t, st, kind))
}

// marshaled returns a resource as a machine sends it.
func marshaled(t *testing.T, r resource.Resource) *v1alpha1.Resource {
	t.Helper()

	converted, err := protobuf.FromResource(r)
	require.NoError(t, err)

	message, err := converted.Marshal()
	require.NoError(t, err)

	return message
}
