package talostest

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"slices"

	"github.com/cosi-project/runtime/pkg/safe"
	"github.com/cosi-project/runtime/pkg/state"
	"github.com/siderolabs/talos/pkg/machinery/nethelpers"
	"github.com/siderolabs/talos/pkg/machinery/resources/k8s"
	"github.com/siderolabs/talos/pkg/machinery/resources/network"
)

const (
	// LinkExternal is the link name of addresses that the platform maps to the machine (external IPs).
	LinkExternal = "external"

	// linkAPI is the link of the address that apid listens on.
	linkAPI = "eth0"
)

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

func (a Address) id() string { return network.AddressID(a.Link, a.Prefix) }

func (a Address) family() nethelpers.Family {
	if a.Prefix.Addr().Is4() {
		return nethelpers.FamilyInet4
	}

	return nethelpers.FamilyInet6
}

// status returns the resource of the address. External addresses belong to no link and have no link index.
func (a Address) status(linkIndex uint32) *network.AddressStatus {
	res := network.NewAddressStatus(network.NamespaceName, a.id())
	spec := res.TypedSpec()

	spec.Address = a.Prefix
	spec.LinkName = a.Link
	spec.Family = a.family()
	spec.Scope = a.Scope
	spec.Flags = a.Flags

	if a.Link == LinkExternal {
		return res
	}

	spec.LinkIndex = linkIndex
	spec.Local = a.Prefix.Addr()

	if spec.Flags == 0 {
		spec.Flags = nethelpers.AddressFlags(nethelpers.AddressPermanent)
	}

	return res
}

// addressView holds the data from which a machine's NodeAddress resources are derived.
type addressView struct {
	statuses []network.AddressStatusSpec
	api      netip.Addr     // a node address although it is a loopback address
	cluster  []netip.Prefix // pod and service CIDRs, excluded from the no-k8s lists
}

// nodeAddresses returns the lists by resource ID, except "default", which never changes once it is set.
func (v addressView) nodeAddresses() map[string][]netip.Prefix {
	var current, routed []netip.Prefix

	for _, status := range v.statuses {
		if !v.isNodeAddress(status) {
			continue
		}

		current = append(current, status.Address)

		if status.LinkName != LinkExternal && network.NotSideroLinkIP(status.Address.Addr()) {
			routed = append(routed, status.Address)
		}
	}

	lists := map[string][]netip.Prefix{
		network.NodeAddressCurrentID:      inOrder(current),
		network.NodeAddressRoutedID:       inOrder(routed),
		network.NodeAddressAccumulativeID: inOrder(current),
	}

	for _, id := range []string{network.NodeAddressCurrentID, network.NodeAddressRoutedID, network.NodeAddressAccumulativeID} {
		lists[network.FilteredNodeAddressID(id, k8s.NodeAddressFilterNoK8s)] = v.withoutKubernetes(lists[id])
	}

	return lists
}

// isNodeAddress reports whether Talos lists the address: it excludes link scope, loopback, multicast and link-local addresses.
func (v addressView) isNodeAddress(status network.AddressStatusSpec) bool {
	addr := status.Address.Addr()

	if addr == v.api {
		return true
	}

	return status.Scope < nethelpers.ScopeLink && !addr.IsLoopback() && !addr.IsMulticast() && !addr.IsLinkLocalUnicast()
}

func (v addressView) withoutKubernetes(prefixes []netip.Prefix) []netip.Prefix {
	return slices.DeleteFunc(slices.Clone(prefixes), func(prefix netip.Prefix) bool {
		return slices.ContainsFunc(v.cluster, func(cidr netip.Prefix) bool { return cidr.Contains(prefix.Addr()) })
	})
}

// inOrder sorts like Talos's address sort algorithm v2 and removes duplicates.
func inOrder(prefixes []netip.Prefix) []netip.Prefix {
	sorted := slices.Clone(prefixes)
	slices.SortFunc(sorted, comparePrefixes)

	return slices.Compact(sorted)
}

// comparePrefixes orders IPv4 before IPv6, then the more specific of two overlapping prefixes first, then by address.
func comparePrefixes(a, b netip.Prefix) int {
	if a.Addr().Is4() != b.Addr().Is4() {
		return cmp.Compare(a.Addr().BitLen(), b.Addr().BitLen())
	}

	if a.Addr() == b.Addr() {
		return cmp.Compare(b.Bits(), a.Bits())
	}

	if aHasB, bHasA := a.Contains(b.Addr()), b.Contains(a.Addr()); aHasB != bHasA {
		if aHasB {
			return 1
		}

		return -1
	}

	return a.Addr().Compare(b.Addr())
}

// AddAddress publishes an address on a link, with the default flags and scope; see [Address] and [Machine.State] for others.
func (m *Machine) AddAddress(ctx context.Context, link string, prefix netip.Prefix) error {
	return m.publishAddress(ctx, Address{Link: link, Prefix: prefix})
}

func (m *Machine) publishAddress(ctx context.Context, address Address) error {
	m.addressing.Lock()
	defer m.addressing.Unlock()

	index, err := m.linkIndex(ctx, address.Link)
	if err != nil {
		return err
	}

	if err := m.State().Create(ctx, address.status(index)); err != nil {
		return fmt.Errorf("add address %s to machine %s: %w", address.id(), m.nodename, err)
	}

	return m.deriveNodeAddresses(ctx)
}

// RemoveAddress removes an address from a link. As on Talos, it stays in the accumulative list until the machine reboots.
func (m *Machine) RemoveAddress(ctx context.Context, link string, prefix netip.Prefix) error {
	m.addressing.Lock()
	defer m.addressing.Unlock()

	res := network.NewAddressStatus(network.NamespaceName, network.AddressID(link, prefix))

	if err := m.State().Destroy(ctx, res.Metadata()); err != nil {
		return fmt.Errorf("remove address %s from machine %s: %w", res.Metadata().ID(), m.nodename, err)
	}

	return m.deriveNodeAddresses(ctx)
}

// linkIndex returns the index of a known link, or the next free one.
func (m *Machine) linkIndex(ctx context.Context, link string) (uint32, error) {
	statuses, err := m.addressStatuses(ctx)
	if err != nil {
		return 0, err
	}

	var highest uint32

	for _, status := range statuses {
		if status.LinkName == link {
			return status.LinkIndex, nil
		}

		highest = max(highest, status.LinkIndex)
	}

	return highest + 1, nil
}

func (m *Machine) addressStatuses(ctx context.Context) ([]network.AddressStatusSpec, error) {
	list, err := safe.StateListAll[*network.AddressStatus](ctx, m.State())
	if err != nil {
		return nil, fmt.Errorf("list addresses of machine %s: %w", m.nodename, err)
	}

	return safe.ToSlice(list, func(status *network.AddressStatus) network.AddressStatusSpec { return *status.TypedSpec() }), nil
}

// deriveNodeAddresses updates the NodeAddress resources that differ from the current addresses.
func (m *Machine) deriveNodeAddresses(ctx context.Context) error {
	statuses, err := m.addressStatuses(ctx)
	if err != nil {
		return err
	}

	view := addressView{statuses: statuses, api: m.address, cluster: m.cluster.clusterCIDRs()}

	for id, prefixes := range view.nodeAddresses() {
		if err := m.publishNodeAddress(ctx, id, prefixes); err != nil {
			return err
		}
	}

	return nil
}

func (m *Machine) publishNodeAddress(ctx context.Context, id string, prefixes []netip.Prefix) error {
	existing, err := safe.StateGetByID[*network.NodeAddress](ctx, m.State(), id)

	switch {
	case state.IsNotFoundError(err):
		return m.currentBoot().create(ctx, asResources(newNodeAddress(id, prefixes)))
	case err != nil:
		return fmt.Errorf("get node addresses %s of machine %s: %w", id, m.nodename, err)
	}

	if isAccumulative(id) {
		prefixes = inOrder(append(slices.Clone(existing.TypedSpec().Addresses), prefixes...))
	}

	if slices.Equal(existing.TypedSpec().Addresses, prefixes) {
		return nil
	}

	_, err = safe.StateUpdateWithConflicts(ctx, m.State(), existing.Metadata(), func(res *network.NodeAddress) error {
		res.TypedSpec().Addresses = prefixes

		return nil
	})
	if err != nil {
		return fmt.Errorf("update node addresses %s of machine %s: %w", id, m.nodename, err)
	}

	return nil
}

func isAccumulative(id string) bool {
	return id == network.NodeAddressAccumulativeID ||
		id == network.FilteredNodeAddressID(network.NodeAddressAccumulativeID, k8s.NodeAddressFilterNoK8s)
}

func newNodeAddress(id string, prefixes []netip.Prefix) *network.NodeAddress {
	res := network.NewNodeAddress(network.NamespaceName, id)
	res.TypedSpec().Addresses = prefixes
	res.TypedSpec().SortAlgorithm = nethelpers.AddressSortAlgorithmV2

	return res
}
