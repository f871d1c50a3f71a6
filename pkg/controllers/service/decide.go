package service

import (
	"cmp"
	"crypto/sha256"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/utils/ptr"

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
	// AnnotationAddresses is `external` or `internal`, and overrides config.Service.Addresses.
	AnnotationAddresses = "talos-ccm.dev/addresses"
)

// Reasons of the Events on Services.
const (
	// ReasonNoEligibleNodes: no Node can receive the traffic of the Service.
	ReasonNoEligibleNodes = "NoEligibleNodes"
	// ReasonPortConflict: another Service has a port of the Service on an address.
	ReasonPortConflict = "PortConflict"
	// ReasonPortReserved: a port of the Service is used by Talos, Kubernetes or, by configuration, by the machines.
	ReasonPortReserved = "PortReserved"
	// ReasonInvalidAnnotation: an annotation of the Service is invalid, and its addresses remain as they are.
	ReasonInvalidAnnotation = "InvalidAnnotation"
	// ReasonUnsupportedProxyMode: kube-proxy uses IPVS on a Node, and the addresses of all Services remain as they are.
	ReasonUnsupportedProxyMode = "UnsupportedProxyMode"
	// ReasonOwnershipConflict: another field manager has set the addresses of the Service.
	ReasonOwnershipConflict = "OwnershipConflict"
)

// linkIPVS is the link to which kube-proxy in mode IPVS assigns the addresses of all Services. With the addresses of
// other Nodes on it, a Node could not reach them (k8s.io/kubernetes/pkg/proxy/ipvs, defaultDummyDevice).
const linkIPVS = "kube-ipvs0"

// maxAddresses limits the addresses of a Service, of all its IP families together. DNS answers and clients can handle
// as many.
const maxAddresses = 16

// toBeDeletedTaint is set by cluster-autoscaler before it deletes a Node. k8s.io/cloud-provider/controllers/service
// excludes such Nodes, too.
const toBeDeletedTaint = "ToBeDeletedByClusterAutoscaler"

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
	// endpoints returns the EndpointSlices of a Service.
	endpoints func(*corev1.Service) []*discoveryv1.EndpointSlice
	options   config.Service

	// decide sets the addresses of Services and of control-plane machines. A compromised worker can report any address,
	// but never gets one of these.
	clusterIPs   sets.Set[string]
	controlPlane sets.Set[netip.Addr]
}

// candidate is a Node and its machine.
type candidate struct {
	node  *corev1.Node
	entry inventory.Entry
	// managed is true if the machine was observed and the configuration selects it.
	managed bool
}

// statusManagers returns the field managers of the Service's status.
func statusManagers(service *corev1.Service) string {
	managers := sets.Set[string]{}
	for _, entry := range service.ManagedFields {
		managers.Insert(entry.Manager)
	}

	return strings.Join(sets.List(managers), ", ")
}

// isOwned reports whether the controller has written the addresses of the Service. The API server drops a field manager
// that owns nothing.
func isOwned(service *corev1.Service) bool {
	return slices.ContainsFunc(service.ManagedFields, func(entry metav1.ManagedFieldsEntry) bool { return entry.Manager == FieldManager })
}

// decision contains the addresses that a Service must have.
type decision struct {
	service  *corev1.Service
	ingress  []corev1.LoadBalancerIngress
	problems []events.Problem
}

// socket is an address and a port, which only one Service can have.
type socket struct {
	address netip.Addr
	port
}

// decide decides about all managed Services, and about those that are no longer managed. Older Services come first: of
// two Services with the same port, the older one has the address.
func (s snapshot) decide() []decision {
	s.clusterIPs, s.controlPlane = s.reservedAddresses()
	ipvs := s.findIPVS() // on any Node, eligible or not
	s.nodes = slices.DeleteFunc(slices.Clone(s.nodes), func(c candidate) bool { return !c.eligible() })

	var (
		decisions []decision
		managed   []*corev1.Service
		nodePorts = map[port]*corev1.Service{}
		taken     = map[socket]*corev1.Service{}
	)

	for _, service := range s.services {
		switch {
		case manages(s.options, service):
			managed = append(managed, service)
		case isOwned(service) && len(service.Status.LoadBalancer.Ingress) > 0:
			decisions = append(decisions, decision{service: service})
		}

		for _, p := range service.Spec.Ports {
			nodePorts[port{p.Protocol, p.NodePort}] = service
		}

		nodePorts[port{corev1.ProtocolTCP, service.Spec.HealthCheckNodePort}] = service
	}

	slices.SortFunc(managed, func(a, b *corev1.Service) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})

	for _, service := range managed {
		d := decision{service, service.Status.LoadBalancer.Ingress, ipvs}
		if ipvs == nil {
			d = s.decideOne(service, nodePorts, taken)
		}

		decisions = append(decisions, d)

		for _, ingress := range d.ingress {
			address, _ := netip.ParseAddr(ingress.IP) // the zero Addr is an address like any other here

			for _, p := range service.Spec.Ports {
				taken[socket{address, port{p.Protocol, p.Port}}] = service
			}
		}
	}

	return decisions
}

// findIPVS returns a problem if kube-proxy uses IPVS.
func (s snapshot) findIPVS() []events.Problem {
	for _, c := range s.nodes {
		if slices.ContainsFunc(c.entry.Machine.Addresses, func(a machine.Address) bool { return a.Link == linkIPVS }) {
			return []events.Problem{{Reason: ReasonUnsupportedProxyMode, Message: fmt.Sprintf(
				"kube-proxy on Node %s uses IPVS, which is not supported (link %s); use nftables, and restart the machine", c.node.Name, linkIPVS)}}
		}
	}

	return nil
}

func (s snapshot) decideOne(service *corev1.Service, nodePorts map[port]*corev1.Service, taken map[socket]*corev1.Service) decision {
	present := service.Status.LoadBalancer.Ingress

	if service.Spec.LoadBalancerClass == nil && len(present) > 0 && !isOwned(service) {
		return decision{service, present, []events.Problem{{Reason: ReasonOwnershipConflict, Message: fmt.Sprintf(
			"The addresses were set by another controller (%s); set spec.loadBalancerClass, so that only one of them manages the Service", statusManagers(service))}}}
	}

	request, invalid := parseRequest(service, s.options.Addresses)
	if invalid != "" {
		return decision{service, present, []events.Problem{{Reason: ReasonInvalidAnnotation, Message: invalid}}}
	}

	if problem := s.unusablePort(service, nodePorts); problem != nil {
		return decision{service, nil, []events.Problem{*problem}}
	}

	var (
		d         = decision{service: service}
		conflicts []string
	)

	for _, family := range service.Spec.IPFamilies {
		limit := maxAddresses / len(service.Spec.IPFamilies)
		free, refused := s.available(service, request, family, taken)

		if len(free) < limit {
			conflicts = append(conflicts, refused...)
		}

		// In ascending order: once the limit is reached, a new Node changes nothing.
		chosen := free[:min(limit, len(free))]
		slices.SortFunc(chosen, netip.Addr.Compare)

		for _, address := range chosen {
			d.ingress = append(d.ingress, corev1.LoadBalancerIngress{IP: address.String(), IPMode: ptr.To(corev1.LoadBalancerIPModeVIP)})
		}
	}

	switch {
	case len(conflicts) > 0:
		d.problems = []events.Problem{{
			Reason: ReasonPortConflict, Message: "Addresses omitted because of a port that an older Service has: " + strings.Join(conflicts, "; "),
		}}
	case len(d.ingress) == 0 && !slices.ContainsFunc(s.nodes, candidate.pending):
		d.problems = []events.Problem{{Reason: ReasonNoEligibleNodes, Message: s.explain(service, request)}}
	}

	return d
}

// unusablePort returns a problem if the Service has a port that cannot be used at any address.
func (s snapshot) unusablePort(service *corev1.Service, nodePorts map[port]*corev1.Service) *events.Problem {
	for _, p := range service.Spec.Ports {
		key := port{p.Protocol, p.Port}

		user := machinePorts[key]
		if user == "" && slices.Contains(s.options.ReservedPorts, int(p.Port)) {
			user = "the configuration (service.reservedPorts)"
		}

		if user != "" {
			return &events.Problem{Reason: ReasonPortReserved, Message: fmt.Sprintf("Port %s is reserved for %s; use another port", key, user)}
		}

		if other := nodePorts[key]; other != nil && other.UID != service.UID {
			return &events.Problem{
				Reason: ReasonPortConflict, Message: fmt.Sprintf("Port %s is a node port of Service %s/%s; use another port", key, other.Namespace, other.Name),
			}
		}
	}

	return nil
}

// request contains the Nodes and the types of addresses that a Service requests.
type request struct {
	selector labels.Selector
	types    []corev1.NodeAddressType
}

// parseRequest reads the annotations of a Service. The problem is empty if they are valid.
func parseRequest(service *corev1.Service, addresses config.ServiceAddresses) (r request, problem string) {
	selector, err := labels.Parse(service.Annotations[AnnotationNodeSelector])
	if err != nil {
		return request{}, fmt.Sprintf("Annotation %s is not a label selector: %v", AnnotationNodeSelector, err)
	}

	if value, found := service.Annotations[AnnotationAddresses]; found {
		addresses = config.ServiceAddresses(value)
	}

	switch addresses {
	case "":
		return request{selector, []corev1.NodeAddressType{corev1.NodeExternalIP, corev1.NodeInternalIP}}, ""
	case config.AddressesExternal:
		return request{selector, []corev1.NodeAddressType{corev1.NodeExternalIP}}, ""
	case config.AddressesInternal:
		return request{selector, []corev1.NodeAddressType{corev1.NodeInternalIP}}, ""
	default:
		return request{}, fmt.Sprintf("Annotation %s is %.80q; use %q or %q", AnnotationAddresses, addresses, config.AddressesExternal, config.AddressesInternal)
	}
}

// available returns the addresses of one IP family that the Service can have, the best first, and a description of each
// address that it would have without an older Service. The addresses that the Service has are the best. The others are
// in an order that differs between Services, so that Services spread over the Nodes.
func (s snapshot) available(service *corev1.Service, r request, family corev1.IPFamily, taken map[socket]*corev1.Service) (free []netip.Addr, refused []string) {
	serving := s.servingNodes(service, family)
	present, ranks := sets.Set[string]{}, map[netip.Addr]string{}

	for _, ingress := range service.Status.LoadBalancer.Ingress {
		present.Insert(ingress.IP)
	}

	for _, c := range s.selected(r) {
		if serving != nil && !serving.Has(c.node.Name) {
			continue
		}

		address, found := addressOf(c.node, family, r.types)
		isPresent := present.Has(address.String())
		_, isRanked := ranks[address]

		if !found || isRanked || !s.mayServe(c, address, isPresent) {
			continue
		}

		ranks[address] = ""

		if !isPresent {
			sum := sha256.Sum256([]byte(string(service.UID) + "/" + c.node.Name))
			ranks[address] = string(sum[:])
		}

		if owner, key := conflicting(service, address, taken); owner != nil {
			refused = append(refused, fmt.Sprintf("%s on %s (Service %s/%s)", key, address, owner.Namespace, owner.Name))
		} else {
			free = append(free, address)
		}
	}

	slices.SortFunc(free, func(a, b netip.Addr) int { return cmp.Or(cmp.Compare(ranks[a], ranks[b]), a.Compare(b)) })

	return free, refused
}

// selected returns the ready Nodes that match the node selector. If no managed Node is ready, it returns all that match:
// the kubelets probably cannot reach the API server, and kube-proxy still forwards traffic to the published addresses.
// kube-controller-manager does not evict pods in this case, either.
func (s snapshot) selected(r request) []candidate {
	nodes := slices.DeleteFunc(slices.Clone(s.nodes), func(c candidate) bool { return !r.selector.Matches(labels.Set(c.node.Labels)) })

	if slices.ContainsFunc(nodes, func(c candidate) bool { return c.managed && c.ready() }) {
		nodes = slices.DeleteFunc(nodes, func(c candidate) bool { return !c.ready() })
	}

	return nodes
}

// reservedAddresses returns the addresses of Services and of control-plane machines.
func (s snapshot) reservedAddresses() (clusterIPs sets.Set[string], controlPlane sets.Set[netip.Addr]) {
	clusterIPs, controlPlane = sets.Set[string]{}, sets.Set[netip.Addr]{}

	for _, service := range s.services {
		clusterIPs.Insert(service.Spec.ClusterIPs...)
	}

	for _, c := range s.nodes {
		if nodespec.IsControlPlane(c.node) {
			for _, a := range c.entry.Last.Addresses {
				controlPlane.Insert(a.Prefix.Addr().Unmap())
			}
		}
	}

	return clusterIPs, controlPlane
}

// mayServe reports whether a Service can have the address of the Node. The addresses of the Node are no proof, because
// its kubelet can write them: the machine must have the address. A Service keeps a present address
//   - until the machine has responded, which takes a moment after a leader change;
//   - while the Node is not ready. It gets no new address of such a Node: the machine may be shut down.
func (s snapshot) mayServe(c candidate, address netip.Addr, present bool) bool {
	switch {
	case s.clusterIPs.Has(address.String()), s.controlPlane.Has(address) && !nodespec.IsControlPlane(c.node):
		return false // reserved, although its machine may report it
	case c.entry.ObservedAt.IsZero():
		return present
	default:
		return c.managed && c.entry.Machine.HasAddress(address) && (present || c.ready())
	}
}

// conflicting returns the older Service that has a port of the Service on the address, and the port.
func conflicting(service *corev1.Service, address netip.Addr, taken map[socket]*corev1.Service) (*corev1.Service, port) {
	for _, p := range service.Spec.Ports {
		key := port{p.Protocol, p.Port}
		if owner := taken[socket{address, key}]; owner != nil {
			return owner, key
		}
	}

	return nil, port{}
}

// servingNodes returns the names of the Nodes with ready endpoints of the IP family. It returns nil for a Service without
// externalTrafficPolicy: Local.
func (s snapshot) servingNodes(service *corev1.Service, family corev1.IPFamily) sets.Set[string] {
	if service.Spec.ExternalTrafficPolicy != corev1.ServiceExternalTrafficPolicyLocal {
		return nil
	}

	nodes := sets.Set[string]{}

	for _, slice := range s.endpoints(service) {
		if string(slice.AddressType) != string(family) {
			continue
		}

		nodes = nodes.Union(readyNodes(slice))
	}

	return nodes
}

// readyNodes returns the names of the Nodes with endpoints that are ready: serving and not terminating. An absent
// condition means ready (discovery.k8s.io/v1, EndpointConditions).
func readyNodes(slice *discoveryv1.EndpointSlice) sets.Set[string] {
	nodes := sets.Set[string]{}

	for _, endpoint := range slice.Endpoints {
		if endpoint.NodeName != nil && ptr.Deref(endpoint.Conditions.Ready, true) {
			nodes.Insert(*endpoint.NodeName)
		}
	}

	return nodes
}

// addressOf returns the first address of the Node in the IP family. Earlier types are preferred. All addresses of a Node
// lead to the same machine, so one is enough.
func addressOf(node *corev1.Node, family corev1.IPFamily, types []corev1.NodeAddressType) (address netip.Addr, found bool) {
	for _, t := range types {
		for _, a := range node.Status.Addresses {
			ip, err := netip.ParseAddr(a.Address)
			if a.Type == t && err == nil && ip.IsGlobalUnicast() && ip.Unmap().Is4() == (family == corev1.IPv4Protocol) {
				return ip.Unmap(), true
			}
		}
	}

	return netip.Addr{}, false
}

func (c candidate) ready() bool { return nodespec.IsReady(c.node) }

// eligible reports whether the Node can receive traffic if it is ready. The conditions are those of
// k8s.io/cloud-provider/controllers/service. The Node must also be initialized, because its addresses are not final before.
func (c candidate) eligible() bool {
	isLeaving := slices.ContainsFunc(c.node.Spec.Taints, func(taint corev1.Taint) bool { return taint.Key == toBeDeletedTaint })

	isExcluded := false

	if value, found := c.node.Labels[corev1.LabelNodeExcludeBalancers]; found {
		excluded, err := strconv.ParseBool(value)
		isExcluded = excluded || err != nil
	}

	return !isLeaving && !isExcluded && c.node.DeletionTimestamp == nil &&
		nodespec.IsTalos(c.node) && !nodespec.IsUninitialized(c.node) && c.entry.Condition != inventory.Mismatch
}

// pending reports whether the Node may get addresses when its machine responds.
func (c candidate) pending() bool { return c.ready() && c.entry.Condition == inventory.Unknown }

// explain returns how many Nodes meet each requirement.
func (s snapshot) explain(service *corev1.Service, r request) string {
	nodes := slices.DeleteFunc(slices.Clone(s.nodes), func(c candidate) bool { return !c.managed || !c.ready() })
	managed := len(nodes)

	nodes = slices.DeleteFunc(nodes, func(c candidate) bool { return !r.selector.Matches(labels.Set(c.node.Labels)) })
	message := fmt.Sprintf("No Node can receive traffic: %d Nodes are managed, eligible and ready, and %d of these match the node selector", managed, len(nodes))

	if service.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal {
		nodes = slices.DeleteFunc(nodes, func(c candidate) bool {
			return !slices.ContainsFunc(service.Spec.IPFamilies, func(family corev1.IPFamily) bool { return s.servingNodes(service, family).Has(c.node.Name) })
		})
		message += fmt.Sprintf("; %d of these have a ready endpoint (externalTrafficPolicy: Local)", len(nodes))
	}

	if len(nodes) > 0 {
		message += fmt.Sprintf("; none of these has an address of type %v and family %v", r.types, service.Spec.IPFamilies)
	}

	return message
}
