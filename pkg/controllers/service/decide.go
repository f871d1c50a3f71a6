package service

import (
	"cmp"
	"crypto/sha256"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/utils/ptr"

	"github.com/talos-ccm/talos-ccm/pkg/cidrset"
	"github.com/talos-ccm/talos-ccm/pkg/config"
	"github.com/talos-ccm/talos-ccm/pkg/internal/events"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
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
	// ReasonNoEligibleNodes: no Node can receive traffic, as the message explains; the Service gets no addresses.
	// Fix: docs/troubleshooting/load-balancers.md#load-balancer-pending.
	ReasonNoEligibleNodes = "NoEligibleNodes"
	// ReasonNodesNotReady: no Node that could receive traffic is ready; the Service keeps its addresses, except those of
	// Nodes that are gone or excluded.
	// Fix: check the kubelets, or select other Nodes.
	ReasonNodesNotReady = "NodesNotReady"
	// ReasonPortConflict: an older Service has the port on an address; the Service gets the other addresses.
	// Fix: use another port or node selector; if the older Service is being deleted, find out why its finalizer remains.
	ReasonPortConflict = "PortConflict"
	// ReasonPortReserved: Talos, Kubernetes or the configuration uses the port; the Service gets no addresses.
	// Fix: use another port.
	ReasonPortReserved = "PortReserved"
	// ReasonUnsupportedProxyMode: kube-proxy uses IPVS on a Node; the addresses of all Services stay.
	// Fix: set `cluster.proxy.mode: nftables` and reboot.
	ReasonUnsupportedProxyMode = "UnsupportedProxyMode"
	// ReasonInvalidAnnotation: an annotation `talos-ccm.dev/…` is invalid; the addresses stay.
	// Fix: correct it.
	ReasonInvalidAnnotation = "InvalidAnnotation"
	// ReasonOwnershipConflict: another controller has set the addresses of a Service without a class; the addresses
	// stay.
	// Fix: allow one default per cluster; create the Service again with the right class.
	ReasonOwnershipConflict = "OwnershipConflict"
)

// maxAddresses limits the addresses of a Service, of all its IP families together. DNS answers and clients can handle
// as many.
const maxAddresses = 16

// manages reports whether the controller is responsible for the Service.
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

// snapshot is everything that the addresses of Services depend on.
type snapshot struct {
	// services are all Services of the cluster, because all node ports count.
	services []*corev1.Service
	nodes    []candidate
	// endpoints returns the EndpointSlices of a Service, as trimSlice leaves them.
	endpoints func(*corev1.Service) []*discoveryv1.EndpointSlice
	options   config.Service

	// decide sets the following fields.

	// clusterIPs and controlPlane are the addresses of Services and of control-plane machines. A compromised worker can
	// report any address, but never gets one of these.
	clusterIPs   sets.Set[string]
	controlPlane sets.Set[netip.Addr]
	// external limits the external addresses; empty means no limit.
	external []netip.Prefix
	// ipvs is the name of a Node, eligible or not, on which kube-proxy uses IPVS. With the addresses of other Nodes on its
	// link, a Node could not reach them.
	ipvs string
	// excluded describes how many Nodes have the exclusion label.
	excluded string
	// taken are the older Services that have an address and port. A node port has the zero Addr.
	taken map[socket]*corev1.Service
}

// candidate is a Node and its machine.
type candidate struct {
	node  *corev1.Node
	entry inventory.Entry
	// managed is true if the machine was observed and the configuration selects it.
	managed bool
	// leaving is true if the machine has announced that it stops serving, or has probably lost power.
	leaving bool
}

// filter returns the Nodes to keep.
func filter(nodes []candidate, keep func(candidate) bool) []candidate {
	return slices.DeleteFunc(slices.Clone(nodes), func(c candidate) bool { return !keep(c) })
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

// decision contains the addresses that a Service must have.
type decision struct {
	service  *corev1.Service
	ingress  []corev1.LoadBalancerIngress
	problems []events.Problem
}

// report returns the decision with a problem.
func (d decision) report(reason, format string, args ...any) decision {
	d.problems = append(d.problems, events.Problem{Reason: reason, Message: fmt.Sprintf(format, args...)})

	return d
}

// socket is an address and a port, which only one Service can have.
type socket struct {
	address netip.Addr
	port
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

		for _, p := range service.Spec.Ports {
			s.taken[socket{port: port{p.Protocol, p.NodePort}}] = service
		}

		s.taken[socket{port: port{corev1.ProtocolTCP, service.Spec.HealthCheckNodePort}}] = service

		for _, ingress := range d.ingress {
			address, err := netip.ParseAddr(ingress.IP)
			for _, p := range service.Spec.Ports {
				if err == nil {
					s.taken[socket{address, port{p.Protocol, p.Port}}] = service
				}
			}
		}
	}

	return decisions
}

// prepare sorts the Services by age, removes the Nodes that are not eligible, and sets the derived fields.
func (s *snapshot) prepare() {
	s.external, _ = cidrset.ParsePrefixes(s.options.ExternalCIDRs) // validated
	s.clusterIPs, s.controlPlane, s.taken = sets.Set[string]{}, sets.Set[netip.Addr]{}, map[socket]*corev1.Service{}
	s.services = slices.SortedFunc(slices.Values(s.services), func(a, b *corev1.Service) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})

	for _, service := range s.services {
		s.clusterIPs.Insert(service.Spec.ClusterIPs...)
	}

	for _, c := range s.nodes {
		if slices.ContainsFunc(c.entry.Machine.Addresses, func(a machine.Address) bool { return a.Link == machine.LinkIPVS }) {
			s.ipvs = c.node.Name
		}

		if nodespec.IsControlPlane(c.node) {
			for _, a := range c.entry.Last.Addresses {
				s.controlPlane.Insert(a.Prefix.Addr().Unmap())
			}
		}
	}

	s.excluded = fmt.Sprintf("%d of %d Nodes have the label %s", len(filter(s.nodes, candidate.excluded)), len(s.nodes), corev1.LabelNodeExcludeBalancers)
	s.nodes = filter(s.nodes, candidate.eligible)
}

// decideOne decides about a managed Service.
func (s snapshot) decideOne(service *corev1.Service) decision {
	d := decision{service: service, ingress: service.Status.LoadBalancer.Ingress}
	r, invalid := s.parseRequest(service)

	switch managers := statusManagers(service); {
	case s.ipvs != "":
		return d.report(ReasonUnsupportedProxyMode,
			"kube-proxy on Node %s uses IPVS, which is not supported (link %s); use nftables, and restart the machine", s.ipvs, machine.LinkIPVS)
	case service.Spec.LoadBalancerClass == nil && len(d.ingress) > 0 && !managers.Has(FieldManager):
		return d.report(ReasonOwnershipConflict,
			"The addresses were set by another controller (%s); set spec.loadBalancerClass, so that only one of them manages the Service", strings.Join(sets.List(managers), ", "))
	case invalid != "":
		return d.report(ReasonInvalidAnnotation, "%s", invalid)
	}

	d.ingress = nil

	for _, p := range service.Spec.Ports {
		key := port{p.Protocol, p.Port}

		user := machinePorts[key]
		if user == "" && slices.Contains(s.options.ReservedPorts, int(p.Port)) {
			user = "the configuration (service.reservedPorts)"
		}

		if user != "" {
			return d.report(ReasonPortReserved, "Port %s is reserved for %s; use another port", key, user)
		}
	}

	if other, key := s.owner(service, netip.Addr{}); other != "" {
		return d.report(ReasonPortConflict, "Port %s is a node port of the older %s; use another port", key, other)
	}

	return s.choose(d, r)
}

// request contains what a Service requires of Nodes.
type request struct {
	// nodes match the node selector. They are ready, unless no managed one is: then the kubelets probably cannot reach the
	// API server, and kube-proxy still forwards traffic to the published addresses. kube-controller-manager does not evict
	// pods in this case, either.
	nodes []candidate
	types []corev1.NodeAddressType
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

// parseRequest returns the request of a Service. The problem is empty if the annotations are valid.
func (s snapshot) parseRequest(service *corev1.Service) (r request, problem string) {
	selector, err := labels.Parse(service.Annotations[AnnotationNodeSelector])
	if err != nil {
		return r, fmt.Sprintf("Annotation %s is not a label selector: %v", AnnotationNodeSelector, err)
	}

	addresses := s.options.Addresses
	if value, found := service.Annotations[AnnotationAddresses]; found {
		addresses = config.ServiceAddresses(value)
	}

	r = request{types: addressTypes[addresses]}
	if r.types == nil {
		return r, fmt.Sprintf("Annotation %s is %.80q; use %q or %q", AnnotationAddresses, addresses, config.AddressesExternal, config.AddressesInternal)
	}

	r.nodes = filter(s.nodes, func(c candidate) bool { return selector.Matches(labels.Set(c.node.Labels)) })
	if slices.ContainsFunc(r.nodes, candidate.inUse) {
		r.nodes = filter(r.nodes, candidate.ready)
	}

	if service.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal && (len(r.nodes) == 0 || slices.ContainsFunc(r.nodes, candidate.ready)) {
		r.serving = sets.Set[string]{}

		for _, slice := range s.endpoints(service) {
			for _, endpoint := range slice.Endpoints {
				r.serving.Insert(string(slice.AddressType) + "/" + *endpoint.NodeName)
			}
		}
	}

	return r, ""
}

// serves reports whether the Node receives traffic of the IP family.
func (r request) serves(c candidate, family corev1.IPFamily) bool {
	return r.serving == nil || r.serving.Has(string(family)+"/"+c.node.Name)
}

// choose adds the addresses to a decision.
func (s snapshot) choose(d decision, r request) decision {
	families := d.service.Spec.IPFamilies

	var conflicts []string

	for _, family := range families {
		limit := maxAddresses / len(families)

		free, refused := s.available(d.service, r, family)
		if len(free) < limit {
			conflicts = append(conflicts, refused...)
		}

		// In ascending order: once the limit is reached, a new Node changes nothing.
		free = free[:min(limit, len(free))]
		slices.SortFunc(free, netip.Addr.Compare)

		for _, address := range free {
			d.ingress = append(d.ingress, corev1.LoadBalancerIngress{IP: address.String(), IPMode: ptr.To(corev1.LoadBalancerIPModeVIP)})
		}
	}

	// A ready Node may get addresses when its machine responds.
	isPending := func(c candidate) bool { return c.ready() && c.entry.Condition == inventory.Unknown }

	switch {
	case len(conflicts) > 0:
		return d.report(ReasonPortConflict, "Addresses omitted because of a port that an older Service has: %s", strings.Join(conflicts, "; "))
	case len(d.ingress) > 0 && !slices.ContainsFunc(r.nodes, candidate.ready):
		return d.report(ReasonNodesNotReady, "None of the %d Nodes that can receive traffic is ready; the Service keeps their addresses until one is; check their kubelets", len(r.nodes))
	case len(d.ingress) > 0, slices.ContainsFunc(s.nodes, isPending):
		return d
	}

	nodes := filter(r.nodes, candidate.inUse)
	message := fmt.Sprintf("%d Nodes are managed, eligible and ready (%s), and %d of these match the node selector",
		len(filter(s.nodes, candidate.inUse)), s.excluded, len(nodes))

	if r.serving != nil {
		nodes = filter(nodes, func(c candidate) bool {
			return slices.ContainsFunc(families, func(f corev1.IPFamily) bool { return r.serves(c, f) })
		})
		message += fmt.Sprintf("; %d of these have a ready endpoint (externalTrafficPolicy: Local)", len(nodes))
	}

	if len(nodes) > 0 {
		message += fmt.Sprintf("; none of these has on a link an address of type %v and family %v", r.types, families)

		if !slices.Contains(r.types, corev1.NodeInternalIP) {
			message += fmt.Sprintf("; if the network translates external addresses (1:1 NAT), set annotation %s=%s", AnnotationAddresses, config.AddressesInternal)
		}
	}

	return d.report(ReasonNoEligibleNodes, "No Node can receive traffic: %s", message)
}

// available returns what availableOn returns. Machines that leave serve only as long as there is no other address.
func (s snapshot) available(service *corev1.Service, r request, family corev1.IPFamily) (free []netip.Addr, refused []string) {
	staying := r
	staying.nodes = filter(r.nodes, func(c candidate) bool { return !c.leaving })

	if free, refused = s.availableOn(service, staying, family); len(free) > 0 {
		return free, refused
	}

	return s.availableOn(service, r, family)
}

// availableOn returns the addresses of one IP family that the Service can have, the best first, and a description of each
// address that it would have without an older Service. The addresses that the Service has are the best. The others are
// in an order that differs between Services, so that Services spread over the Nodes.
func (s snapshot) availableOn(service *corev1.Service, r request, family corev1.IPFamily) (free []netip.Addr, refused []string) {
	ranks, present := map[netip.Addr]string{}, addresses(service.Status.LoadBalancer.Ingress)

	for _, c := range r.nodes {
		address := s.addressOf(c, family, r.types, present)
		if _, isRanked := ranks[address]; isRanked || !address.IsValid() || !r.serves(c, family) {
			continue
		}

		ranks[address] = ""

		if !slices.Contains(present, address.String()) {
			sum := sha256.Sum256([]byte(string(service.UID) + "/" + c.node.Name))
			ranks[address] = string(sum[:])
		}

		if other, key := s.owner(service, address); other != "" {
			refused = append(refused, fmt.Sprintf("%s on %s (%s)", key, address, other))
		} else {
			free = append(free, address)
		}
	}

	slices.SortFunc(free, func(a, b netip.Addr) int { return cmp.Or(cmp.Compare(ranks[a], ranks[b]), a.Compare(b)) })

	return free, refused
}

// owner describes the older Service that has a port of the Service on the address, if any, and returns the port.
func (s snapshot) owner(service *corev1.Service, address netip.Addr) (string, port) {
	for _, p := range service.Spec.Ports {
		key := port{p.Protocol, p.Port}
		if other := s.taken[socket{address, key}]; other != nil && other.DeletionTimestamp != nil {
			return fmt.Sprintf("Service %s/%s, which is being deleted and waits for its finalizers: %s", other.Namespace, other.Name, strings.Join(other.Finalizers, ", ")), key
		} else if other != nil {
			return fmt.Sprintf("Service %s/%s", other.Namespace, other.Name), key
		}
	}

	return "", port{}
}

// mayServe reports whether a Service can have the address of the Node. The addresses of the Node are no proof, because
// its kubelet can write them: the machine must have the address, and on a link. If a cloud translates the address (1:1
// NAT), the packets arrive with another destination, and kube-proxy does not serve them. A Service keeps a present address
//   - until the machine has responded, which takes a moment after a leader change;
//   - while the Node is not ready. It gets no new address of such a Node: the machine may be shut down.
func (s snapshot) mayServe(c candidate, address netip.Addr, present bool) bool {
	switch {
	case s.clusterIPs.Has(address.String()), s.controlPlane.Has(address) && !nodespec.IsControlPlane(c.node):
		return false // reserved, although its machine may report it
	case c.entry.ObservedAt.IsZero():
		return present
	default:
		return c.managed && (present || c.ready()) && slices.ContainsFunc(c.entry.Machine.Addresses, func(a machine.Address) bool {
			return a.Link != machine.LinkExternal && a.Prefix.Addr().Unmap() == address
		})
	}
}

// addressOf returns the first address of the Node in the IP family that a Service can have, if any. Earlier types are
// preferred. All addresses of a Node lead to the same machine, so one is enough.
func (s snapshot) addressOf(c candidate, family corev1.IPFamily, types []corev1.NodeAddressType, present []string) netip.Addr {
	for _, t := range types {
		for _, a := range c.node.Status.Addresses {
			ip, err := netip.ParseAddr(a.Address)
			if a.Type != t || err != nil || !ip.IsGlobalUnicast() || ip.Unmap().Is4() != (family == corev1.IPv4Protocol) {
				continue
			}

			ip = ip.Unmap()
			isAllowed := t != corev1.NodeExternalIP || len(s.external) == 0 || slices.ContainsFunc(s.external, func(cidr netip.Prefix) bool { return cidr.Contains(ip) })

			if isAllowed && s.mayServe(c, ip, slices.Contains(present, ip.String())) {
				return ip
			}
		}
	}

	return netip.Addr{}
}

func (c candidate) ready() bool { return nodespec.IsReady(c.node) }

// announced are the stages in which a machine stops serving.
var announced = sets.New(runtime.MachineStageRebooting, runtime.MachineStageUpgrading, runtime.MachineStageShuttingDown, runtime.MachineStageResetting)

// isLeaving reports whether the machine has announced that it stops serving. If it no longer responds, the announcement
// counts until the Node cannot be ready any more unless its kubelet works.
func isLeaving(entry inventory.Entry, now time.Time) bool {
	return announced.Has(entry.Machine.Stage) && (entry.SilentSince.IsZero() || now.Sub(entry.SilentSince) < resyncPeriod)
}

// isDown reports whether the machine has probably lost power: its kubelet has stopped, and it accepts no connections.
func (r renewal) isDown(entry inventory.Entry) bool {
	return r.overdue && entry.Condition == inventory.Unreachable
}

// inUse reports whether the Node is managed and ready.
func (c candidate) inUse() bool { return c.managed && c.ready() }

// excluded reports whether the Node has the exclusion label, with any value.
func (c candidate) excluded() bool {
	_, found := c.node.Labels[corev1.LabelNodeExcludeBalancers]

	return found
}

// eligible reports whether the Node can receive traffic if it is ready. The conditions are those of
// k8s.io/cloud-provider/controllers/service. The Node must also be initialized, because its addresses are not final before.
func (c candidate) eligible() bool {
	return !nodespec.IsScaledDown(c.node) && !c.excluded() && c.node.DeletionTimestamp == nil &&
		nodespec.IsTalos(c.node) && !nodespec.IsUninitialized(c.node) && c.entry.Condition != inventory.Mismatch
}
