package nodespec_test

import (
	"net/netip"
	"testing"

	"github.com/siderolabs/talos/pkg/machinery/nethelpers"
	"github.com/siderolabs/talos/pkg/machinery/platforms"
	"github.com/siderolabs/talos/pkg/machinery/resources/hardware"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
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

func addrs(list []string) (ips []netip.Addr) {
	for _, ip := range list {
		ips = append(ips, addr(ip))
	}

	return ips
}

func prefix(text string) netip.Prefix { return netip.MustParsePrefix(text) }

func onLink(link, text string) machine.Address {
	return machine.Address{Prefix: prefix(text), Link: link, Scope: nethelpers.ScopeGlobal, Flags: nethelpers.AddressFlags(nethelpers.AddressPermanent)}
}

// external returns an address that only the platform metadata contains, as Talos publishes it.
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

// having returns the input for a running metal machine with more addresses.
func having(addresses ...machine.Address) nodespec.Input {
	in := running()
	in.Machine.Addresses = append(in.Machine.Addresses, addresses...)

	return in
}

// on returns the input for a running machine with the metadata of its platform.
func on(metadata runtime.PlatformMetadataSpec) nodespec.Input {
	in := running()
	in.Machine.Platform = metadata

	return in
}

// desired fails the test if the desired state is pending.
func desired(t *testing.T, in nodespec.Input) (nodespec.Spec, []nodespec.Problem) {
	t.Helper()

	spec, problems, pending := nodespec.Desired(in)
	require.Empty(t, pending)

	return spec, problems
}

func specOf(t *testing.T, in nodespec.Input) nodespec.Spec {
	t.Helper()

	spec, _ := desired(t, in)

	return spec
}

func problemKeys(t *testing.T, in nodespec.Input) (keys []string) {
	t.Helper()

	_, problems := desired(t, in)
	for _, p := range problems {
		keys = append(keys, p.Key)
	}

	return keys
}

// requirePending fails the test unless the desired state is empty and pending for a reason with this text.
func requirePending(t *testing.T, in nodespec.Input, mention string) {
	t.Helper()

	spec, problems, pending := nodespec.Desired(in)
	assert.Equal(t, nodespec.Spec{}, spec)
	assert.Nil(t, problems)
	assert.NotEmpty(t, pending)
	assert.Contains(t, pending, mention)
}

// of returns the addresses of one type, in order.
func of(typ corev1.NodeAddressType, spec nodespec.Spec) (list []string) {
	for _, a := range spec.Addresses {
		if a.Type == typ {
			list = append(list, a.Address)
		}
	}

	return list
}

func requireAddresses(t *testing.T, typ corev1.NodeAddressType, in nodespec.Input, want ...string) {
	t.Helper()
	assert.Equal(t, want, of(typ, specOf(t, in)), typ)
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
