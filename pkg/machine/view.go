package machine

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"

	"github.com/cosi-project/runtime/pkg/resource"
	"github.com/siderolabs/talos/pkg/machinery/extensions"
	"github.com/siderolabs/talos/pkg/machinery/resources/cluster"
	"github.com/siderolabs/talos/pkg/machinery/resources/config"
	"github.com/siderolabs/talos/pkg/machinery/resources/hardware"
	"github.com/siderolabs/talos/pkg/machinery/resources/k8s"
	"github.com/siderolabs/talos/pkg/machinery/resources/network"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
)

// WatchedKinds are the kinds whose every change must reach the Node at once.
func WatchedKinds() []resource.Kind {
	return []resource.Kind{
		kind(runtime.NamespaceName, runtime.PlatformMetadataType),
		kind(network.NamespaceName, network.AddressStatusType),
		kind(network.NamespaceName, network.HostnameStatusType),
		kind(k8s.NamespaceName, k8s.NodenameType),
	}
}

// PolledKinds are the kinds that settle shortly after boot: each is listed from time to time rather than watched, since a
// held watch costs about 25 KB per machine on this side and as much on the other.
func PolledKinds() []resource.Kind {
	return []resource.Kind{
		kind(hardware.NamespaceName, hardware.SystemInformationType),
		kind(network.NamespaceName, network.PlatformConfigType),
		kind(cluster.NamespaceName, cluster.InfoType),
		kind(config.NamespaceName, config.MachineTypeType),
		kind(runtime.NamespaceName, runtime.MachineStatusType),
		kind(runtime.NamespaceName, runtime.VersionType),
		kind(runtime.NamespaceName, runtime.ExtensionStatusType),
		kind(k8s.NamespaceName, k8s.NodeIPType),
		kind(k8s.NamespaceName, k8s.NodeIPConfigType),
	}
}

func kind(namespace resource.Namespace, typ resource.Type) resource.Kind {
	return resource.NewMetadata(namespace, typ, "", resource.VersionUndefined)
}

// View gathers the resources of one machine. The zero value is empty and ready for use. It is not safe for
// concurrent use.
type View struct {
	resources map[resource.Type]map[resource.ID]resource.Resource
}

// Put takes in a created or updated resource.
func (v *View) Put(r resource.Resource) {
	if v.resources == nil {
		v.resources = map[resource.Type]map[resource.ID]resource.Resource{}
	}

	md := r.Metadata()
	if v.resources[md.Type()] == nil {
		v.resources[md.Type()] = map[resource.ID]resource.Resource{}
	}

	v.resources[md.Type()][md.ID()] = r
}

// Drop forgets a destroyed resource. Dropping an unknown one does nothing.
func (v *View) Drop(ptr resource.Pointer) {
	delete(v.resources[ptr.Type()], ptr.ID())
}

// ReplaceKind makes items all there is of one kind.
func (v *View) ReplaceKind(k resource.Kind, items []resource.Resource) {
	delete(v.resources, k.Type())

	for _, item := range items {
		v.Put(item)
	}
}

// Len is how many resources have been gathered.
func (v *View) Len() int {
	n := 0
	for _, byID := range v.resources {
		n += len(byID)
	}

	return n
}

// Machine is what the gathered resources say together.
func (v *View) Machine() Machine {
	var m Machine

	for _, byID := range v.resources {
		for _, id := range slices.Sorted(maps.Keys(byID)) {
			m.add(byID[id])
		}
	}

	m.PlatformPublished = v.platformPublished(m.Platform)
	m.PlatformFromCache = v.platformFromCache()

	slices.SortFunc(m.Addresses, func(a, b Address) int {
		return cmp.Or(cmp.Compare(a.Link, b.Link), a.Prefix.Compare(b.Prefix))
	})

	return m
}

// platformPublished tells whether applied is what the platform's driver has delivered. A configuration that names another instance
// has not been applied yet, or that has not been seen yet: the two resources are read over separate streams.
func (v *View) platformPublished(applied runtime.PlatformMetadataSpec) bool {
	for _, r := range v.resources[network.PlatformConfigType] {
		platformConfig, ok := r.(*network.PlatformConfig)
		if !ok {
			continue
		}

		delivered := platformConfig.TypedSpec().Metadata
		if delivered == nil || (delivered.InstanceID == applied.InstanceID && delivered.ProviderID == applied.ProviderID) {
			return true
		}
	}

	return false
}

// platformFromCache tells whether all that is known is the configuration of an earlier boot.
func (v *View) platformFromCache() bool {
	configs := v.resources[network.PlatformConfigType]
	_, cached := configs[network.PlatformConfigCachedID]
	_, active := configs[network.PlatformConfigActiveID]

	return cached && !active
}

func (m *Machine) add(r resource.Resource) {
	switch r := r.(type) {
	case *runtime.PlatformMetadata:
		m.Platform = r.TypedSpec().DeepCopy()
	case *runtime.MachineStatus:
		m.Stage = r.TypedSpec().Stage
	case *runtime.Version:
		m.TalosVersion = r.TypedSpec().Version
	case *runtime.ExtensionStatus:
		m.addExtension(r.TypedSpec().Metadata)
	case *network.AddressStatus:
		spec := r.TypedSpec()
		m.Addresses = append(m.Addresses, Address{Prefix: spec.Address, Link: spec.LinkName, Scope: spec.Scope, Flags: spec.Flags})
	case *network.HostnameStatus:
		m.Hostname, m.Domainname = r.TypedSpec().Hostname, r.TypedSpec().Domainname
	case *hardware.SystemInformation:
		m.System = *r.TypedSpec()
	case *cluster.Info:
		m.ClusterName = r.TypedSpec().ClusterName
	case *config.MachineType:
		m.Type = r.MachineType()
	default:
		m.addKubernetes(r)
	}
}

func (m *Machine) addExtension(extension extensions.Metadata) {
	if m.Extensions == nil {
		m.Extensions = map[string]string{}
	}

	m.Extensions[extension.Name] = extension.Version
}

func (m *Machine) addKubernetes(r resource.Resource) {
	switch r := r.(type) {
	case *k8s.Nodename:
		m.Nodename = r.TypedSpec().Nodename
	case *k8s.NodeIP:
		m.NodeIPs = slices.Clone(r.TypedSpec().Addresses)
	case *k8s.NodeIPConfig:
		m.ExcludedSubnets = parsePrefixes(r.TypedSpec().ExcludeSubnets)
	}
}

// parsePrefixes reads prefixes, and addresses as prefixes of their own: Talos lists virtual IPs without a length (k8s/NodeIPConfigController). It
// leaves out what is neither: Talos validates the list (a leading "!" marks an inverted match in user input and has been resolved
// by then), so there is nobody to report to.
func parsePrefixes(list []string) []netip.Prefix {
	var prefixes []netip.Prefix

	for _, s := range list {
		if p, err := netip.ParsePrefix(s); err == nil {
			prefixes = append(prefixes, p.Masked())
		} else if addr, err := netip.ParseAddr(s); err == nil && addr.Zone() == "" {
			prefixes = append(prefixes, netip.PrefixFrom(addr, addr.BitLen()))
		}
	}

	return prefixes
}
