package service

import (
	"cmp"
	"crypto/sha256"
	"fmt"
	"math/big"
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
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
)

// Class is the loadBalancerClass of the Services that this controller manages.
const Class = "talos-ccm.dev/node-ip"

// Annotations of Services.
const (
	// AnnotationNodeSelector is a label selector in Kubernetes' syntax. Only Nodes that match it receive traffic.
	AnnotationNodeSelector = "talos-ccm.dev/node-selector"
	// AnnotationAddresses is `external` or `internal`. It overrides `service.addresses` of the configuration.
	AnnotationAddresses = "talos-ccm.dev/addresses"
)

// Reasons of the Events on Services.
const (
	// ReasonNoEligibleNodes: no Node can receive traffic, as the message explains; the Service gets no addresses.
	// Fix: docs/troubleshooting/load-balancers.md#load-balancer-pending.
	ReasonNoEligibleNodes = "NoEligibleNodes"
	// ReasonClusterIdentityIncomplete: the addresses of the cluster are not known; the Service gets no new address.
	// Fix: the log names the source that does not respond.
	ReasonClusterIdentityIncomplete = "ClusterIdentityIncomplete"
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
	// ReasonTooManyPorts: the Service has more than 1,000 ports; it gets no addresses.
	// Fix: divide it into several Services.
	ReasonTooManyPorts = "TooManyPorts"
	// ReasonUnsupportedProxyMode: kube-proxy uses IPVS on all Nodes that could receive traffic; the Service keeps their
	// addresses and gets no new ones.
	// Fix: set `cluster.proxy.mode: nftables` and reboot.
	ReasonUnsupportedProxyMode = "UnsupportedProxyMode"
	// ReasonInvalidAnnotation: an annotation `talos-ccm.dev/…` is invalid or too long; the addresses stay.
	// Fix: correct it.
	ReasonInvalidAnnotation = "InvalidAnnotation"
	// ReasonOwnershipConflict: another controller has set the addresses of a Service without a class; the addresses
	// stay.
	// Fix: allow one default per cluster; create the Service again with the right class.
	ReasonOwnershipConflict = "OwnershipConflict"
)

const (
	// maxAddresses limits the addresses of a Service, of all its IP families together. DNS answers and clients can handle
	// as many.
	maxAddresses = 16

	// The following limits are far above use, and keep one user's Services and one kubelet from delaying all Services.

	// maxPorts limits the ports of a Service.
	maxPorts = 1000
	// maxSelector limits a node selector in bytes, and maxRequirements its requirements: each is compared with each Node.
	maxSelector, maxRequirements = 16 << 10, 100
	// maxNodeAddresses limits the addresses of a Node that count.
	maxNodeAddresses = 100
)

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
	// cluster are the addresses of the cluster itself and of pods. While isClusterUnknown, Services get no new addresses.
	cluster          []csrpolicy.ClusterSubjects
	isClusterUnknown bool
	// apiServerPorts are the TCP ports at which the API servers listen.
	apiServerPorts []int32
	// selectors are the node selectors of earlier passes, by Service. decide adds to them; nil keeps none.
	selectors map[string]parsedSelector

	// decide sets the following fields.

	// eligible are the Nodes that can receive traffic if they are ready, and index numbers their addresses.
	eligible []*candidate
	index    map[netip.Addr]int

	// reserved are the addresses of Services and pods, and virtual IPs, which no Node gets. controlPlane are the addresses
	// of the API server and of control-plane machines, which only control-plane Nodes get. A compromised worker can report
	// any address.
	reserved     []netip.Prefix
	virtual      sets.Set[netip.Addr]
	controlPlane sets.Set[netip.Addr]
	// external limits the external addresses; empty means no limit.
	external []netip.Prefix
	// excluded describes how many Nodes have the exclusion label.
	excluded string
	// claims are the ports of older Services.
	claims map[port]*claim
}

// claim contains the older Services that have a port as node port or, on the addresses with these indexes, as load balancer.
type claim struct {
	nodePort  *corev1.Service
	decisions []*decision
	addresses big.Int
}

// parsedSelector is the result of parsing the text of a node selector.
type parsedSelector struct {
	text     string
	selector labels.Selector
	err      error
}

// candidate is a Node and its machine.
type candidate struct {
	node  *corev1.Node
	entry inventory.Entry
	// managed is true if the machine was observed and the configuration selects it.
	managed bool
	// leaving is true if the machine has announced that it stops serving, or has probably lost power.
	leaving bool
	// addresses are the addresses that Services can have. decide sets them.
	addresses []address
	// usesIPVS is true if the machine has the link of kube-proxy in mode IPVS. With the addresses of other Nodes on it, the
	// machine cannot reach them. decide sets it.
	usesIPVS bool
}

// address is an address of a Node.
type address struct {
	ip   netip.Addr
	kind corev1.NodeAddressType
	// isPublishable is false if only Services that have the address already can have it.
	isPublishable bool
}

// filter returns the Nodes to keep.
func filter(nodes []*candidate, keep func(*candidate) bool) (kept []*candidate) {
	for _, c := range nodes {
		if keep(c) {
			kept = append(kept, c)
		}
	}

	return kept
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
	turn     int // order of the writes
}

// report returns the decision with a problem.
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

		s.claim(&d)
	}

	return decisions
}

// claim records the ports of a Service for the younger ones.
func (s snapshot) claim(d *decision) {
	claimOf := func(protocol corev1.Protocol, number int32) *claim {
		key := port{protocol, number}
		if s.claims[key] == nil {
			s.claims[key] = &claim{}
		}

		return s.claims[key]
	}

	var addresses big.Int

	for _, ingress := range d.ingress {
		ip, _ := netip.ParseAddr(ingress.IP)
		if i, found := s.index[ip]; found {
			addresses.SetBit(&addresses, i, 1)
		}
	}

	for _, p := range d.service.Spec.Ports {
		if p.NodePort != 0 {
			claimOf(p.Protocol, p.NodePort).nodePort = d.service
		}

		if addresses.Sign() > 0 {
			c := claimOf(p.Protocol, p.Port)
			c.addresses.Or(&c.addresses, &addresses)
			c.decisions = append(c.decisions, d)
		}
	}

	if number := d.service.Spec.HealthCheckNodePort; number != 0 {
		claimOf(corev1.ProtocolTCP, number).nodePort = d.service
	}
}

// prepare sorts the Services by age, and sets the derived fields.
func (s *snapshot) prepare() {
	s.external, _ = cidrset.ParsePrefixes(s.options.ExternalCIDRs) // validated
	s.claims, s.index = map[port]*claim{}, map[netip.Addr]int{}
	s.services = slices.SortedFunc(slices.Values(s.services), func(a, b *corev1.Service) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})

	s.reserve()

	excluded := 0

	for i := range s.nodes {
		if s.nodes[i].excluded() {
			excluded++
		}
	}

	s.excluded = fmt.Sprintf("%d of %d Nodes have the label %s", excluded, len(s.nodes), corev1.LabelNodeExcludeBalancers)

	for _, c := range s.nodes {
		if c.eligible() {
			s.setAddresses(&c)
			s.eligible = append(s.eligible, &c)
		}

		for _, a := range c.addresses {
			if _, found := s.index[a.ip]; !found {
				s.index[a.ip] = len(s.index)
			}
		}
	}
}

// reserve determines the addresses that workers cannot have.
func (s *snapshot) reserve() {
	s.virtual, s.controlPlane = sets.Set[netip.Addr]{}, sets.Set[netip.Addr]{}

	for _, service := range s.services {
		for _, text := range service.Spec.ClusterIPs {
			ip, _ := netip.ParseAddr(text) // "None" is the zero value, which no Node has
			s.virtual.Insert(ip)
		}
	}

	for _, subjects := range s.cluster {
		s.reserved = slices.Concat(s.reserved, subjects.ServiceCIDRs, subjects.PodCIDRs)

		for _, ip := range subjects.VIPs {
			s.virtual.Insert(ip.Unmap())
		}

		for _, ip := range subjects.APIServerIPs {
			s.controlPlane.Insert(ip.Unmap())
		}
	}

	for _, c := range s.nodes {
		if nodespec.IsControlPlane(c.node) {
			s.controlPlane.Insert(nodespec.RecordedAddress(c.node)) // the machine may be down since before this process was the leader

			for _, a := range c.entry.Last.Addresses {
				s.controlPlane.Insert(a.Prefix.Addr().Unmap())
			}
		}
	}
}

// decideOne decides about a managed Service.
func (s snapshot) decideOne(service *corev1.Service) decision {
	d := decision{service: service, ingress: service.Status.LoadBalancer.Ingress}
	r, invalid := s.parseRequest(service)

	switch managers := statusManagers(service); {
	case service.Spec.LoadBalancerClass == nil && len(d.ingress) > 0 && !managers.Has(FieldManager):
		return d.report(ReasonOwnershipConflict,
			"The addresses were set by another controller (%s); set spec.loadBalancerClass, so that only one of them manages the Service", strings.Join(sets.List(managers), ", "))
	case invalid != "":
		return d.report(ReasonInvalidAnnotation, "%s", invalid)
	}

	d.ingress = nil

	if count := len(service.Spec.Ports); count > maxPorts {
		return d.report(ReasonTooManyPorts, "The Service has %d ports, and at most %d are supported; divide it into several Services", count, maxPorts)
	}

	for _, p := range service.Spec.Ports {
		key := port{p.Protocol, p.Port}
		if user := s.userOf(key); user != "" {
			return d.report(ReasonPortReserved, "Port %s is reserved for %s; use another port", key, user)
		}
	}

	if other, key := s.owner(service, netip.Addr{}); other != "" {
		return d.report(ReasonPortConflict, "Port %s is a node port of the older %s; use another port", key, other)
	}

	return s.choose(d, r)
}

// userOf returns what uses the port on the machines; an empty string if nothing does.
func (s snapshot) userOf(p port) string {
	switch user := machinePorts[p]; {
	case user != "":
		return user
	case p.protocol == corev1.ProtocolTCP && slices.Contains(s.apiServerPorts, p.number):
		return "kube-apiserver"
	case slices.Contains(s.options.ReservedPorts, int(p.number)):
		return "the configuration (service.reservedPorts)"
	default:
		return ""
	}
}

// request contains what a Service requires of Nodes.
type request struct {
	// nodes match the node selector. They are ready, unless no managed one is: then the kubelets probably cannot reach the
	// API server, and kube-proxy still forwards traffic to the published addresses. kube-controller-manager does not evict
	// pods in this case, either.
	nodes []*candidate
	types []corev1.NodeAddressType
	// present are the addresses that the Service has, and taken those on which older Services have its ports, by index.
	present sets.Set[netip.Addr]
	taken   *big.Int
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
	selector, err := s.selectorOf(service)
	if err != nil {
		return r, fmt.Sprintf("Annotation %s %v", AnnotationNodeSelector, err)
	}

	addresses := s.options.Addresses
	if value, found := service.Annotations[AnnotationAddresses]; found {
		addresses = config.ServiceAddresses(value)
	}

	r = request{types: addressTypes[addresses], present: sets.Set[netip.Addr]{}, taken: s.taken(service)}
	if r.types == nil {
		return r, fmt.Sprintf("Annotation %s is %.80q; use %q or %q", AnnotationAddresses, addresses, config.AddressesExternal, config.AddressesInternal)
	}

	for _, ingress := range service.Status.LoadBalancer.Ingress {
		ip, _ := netip.ParseAddr(ingress.IP)
		r.present.Insert(ip)
	}

	r.nodes = filter(s.eligible, func(c *candidate) bool { return selector.Matches(labels.Set(c.node.Labels)) })
	if slices.ContainsFunc(r.nodes, (*candidate).inUse) {
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

// taken returns the indexes of the addresses on which older Services have a port of the Service.
func (s snapshot) taken(service *corev1.Service) *big.Int {
	addresses := &big.Int{}

	for _, p := range service.Spec.Ports {
		if c := s.claims[port{p.Protocol, p.Port}]; c != nil {
			addresses.Or(addresses, &c.addresses)
		}
	}

	return addresses
}

// selectorOf returns the node selector of a Service, which is parsed once.
func (s snapshot) selectorOf(service *corev1.Service) (labels.Selector, error) {
	name, text := cache.MetaObjectToName(service).String(), service.Annotations[AnnotationNodeSelector]

	parsed, known := s.selectors[name]

	switch {
	case text == "":
		return labels.Everything(), nil
	case len(text) > maxSelector:
		return nil, fmt.Errorf("has more than %d bytes; select by a label that the Nodes have in common", maxSelector)
	case known && parsed.text == text:
		return parsed.selector, parsed.err
	}

	selector, err := labels.Parse(text)
	if err != nil {
		err = fmt.Errorf("is not a label selector: %w", err)
	} else if requirements, _ := selector.Requirements(); len(requirements) > maxRequirements {
		err = fmt.Errorf("has more than %d requirements; select by a label that the Nodes have in common", maxRequirements)
	}

	if s.selectors != nil {
		s.selectors[name] = parsedSelector{text, selector, err}
	}

	return selector, err
}

// serves reports whether the Node receives traffic of the IP family.
func (r request) serves(c *candidate, family corev1.IPFamily) bool {
	return r.serving == nil || r.serving.Has(string(family)+"/"+c.node.Name)
}

// choose adds the addresses to a decision.
func (s snapshot) choose(d decision, r request) decision {
	families := d.service.Spec.IPFamilies

	var conflicts []netip.Addr

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
	isPending := func(c *candidate) bool { return c.ready() && c.entry.Condition == inventory.Unknown }

	switch {
	case len(conflicts) > 0:
		return d.report(ReasonPortConflict, "Addresses omitted because of a port that an older Service has: %s", s.describe(d.service, conflicts))
	case len(r.nodes) > 0 && !slices.ContainsFunc(r.nodes, func(c *candidate) bool { return !c.usesIPVS }):
		return d.report(ReasonUnsupportedProxyMode, "kube-proxy uses IPVS, which is not supported, on all %d Nodes that could receive traffic, such as %s (link %s); use nftables, and restart the machines",
			len(r.nodes), r.nodes[0].node.Name, machine.LinkIPVS)
	case len(d.ingress) > 0 && !slices.ContainsFunc(r.nodes, (*candidate).ready):
		return d.report(ReasonNodesNotReady, "None of the %d Nodes that can receive traffic is ready; the Service keeps their addresses until one is; check their kubelets", len(r.nodes))
	case len(d.ingress) > 0, slices.ContainsFunc(s.eligible, isPending):
		return d
	case s.isClusterUnknown:
		return d.report(ReasonClusterIdentityIncomplete, "The addresses of the cluster itself are not all known, so the Service gets no new address; the log names the source that does not respond")
	}

	return s.explain(d, r)
}

// explain reports why no Node can receive the traffic of a Service.
func (s snapshot) explain(d decision, r request) decision {
	families, nodes := d.service.Spec.IPFamilies, filter(r.nodes, (*candidate).inUse)
	message := fmt.Sprintf("%d Nodes are managed, eligible and ready (%s), and %d of these match the node selector",
		len(filter(s.eligible, (*candidate).inUse)), s.excluded, len(nodes))

	if r.serving != nil {
		nodes = filter(nodes, func(c *candidate) bool {
			return slices.ContainsFunc(families, func(f corev1.IPFamily) bool { return r.serves(c, f) })
		})
		message += fmt.Sprintf("; %d of these have a ready endpoint (externalTrafficPolicy: Local)", len(nodes))
	}

	if len(nodes) > 0 {
		message += fmt.Sprintf("; none of these has on a link an address of type %v and family %v that is not the cluster's, a pod's or a control-plane machine's", r.types, families)

		if !slices.Contains(r.types, corev1.NodeInternalIP) {
			message += fmt.Sprintf("; if the network translates external addresses (1:1 NAT), set annotation %s=%s", AnnotationAddresses, config.AddressesInternal)
		}
	}

	return d.report(ReasonNoEligibleNodes, "No Node can receive traffic: %s", message)
}

// available returns what availableOn returns. Machines that leave serve only as long as there is no other address.
func (s snapshot) available(service *corev1.Service, r request, family corev1.IPFamily) (free, refused []netip.Addr) {
	staying := r
	staying.nodes = filter(r.nodes, func(c *candidate) bool { return !c.leaving })

	if free, refused = s.availableOn(service, staying, family); len(free) > 0 {
		return free, refused
	}

	return s.availableOn(service, r, family)
}

// availableOn returns the addresses of one IP family that the Service can have, the best first, and those that it would
// have without an older Service. The addresses that the Service has are the best. The others are in an order that differs
// between Services, so that Services spread over the Nodes.
func (s snapshot) availableOn(service *corev1.Service, r request, family corev1.IPFamily) (free, refused []netip.Addr) {
	ranks := make(map[netip.Addr]string, len(r.nodes))

	for _, c := range r.nodes {
		ip := r.addressOf(c, family)
		if _, isRanked := ranks[ip]; isRanked || !ip.IsValid() || !r.serves(c, family) {
			continue
		}

		ranks[ip] = ""

		if r.taken.Bit(s.index[ip]) != 0 {
			refused = append(refused, ip)

			continue
		}

		if !r.present.Has(ip) {
			sum := sha256.Sum256([]byte(string(service.UID) + "/" + c.node.Name))
			ranks[ip] = string(sum[:])
		}

		free = append(free, ip)
	}

	slices.SortFunc(free, func(a, b netip.Addr) int { return cmp.Or(cmp.Compare(ranks[a], ranks[b]), a.Compare(b)) })

	return free, refused
}

// describe describes on which addresses older Services have ports of the Service, as far as an Event has room.
func (s snapshot) describe(service *corev1.Service, refused []netip.Addr) string {
	var conflicts []string

	for _, ip := range refused[:min(len(refused), maxAddresses)] {
		other, key := s.owner(service, ip)
		conflicts = append(conflicts, fmt.Sprintf("%s on %s (%s)", key, ip, other))
	}

	return strings.Join(conflicts, "; ")
}

// owner describes the older Service that has a port of the Service on the address, or as node port if the address is zero,
// and returns the port. It returns an empty string if there is none.
func (s snapshot) owner(service *corev1.Service, ip netip.Addr) (string, port) {
	for _, p := range service.Spec.Ports {
		key := port{p.Protocol, p.Port}

		other := s.claims[key].owner(ip, s.index)
		if other != nil && other.DeletionTimestamp != nil {
			return fmt.Sprintf("Service %s/%s, which is being deleted and waits for its finalizers: %s", other.Namespace, other.Name, strings.Join(other.Finalizers, ", ")), key
		} else if other != nil {
			return fmt.Sprintf("Service %s/%s", other.Namespace, other.Name), key
		}
	}

	return "", port{}
}

// owner returns the older Service that has the port on the address, or as node port if the address is zero; nil if there is
// none.
func (c *claim) owner(ip netip.Addr, index map[netip.Addr]int) *corev1.Service {
	switch {
	case c == nil:
		return nil
	case !ip.IsValid():
		return c.nodePort
	case c.addresses.Bit(index[ip]) == 0:
		return nil
	}

	i := slices.IndexFunc(c.decisions, func(d *decision) bool { return slices.Contains(addresses(d.ingress), ip.String()) })

	return c.decisions[i].service
}

// setAddresses determines the addresses of the Node that Services can have. What the Node lists is no proof, because its
// kubelet can write it: the machine must have the address, and on a link. If a cloud translates the address (1:1 NAT), the
// packets arrive with another destination, and kube-proxy does not serve them. A Service keeps a present address
//   - until the machine has responded, which takes a moment after a leader change;
//   - until the addresses of the cluster itself are known;
//   - while the Node is not ready. It gets no new address of such a Node: the machine may be shut down;
//   - while kube-proxy uses IPVS on the Node.
func (s snapshot) setAddresses(c *candidate) {
	onLinks := c.readLinks()

	listed := c.node.Status.Addresses
	for _, a := range listed[:min(len(listed), maxNodeAddresses)] {
		ip, err := netip.ParseAddr(a.Address)
		ip = ip.Unmap()
		contains := func(cidr netip.Prefix) bool { return cidr.Contains(ip) }
		isForeign := a.Type == corev1.NodeExternalIP && len(s.external) > 0 && !slices.ContainsFunc(s.external, contains)

		switch {
		case err != nil, !ip.IsGlobalUnicast(), isForeign:
		case s.virtual.Has(ip), slices.ContainsFunc(s.reserved, contains), s.controlPlane.Has(ip) && !nodespec.IsControlPlane(c.node):
		case c.entry.ObservedAt.IsZero():
			c.addresses = append(c.addresses, address{ip: ip, kind: a.Type})
		case c.managed && onLinks.Has(ip):
			c.addresses = append(c.addresses, address{ip: ip, kind: a.Type, isPublishable: c.ready() && !s.isClusterUnknown && !c.usesIPVS})
		}
	}
}

// readLinks returns the addresses on links of the machine, without those of Services, and sets usesIPVS.
func (c *candidate) readLinks() sets.Set[netip.Addr] {
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

	return onLinks
}

// addressOf returns the first address of the Node in the IP family that the Service can have, if any. Earlier types are
// preferred. All addresses of a Node lead to the same machine, so one is enough.
func (r request) addressOf(c *candidate, family corev1.IPFamily) netip.Addr {
	for _, t := range r.types {
		for _, a := range c.addresses {
			if a.kind == t && a.ip.Is4() == (family == corev1.IPv4Protocol) && (a.isPublishable || r.present.Has(a.ip)) {
				return a.ip
			}
		}
	}

	return netip.Addr{}
}

func (c *candidate) ready() bool { return nodespec.IsReady(c.node) }

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
func (c *candidate) inUse() bool { return c.managed && c.ready() }

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
