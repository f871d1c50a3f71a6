package talostest

import (
	"context"
	"fmt"
	"net/netip"

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
		return fmt.Errorf("add address %s to machine %s: %w", res.Metadata().ID(), m.spec.Nodename, err)
	}

	return nil
}

// RemoveAddress removes an address from a link.
func (m *Machine) RemoveAddress(ctx context.Context, link string, prefix netip.Prefix) error {
	res := Address{Link: link, Prefix: prefix}.status()

	if err := m.State().Destroy(ctx, res.Metadata()); err != nil {
		return fmt.Errorf("remove address %s from machine %s: %w", res.Metadata().ID(), m.spec.Nodename, err)
	}

	return nil
}
