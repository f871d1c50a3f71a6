package service

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	cloudproviderapi "k8s.io/cloud-provider/api"

	"github.com/talos-ccm/talos-ccm/pkg/config"
	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/noderecord"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
)

var began = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

// newService returns a managed IPv4 Service for TCP port 80. Services with lower names are older.
func newService(name string, changes ...func(*corev1.Service)) *corev1.Service {
	service := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "default", Name: name, UID: types.UID("uid-" + name),
			CreationTimestamp: metav1.NewTime(began.Add(time.Duration(name[0]) * time.Second)),
		},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeLoadBalancer, LoadBalancerClass: new(Class), IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol},
			Ports: []corev1.ServicePort{{Protocol: corev1.ProtocolTCP, Port: 80}},
		},
	}

	for _, change := range changes {
		change(service)
	}

	return service
}

func families(list ...corev1.IPFamily) func(*corev1.Service) {
	return func(service *corev1.Service) { service.Spec.IPFamilies = list }
}

func annotation(key, value string) func(*corev1.Service) {
	return func(service *corev1.Service) { metav1.SetMetaDataAnnotation(&service.ObjectMeta, key, value) }
}

func published(addresses ...string) func(*corev1.Service) {
	return func(service *corev1.Service) {
		for _, address := range addresses {
			service.Status.LoadBalancer.Ingress = append(service.Status.LoadBalancer.Ingress, corev1.LoadBalancerIngress{IP: address})
		}
	}
}

func onPort(number int32) func(*corev1.Service) {
	return func(service *corev1.Service) { service.Spec.Ports[0].Port = number }
}

func withoutClass(service *corev1.Service) { service.Spec.LoadBalancerClass = nil }

func local(service *corev1.Service) {
	service.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
}

func owned(service *corev1.Service) {
	service.ManagedFields = []metav1.ManagedFieldsEntry{{Manager: FieldManager}}
}

// newCandidate returns a ready, managed Node whose machine has the addresses. Those with the prefix "ext:" are external, and
// those with the prefix "ext:nat:" are also translated: no link of the machine has them.
func newCandidate(name string, addresses ...string) candidate {
	c := candidate{managed: true, node: &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"name": name}}}}
	c.node.Status.NodeInfo.OSImage = "Talos (v1.13.5)"
	c.node.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
	c.entry = inventory.Entry{Condition: inventory.Current, ObservedAt: began}

	for _, text := range addresses {
		address, isExternal := strings.CutPrefix(text, "ext:")

		address, isTranslated := strings.CutPrefix(address, "nat:")

		kind, link := corev1.NodeInternalIP, "eth0"
		if isExternal {
			kind = corev1.NodeExternalIP
		}

		if isTranslated {
			link = machine.LinkExternal
		}

		c.node.Status.Addresses = append(c.node.Status.Addresses, corev1.NodeAddress{Type: kind, Address: address})

		ip := netip.MustParseAddr(address)
		c.entry.Machine.Addresses = append(c.entry.Machine.Addresses, machine.Address{Link: link, Prefix: netip.PrefixFrom(ip, ip.BitLen())})
	}

	c.entry.Last = c.entry.Machine

	return c
}

// candidates returns n Nodes with the addresses 192.0.2.1 and so on.
func candidates(n int) (list []candidate) {
	for i := range n {
		list = append(list, newCandidate(fmt.Sprint("node-", i), fmt.Sprintf("192.0.%d.%d", 2+(i+1)/256, (i+1)%256)))
	}

	return list
}

// known is the identity of a cluster without addresses of its own.
var known = csrpolicy.ClusterIdentity{Known: true}

// addressesOf returns the planned addresses of a Service, and its reasons.
func (s snapshot) addressesOf(name string) (list, reasons []string) {
	for _, d := range s.decide() {
		if d.service.Name != name {
			continue
		}

		for _, problem := range d.problems {
			reasons = append(reasons, problem.Reason)
		}

		return append(list, addresses(d.ingress)...), reasons // nil if there are none
	}

	return nil, []string{"no decision"}
}

func TestDecide_Addresses(t *testing.T) {
	const v4, v6 = corev1.IPv4Protocol, corev1.IPv6Protocol

	listed, unlisted := []string{"192.0.2.0/24", "198.51.100.0/24"}, []string{"192.0.2.0/24", "10.0.0.0/31"}
	translated := []candidate{newCandidate("a", "10.0.0.1", "ext:nat:198.51.100.1")}
	dual := []candidate{newCandidate("a", "10.0.0.1", "fd00::1", "ext:198.51.100.1"), newCandidate("b", "10.0.0.2", "fd00::2")}

	var (
		none      config.Service
		byDefault = config.Service{Default: true}
		external  = config.Service{Addresses: config.AddressesExternal}
		elsewhere = []string{"203.0.113.9"}
		foreign   = published(elsewhere...)
	)

	for name, test := range map[string]struct {
		service *corev1.Service
		nodes   []candidate
		options config.Service
		want    []string
		reasons []string
	}{
		"external addresses, else internal ones":    {newService("s"), dual, none, []string{"10.0.0.2", "198.51.100.1"}, nil},
		"of the Service's family":                   {newService("s", families(v6)), dual, none, []string{"fd00::1", "fd00::2"}, nil},
		"in the order of the Service's families":    {newService("s", families(v6, v4)), dual, none, []string{"fd00::1", "fd00::2", "10.0.0.2", "198.51.100.1"}, nil},
		"internal by configuration":                 {newService("s"), dual, config.Service{Addresses: config.AddressesInternal}, []string{"10.0.0.1", "10.0.0.2"}, nil},
		"the annotation overrides":                  {newService("s", annotation(AnnotationAddresses, "external")), dual, config.Service{Addresses: config.AddressesInternal}, []string{"198.51.100.1"}, nil},
		"an empty annotation is the default":        {newService("s", annotation(AnnotationAddresses, "")), dual, external, []string{"10.0.0.2", "198.51.100.1"}, nil},
		"no address of the type":                    {newService("s", families(v6), annotation(AnnotationAddresses, "external")), dual, none, nil, []string{ReasonNoEligibleNodes}},
		"no translated address":                     {newService("s", published("198.51.100.1")), translated, none, []string{"10.0.0.1"}, nil},
		"only a translated address":                 {newService("s"), translated, external, nil, []string{ReasonNoEligibleNodes}},
		"an external address in externalCIDRs":      {newService("s"), dual, config.Service{ExternalCIDRs: listed}, []string{"10.0.0.2", "198.51.100.1"}, nil},
		"an external address elsewhere":             {newService("s", published("198.51.100.1")), dual, config.Service{ExternalCIDRs: unlisted}, []string{"10.0.0.1", "10.0.0.2"}, nil},
		"only an external address elsewhere":        {newService("s"), dual, config.Service{Addresses: config.AddressesExternal, ExternalCIDRs: unlisted}, nil, []string{ReasonNoEligibleNodes}},
		"selected Nodes":                            {newService("s", annotation(AnnotationNodeSelector, "name in (b, c)")), dual, none, []string{"10.0.0.2"}, nil},
		"no selected Node":                          {newService("s", annotation(AnnotationNodeSelector, "name=c")), dual, none, nil, []string{ReasonNoEligibleNodes}},
		"an invalid selector changes nothing":       {newService("s", annotation(AnnotationNodeSelector, "="), foreign), dual, none, elsewhere, []string{ReasonInvalidAnnotation}},
		"an invalid type changes nothing":           {newService("s", annotation(AnnotationAddresses, "x"), foreign), dual, none, elsewhere, []string{ReasonInvalidAnnotation}},
		"no Node":                                   {newService("s"), nil, none, nil, []string{ReasonNoEligibleNodes}},
		"one address per Node and family":           {newService("s"), []candidate{newCandidate("a", "ext:198.51.100.2", "ext:198.51.100.1")}, none, []string{"198.51.100.2"}, nil},
		"an address of two Nodes once":              {newService("s"), []candidate{newCandidate("a", "10.0.0.1"), newCandidate("b", "10.0.0.1")}, none, []string{"10.0.0.1"}, nil},
		"no special address":                        {newService("s"), []candidate{newCandidate("a", "127.0.0.1", "169.254.1.1", "10.0.0.1")}, none, []string{"10.0.0.1"}, nil},
		"a port of Talos":                           {newService("s", onPort(50000), published("10.0.0.1")), dual, none, nil, []string{ReasonPortReserved}},
		"the port of talos-ccm":                     {newService("s", onPort(10459)), dual, none, nil, []string{ReasonPortReserved}},
		"a reserved port":                           {newService("s", onPort(443)), dual, config.Service{ReservedPorts: []int{22, 443}}, nil, []string{ReasonPortReserved}},
		"without a class":                           {newService("s", withoutClass), dual, none, nil, []string{"no decision"}},
		"without a class by default":                {newService("s", withoutClass), dual, byDefault, []string{"10.0.0.2", "198.51.100.1"}, nil},
		"another class":                             {newService("s", func(s *corev1.Service) { s.Spec.LoadBalancerClass = new("x/y") }), dual, byDefault, nil, []string{"no decision"}},
		"another type":                              {newService("s", withoutClass, func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeNodePort }), dual, byDefault, nil, []string{"no decision"}},
		"no longer managed":                         {newService("s", withoutClass, owned, published("10.0.0.1")), dual, none, nil, nil},
		"no longer managed, and removed":            {newService("s", withoutClass, owned), dual, none, nil, []string{"no decision"}},
		"not managed, of another controller":        {newService("s", withoutClass, published("10.0.0.1")), dual, none, nil, []string{"no decision"}},
		"managed, of another controller":            {newService("s", withoutClass, foreign), dual, byDefault, elsewhere, []string{ReasonOwnershipConflict}},
		"managed by class, of another controller":   {newService("s", foreign), dual, none, []string{"10.0.0.2", "198.51.100.1"}, nil},
		"local without endpoints":                   {newService("s", local), dual, none, nil, []string{ReasonNoEligibleNodes}},
		"a machine of which nothing is known":       {newService("s"), []candidate{unknown(dual[0])}, none, nil, nil},
		"an unknown machine keeps what it has":      {newService("s", published("198.51.100.1")), []candidate{unknown(dual[0])}, none, []string{"198.51.100.1"}, nil},
		"an address that the machine does not have": {newService("s"), []candidate{{node: dual[0].node, entry: dual[1].entry, managed: true}}, none, nil, []string{ReasonNoEligibleNodes}},
	} {
		t.Run(name, func(t *testing.T) {
			s := snapshot{identity: known, services: []*corev1.Service{test.service}, nodes: test.nodes, options: test.options, endpoints: noEndpoints}

			got, reasons := s.addressesOf("s")
			assert.Equal(t, test.want, got)
			assert.Equal(t, test.reasons, reasons)
		})
	}
}

func noEndpoints(*corev1.Service) []*discoveryv1.EndpointSlice { return nil }

func unknown(c candidate) candidate { return candidate{node: c.node} }

func TestDecide_EligibleNodes(t *testing.T) {
	for name, test := range map[string]struct {
		change func(*candidate)
		want   bool
	}{
		"ready":               {func(*candidate) {}, true},
		"not ready":           {func(c *candidate) { c.node.Status.Conditions[0].Status = corev1.ConditionFalse }, false},
		"unknown":             {func(c *candidate) { c.node.Status.Conditions[0].Status = corev1.ConditionUnknown }, false},
		"without conditions":  {func(c *candidate) { c.node.Status.Conditions = nil }, false},
		"deleted":             {func(c *candidate) { c.node.DeletionTimestamp = &metav1.Time{Time: began} }, false},
		"excluded":            {func(c *candidate) { c.node.Labels[corev1.LabelNodeExcludeBalancers] = "" }, false},
		"excluded: true":      {func(c *candidate) { c.node.Labels[corev1.LabelNodeExcludeBalancers] = "true" }, false},
		"excluded: false":     {func(c *candidate) { c.node.Labels[corev1.LabelNodeExcludeBalancers] = "false" }, false},
		"about to be deleted": {func(c *candidate) { c.node.Spec.Taints = []corev1.Taint{{Key: nodespec.TaintToBeDeleted}} }, false},
		"uninitialized": {func(c *candidate) {
			c.node.Spec.Taints = []corev1.Taint{{Key: cloudproviderapi.TaintExternalCloudProvider}}
		}, false},
		"cordoned": {func(c *candidate) { c.node.Spec.Unschedulable = true }, true},
		"control plane": {func(c *candidate) {
			c.node.Spec.Taints = []corev1.Taint{{Key: "node-role.kubernetes.io/control-plane"}}
		}, true},
		"not Talos":             {func(c *candidate) { c.node.Status.NodeInfo.OSImage = "Debian" }, false},
		"not managed":           {func(c *candidate) { c.managed = false }, false},
		"machine unreachable":   {func(c *candidate) { c.entry.Condition = inventory.Unreachable }, true},
		"another machine there": {func(c *candidate) { c.entry = inventory.Entry{Condition: inventory.Mismatch} }, false},
	} {
		t.Run(name, func(t *testing.T) {
			c := newCandidate("a", "10.0.0.1")
			test.change(&c)

			// The Service has the address already, so only the requirement under test can remove it.
			s := snapshot{identity: known, services: []*corev1.Service{newService("s", published("10.0.0.1"))}, nodes: []candidate{c, newCandidate("b", "10.0.0.2")}}
			if got, _ := s.addressesOf("s"); slices.Contains(got, "10.0.0.1") != test.want {
				t.Errorf("got %v", got)
			}
		})
	}
}

func TestDecide_AvoidsStoppingMachines(t *testing.T) {
	endpoints := func(*corev1.Service) []*discoveryv1.EndpointSlice {
		return []*discoveryv1.EndpointSlice{{AddressType: discoveryv1.AddressTypeIPv4, Endpoints: []discoveryv1.Endpoint{{NodeName: new("node-0")}}}}
	}

	for name, test := range map[string]struct {
		stopping []int
		service  *corev1.Service
		want     []string
	}{
		"one leaves":                         {[]int{0}, newService("s", published("192.0.2.1", "192.0.2.2", "192.0.2.3")), []string{"192.0.2.2", "192.0.2.3"}},
		"a new Service":                      {[]int{0}, newService("s"), []string{"192.0.2.2", "192.0.2.3"}},
		"all stop":                           {[]int{0, 1, 2}, newService("s", published("192.0.2.1")), []string{"192.0.2.1", "192.0.2.2", "192.0.2.3"}},
		"the only one with endpoints leaves": {[]int{0}, newService("s", local, published("192.0.2.1")), []string{"192.0.2.1"}},
		"the only selected one leaves":       {[]int{0}, newService("s", annotation(AnnotationNodeSelector, "name=node-0")), []string{"192.0.2.1"}},
	} {
		t.Run(name, func(t *testing.T) {
			nodes := candidates(3)
			for _, i := range test.stopping {
				nodes[i].stopping = true
			}

			got, reasons := snapshot{identity: known, services: []*corev1.Service{test.service}, nodes: nodes, endpoints: endpoints}.addressesOf("s")
			assert.Equal(t, test.want, got)
			assert.Empty(t, reasons)
		})
	}
}

func TestIsStopping(t *testing.T) {
	stopping := map[runtime.MachineStage]bool{
		runtime.MachineStageRebooting: true, runtime.MachineStageUpgrading: true, runtime.MachineStageShuttingDown: true, runtime.MachineStageResetting: true,
	}

	for _, stage := range runtime.MachineStageValues() {
		entry := inventory.Entry{Condition: inventory.Current, Machine: machine.Machine{Stage: stage}}
		assert.Equal(t, stopping[stage], isStopping(entry, began), stage.String())

		entry.Condition, entry.UnresponsiveSince = inventory.Unreachable, began
		assert.Equal(t, stopping[stage], isStopping(entry, began.Add(resyncPeriod-1)), stage.String())
		assert.False(t, isStopping(entry, began.Add(resyncPeriod)), stage.String())
	}
}

func TestRenewal_IsDown(t *testing.T) {
	for _, condition := range []inventory.Condition{inventory.Unknown, inventory.Current, inventory.Unreachable, inventory.Mismatch} {
		entry := inventory.Entry{Condition: condition}
		assert.Equal(t, condition == inventory.Unreachable, renewal{overdue: true}.isDown(entry), condition.String())
		assert.False(t, renewal{}.isDown(entry), "%s, not overdue or no Lease", condition)
	}
}

func TestDecide_IgnoresReadinessIfNoNodeIsReady(t *testing.T) {
	nodes := candidates(3)
	nodes[0].node.Labels[corev1.LabelNodeExcludeBalancers] = "" // does not count, although it is ready
	nodes[1].node.Status.Conditions[0].Status = corev1.ConditionUnknown
	s := snapshot{identity: known, services: []*corev1.Service{newService("s", published("192.0.2.2", "192.0.2.3"))}, nodes: nodes}

	for _, test := range []struct {
		last corev1.ConditionStatus
		want []string
		why  []string
	}{
		{corev1.ConditionTrue, []string{"192.0.2.3"}, nil},
		{corev1.ConditionFalse, []string{"192.0.2.2", "192.0.2.3"}, []string{ReasonNodesNotReady}},
	} {
		nodes[2].node.Status.Conditions[0].Status = test.last

		if got, reasons := s.addressesOf("s"); !slices.Equal(got, test.want) || !slices.Equal(reasons, test.why) {
			t.Errorf("last Node is ready %q: got %v %v, want %v", test.last, got, reasons, test.want)
		}
	}
}

func TestDecide_KeepsPublishedAddressesOnlyIfNoNodeIsReady(t *testing.T) {
	down, unready, other := newCandidate("down", "192.0.2.1"), newCandidate("unready", "192.0.2.2"), newCandidate("other", "192.0.2.3")
	down.node.Spec.Taints = []corev1.Taint{{Key: cloudproviderapi.TaintNodeShutdown}}
	down.node.Status.Conditions, unready.node.Status.Conditions = nil, nil

	unmanaged := other
	unmanaged.managed = false

	selecting := annotation(AnnotationNodeSelector, "name!=other")
	present := []string{"192.0.2.2"}

	for name, test := range map[string]struct {
		service *corev1.Service
		nodes   []candidate
		want    []string
		reasons []string
	}{
		"no ready Node":                 {newService("s", published(present...)), []candidate{down, unready}, present, []string{ReasonNodesNotReady}},
		"no ready Node, local":          {newService("s", published(present...), local), []candidate{down, unready}, present, []string{ReasonNodesNotReady}},
		"a ready Node, local":           {newService("s", published(present...), local), []candidate{unready, other}, nil, []string{ReasonNoEligibleNodes}},
		"the ready Node is not managed": {newService("s", published(present...)), []candidate{down, unready, unmanaged}, present, nil},
		"the ready Node does not match": {newService("s", published(present...), selecting), []candidate{down, unready, other}, present, []string{ReasonNodesNotReady}},
		"a ready Node":                  {newService("s", published(present...)), []candidate{down, unready, other}, []string{"192.0.2.3"}, nil},
		"a new Service":                 {newService("s"), []candidate{down, unready}, nil, []string{ReasonNoEligibleNodes}},
	} {
		t.Run(name, func(t *testing.T) {
			s := snapshot{identity: known, services: []*corev1.Service{test.service}, nodes: test.nodes, endpoints: noEndpoints}
			if got, reasons := s.addressesOf("s"); !slices.Equal(got, test.want) || !slices.Equal(reasons, test.reasons) {
				t.Errorf("got %v %v, want %v %v", got, reasons, test.want, test.reasons)
			}
		})
	}
}

func TestDecide_LocalEndpoints(t *testing.T) {
	endpoint := func(node string, conditions discoveryv1.EndpointConditions) discoveryv1.Endpoint {
		return discoveryv1.Endpoint{NodeName: &node, Conditions: conditions}
	}
	s := snapshot{
		identity: known,
		services: []*corev1.Service{newService("s", local, families(corev1.IPv4Protocol, corev1.IPv6Protocol))},
		endpoints: func(*corev1.Service) []*discoveryv1.EndpointSlice {
			list := []*discoveryv1.EndpointSlice{
				{AddressType: discoveryv1.AddressTypeIPv4, Endpoints: []discoveryv1.Endpoint{
					endpoint("a", discoveryv1.EndpointConditions{}),
					endpoint("b", discoveryv1.EndpointConditions{Ready: new(false), Serving: new(true), Terminating: new(true)}),
					{Addresses: []string{"203.0.113.1"}}, // outside the cluster
				}},
				{AddressType: discoveryv1.AddressTypeIPv4, Endpoints: []discoveryv1.Endpoint{endpoint("c", discoveryv1.EndpointConditions{Ready: new(true)})}},
				{AddressType: discoveryv1.AddressTypeIPv6, Endpoints: []discoveryv1.Endpoint{endpoint("b", discoveryv1.EndpointConditions{})}},
				{AddressType: discoveryv1.AddressTypeFQDN, Endpoints: []discoveryv1.Endpoint{endpoint("d", discoveryv1.EndpointConditions{})}},
			}
			for _, slice := range list {
				_, err := trimSlice(slice)
				require.NoError(t, err)
			}

			return list
		},
	}

	for i, name := range []string{"a", "b", "c", "d"} {
		s.nodes = append(s.nodes, newCandidate(name, fmt.Sprint("10.0.0.", i), fmt.Sprint("fd00::", i)))
	}

	if got, _ := s.addressesOf("s"); !slices.Equal(got, []string{"10.0.0.0", "10.0.0.2", "fd00::1"}) {
		t.Errorf("got %v", got)
	}
}

func TestDecide_PortConflicts(t *testing.T) {
	nodes := candidates(2)
	both := []string{"192.0.2.1", "192.0.2.2"}
	onFirst := annotation(AnnotationNodeSelector, "name=node-0")
	nodePort := func(number int32) func(*corev1.Service) {
		return func(service *corev1.Service) { service.Spec.Ports[0].NodePort = number }
	}

	for name, test := range map[string]struct {
		other   *corev1.Service
		service *corev1.Service
		want    []string
		reasons []string
	}{
		"an older Service on all":    {newService("a"), newService("b"), nil, []string{ReasonPortConflict}},
		"an older Service on one":    {newService("a", onFirst), newService("b"), both[1:], []string{ReasonPortConflict}},
		"older by time, not by name": {newService("z", func(s *corev1.Service) { s.CreationTimestamp = metav1.NewTime(began) }), newService("b"), nil, []string{ReasonPortConflict}},
		"a younger Service":          {newService("c", published(both...)), newService("b"), both, nil},
		"the same age, by namespace": {newService("b", func(s *corev1.Service) { s.Namespace = "a"; s.UID = "other" }), newService("b"), nil, []string{ReasonPortConflict}},
		"another port":               {newService("a", onPort(81)), newService("b"), both, nil},
		"another protocol":           {newService("a", func(s *corev1.Service) { s.Spec.Ports[0].Protocol = corev1.ProtocolUDP }), newService("b"), both, nil},
		"one of several ports": {newService("a", onPort(443)), newService("b", func(s *corev1.Service) {
			s.Spec.Ports = append(s.Spec.Ports, newService("x", onPort(443)).Spec.Ports...)
		}), nil, []string{ReasonPortConflict}},
		"a Service of another class": {newService("a", withoutClass, published(both...)), newService("b"), both, nil},
		"an older node port":         {newService("a", withoutClass, nodePort(80)), newService("b"), nil, []string{ReasonPortConflict}},
		"a younger node port":        {newService("c", withoutClass, nodePort(80)), newService("b"), both, nil},
		"an older health check port": {newService("a", withoutClass, func(s *corev1.Service) { s.Spec.HealthCheckNodePort = 80 }), newService("b"), nil, []string{ReasonPortConflict}},
		"its own node port":          {newService("c", withoutClass), newService("b", nodePort(80)), both, nil},
	} {
		t.Run(name, func(t *testing.T) {
			s := snapshot{identity: known, services: []*corev1.Service{test.service, test.other}, nodes: nodes}

			for _, d := range s.decide() {
				if d.service == test.service {
					s.services = []*corev1.Service{test.service} // found
					reasons := []string(nil)

					for _, problem := range d.problems {
						reasons = append(reasons, problem.Reason)
					}

					assert.Equal(t, test.want, append([]string(nil), addresses(d.ingress)...))
					assert.Equal(t, test.reasons, reasons)
				}
			}

			if len(s.services) > 1 {
				t.Error("no decision")
			}
		})
	}
}

func TestDecide_ConflictsCountOnlyBelowTheLimit(t *testing.T) {
	s := snapshot{identity: known, services: []*corev1.Service{newService("a", annotation(AnnotationNodeSelector, "name in (node-0, node-1)")), newService("b")}, nodes: candidates(18)}
	if got, reasons := s.addressesOf("b"); len(got) != maxAddresses || reasons != nil {
		t.Errorf("with 16 other addresses: got %d %v", len(got), reasons)
	}

	s.nodes = candidates(17)
	if got, reasons := s.addressesOf("b"); len(got) != 15 || !slices.Equal(reasons, []string{ReasonPortConflict}) {
		t.Errorf("with 15 other addresses: got %d %v", len(got), reasons)
	}
}

func TestDecide_LimitIsSharedByFamilies(t *testing.T) {
	var nodes []candidate
	for i := range 10 {
		nodes = append(nodes, newCandidate(fmt.Sprint("node-", i), fmt.Sprint("192.0.2.", i+1), fmt.Sprintf("fd00::%x", i+1)))
	}

	s := snapshot{identity: known, services: []*corev1.Service{newService("s", families(corev1.IPv4Protocol, corev1.IPv6Protocol))}, nodes: nodes}

	got, _ := s.addressesOf("s")
	assert.Len(t, got, maxAddresses)
	assert.Len(t, slices.DeleteFunc(slices.Clone(got), func(a string) bool { return strings.Contains(a, ":") }), 8)
}

// With IPVS, each Node would consider the addresses of the other Nodes as its own. A worker must not stop the Services on
// other Nodes by reporting the link.
func TestDecide_IPVSCountsOnlyForTheNodeItself(t *testing.T) {
	for name, test := range map[string]struct {
		withIPVS []int
		service  *corev1.Service
		want     []string
		reasons  []string
	}{
		"one Node":                          {[]int{1}, newService("s"), []string{"192.0.2.1"}, nil},
		"one Node, published":               {[]int{1}, newService("s", published("192.0.2.2")), []string{"192.0.2.1", "192.0.2.2"}, nil},
		"the only selected Node":            {[]int{1}, newService("s", annotation(AnnotationNodeSelector, "name=node-1")), nil, []string{ReasonUnsupportedProxyMode}},
		"all Nodes":                         {[]int{0, 1}, newService("s"), nil, []string{ReasonUnsupportedProxyMode}},
		"all Nodes, one address present":    {[]int{0, 1}, newService("s", published("192.0.2.2")), []string{"192.0.2.2"}, []string{ReasonUnsupportedProxyMode}},
		"all Nodes, an address of the link": {[]int{0, 1}, newService("s", published("192.0.2.100")), nil, []string{ReasonUnsupportedProxyMode}},
	} {
		t.Run(name, func(t *testing.T) {
			nodes := candidates(2)
			for _, i := range test.withIPVS {
				m := &nodes[i].entry.Machine
				m.Addresses = append(m.Addresses, machine.Address{Link: "kube-ipvs0", Prefix: netip.MustParsePrefix("192.0.2.100/32")})
				nodes[i].node.Status.Addresses = append(nodes[i].node.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeExternalIP, Address: "192.0.2.100"})
			}

			got, reasons := snapshot{identity: known, services: []*corev1.Service{test.service}, nodes: nodes}.addressesOf("s")
			assert.Equal(t, test.want, got)
			assert.Equal(t, test.reasons, reasons)
		})
	}
}

func TestDecide_SpreadsServices(t *testing.T) {
	used := map[string]bool{}

	for i := range 20 {
		s := snapshot{identity: known, services: []*corev1.Service{newService(fmt.Sprint("s", i))}, nodes: candidates(100)}

		got, _ := s.addressesOf(s.services[0].Name)
		for _, address := range got {
			used[address] = true
		}
	}

	// Each of 100 Nodes is missed by 20 random choices of 16 with a probability of 0.03.
	if len(used) < 85 {
		t.Errorf("20 Services use %d of 100 Nodes", len(used))
	}
}

// TestDecide_Stability applies random changes and checks that addresses change only if they must, that no port is
// assigned twice, and that the order of the inputs does not matter.
func TestDecide_Stability(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	all := candidates(40)

	for range 200 {
		var services []*corev1.Service
		for i := range 1 + random.IntN(4) {
			services = append(services, newService(string(rune('a'+i)), onPort(int32(80+random.IntN(2)))))
		}

		nodes := slices.Clone(all[:10+random.IntN(20)])
		before := publish(services, nodes)

		// Another Node and another order change nothing for the oldest Service, and a lost Node only its own address.
		lost := random.IntN(len(nodes))
		gone := nodes[lost].node.Status.Addresses[0].Address
		nodes = append(slices.Delete(nodes, lost, lost+1), all[30+random.IntN(10)])

		random.Shuffle(len(nodes), func(i, j int) { nodes[i], nodes[j] = nodes[j], nodes[i] })
		random.Shuffle(len(services), func(i, j int) { services[i], services[j] = services[j], services[i] })

		after := publish(services, nodes)

		for _, address := range before["a"] {
			if address != gone && !slices.Contains(after["a"], address) {
				t.Fatalf("%s was dropped: before %v, after %v, lost %s", address, before["a"], after["a"], gone)
			}
		}

		taken := map[string]bool{}

		for _, service := range services {
			for _, address := range after[service.Name] {
				key := fmt.Sprint(address, service.Spec.Ports[0].Port)
				require.False(t, taken[key], "%s was assigned twice", key)

				taken[key] = true
			}
		}
	}
}

// A compromised worker reports addresses that it does not have.
func TestDecide_OmitsAddressesThatAWorkerCannotHave(t *testing.T) {
	controlPlane := newCandidate("cp", "10.0.0.11")
	controlPlane.node.Labels["node-role.kubernetes.io/control-plane"] = ""
	controlPlane.node.Labels[corev1.LabelNodeExcludeBalancers] = "true"

	// With IPVS, a control-plane machine has the addresses of all Services on a link.
	controlPlane.entry.Last.Addresses = append(controlPlane.entry.Last.Addresses, machine.Address{Link: machine.LinkIPVS, Prefix: netip.MustParsePrefix("203.0.113.9/32")})

	down := controlPlane
	down.node, down.entry = controlPlane.node.DeepCopy(), inventory.Entry{}
	down.node.Labels[noderecord.LabelAddress] = "10.0.0.12"
	down.node.Labels[noderecord.LabelAddressOther] = "10.0.0.13"

	kubernetes := newService("kubernetes")
	kubernetes.Spec.Type, kubernetes.Spec.ClusterIPs = corev1.ServiceTypeClusterIP, []string{"10.96.0.1"}

	identity := csrpolicy.ClusterIdentity{
		Known:  true,
		Stated: csrpolicy.ClusterSubjects{APIServerIPs: []netip.Addr{netip.MustParseAddr("203.0.113.1"), netip.MustParseAddr("::ffff:203.0.113.2")}},
		Reported: []csrpolicy.Report{
			{ClusterSubjects: csrpolicy.ClusterSubjects{VIPs: []netip.Addr{netip.MustParseAddr("::ffff:203.0.113.3")}}},
			{ClusterSubjects: csrpolicy.ClusterSubjects{PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}}},
		},
	}

	for name, test := range map[string]struct {
		address              string
		worker, controlPlane bool
	}{
		"its own":                                 {"203.0.113.4", true, true},
		"on link kube-ipvs0 of a machine":         {"203.0.113.9", true, true},
		"control-plane machine":                   {"10.0.0.11", false, true},
		"control-plane machine that is down":      {"10.0.0.12", false, true},
		"other address of such a machine":         {"10.0.0.13", false, true},
		"cluster endpoint":                        {"203.0.113.1", false, true},
		"cluster endpoint as IPv4-mapped address": {"203.0.113.2", false, true},
		"virtual IP":                              {"203.0.113.3", false, true},
		"pod":                                     {"10.244.1.1", false, true},
		"ClusterIP":                               {"10.96.0.1", false, false},
	} {
		t.Run(name, func(t *testing.T) {
			node := newCandidate("a", "ext:"+test.address)
			s := snapshot{
				identity:  identity,
				services:  []*corev1.Service{kubernetes, newService("s", onPort(8443), published(test.address))},
				nodes:     []candidate{controlPlane, down, node},
				endpoints: noEndpoints,
			}

			got, _ := s.addressesOf("s")
			assert.Equal(t, test.worker, len(got) > 0, "worker")

			node.node.Labels["node-role.kubernetes.io/control-plane"] = ""
			got, _ = s.addressesOf("s")
			assert.Equal(t, test.controlPlane, len(got) > 0, "control-plane machine")
		})
	}
}

func TestDecide_AddsNoAddressUntilTheClusterIsKnown(t *testing.T) {
	for name, want := range map[string][]string{"new": nil, "published": {"192.0.2.2"}} {
		s := snapshot{services: []*corev1.Service{newService(name, published(want...))}, nodes: candidates(2)}

		got, reasons := s.addressesOf(name)
		assert.Equal(t, want, got, name)
		assert.Empty(t, reasons, name)
	}
}

func TestDecide_LimitsPortsAndSelectors(t *testing.T) {
	both := []string{"192.0.2.1", "192.0.2.2"}
	selector := func(text string) func(*corev1.Service) { return annotation(AnnotationNodeSelector, text) }
	padded := "name in (node-0, " + strings.Repeat("a,", maxSelector) // cut below

	for name, test := range map[string]struct {
		service *corev1.Service
		want    []string
		reasons []string
	}{
		"as many ports as allowed":        {newService("s", ports(11_000, maxPorts)), both, nil},
		"more ports":                      {newService("s", ports(11_000, maxPorts+1), published(both...)), nil, []string{ReasonTooManyPorts}},
		"as long a selector as allowed":   {newService("s", selector(padded[:maxSelector-1]+")")), both[:1], nil},
		"a longer selector":               {newService("s", selector(padded[:maxSelector]+")"), published(both...)), both, []string{ReasonInvalidAnnotation}},
		"as many requirements as allowed": {newService("s", selector("name=node-0"+strings.Repeat(",!a", maxRequirements-1))), both[:1], nil},
		"more requirements":               {newService("s", selector("name=node-0"+strings.Repeat(",!a", maxRequirements)), published(both...)), both, []string{ReasonInvalidAnnotation}},
		// The addresses of a Service with an invalid annotation stay, but not on each port.
		"a longer selector, a reserved port": {newService("s", selector(padded[:maxSelector]+")"), published(both...), onPort(10250)), nil, []string{ReasonPortReserved}},
		"a longer selector, more ports":      {newService("s", selector(padded[:maxSelector]+")"), published(both...), ports(1, maxPorts+1)), nil, []string{ReasonTooManyPorts}},
	} {
		t.Run(name, func(t *testing.T) {
			got, reasons := snapshot{identity: known, services: []*corev1.Service{test.service}, nodes: candidates(2)}.addressesOf("s")
			assert.Equal(t, test.want, got)
			assert.Equal(t, test.reasons, reasons)
		})
	}
}

func TestDecide_ParsesSelectorsOnce(t *testing.T) {
	for _, text := range []string{"name=node-0", "="} {
		service := newService("s", annotation(AnnotationNodeSelector, text))
		s := snapshot{identity: known, services: []*corev1.Service{service}, nodes: candidates(2)}
		first := s.decide()[0].selector

		s.selectors = map[string]*nodeSelector{"default/s": first}
		assert.Same(t, first, s.decide()[0].selector, text)

		annotation(AnnotationNodeSelector, "name=node-1")(service)

		got, _ := s.addressesOf("s")
		assert.Equal(t, []string{"192.0.2.2"}, got, "after %s", text)
	}
}

func TestDecide_RefusesPortsOfAPIServers(t *testing.T) {
	identity := csrpolicy.ClusterIdentity{Known: true, APIServerPorts: []int32{7443}}

	for name, test := range map[string]struct {
		service *corev1.Service
		want    []string
	}{
		"TCP":          {newService("s", onPort(7443)), []string{ReasonPortReserved}},
		"UDP":          {newService("s", onPort(7443), func(s *corev1.Service) { s.Spec.Ports[0].Protocol = corev1.ProtocolUDP }), nil},
		"another port": {newService("s", onPort(443)), nil},
	} {
		_, reasons := snapshot{identity: identity, services: []*corev1.Service{test.service}, nodes: candidates(1)}.addressesOf("s")
		assert.Equal(t, test.want, reasons, name)
	}
}

func TestDecide_RefusesPortsOfPodNetworks(t *testing.T) {
	for _, number := range []int32{4789, 8472} {
		service := newService("s", onPort(number))
		service.Spec.Ports[0].Protocol = corev1.ProtocolUDP

		s := snapshot{identity: known, services: []*corev1.Service{service}, nodes: candidates(2), endpoints: noEndpoints}
		if got, reasons := s.addressesOf("s"); len(got) > 0 || !slices.Contains(reasons, ReasonPortReserved) {
			t.Errorf("port %d: published %v, reasons %v", number, got, reasons)
		}
	}
}

// publish plans, and sets the planned status of the Services.
func publish(services []*corev1.Service, nodes []candidate) map[string][]string {
	result := map[string][]string{}

	for _, d := range (snapshot{identity: known, services: services, nodes: nodes}).decide() {
		d.service.Status.LoadBalancer.Ingress = d.ingress
		result[d.service.Name] = addresses(d.ingress)
	}

	return result
}
