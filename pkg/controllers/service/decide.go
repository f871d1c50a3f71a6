package service

import (
	"cmp"
	"crypto/sha256"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"

	"github.com/talos-ccm/talos-ccm/pkg/cidrset"
	"github.com/talos-ccm/talos-ccm/pkg/config"
	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/internal/events"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/noderecord"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
)

// Class is the loadBalancerClass of the Services that this controller manages.
const Class = "talos-ccm.dev/node-ip"

// Annotations of Services.
const (
	// AnnotationNodeSelector is a label selector in Kubernetes' syntax. Only Nodes that match it receive traffic.
	AnnotationNodeSelector = "talos-ccm.dev/node-selector"
	// AnnotationAddresses is `external` or `internal`, and overrides `service.addresses` of the configuration.
	AnnotationAddresses = "talos-ccm.dev/addresses"
)

// Reasons of the Events on Services.
const (
	// ReasonNoEligibleNodes: no Node meets all requirements; the Service gets no addresses.
	// Fix: as the message says, see docs/guides/load-balancer.md#choose-nodes, docs/guides/load-balancer.md#choose-addresses.
	ReasonNoEligibleNodes = "NoEligibleNodes"
	// ReasonNodesNotReady: no eligible Node is ready; addresses stay unless their Nodes are gone or excluded.
	// Fix: check the kubelets, or select other Nodes.
	ReasonNodesNotReady = "NodesNotReady"
	// ReasonPortConflict: an older Service has the port on an address, or as its node port; the Service gets the other
	// addresses.
	// Fix: use another port or node selector.
	ReasonPortConflict = "PortConflict"
	// ReasonPortReserved: Talos, Kubernetes, talos-ccm or `service.reservedPorts` has the port; the Service gets no
	// addresses.
	// Fix: use another port.
	ReasonPortReserved = "PortReserved"
	// ReasonTooManyPorts: the Service has more than 1,000 ports; it gets no addresses.
	// Fix: divide it into several Services.
	ReasonTooManyPorts = "TooManyPorts"
	// ReasonUnsupportedProxyMode: kube-proxy uses IPVS on all eligible Nodes; the addresses stay.
	// Fix: set `cluster.proxy.mode: nftables` (Talos 1.14: `KubeProxyConfig`), and reboot, or use another load balancer.
	ReasonUnsupportedProxyMode = "UnsupportedProxyMode"
	// ReasonInvalidAnnotation: `talos-ccm.dev/node-selector` is no label selector or larger than 16 KiB or 100 requirements,
	// or `talos-ccm.dev/addresses` has an unknown value; the addresses stay.
	// Fix: correct it.
	ReasonInvalidAnnotation = "InvalidAnnotation"
	// ReasonOwnershipConflict: another field manager has set the addresses of a Service without a class; they stay.
	// Fix: allow one default per cluster; create the Service again with the right class.
	ReasonOwnershipConflict = "OwnershipConflict"
)

const (
	// maxAddresses limits the addresses of a Service, of all its IP families together. DNS answers and clients can handle
	// as many.
	maxAddresses = 16

	// Limits of the ports of a Service, and of a node selector in bytes and requirements, are far above use: a user's
	// Services must not delay those of others.
	maxPorts, maxSelector, maxRequirements = 1000, 16 << 10, 100
)

func manages(options config.Service, service *corev1.Service) bool {
	if service.Spec.Type != corev1.ServiceTypeLoadBalancer {
		return false
	}

	if class := service.Spec.LoadBalancerClass; class != nil {
		return *class == Class
	}

	return options.Default
}

// port is a port of a Service. All Nodes have the same ports.
type port struct {
	protocol corev1.Protocol
	number   int32
}

func (p port) String() string { return fmt.Sprintf("%s/%d", p.protocol, p.number) }

// machinePorts are the ports on which Talos and Kubernetes listen on a machine's addresses
// (https://docs.siderolabs.com/talos/v1.13/learn-more/talos-network-connectivity and
// https://kubernetes.io/docs/reference/networking/ports-and-protocols/). kube-proxy redirects the traffic to a load
// balancer's port before a process on the machine receives it, so a Service with one of these ports would cut off the
// machine.
var machinePorts = map[port]string{
	{corev1.ProtocolTCP, 2379}:  "etcd",
	{corev1.ProtocolTCP, 2380}:  "etcd",
	{corev1.ProtocolTCP, 6443}:  "kube-apiserver",
	{corev1.ProtocolTCP, 10250}: "kubelet",
	{corev1.ProtocolTCP, 10256}: "kube-proxy",
	{corev1.ProtocolTCP, 10257}: "kube-controller-manager",
	{corev1.ProtocolTCP, 10259}: "kube-scheduler",
	{corev1.ProtocolTCP, 10459}: "talos-ccm",
	{corev1.ProtocolTCP, 50000}: "apid",
	{corev1.ProtocolTCP, 50001}: "trustd",
	{corev1.ProtocolUDP, 4789}:  "VXLAN of Flannel",
	{corev1.ProtocolUDP, 8472}:  "VXLAN of Cilium",
	{corev1.ProtocolUDP, 51820}: "KubeSpan",
}

// UserOfPort returns what uses the TCP port of a machine's addresses; empty if nothing of Talos or Kubernetes does.
func UserOfPort(number int) string { return machinePorts[port{corev1.ProtocolTCP, int32(number)}] } //nolint:gosec // is at most 65535

// snapshot is everything that the addresses of Services depend on.
type snapshot struct {
	// services are all Services of the cluster, because all node ports count.
	services []*corev1.Service
	nodes    []candidate
	// endpoints returns the EndpointSlices of a Service, as trimSlice leaves them.
	endpoints func(*corev1.Service) []*discoveryv1.EndpointSlice
	options   config.Service
	// identity contains the addresses of the cluster itself and of pods. Until it is known, Services get no new addresses.
	identity csrpolicy.ClusterIdentity
	// selectors are the node selectors of the last pass, by Service. They are not parsed again.
	selectors map[string]*nodeSelector

	// decide sets the following fields.

	// eligible are the Nodes that can receive traffic if they are ready.
	eligible []*candidate
	// clusterIPs are the addresses of Services, and reserved are the addresses of the API server and of control-plane
	// machines. A Service never gets any of these, or an address in podCIDRs, for a worker, which may be compromised.
	clusterIPs sets.Set[string]
	reserved   sets.Set[netip.Addr]
	podCIDRs   []netip.Prefix
	// external limits the external addresses; empty means no limit.
	external []netip.Prefix
	// excluded describes how many Nodes have the exclusion label.
	excluded string
	// users are machinePorts, and the ports of API servers. nodePorts are the older Services that have a node port, and
	// taken those that have a port on addresses.
	users     map[port]string
	nodePorts map[port]*corev1.Service
	taken     map[port][]decision
}

// nodeSelector is a parsed AnnotationNodeSelector. The problem is empty if it is valid.
type nodeSelector struct {
	labels.Selector
	text, problem string
}

type candidate struct {
	node  *corev1.Node
	entry inventory.Entry
	// managed is true if the machine was observed and the configuration selects it.
	managed bool
	// stopping is true if the machine has announced that it stops serving, or has probably lost power.
	stopping bool
	// addresses are those that Services can have. decide sets them.
	addresses []address
	// usesIPVS is true if the machine has the link of kube-proxy in mode IPVS. With the addresses of other Nodes on it, the
	// machine cannot reach them. decide sets it.
	usesIPVS bool
}

type address struct {
	ip   netip.Addr
	text string
	kind corev1.NodeAddressType
	// isPublishable is false if only a Service that has the address already can have it.
	isPublishable bool
	// rank orders the addresses that a Service can have.
	rank string
}

func filter(nodes []*candidate, keep func(*candidate) bool) []*candidate {
	return slices.DeleteFunc(slices.Clone(nodes), func(c *candidate) bool { return !keep(c) })
}

// statusManagers returns the field managers of the Service's status. They contain FieldManager if the controller has
// written the addresses: the API server drops a field manager that owns nothing.
func statusManagers(service *corev1.Service) sets.Set[string] {
	managers := sets.Set[string]{}
	for _, entry := range service.ManagedFields {
		managers.Insert(entry.Manager)
	}

	return managers
}

type decision struct {
	service  *corev1.Service
	ingress  []corev1.LoadBalancerIngress
	selector *nodeSelector // nil if the Service is no longer managed
	problems []events.Problem
}

func (d decision) report(reason, format string, args ...any) decision {
	d.problems = append(d.problems, events.Problem{Reason: reason, Message: fmt.Sprintf(format, args...)})

	return d
}

// decide decides about all managed Services, and about those that are no longer managed. Older Services come first: of
// two Services with the same port, the older one has the address. A node port of a younger Service does not matter, because
// kube-proxy serves published addresses first.
func (s snapshot) decide() (decisions []decision) {
	s.prepare()

	for _, service := range s.services {
		d := decision{service: service}

		if manages(s.options, service) {
			d = s.decideOne(service)
			decisions = append(decisions, d)
		} else if len(service.Status.LoadBalancer.Ingress) > 0 && statusManagers(service).Has(FieldManager) {
			decisions = append(decisions, d)
		}

		s.nodePorts[port{corev1.ProtocolTCP, service.Spec.HealthCheckNodePort}] = service // 0 means none, and is no port of a Service

		for _, p := range service.Spec.Ports {
			if p.NodePort != 0 {
				s.nodePorts[port{p.Protocol, p.NodePort}] = service
			}

			if key := (port{p.Protocol, p.Port}); len(d.ingress) > 0 {
				s.taken[key] = append(s.taken[key], d)
			}
		}
	}

	return decisions
}

// prepare sorts the Services by age, and sets the derived fields. The podCIDRs of Nodes do not count, because a kubelet can
// set those of its own Node.
func (s *snapshot) prepare() {
	s.external, _ = cidrset.ParsePrefixes(s.options.ExternalCIDRs) // validated
	s.clusterIPs, s.reserved = sets.Set[string]{}, sets.Set[netip.Addr]{}
	s.users, s.nodePorts, s.taken = maps.Clone(machinePorts), map[port]*corev1.Service{}, map[port][]decision{}
	s.services = slices.SortedFunc(slices.Values(s.services), func(a, b *corev1.Service) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})

	for _, service := range s.services {
		s.clusterIPs.Insert(service.Spec.ClusterIPs...)
	}

	for _, number := range s.identity.APIServerPorts {
		s.users[port{corev1.ProtocolTCP, number}] = "kube-apiserver"
	}

	for _, report := range slices.Concat(s.identity.Reported, []csrpolicy.Report{{ClusterSubjects: s.identity.Stated}}) {
		s.podCIDRs = append(s.podCIDRs, report.PodCIDRs...)
		for _, ip := range slices.Concat(report.APIServerIPs, report.VIPs) {
			s.reserved.Insert(ip.Unmap())
		}
	}

	for _, c := range s.nodes {
		if nodespec.IsControlPlane(c.node) {
			record := noderecord.Of(c.node)
			s.reserved.Insert(record.Address, record.OtherAddress) // the machine may not have responded yet

			for _, a := range c.entry.Last.Addresses {
				if a.Link != machine.LinkIPVS { // these are of other machines
					s.reserved.Insert(a.Prefix.Addr().Unmap())
				}
			}
		}
	}

	for _, c := range s.nodes {
		s.setAddresses(&c)
		s.eligible = append(s.eligible, &c)
	}

	s.excluded = fmt.Sprintf("%d of %d Nodes have the label %s", len(filter(s.eligible, (*candidate).excluded)), len(s.nodes), corev1.LabelNodeExcludeBalancers)
	s.eligible = filter(s.eligible, (*candidate).eligible)
}

func (s snapshot) decideOne(service *corev1.Service) decision {
	d, present := decision{service: service, selector: s.selectorOf(service)}, service.Status.LoadBalancer.Ingress

	if managers := statusManagers(service); service.Spec.LoadBalancerClass == nil && len(present) > 0 && !managers.Has(FieldManager) {
		d.ingress = present

		return d.report(ReasonOwnershipConflict,
			"The addresses were set by another controller (%s); set spec.loadBalancerClass, so that only one of them manages the Service", strings.Join(sets.List(managers), ", "))
	}

	if count := len(service.Spec.Ports); count > maxPorts {
		return d.report(ReasonTooManyPorts, "The Service has %d ports, and at most %d are supported; divide it into several Services", count, maxPorts)
	}

	for _, p := range service.Spec.Ports {
		key := port{p.Protocol, p.Port}

		user := s.users[key]
		if user == "" && slices.Contains(s.options.ReservedPorts, int(p.Port)) {
			user = "the configuration (service.reservedPorts)"
		}

		if user != "" {
			return d.report(ReasonPortReserved, "Port %s is reserved for %s; use another port", key, user)
		}

		if older := s.nodePorts[key]; older != nil {
			return d.report(ReasonPortConflict, "Port %s is a node port of the older %s; use another port", key, describe(older))
		}
	}

	r, invalid := s.requirementsOf(d)
	if invalid != "" {
		d.ingress = present

		return d.report(ReasonInvalidAnnotation, "%s", invalid)
	}

	return s.choose(d, r)
}

func describe(service *corev1.Service) string {
	name := fmt.Sprintf("Service %s/%s", service.Namespace, service.Name)
	if service.DeletionTimestamp != nil {
		name += ", which is being deleted and waits for its finalizers: " + strings.Join(service.Finalizers, ", ")
	}

	return name
}

// selectorOf returns the node selector of a Service, which is parsed once.
func (s snapshot) selectorOf(service *corev1.Service) *nodeSelector {
	n := &nodeSelector{text: service.Annotations[AnnotationNodeSelector]}
	if before := s.selectors[cache.MetaObjectToName(service).String()]; before != nil && before.text == n.text {
		return before
	} else if len(n.text) > maxSelector {
		n.problem = fmt.Sprintf("is longer than %d bytes", maxSelector)

		return n
	}

	var err error
	if n.Selector, err = labels.Parse(n.text); err != nil {
		n.problem = fmt.Sprintf("is not a label selector: %v", err)
	} else if requirements, _ := n.Requirements(); len(requirements) > maxRequirements {
		n.problem = fmt.Sprintf("has more than %d requirements", maxRequirements)
	}

	return n
}

type requirements struct {
	// nodes match the node selector. They are ready, unless no managed one is: then the kubelets probably cannot reach the
	// API server, and kube-proxy still forwards traffic to the published addresses. kube-controller-manager does not evict
	// pods in this case, either.
	nodes []*candidate
	types []corev1.NodeAddressType
	// present are the addresses that the Service has.
	present sets.Set[string]
	// conflicts describe the ports that older Services have, by address.
	conflicts map[string]string
	// serving contains FAMILY/NODE for each Node with ready endpoints; nil without externalTrafficPolicy: Local. If no Node
	// is ready, neither are the endpoints, and it is nil, too.
	serving sets.Set[string]
}

// addressTypes are the types of addresses for each setting, the preferred one first.
var addressTypes = map[config.ServiceAddresses][]corev1.NodeAddressType{
	"":                       {corev1.NodeExternalIP, corev1.NodeInternalIP},
	config.AddressesExternal: {corev1.NodeExternalIP},
	config.AddressesInternal: {corev1.NodeInternalIP},
}

// requirementsOf returns the requirements of a Service. The problem is empty if the annotations are valid.
func (s snapshot) requirementsOf(d decision) (r requirements, problem string) {
	if d.selector.problem != "" {
		return r, fmt.Sprintf("Annotation %s %s", AnnotationNodeSelector, d.selector.problem)
	}

	service := d.service

	setting := s.options.Addresses
	if value, found := service.Annotations[AnnotationAddresses]; found {
		setting = config.ServiceAddresses(value)
	}

	r = requirements{types: addressTypes[setting], present: sets.New(addresses(service.Status.LoadBalancer.Ingress)...), conflicts: s.conflicts(service)}
	if r.types == nil {
		return r, fmt.Sprintf("Annotation %s is %.80q; use %q or %q", AnnotationAddresses, setting, config.AddressesExternal, config.AddressesInternal)
	}

	r.nodes = filter(s.eligible, func(c *candidate) bool { return d.selector.Matches(labels.Set(c.node.Labels)) })
	if slices.ContainsFunc(r.nodes, (*candidate).available) {
		r.nodes = filter(r.nodes, (*candidate).ready)
	}

	if service.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal && (len(r.nodes) == 0 || slices.ContainsFunc(r.nodes, (*candidate).ready)) {
		r.serving = sets.Set[string]{}

		for _, slice := range s.endpoints(service) {
			for _, endpoint := range slice.Endpoints {
				r.serving.Insert(string(slice.AddressType) + "/" + *endpoint.NodeName)
			}
		}
	}

	return r, ""
}

// conflicts describes the ports of the Service that older Services have, by address. A Service has at most 16 addresses, so
// this takes no longer with more Nodes.
func (s snapshot) conflicts(service *corev1.Service) map[string]string {
	conflicts, seen := map[string]string{}, sets.Set[*corev1.Service]{}

	for _, p := range service.Spec.Ports {
		key := port{p.Protocol, p.Port}

		for _, older := range s.taken[key] {
			if seen.Has(older.service) {
				continue
			}

			seen.Insert(older.service)

			for _, ingress := range older.ingress {
				conflicts[ingress.IP] = fmt.Sprintf("%s on %s (%s)", key, ingress.IP, describe(older.service))
			}
		}
	}

	return conflicts
}

func (r requirements) serves(c *candidate, family corev1.IPFamily) bool {
	return r.serving == nil || r.serving.Has(string(family)+"/"+c.node.Name)
}

func (s snapshot) choose(d decision, r requirements) decision {
	families := d.service.Spec.IPFamilies

	var conflicts []string

	for _, family := range families {
		limit := maxAddresses / len(families)

		free, refused := s.freeAddresses(d.service, r, family)
		if len(free) < limit {
			conflicts = append(conflicts, refused...)
		}

		// In ascending order: once the limit is reached, a new Node changes nothing.
		free = free[:min(limit, len(free))]
		slices.SortFunc(free, func(a, b address) int { return a.ip.Compare(b.ip) })

		for _, a := range free {
			d.ingress = append(d.ingress, corev1.LoadBalancerIngress{IP: a.text, IPMode: ptr.To(corev1.LoadBalancerIPModeVIP)})
		}
	}

	// A ready Node may get addresses when its machine responds.
	isPending := func(c *candidate) bool { return c.ready() && c.entry.Condition == inventory.Unknown }

	switch {
	case len(conflicts) > 0:
		return d.report(ReasonPortConflict, "Addresses omitted because of a port that an older Service has: %s", strings.Join(conflicts, "; "))
	case len(r.nodes) > 0 && !slices.ContainsFunc(r.nodes, func(c *candidate) bool { return !c.usesIPVS }):
		return d.report(ReasonUnsupportedProxyMode, "kube-proxy uses IPVS, which is not supported, on all %d Nodes that can receive traffic, such as %s (link %s); use nftables, and restart the machines",
			len(r.nodes), r.nodes[0].node.Name, machine.LinkIPVS)
	case len(d.ingress) > 0 && !slices.ContainsFunc(r.nodes, (*candidate).ready):
		return d.report(ReasonNodesNotReady, "None of the %d Nodes that can receive traffic is ready; the Service keeps their addresses until one is; check their kubelets", len(r.nodes))
	case len(d.ingress) > 0, !s.identity.Known, slices.ContainsFunc(s.eligible, isPending):
		return d
	}

	return s.explain(d, r)
}

// explain reports why no Node can receive the traffic of a Service.
func (s snapshot) explain(d decision, r requirements) decision {
	families, nodes := d.service.Spec.IPFamilies, filter(r.nodes, (*candidate).available)
	message := fmt.Sprintf("%d Nodes are managed, eligible and ready (%s), and %d of these match the node selector",
		len(filter(s.eligible, (*candidate).available)), s.excluded, len(nodes))

	if r.serving != nil {
		nodes = filter(nodes, func(c *candidate) bool {
			return slices.ContainsFunc(families, func(f corev1.IPFamily) bool { return r.serves(c, f) })
		})
		message += fmt.Sprintf("; %d of these have a ready endpoint (externalTrafficPolicy: Local)", len(nodes))
	}

	if len(nodes) > 0 {
		message += fmt.Sprintf("; none of these has on a link an address of type %v and family %v that is not of the cluster or another Node", r.types, families)

		if !slices.Contains(r.types, corev1.NodeInternalIP) {
			message += fmt.Sprintf("; if the network translates external addresses (1:1 NAT), set annotation %s=%s", AnnotationAddresses, config.AddressesInternal)
		}
	}

	return d.report(ReasonNoEligibleNodes, "No Node can receive traffic: %s", message)
}

// freeAddresses returns what freeAddressesOn returns. It prefers machines that are not stopping.
func (s snapshot) freeAddresses(service *corev1.Service, r requirements, family corev1.IPFamily) (free []address, refused []string) {
	others := r
	others.nodes = filter(r.nodes, func(c *candidate) bool { return !c.stopping })

	if free, refused = s.freeAddressesOn(service, others, family); len(free) > 0 {
		return free, refused
	}

	return s.freeAddressesOn(service, r, family)
}

// freeAddressesOn returns the addresses of one IP family that the Service can have, the best first, and a description of each
// address that it would have without an older Service. The addresses that the Service has are the best. The others are
// in an order that differs between Services, so that Services spread over the Nodes.
func (s snapshot) freeAddressesOn(service *corev1.Service, r requirements, family corev1.IPFamily) (free []address, refused []string) {
	seen := make(sets.Set[string], len(r.nodes))

	for _, c := range r.nodes {
		a := r.addressOf(c, family)
		if a.text == "" || seen.Has(a.text) || !r.serves(c, family) {
			continue
		}

		seen.Insert(a.text)

		if !r.present.Has(a.text) {
			sum := sha256.Sum256([]byte(string(service.UID) + "/" + c.node.Name))
			a.rank = string(sum[:])
		}

		if conflict := r.conflicts[a.text]; conflict != "" {
			refused = append(refused, conflict)
		} else {
			free = append(free, a)
		}
	}

	slices.SortFunc(free, func(a, b address) int { return cmp.Or(cmp.Compare(a.rank, b.rank), a.ip.Compare(b.ip)) })

	return free, refused
}

// setAddresses determines the addresses of the Node that Services can have. What the Node lists is no proof, because its
// kubelet can write it: the machine must have the address, and on a link. If a cloud translates the address (1:1 NAT), the
// packets arrive with another destination, and kube-proxy does not serve them. A Service keeps a present address
//   - until the machine has responded, which takes a moment after a leader change;
//   - until the addresses of the cluster itself are known;
//   - while kube-proxy uses IPVS on the Node;
//   - while the Node is not ready. It gets no new address of such a Node: the machine may be shut down.
func (s snapshot) setAddresses(c *candidate) {
	onLinks := sets.Set[netip.Addr]{}

	for _, a := range c.entry.Machine.Addresses {
		switch a.Link {
		case machine.LinkExternal:
		case machine.LinkIPVS:
			c.usesIPVS = true
		default:
			onLinks.Insert(a.Prefix.Addr().Unmap())
		}
	}

	for _, listed := range c.node.Status.Addresses {
		ip, err := netip.ParseAddr(listed.Address)
		a := address{ip: ip.Unmap(), text: ip.Unmap().String(), kind: listed.Type}

		switch {
		case err != nil, !ip.IsGlobalUnicast(), !s.mayPublish(c, a):
		case c.entry.ObservedAt.IsZero():
			c.addresses = append(c.addresses, a)
		case c.managed && onLinks.Has(a.ip):
			a.isPublishable = c.ready() && s.identity.Known && !c.usesIPVS
			c.addresses = append(c.addresses, a)
		}
	}
}

// mayPublish reports whether an address is allowed by the configuration, and not reserved although the machine of a worker
// may report it.
func (s snapshot) mayPublish(c *candidate, a address) bool {
	contains := func(cidr netip.Prefix) bool { return cidr.Contains(a.ip) }
	isForeign := a.kind == corev1.NodeExternalIP && len(s.external) > 0 && !slices.ContainsFunc(s.external, contains)
	isReserved := s.reserved.Has(a.ip) || slices.ContainsFunc(s.podCIDRs, contains)

	return !isForeign && !s.clusterIPs.Has(a.text) && (!isReserved || nodespec.IsControlPlane(c.node))
}

// addressOf returns the first address of the Node in the IP family that a Service can have, if any. Earlier types are
// preferred. All addresses of a Node lead to the same machine, so one is enough.
func (r requirements) addressOf(c *candidate, family corev1.IPFamily) address {
	for _, t := range r.types {
		for _, a := range c.addresses {
			if a.kind == t && a.ip.Is4() == (family == corev1.IPv4Protocol) && (a.isPublishable || r.present.Has(a.text)) {
				return a
			}
		}
	}

	return address{}
}

func (c *candidate) ready() bool { return nodespec.IsReady(c.node) }

// announced are the stages in which a machine stops serving.
var announced = sets.New(runtime.MachineStageRebooting, runtime.MachineStageUpgrading, runtime.MachineStageShuttingDown, runtime.MachineStageResetting)

// isStopping reports whether the machine has announced that it stops serving. If it no longer responds, the announcement
// counts until the Node cannot be ready any more unless its kubelet works.
func isStopping(entry inventory.Entry, now time.Time) bool {
	return announced.Has(entry.Machine.Stage) && (entry.UnresponsiveSince.IsZero() || now.Sub(entry.UnresponsiveSince) < resyncPeriod)
}

// isDown reports whether the machine has probably lost power: its kubelet has stopped, and it accepts no connections.
func (r renewal) isDown(entry inventory.Entry) bool {
	return r.overdue && entry.Condition == inventory.Unreachable
}

func (c *candidate) available() bool { return c.managed && c.ready() }

// excluded reports whether the Node has the exclusion label, with any value.
func (c *candidate) excluded() bool {
	_, found := c.node.Labels[corev1.LabelNodeExcludeBalancers]

	return found
}

// eligible reports whether the Node can receive traffic if it is ready. The conditions are those of
// k8s.io/cloud-provider/controllers/service. The Node must also be initialized, because its addresses are not final before.
func (c *candidate) eligible() bool {
	return !nodespec.IsScaledDown(c.node) && !c.excluded() && c.node.DeletionTimestamp == nil &&
		nodespec.IsTalos(c.node) && !nodespec.IsUninitialized(c.node) && c.entry.Condition != inventory.Mismatch
}
