package talos

import (
	"context"
	"net/netip"

	"github.com/talos-ccm/talos-ccm/test/netns"
)

// The addresses of a bed. All beds use the same ones, because each bed has its own network namespaces.
var (
	bridgeAddress   = netip.MustParseAddr("10.77.0.1")
	controlAddress  = netip.MustParseAddr("10.77.0.2")
	workerAddress   = netip.MustParseAddr("10.77.0.3")
	registryAddress = netip.AddrPortFrom(bridgeAddress, 5000)
)

// subnetBits is the prefix length of the network.
const subnetBits = 24

// newBridge creates the network namespace with the bridge that connects the machines.
func (b *Bed) newBridge(ctx context.Context) (err error) {
	if b.bridge, err = netns.New(ctx); err != nil {
		return err
	}

	b.cleanup(b.bridge.Close)

	return b.bridge.IP(ctx, "link add br0 type bridge", "link set br0 up",
		"address add "+netip.PrefixFrom(bridgeAddress, subnetBits).String()+" dev br0")
}

// port returns the name of the bridge's end of a machine's veth pair.
func port(machine string) string { return "v-" + machine }

// plug creates a machine's network namespace and connects it to the bridge.
func (b *Bed) plug(ctx context.Context, machine string, address netip.Addr) (*netns.Namespace, error) {
	ns, err := b.bridge.Connect(ctx, port(machine), netip.PrefixFrom(address, subnetBits))
	if err != nil {
		return nil, err
	}

	b.cleanup(ns.Close)

	if err := b.bridge.IP(ctx, "link set "+port(machine)+" master br0"); err != nil {
		return nil, err
	}

	return ns, ns.IP(ctx, "route add default via "+bridgeAddress.String())
}
