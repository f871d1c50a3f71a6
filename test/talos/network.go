package talos

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"github.com/talos-ccm/talos-ccm/test/netns"
)

// The network of a bed. It is in namespaces of its own, so all beds use the same one.
var (
	subnet          = netip.MustParsePrefix("10.77.0.0/24")
	bridgeAddress   = netip.MustParseAddr("10.77.0.1")
	controlAddress  = netip.MustParseAddr("10.77.0.2")
	workerAddress   = netip.MustParseAddr("10.77.0.3")
	registryAddress = netip.AddrPortFrom(bridgeAddress, 5000)
)

const (
	bridgeLink = "br0"
	// machineLink is the network interface of every machine.
	machineLink = "eth0"
)

// bridge is the network that the machines are plugged into.
type bridge struct {
	*netns.Namespace
}

func newBridge(ctx context.Context) (*bridge, error) {
	ns, err := netns.New()
	if err != nil {
		return nil, err
	}

	b := &bridge{ns}

	if err := b.IP(ctx, [][]string{
		{"link", "set", "lo", "up"},
		{"link", "add", bridgeLink, "type", "bridge"},
		{"link", "set", bridgeLink, "up"},
		{"address", "add", netip.PrefixFrom(bridgeAddress, subnet.Bits()).String(), "dev", bridgeLink},
	}...); err != nil {
		return nil, errors.Join(fmt.Errorf("make bridge: %w", err), b.Close())
	}

	return b, nil
}

// port is the bridge's end of a machine's cable.
func port(machine string) string { return "v-" + machine }

// plug makes a machine's network namespace, with a cable to the bridge.
func (b *bridge) plug(ctx context.Context, machine string, address netip.Addr) (*netns.Namespace, error) {
	ns, err := netns.New()
	if err != nil {
		return nil, err
	}

	name := port(machine)

	err = errors.Join(
		b.IP(ctx, [][]string{
			{"link", "add", name, "type", "veth", "peer", "name", machineLink, "netns", ns.Path()},
			{"link", "set", name, "master", bridgeLink, "up"},
		}...),
		ns.IP(ctx, [][]string{
			{"link", "set", "lo", "up"},
			{"link", "set", machineLink, "up"},
			{"address", "add", netip.PrefixFrom(address, subnet.Bits()).String(), "dev", machineLink},
			{"route", "add", "default", "via", bridgeAddress.String()},
		}...),
	)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("plug in machine %s: %w", machine, err), ns.Close())
	}

	return ns, nil
}
