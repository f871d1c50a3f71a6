package service_test

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/talos-ccm/talos-ccm/pkg/config"
	"github.com/talos-ccm/talos-ccm/pkg/controllers/service"
	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/test/ctest"
)

func TestController_FollowsNodes(t *testing.T) {
	s := newSuite(t)
	s.run()
	s.create("web", nil)
	s.join("a", "192.0.2.1")
	s.join("b", "192.0.2.2")
	s.await("web", "192.0.2.1", "192.0.2.2")

	for _, ingress := range s.get("web").Status.LoadBalancer.Ingress {
		assert.Equal(t, corev1.LoadBalancerIPModeVIP, *ingress.IPMode)
	}

	s.SetReady("b", corev1.ConditionUnknown)
	s.await("web", "192.0.2.1")
	s.SetReady("a", corev1.ConditionUnknown)
	s.AwaitEvent("web", service.ReasonNodesNotReady, "None of the 2 Nodes")
	s.await("web", "192.0.2.1")
	s.SetReady("b", corev1.ConditionTrue)
	s.await("web", "192.0.2.2")
	s.SetReady("a", corev1.ConditionTrue)
	s.await("web", "192.0.2.1", "192.0.2.2")

	s.PatchNode("a", "other", `{"metadata":{"labels":{"node.kubernetes.io/exclude-from-external-load-balancers":""}}}`)
	s.await("web", "192.0.2.2")

	s.PatchNode("b", "other", `{"metadata":{"labels":{"test/unmanaged":"true"}}}`)
	s.await("web")
	s.AwaitEvent("web", service.ReasonNoEligibleNodes, "0 Nodes are managed, eligible and ready (1 of 2 Nodes have the label node.kubernetes.io/exclude-from-external-load-balancers)")

	s.PatchNode("a", "other", `{"metadata":{"labels":{"node.kubernetes.io/exclude-from-external-load-balancers":null}}}`)
	s.PatchNode("b", "other", `{"metadata":{"labels":{"test/unmanaged":null}}}`)
	s.await("web", "192.0.2.1", "192.0.2.2")

	s.PatchNode("b", "other", `{"spec":{"taints":[{"key":"ToBeDeletedByClusterAutoscaler","effect":"NoSchedule"}]}}`)
	s.await("web", "192.0.2.1")
	s.PatchNode("b", "other", `{"spec":{"taints":null}}`)
	s.await("web", "192.0.2.1", "192.0.2.2")

	s.Remove("a")
	s.await("web", "192.0.2.2")
}

func TestController_RemovesAddressesOfMachinesThatLeave(t *testing.T) {
	s := newSuite(t)
	s.run()
	s.create("web", nil)
	s.join("a", "192.0.2.1")
	s.join("b", "192.0.2.2")
	s.await("web", "192.0.2.1", "192.0.2.2")

	start := time.Now()

	s.announce("b", runtime.MachineStageRebooting, "192.0.2.2")
	s.await("web", "192.0.2.1")
	t.Logf("removed the address after %s", time.Since(start))

	s.inventory.MarkUnreachable("b", "it reboots")
	s.announce("a", runtime.MachineStageShuttingDown, "192.0.2.1")
	s.await("web", "192.0.2.1", "192.0.2.2") // both stop: the readiness of the Nodes decides
	s.respond("b", "192.0.2.2")
	s.await("web", "192.0.2.2")
}

func TestController_RemovesAddressesOfMachinesThatLosePower(t *testing.T) {
	s := newSuite(t)
	s.run()
	s.create("web", nil)

	for i, name := range []string{"a", "b", "c"} {
		s.join(name, fmt.Sprint("192.0.2.", i+1))
		s.renew(name)
	}

	s.await("web", "192.0.2.1", "192.0.2.2", "192.0.2.3")

	renewed := time.Now()

	s.unreachable.Store("b", true) // all Leases will be overdue
	s.await("web", "192.0.2.1", "192.0.2.3")
	t.Logf("removed the address %s after the last renewal", time.Since(renewed))

	s.unreachable.Delete("b")
	s.respond("b", "192.0.2.2")
	s.await("web", "192.0.2.1", "192.0.2.2", "192.0.2.3")
	s.inventory.MarkUnreachable("b", "connection timed out")
	s.await("web", "192.0.2.1", "192.0.2.3")

	s.inventory.MarkUnreachable("c", "connection timed out")
	s.await("web", "192.0.2.1", "192.0.2.2", "192.0.2.3") // most machines do not respond
	s.join("d", "192.0.2.4")
	s.await("web", "192.0.2.1", "192.0.2.4") // half of the machines respond
	s.Remove("d")
	s.await("web", "192.0.2.1", "192.0.2.2", "192.0.2.3")
	s.respond("c", "192.0.2.3")
	s.await("web", "192.0.2.1", "192.0.2.3")

	s.renew("b")
	s.await("web", "192.0.2.1", "192.0.2.2", "192.0.2.3")
}

func TestController_PublishesOnlyAddressesOfTheMachine(t *testing.T) {
	s := newSuite(t)
	s.run()
	s.create("web", nil)
	s.join("a", "192.0.2.1")
	s.await("web", "192.0.2.1")

	// A kubelet can write the addresses of its Node. The port of another Service shows that this one was decided about again.
	s.PatchNode("a", "other", `{"status":{"addresses":[{"type":"InternalIP","address":"192.0.2.1"},{"type":"ExternalIP","address":"8.8.8.8"}]}}`, "status")
	s.create("web-external", func(svc *corev1.Service) {
		svc.Annotations = map[string]string{service.AnnotationAddresses: "external"}
		svc.Spec.Ports[0].Port = 81
	})
	s.AwaitEvent("web-external", service.ReasonNoEligibleNodes, "(1:1 NAT), set annotation talos-ccm.dev/addresses=internal")
	s.await("web", "192.0.2.1")

	s.respond("a", "192.0.2.1", "8.8.8.8")
	s.await("web", "8.8.8.8")
}

func TestController_FollowsTheClusterIdentity(t *testing.T) {
	s := newSuite(t)
	s.identity.Store(&csrpolicy.ClusterIdentity{})
	s.run()
	s.join("a", "192.0.2.1")
	s.PatchNode("a", "other", `{"status":{"addresses":[{"type":"InternalIP","address":"192.0.2.1"},{"type":"ExternalIP","address":"203.0.113.1"}]}}`, "status")
	s.respond("a", "192.0.2.1", "203.0.113.1")
	s.create("web", nil)
	s.create("reserved", func(svc *corev1.Service) { svc.Spec.Ports[0].Port = 7443 })

	follow := func(identity csrpolicy.ClusterIdentity) {
		s.identity.Store(&identity)
		s.resync()
	}

	follow(csrpolicy.ClusterIdentity{APIServerPorts: []int32{7443}})
	s.AwaitEvent("reserved", service.ReasonPortReserved, "TCP/7443 is reserved for kube-apiserver")
	s.await("web")

	follow(csrpolicy.ClusterIdentity{Known: true})
	s.await("web", "203.0.113.1")

	endpoint := csrpolicy.ClusterSubjects{APIServerIPs: []netip.Addr{netip.MustParseAddr("203.0.113.1")}}
	follow(csrpolicy.ClusterIdentity{Known: true, Reported: []csrpolicy.Report{{ClusterSubjects: endpoint}}})
	s.await("web", "192.0.2.1")

	follow(csrpolicy.ClusterIdentity{})
	s.create("zz-other-port", func(svc *corev1.Service) { svc.Spec.Ports[0].Port = 10250 })
	s.AwaitEvent("zz-other-port", service.ReasonPortReserved)
	s.await("web", "192.0.2.1")
}

func TestController_KeepsAddressesUntilMachinesRespond(t *testing.T) {
	s := newSuite(t)
	s.run()
	s.create("web", nil)
	s.join("a", "192.0.2.1")
	s.join("b", "192.0.2.2")
	s.await("web", "192.0.2.1", "192.0.2.2")
	s.stop()

	before := s.get("web").ResourceVersion

	s.run()
	s.register("c", "192.0.2.3")
	s.create("zz-younger", nil)
	s.respond("b", "192.0.2.2")
	s.respond("c", "192.0.2.3")
	// The older Service takes the third address as soon as it can, too.
	s.await("web", "192.0.2.1", "192.0.2.2", "192.0.2.3")

	history, err := s.services().Watch(t.Context(), metav1.ListOptions{ResourceVersion: before, FieldSelector: "metadata.name=web"})
	require.NoError(s, err)

	defer history.Stop()

	first, isService := (<-history.ResultChan()).Object.(*corev1.Service)
	require.True(t, isService)
	assert.Len(t, ctest.Addresses(first), 3, "first change after the restart")
}

func TestController_RemovesItsAddressesWhenNotManaged(t *testing.T) {
	s := newSuite(t)
	s.options.Store(&config.Service{Default: true})
	s.run()
	s.join("a", "192.0.2.1")
	s.create("class", nil)
	s.create("default", func(svc *corev1.Service) {
		svc.Spec.LoadBalancerClass = nil
		svc.Spec.Ports[0].Port = 81
	})
	s.await("class", "192.0.2.1")
	s.await("default", "192.0.2.1")

	s.options.Store(&config.Service{})
	s.resync()
	s.await("default")
	s.await("class", "192.0.2.1")

	// The API server clears the status itself, even without a controller.
	s.stop()
	s.patch("class", `{"spec":{"type":"ClusterIP","loadBalancerClass":null}}`)

	assert.Empty(t, ctest.Addresses(s.get("class")))

	s.run()
	s.respond("a", "192.0.2.1")
	s.patch("class", `{"spec":{"type":"LoadBalancer","loadBalancerClass":"example.com/other"}}`)
	s.patch("class", `{"status":{"loadBalancer":{"ingress":[{"ip":"198.51.100.1"}]}}}`, "status")
	s.create("next", nil)
	s.await("next", "192.0.2.1")
	s.stop()

	assert.Equal(t, []string{"198.51.100.1"}, ctest.Addresses(s.get("class")))
}

func TestController_LeavesOtherServicesAlone(t *testing.T) {
	s := newSuite(t)
	s.run()
	s.join("a", "192.0.2.1")

	status := `{"status":{"loadBalancer":{"ingress":[{"ip":"198.51.100.1"}]}}}`

	s.create("other-class", func(svc *corev1.Service) { svc.Spec.LoadBalancerClass = new("example.com/other") })
	s.create("no-class", func(svc *corev1.Service) { svc.Spec.LoadBalancerClass = nil })
	s.create("pending", func(svc *corev1.Service) {
		svc.Spec.LoadBalancerClass = nil
		svc.Spec.Ports[0].Port = 81
	})
	s.create("cluster-ip", func(svc *corev1.Service) {
		svc.Spec.LoadBalancerClass, svc.Spec.Type = nil, corev1.ServiceTypeClusterIP
	})
	s.patch("other-class", status, "status")
	s.patch("no-class", status, "status")

	versions := map[string]string{}
	for _, name := range []string{"other-class", "no-class", "pending", "cluster-ip"} {
		versions[name] = s.get(name).ResourceVersion
	}

	s.create("web", nil)
	s.await("web", "192.0.2.1")
	s.join("b", "192.0.2.2")
	s.await("web", "192.0.2.1", "192.0.2.2")

	// With default, another controller's addresses remain, and an Event reports them.
	s.options.Store(&config.Service{Default: true})
	s.resync()
	s.AwaitEvent("no-class", service.ReasonOwnershipConflict, "(other)")
	s.await("web", "192.0.2.1", "192.0.2.2")
	s.stop()

	delete(versions, "pending")

	for name, version := range versions {
		assert.Equal(t, version, s.get(name).ResourceVersion)
	}
}

// slice creates or replaces the only EndpointSlice of a Service.
func (s *suite) slice(name string, endpoints ...discoveryv1.Endpoint) {
	s.Helper()

	slice := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: name}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Endpoints:   endpoints,
	}

	client := s.Client.DiscoveryV1().EndpointSlices(s.Namespace)
	if _, err := client.Update(s.Context(), slice, metav1.UpdateOptions{}); err != nil {
		_, err = client.Create(s.Context(), slice, metav1.CreateOptions{})
		require.NoError(s, err)
	}
}

func endpoint(address, nodename string, ready bool) discoveryv1.Endpoint {
	return discoveryv1.Endpoint{
		Addresses: []string{address}, NodeName: &nodename,
		Conditions: discoveryv1.EndpointConditions{Ready: &ready, Serving: new(true), Terminating: new(!ready)},
	}
}

func TestController_LocalFollowsEndpoints(t *testing.T) {
	s := newSuite(t)
	s.run()
	s.join("a", "192.0.2.1")
	s.join("b", "192.0.2.2")
	s.create("web", func(svc *corev1.Service) { svc.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal })
	s.AwaitEvent("web", service.ReasonNoEligibleNodes, "0 of these have a ready endpoint")

	s.slice("web", endpoint("10.1.0.1", "a", true))
	s.await("web", "192.0.2.1")
	s.slice("web", endpoint("10.1.0.1", "a", false), endpoint("10.1.0.2", "b", true))
	s.await("web", "192.0.2.2")
	s.slice("web", endpoint("10.1.0.3", "a", true), endpoint("10.1.0.2", "b", true))
	s.await("web", "192.0.2.1", "192.0.2.2")
	require.NoError(s, s.Client.DiscoveryV1().EndpointSlices(s.Namespace).Delete(t.Context(), "web", metav1.DeleteOptions{}))
	s.await("web")

	s.patch("web", `{"spec":{"externalTrafficPolicy":"Cluster"}}`)
	s.await("web", "192.0.2.1", "192.0.2.2")
}

func TestController_OlderServiceKeepsThePort(t *testing.T) {
	s := newSuite(t)
	s.run()
	s.join("a", "192.0.2.1")
	s.join("b", "192.0.2.2")
	s.create("older", func(svc *corev1.Service) {
		svc.Annotations = map[string]string{service.AnnotationNodeSelector: "kubernetes.io/hostname=a"}
	})
	s.await("older", "192.0.2.1")

	// Timestamps have seconds; the name decides within one.
	s.create("younger", func(svc *corev1.Service) {
		svc.Spec.Ports = append(svc.Spec.Ports, corev1.ServicePort{Name: "second", Port: 443})
	})
	s.await("younger", "192.0.2.2")
	s.AwaitEvent("younger", service.ReasonPortConflict, fmt.Sprintf("TCP/80 on 192.0.2.1 (Service %s/older)", s.Namespace))

	s.create("zz-other-protocol", func(svc *corev1.Service) { svc.Spec.Ports[0].Protocol = corev1.ProtocolUDP })
	s.await("zz-other-protocol", "192.0.2.1", "192.0.2.2")

	s.patch("older", `{"metadata":{"finalizers":["example.org/cleanup"],"annotations":{"talos-ccm.dev/node-selector":null}}}`)
	s.await("older", "192.0.2.1", "192.0.2.2")
	s.await("younger")

	// A deleted Service keeps its ports until its finalizers are removed.
	require.NoError(s, s.services().Delete(t.Context(), "older", metav1.DeleteOptions{}))
	s.create("zz-youngest", nil)
	s.AwaitEvent("zz-youngest", service.ReasonPortConflict, "older, which is being deleted and waits for its finalizers: example.org/cleanup)")

	s.patch("older", `{"metadata":{"finalizers":null}}`)
	s.await("younger", "192.0.2.1", "192.0.2.2")
}
