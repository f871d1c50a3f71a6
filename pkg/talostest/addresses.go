package talostest

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/cosi-project/runtime/pkg/safe"
	"github.com/siderolabs/talos/pkg/machinery/nethelpers"
	"github.com/siderolabs/talos/pkg/machinery/resources/network"
)

// LinkExternal is the link name of addresses that the platform maps to the machine (external IPs).
const LinkExternal = "external"

// Address is an address of a machine, published as network.AddressStatus.
type Address struct {
	// Link is the name of the interface; [LinkExternal] for an address that the platform maps to the machine.
	Link string
	// Prefix is the address with its prefix length.
	Prefix netip.Prefix
	// Flags default to permanent, except on [LinkExternal].
	Flags nethelpers.AddressFlags
	// Scope is global by default.
	Scope nethelpers.Scope
}

func (a Address) status() *network.AddressStatus {
	res := network.NewAddressStatus(network.NamespaceName, network.AddressID(a.Link, a.Prefix))
	spec := res.TypedSpec()
	spec.Address, spec.LinkName, spec.Scope, spec.Flags = a.Prefix, a.Link, a.Scope, a.Flags

	spec.Family = nethelpers.FamilyInet6
	if a.Prefix.Addr().Is4() {
		spec.Family = nethelpers.FamilyInet4
	}

	if spec.Flags == 0 && a.Link != LinkExternal {
		spec.Flags = nethelpers.AddressFlags(nethelpers.AddressPermanent)
	}

	return res
}

// AddAddress publishes an address on a link, with the default flags and scope; see [Address] and [Machine.State] for others.
func (m *Machine) AddAddress(ctx context.Context, link string, prefix netip.Prefix) error {
	res := Address{Link: link, Prefix: prefix}.status()

	if err := m.State().Create(ctx, res); err != nil {
		return fmt.Errorf("add address %s to machine %s: %w", res.Metadata().ID(), m.nodename, err)
	}

	return nil
}

// RemoveAddress removes an address from a link. As on Talos, it stays in the certificate of apid until the machine reboots.
func (m *Machine) RemoveAddress(ctx context.Context, link string, prefix netip.Prefix) error {
	memory := m.currentBoot()
	res := Address{Link: link, Prefix: prefix}.status()

	m.mu.Lock()
	memory.former = append(memory.former, prefix.Addr())
	m.mu.Unlock()

	if err := memory.state.Destroy(ctx, res.Metadata()); err != nil {
		return fmt.Errorf("remove address %s from machine %s: %w", res.Metadata().ID(), m.nodename, err)
	}

	return nil
}

// serverNames returns the subject alternative names of apid: the hostnames, all addresses since boot, and 127.0.0.1.
func (m *Machine) serverNames() (serverNames, error) {
	ctx := context.Background() // reads memory only
	memory := m.currentBoot()

	hostname, err := safe.StateGetByID[*network.HostnameStatus](ctx, memory.state, network.HostnameID)
	if err != nil {
		return serverNames{}, fmt.Errorf("get hostname of machine %s: %w", m.nodename, err)
	}

	statuses, err := safe.StateListAll[*network.AddressStatus](ctx, memory.state)
	if err != nil {
		return serverNames{}, fmt.Errorf("list addresses of machine %s: %w", m.nodename, err)
	}

	m.mu.Lock()
	addresses := slices.Concat([]netip.Addr{netip.MustParseAddr("127.0.0.1"), m.address}, memory.former)
	m.mu.Unlock()

	for status := range statuses.All() {
		if addr := status.TypedSpec().Address.Addr(); status.TypedSpec().Scope < nethelpers.ScopeLink && m.cluster.isNodeAddress(addr) {
			addresses = append(addresses, addr)
		}
	}

	names := serverNames{dns: hostname.TypedSpec().DNSNames()}
	for _, addr := range addresses {
		names.ips = append(names.ips, net.IP(addr.AsSlice()))
	}

	return names, nil
}

// isNodeAddress reports whether Talos lists the address in NodeAddresses without those of Kubernetes.
func (c *Cluster) isNodeAddress(addr netip.Addr) bool {
	return addr.IsGlobalUnicast() && !slices.ContainsFunc(c.clusterCIDRs(), func(cidr netip.Prefix) bool { return cidr.Contains(addr) })
}
