package service_test

import (
	"fmt"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/talos-ccm/talos-ccm/pkg/config"
	"github.com/talos-ccm/talos-ccm/pkg/controllers/service"
)

func TestController_FollowsNodes(t *testing.T) {
	s := newSuite(t)
	s.run()
	s.create("web", nil)
	s.join("a", "192.0.2.1")
	s.join("b", "192.0.2.2")
	s.await("web", "192.0.2.1", "192.0.2.2")

	for _, ingress := range s.get("web").Status.LoadBalancer.Ingress {
		if *ingress.IPMode != corev1.LoadBalancerIPModeVIP {
			t.Errorf("ipMode of %s: got %s, want VIP", ingress.IP, *ingress.IPMode)
		}
	}

	s.setReady("b", corev1.ConditionUnknown)
	s.await("web", "192.0.2.1")
	s.setReady("b", corev1.ConditionTrue)
	s.await("web", "192.0.2.1", "192.0.2.2")

	s.patchNode("a", `{"metadata":{"labels":{"node.kubernetes.io/exclude-from-external-load-balancers":""}}}`)
	s.await("web", "192.0.2.2")

	s.patchNode("b", `{"metadata":{"labels":{"test/unmanaged":"true"}}}`)
	s.await("web")
	s.awaitEvent("web", service.ReasonNoEligibleNodes, "0 Nodes are managed")

	s.patchNode("a", `{"metadata":{"labels":{"node.kubernetes.io/exclude-from-external-load-balancers":null}}}`)
	s.patchNode("b", `{"metadata":{"labels":{"test/unmanaged":null}}}`)
	s.await("web", "192.0.2.1", "192.0.2.2")

	s.patchNode("b", `{"spec":{"taints":[{"key":"ToBeDeletedByClusterAutoscaler","effect":"NoSchedule"}]}}`)
	s.await("web", "192.0.2.1")
	s.patchNode("b", `{"spec":{"taints":null}}`)
	s.await("web", "192.0.2.1", "192.0.2.2")

	s.require(client.CoreV1().Nodes().Delete(t.Context(), "a", metav1.DeleteOptions{}))
	s.await("web", "192.0.2.2")
}

func TestController_PublishesOnlyAddressesOfTheMachine(t *testing.T) {
	s := newSuite(t)
	s.run()
	s.create("web", nil)
	s.join("a", "192.0.2.1")
	s.await("web", "192.0.2.1")

	// A kubelet can write the addresses of its Node.
	s.patchNode("a", `{"status":{"addresses":[{"type":"ExternalIP","address":"8.8.8.8"}]}}`, "status")
	s.await("web")

	s.respond("a", "192.0.2.1", "8.8.8.8")
	s.await("web", "8.8.8.8")
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

	history, err := client.CoreV1().Services(s.namespace).Watch(t.Context(), metav1.ListOptions{ResourceVersion: before, FieldSelector: "metadata.name=web"})
	s.require(err)

	defer history.Stop()

	first, isService := (<-history.ResultChan()).Object.(*corev1.Service)
	if !isService || len(addresses(first)) != 3 {
		t.Errorf("first change after the restart: got addresses %v, want three", addresses(first))
	}
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

	// The API server clears the status itself: even without a controller.
	s.stop()
	s.patch("class", `{"spec":{"type":"ClusterIP","loadBalancerClass":null}}`)

	if got := addresses(s.get("class")); len(got) > 0 {
		t.Errorf("addresses after the type has changed: %v", got)
	}

	s.run()
	s.respond("a", "192.0.2.1")
	s.patch("class", `{"spec":{"type":"LoadBalancer","loadBalancerClass":"example.com/other"}}`)
	s.patch("class", `{"status":{"loadBalancer":{"ingress":[{"ip":"198.51.100.1"}]}}}`, "status")
	s.create("next", nil)
	s.await("next", "192.0.2.1")
	s.stop()

	if got := addresses(s.get("class")); !slices.Equal(got, []string{"198.51.100.1"}) {
		t.Errorf("addresses of another class: got %v", got)
	}
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

	// With default, another controller's addresses remain, and an Event says so.
	s.options.Store(&config.Service{Default: true})
	s.resync()
	s.awaitEvent("no-class", service.ReasonOwnershipConflict, "(other)")
	s.await("web", "192.0.2.1", "192.0.2.2")
	s.stop()

	delete(versions, "pending")

	for name, version := range versions {
		if got := s.get(name).ResourceVersion; got != version {
			t.Errorf("service %s was written: resourceVersion %s, want %s", name, got, version)
		}
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

	client := client.DiscoveryV1().EndpointSlices(s.namespace)
	if _, err := client.Update(s.Context(), slice, metav1.UpdateOptions{}); err != nil {
		_, err = client.Create(s.Context(), slice, metav1.CreateOptions{})
		s.require(err)
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
	s.awaitEvent("web", service.ReasonNoEligibleNodes, "0 of these have a ready endpoint")

	s.slice("web", endpoint("10.1.0.1", "a", true))
	s.await("web", "192.0.2.1")
	s.slice("web", endpoint("10.1.0.1", "a", false), endpoint("10.1.0.2", "b", true))
	s.await("web", "192.0.2.2")
	s.slice("web", endpoint("10.1.0.3", "a", true), endpoint("10.1.0.2", "b", true))
	s.await("web", "192.0.2.1", "192.0.2.2")
	s.require(client.DiscoveryV1().EndpointSlices(s.namespace).Delete(t.Context(), "web", metav1.DeleteOptions{}))
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
	s.awaitEvent("younger", service.ReasonPortConflict, fmt.Sprintf("TCP/80 on 192.0.2.1 (Service %s/older)", s.namespace))

	s.create("zz-other-protocol", func(svc *corev1.Service) { svc.Spec.Ports[0].Protocol = corev1.ProtocolUDP })
	s.await("zz-other-protocol", "192.0.2.1", "192.0.2.2")

	s.patch("older", `{"metadata":{"annotations":{"talos-ccm.dev/node-selector":null}}}`)
	s.await("older", "192.0.2.1", "192.0.2.2")
	s.await("younger")

	s.require(client.CoreV1().Services(s.namespace).Delete(t.Context(), "older", metav1.DeleteOptions{}))
	s.await("younger", "192.0.2.1", "192.0.2.2")
}

func TestController_InvalidAnnotationChangesNothing(t *testing.T) {
	s := newSuite(t)
	s.run()
	s.join("a", "192.0.2.1")
	s.create("web", nil)
	s.await("web", "192.0.2.1")

	s.patch("web", `{"metadata":{"annotations":{"talos-ccm.dev/node-selector":"a b"}}}`)
	s.awaitEvent("web", service.ReasonInvalidAnnotation, service.AnnotationNodeSelector)
	s.await("web", "192.0.2.1")

	s.patch("web", `{"metadata":{"annotations":{"talos-ccm.dev/node-selector":null,"talos-ccm.dev/addresses":"public"}}}`)
	s.await("web", "192.0.2.1")
	s.patch("web", `{"metadata":{"annotations":{"talos-ccm.dev/addresses":"external"}}}`)
	s.await("web")
}

func TestController_LimitsAddressesWithoutReshuffling(t *testing.T) {
	s := newSuite(t)
	s.run()

	for i := range 20 {
		s.join(fmt.Sprintf("n-%d", i), fmt.Sprintf("192.0.2.%d", i+1))
	}

	s.create("web", nil)
	before := addresses(s.awaitThat("web", "16 addresses", func(svc *corev1.Service) bool { return len(addresses(svc)) == 16 }))

	// Only the second pass over the new Node is certain to follow the first one.
	s.join("new", "192.0.2.100")
	s.create("probe", func(svc *corev1.Service) {
		svc.Spec.Ports[0].Port = 81
		svc.Annotations = map[string]string{service.AnnotationNodeSelector: "kubernetes.io/hostname=new"}
	})
	s.await("probe", "192.0.2.100")
	s.stop()

	if got := addresses(s.get("web")); !slices.Equal(got, before) {
		t.Errorf("a new Node changed the addresses: got %v, want %v", got, before)
	}

	s.run()

	for i := range 20 {
		s.respond(fmt.Sprintf("n-%d", i), fmt.Sprintf("192.0.2.%d", i+1))
	}

	lost := before[3]
	nodes, err := client.CoreV1().Nodes().List(t.Context(), metav1.ListOptions{})
	s.require(err)

	for i := range nodes.Items {
		if nodes.Items[i].Status.Addresses[0].Address == lost {
			s.setReady(nodes.Items[i].Name, corev1.ConditionFalse)
		}
	}

	s.awaitThat("web", "15 of the addresses and another one", func(svc *corev1.Service) bool {
		got := addresses(svc)
		kept := slices.DeleteFunc(slices.Clone(before), func(a string) bool { return !slices.Contains(got, a) })

		return len(got) == 16 && len(kept) == 15 && !slices.Contains(got, lost)
	})
}
