package machine

import (
	"cmp"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strings"

	"github.com/cosi-project/runtime/pkg/resource"
	"github.com/siderolabs/talos/pkg/machinery/constants"
	"github.com/siderolabs/talos/pkg/machinery/resources/block"
	"github.com/siderolabs/talos/pkg/machinery/resources/cluster"
	"github.com/siderolabs/talos/pkg/machinery/resources/config"
	"github.com/siderolabs/talos/pkg/machinery/resources/hardware"
	"github.com/siderolabs/talos/pkg/machinery/resources/k8s"
	"github.com/siderolabs/talos/pkg/machinery/resources/network"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
)

// Kinds are the resource kinds that a View needs.
type Kinds struct {
	// Watched are those whose changes must reach the Node immediately. Each watch costs about 10 KB of memory per
	// machine on either side.
	Watched []resource.Kind
	// Polled are those that rarely change after boot. A change of the hostname changes the watched Nodename, too
	// (k8s/NodenameController).
	Polled []resource.Kind
	// Constant are those that do not change before the machine reboots.
	Constant []resource.Kind
	// Facts are the kinds of facts among them.
	Facts FactKinds
}

// BaseKinds returns the kinds that every View needs.
func BaseKinds() Kinds {
	return Kinds{
		Watched: []resource.Kind{
			kind(runtime.NamespaceName, runtime.PlatformMetadataType),
			kind(network.NamespaceName, network.AddressStatusType),
			kind(runtime.NamespaceName, runtime.MachineStatusType),
			kind(k8s.NamespaceName, k8s.NodenameType),
		},
		Polled: []resource.Kind{
			kind(network.NamespaceName, network.PlatformConfigType),
			kind(network.NamespaceName, network.HostnameStatusType),
			kind(cluster.NamespaceName, cluster.InfoType),
			kind(config.NamespaceName, config.MachineTypeType),
			kind(k8s.NamespaceName, k8s.NodeIPType),
			kind(k8s.NamespaceName, k8s.NodeIPConfigType),
		},
		Constant: []resource.Kind{
			kind(hardware.NamespaceName, hardware.SystemInformationType),
			kind(cluster.NamespaceName, cluster.IdentityType),
			kind(block.NamespaceName, block.DiscoveredVolumeType),
		},
	}
}

// WithFacts returns the kinds together with kinds of facts.
func (k Kinds) WithFacts(facts FactKinds) Kinds {
	for i, f := range factKinds {
		isKind := func(other resource.Kind) bool { return other.Type() == f.kind.Type() }

		switch {
		case facts&(1<<i) == 0, slices.ContainsFunc(k.All(), isKind):
		case f.constant:
			k.Constant = append(slices.Clip(k.Constant), f.kind)
		default:
			k.Polled = append(slices.Clip(k.Polled), f.kind)
		}
	}

	k.Facts |= facts

	return k
}

// All returns all kinds, first those that are watched.
func (k Kinds) All() []resource.Kind { return slices.Concat(k.Watched, k.Polled, k.Constant) }

func kind(namespace resource.Namespace, typ resource.Type) resource.Kind {
	return resource.NewMetadata(namespace, typ, "", resource.VersionUndefined)
}

// View collects the resources of one machine. The zero value is empty and ready to use. It is not safe for concurrent
// use.
type View struct {
	// Facts are the kinds of facts that a Machine gets. ReplaceKind must be called for all of them that are not watched.
	Facts FactKinds

	resources []resource.Resource      // sorted by type and ID
	facts     Facts                    // their resources are not kept: a machine can have hundreds of them
	ignored   map[resource.Type]string // see Ignore
}

// Put adds or replaces a resource of BaseKinds. It ignores volumes that no Machine depends on: a machine can have
// hundreds of them.
func (v *View) Put(r resource.Resource) {
	if volume, ok := r.(*block.DiscoveredVolume); ok && volume.TypedSpec().PartitionLabel != constants.EphemeralPartitionLabel {
		return
	}

	if config, ok := r.(*network.PlatformConfig); ok { // of which no Machine has more; an empty link takes 400 bytes
		*config.TypedSpec() = network.PlatformConfigSpec{Metadata: config.TypedSpec().Metadata}
	}

	if i, found := v.find(r.Metadata()); found {
		v.resources[i] = r
	} else {
		v.resources = slices.Insert(v.resources, i, r)
	}
}

// Drop removes a resource, if it is there.
func (v *View) Drop(ptr resource.Pointer) {
	if i, found := v.find(ptr); found {
		v.resources = slices.Delete(v.resources, i, i+1)
	}
}

// find returns the index of a resource, or where to insert it.
func (v *View) find(ptr resource.Pointer) (i int, found bool) {
	return slices.BinarySearchFunc(v.resources, ptr, func(r resource.Resource, ptr resource.Pointer) int {
		return cmp.Or(cmp.Compare(r.Metadata().Type(), ptr.Type()), cmp.Compare(r.Metadata().ID(), ptr.ID()))
	})
}

// ReplaceKind replaces all resources of one kind with items.
func (v *View) ReplaceKind(k resource.Kind, items []resource.Resource) {
	delete(v.ignored, k.Type())

	if v.facts.replace(k.Type(), items) {
		return
	}

	v.resources = slices.DeleteFunc(v.resources, func(r resource.Resource) bool { return r.Metadata().Type() == k.Type() })

	for _, item := range items {
		v.Put(item)
	}
}

// DropFacts removes the facts of a kind. It returns false if the kind is not one of facts only.
func (v *View) DropFacts(k resource.Kind) bool { return v.facts.replace(k.Type(), nil) }

// Ignore records why the resources of a kind are ignored until the next ReplaceKind.
func (v *View) Ignore(k resource.Kind, why string) {
	if v.ignored == nil {
		v.ignored = map[resource.Type]string{}
	}

	v.ignored[k.Type()] = why
}

// Machine builds a Machine from the collected resources.
func (v *View) Machine() Machine {
	var (
		m       Machine
		volumes []string
		configs []*network.PlatformConfig
	)

	for _, r := range v.resources {
		switch r := r.(type) {
		case *block.DiscoveredVolume:
			volumes = append(volumes, r.TypedSpec().UUID)
		case *network.PlatformConfig:
			configs = append(configs, r)
		default:
			m.add(r)
		}
	}

	if len(volumes) == 1 {
		m.EphemeralID = volumes[0]
	}

	m.addPlatformConfigs(configs)
	limit(reflect.ValueOf(&m).Elem())

	m.Ignored = maps.Clone(v.ignored)
	m.UnmetConditions = first(maxUnmetConditions, m.UnmetConditions)
	m.NodeIPs = first(maxSubnets, m.NodeIPs)
	m.ExcludedSubnets = first(maxSubnets, m.ExcludedSubnets)
	m.ValidSubnets = first(maxSubnets, m.ValidSubnets)

	own := 0
	m.Addresses = slices.DeleteFunc(m.Addresses, func(a Address) bool {
		if m.IsService(a) || slices.Contains(m.NodeIPs, a.Prefix.Addr()) {
			return false
		}

		own++

		return own > maxAddresses
	})
	m.Addresses = slices.Clone(m.Addresses)

	if v.Facts != 0 {
		facts := v.facts
		facts.setAddresses(&m)
		m.Facts = &facts
	}

	return m
}

const (
	// maxString is the limit of texts from machines, in bytes, except for META values. A longer text counts as not
	// reported. It is not shortened, because two identities could become equal.
	maxString = 4 << 10
	// maxMeta is the limit of META values, which can be documents.
	maxMeta = 64 << 10
	// maxAddresses is the limit of a machine's own addresses, besides node IPs. More are not reported: the inventory indexes
	// each of them.
	maxAddresses = 1000
	// maxUnmetConditions is far above the number of checks in Talos.
	maxUnmetConditions = 100
	// maxSubnets is the limit of node IPs and of each list of subnets, against which all addresses are compared.
	maxSubnets = 100
)

// first returns the first n elements, or all. It copies them: an empty element has two bytes in a message and up to 32 in a list.
func first[E any](n int, list []E) []E { return slices.Clone(list[:min(len(list), n)]) }

// bounded returns s, or an empty string if s is longer than maxString.
func bounded(s string) string {
	if len(s) > maxString {
		return ""
	}

	return s
}

// limit removes texts that are longer than maxString from a struct with its structs, lists and maps.
func limit(v reflect.Value) {
	for _, field := range v.Fields() {
		switch kind := field.Kind(); {
		case kind == reflect.String && field.Len() > maxString:
			field.SetZero()
		case kind == reflect.Struct:
			limit(field)
		case kind == reflect.Slice && field.Type().Elem().Kind() == reflect.Struct:
			for i := range field.Len() {
				limit(field.Index(i))
			}
		case kind == reflect.Map:
			for key, value := range field.Seq2() {
				if max(key.Len(), value.Len()) > maxString {
					field.SetMapIndex(key, reflect.Value{})
				}
			}
		}
	}
}

// addPlatformConfigs adds whether the applied metadata is what the platform driver has delivered. If they name different
// instances, either the configuration has not been applied yet or the applied metadata has not been received yet: the
// two resources arrive on separate streams.
func (m *Machine) addPlatformConfigs(configs []*network.PlatformConfig) {
	var ids []resource.ID

	for _, c := range configs {
		ids = append(ids, c.Metadata().ID())

		delivered := c.TypedSpec().Metadata
		if delivered == nil || delivered.InstanceID == m.Platform.InstanceID && delivered.ProviderID == m.Platform.ProviderID {
			m.PlatformPublished = true
		}
	}

	m.PlatformFromCache = slices.Contains(ids, network.PlatformConfigCachedID) && !slices.Contains(ids, network.PlatformConfigActiveID)
}

func (m *Machine) add(r resource.Resource) {
	switch r := r.(type) {
	case *runtime.PlatformMetadata:
		m.Platform = r.TypedSpec().DeepCopy()
	case *runtime.MachineStatus:
		m.Stage = r.TypedSpec().Stage
		m.UnmetConditions = append(m.UnmetConditions, r.TypedSpec().Status.UnmetConditions...) // nil if there are none
	case *network.AddressStatus:
		spec := r.TypedSpec()
		m.Addresses = append(m.Addresses, Address{Prefix: spec.Address, Link: spec.LinkName, Scope: spec.Scope, Flags: spec.Flags})
	case *network.HostnameStatus:
		m.Hostname, m.Domainname = r.TypedSpec().Hostname, r.TypedSpec().Domainname
	case *hardware.SystemInformation:
		m.System = *r.TypedSpec()
	case *config.MachineType:
		m.Type = r.MachineType()
	default:
		m.addCluster(r)
	}
}

// addCluster adds what the machine has as a member of the Talos and the Kubernetes cluster.
func (m *Machine) addCluster(r resource.Resource) {
	switch r := r.(type) {
	case *cluster.Identity:
		m.NodeID = r.TypedSpec().NodeID
	case *cluster.Info:
		m.ClusterName = r.TypedSpec().ClusterName
	case *k8s.Nodename:
		m.Nodename = r.TypedSpec().Nodename
	case *k8s.NodeIP:
		m.NodeIPs = slices.Clone(r.TypedSpec().Addresses)
	case *k8s.NodeIPConfig:
		m.ExcludedSubnets = parsePrefixes(r.TypedSpec().ExcludeSubnets)
		m.ValidSubnets = parseValidSubnets(r.TypedSpec().ValidSubnets)
	}
}

// parsePrefixes parses prefixes and single addresses: Talos lists virtual IPs without a prefix length
// (k8s/NodeIPConfigController). It ignores other values, since Talos validates the list.
func parsePrefixes(list []string) []netip.Prefix {
	var prefixes []netip.Prefix

	for _, s := range list {
		if p, ok := ParsePrefix(s); ok {
			prefixes = append(prefixes, p)
		}
	}

	return prefixes
}

// parseValidSubnets parses subnets as parsePrefixes does, with the prefix "!" for an inverted match.
func parseValidSubnets(list []string) []ValidSubnet {
	var subnets []ValidSubnet

	for _, s := range list {
		s, inverted := strings.CutPrefix(s, "!")
		if p, ok := ParsePrefix(s); ok {
			subnets = append(subnets, ValidSubnet{p, inverted})
		}
	}

	return subnets
}

// ParsePrefix parses a prefix or a single address, without host bits.
func ParsePrefix(s string) (netip.Prefix, bool) {
	if p, err := netip.ParsePrefix(s); err == nil {
		return p.Masked(), true
	}

	addr, err := netip.ParseAddr(s)

	return netip.PrefixFrom(addr, addr.BitLen()), err == nil && addr.Zone() == ""
}
