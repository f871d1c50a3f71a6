package nodespec_test

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/siderolabs/talos/pkg/machinery/nethelpers"
	"github.com/siderolabs/talos/pkg/machinery/platforms"
	"github.com/siderolabs/talos/pkg/machinery/resources/hardware"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	corev1 "k8s.io/api/core/v1"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
)

const (
	uuid = "30a0bdf7-4b1a-4f0e-9f86-2a3d64a3c5ee"
	// nodeIP is the node IP of the kubelet.
	nodeIP = "10.0.0.1"
)

func addr(ip string) netip.Addr { return netip.MustParseAddr(ip) }

func onLink(link, prefix string) machine.Address {
	return machine.Address{
		Prefix: netip.MustParsePrefix(prefix),
		Link:   link,
		Scope:  nethelpers.ScopeGlobal,
		Flags:  nethelpers.AddressFlags(nethelpers.AddressPermanent),
	}
}

// external returns an address that only the platform's metadata knows, as Talos publishes it.
func external(ip string) machine.Address {
	a := addr(ip)

	return machine.Address{Prefix: netip.PrefixFrom(a, a.BitLen()), Link: "external", Scope: nethelpers.ScopeGlobal}
}

// running returns the input for a running metal machine.
func running() nodespec.Input {
	return nodespec.Input{
		Machine: machine.Machine{
			Nodename:          "worker-1",
			Stage:             runtime.MachineStageRunning,
			Platform:          runtime.PlatformMetadataSpec{Platform: "metal", InstanceID: uuid},
			PlatformPublished: true,
			System:            hardware.SystemInformationSpec{UUID: uuid},
			Addresses:         []machine.Address{onLink("eth0", nodeIP+"/24")},
		},
		ProvidedNodeIPs: []netip.Addr{addr(nodeIP)},
	}
}

// desired fails the test if the desired state is pending.
func desired(t *testing.T, in nodespec.Input) (nodespec.Spec, []nodespec.Problem) {
	t.Helper()

	spec, problems, pending := nodespec.Desired(in)
	if pending != "" {
		t.Fatalf("pending: %s", pending)
	}

	return spec, problems
}

// of returns the addresses of one type, in order.
func of(typ corev1.NodeAddressType, spec nodespec.Spec) []string {
	var list []string

	for _, a := range spec.Addresses {
		if a.Type == typ {
			list = append(list, a.Address)
		}
	}

	return list
}

func requireAddresses(t *testing.T, typ corev1.NodeAddressType, spec nodespec.Spec, want ...string) {
	t.Helper()

	if got := of(typ, spec); !slices.Equal(got, want) {
		t.Errorf("%s: got %v, want %v", typ, got, want)
	}
}

// talosPlatforms returns all platforms of this version of Talos, as its drivers name them. Tests with one row per
// platform fail for a new one.
func talosPlatforms() []string {
	names := []string{"container", platforms.MetalPlatform().Name}

	for _, platform := range platforms.CloudPlatforms() {
		names = append(names, platform.Name)
	}

	return names
}
