package talos

import (
	"context"
	"net/netip"
	"strings"

	"github.com/talos-ccm/talos-ccm/test/netns"
)

// The addresses of a bed. All beds use the same ones, because each bed has its own network namespaces.
var (
	bridgeAddress   = netip.MustParseAddr("10.77.0.1")
	firstAddress    = netip.MustParseAddr("10.77.0.2")   // of the machines
	virtualAddress  = netip.MustParseAddr("10.77.0.254") // of the cluster endpoint
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

	return b.bridge.IP(ctx, "link add "+mainBridge+" type bridge", "link set "+mainBridge+" up",
		"address add "+netip.PrefixFrom(bridgeAddress, subnetBits).String()+" dev "+mainBridge)
}

// The bridges: one for all machines, and one for the machines that Split separates from them.
const mainBridge, splitBridge = "br0", "br1"

// Split separates machines from the others and from the bridge's namespace until Join. They reach each other, and keep their
// addresses and their carrier.
func (b *Bed) Split(ctx context.Context, machines ...*Machine) error {
	commands := []string{"link add " + splitBridge + " type bridge", "link set " + splitBridge + " up"}
	for _, m := range machines {
		commands = append(commands, "link set "+port(m.name)+" master "+splitBridge)
	}

	return b.bridge.IP(ctx, commands...)
}

// Join ends Split for the same machines.
func (b *Bed) Join(ctx context.Context, machines ...*Machine) error {
	var commands []string
	for _, m := range machines {
		commands = append(commands, "link set "+port(m.name)+" master "+mainBridge)
	}

	return b.bridge.IP(ctx, append(commands, "link delete "+splitBridge)...)
}

// Block loses all packets between two machines until Unblock: each has the address of no machine as the other's link-layer
// address.
func (m *Machine) Block(ctx context.Context, other *Machine) error {
	return m.neighbors(ctx, other, "neigh replace ", " lladdr 02:00:00:00:00:00 nud permanent")
}

// Unblock ends Block.
func (m *Machine) Unblock(ctx context.Context, other *Machine) error {
	return m.neighbors(ctx, other, "neigh del ", "")
}

// neighbors changes the entries of two machines in each other's neighbor tables.
func (m *Machine) neighbors(ctx context.Context, other *Machine, action, entry string) error {
	err := m.network.IP(ctx, action+other.address.String()+" dev "+netns.Link+entry)
	if err == nil {
		err = other.network.IP(ctx, action+m.address.String()+" dev "+netns.Link+entry)
	}

	return m.wrap(strings.TrimSpace(action)+" "+other.name, err)
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

	if err := b.bridge.IP(ctx, "link set "+port(machine)+" master "+mainBridge); err != nil {
		return nil, err
	}

	return ns, ns.IP(ctx, "route add default via "+bridgeAddress.String())
}
