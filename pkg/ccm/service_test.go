package ccm_test

import (
	"context"
	"net/netip"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/talos-ccm/talos-ccm/pkg/controllers/service"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
)

// The RBAC of the extension suffices: for a Service in any namespace, and its Events.
func TestApp_PublishesNodeAddresses(t *testing.T) {
	s := newSuite(t, "lb-", talostest.Options{})
	self := s.controlPlane("cp")
	s.require(self.AddAddress(t.Context(), talostest.LinkExternal, netip.MustParsePrefix("203.0.113.7/32")))
	s.configure(self, "service: {default: true}")
	s.register(self)

	namespace := s.prefix + "namespace"
	ask(s, func(ctx context.Context) (*corev1.Namespace, error) {
		return s.client.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}, metav1.CreateOptions{})
	})

	services := s.client.CoreV1().Services(namespace)
	web := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "web"}, Spec: corev1.ServiceSpec{
		Type: corev1.ServiceTypeLoadBalancer, ExternalTrafficPolicy: corev1.ServiceExternalTrafficPolicyLocal, Ports: []corev1.ServicePort{{Port: 80}},
	}}
	ask(s, func(ctx context.Context) (*corev1.Service, error) {
		return services.Create(ctx, web, metav1.CreateOptions{})
	})

	options := s.options(self)
	options.Framework.Generic.Controllers = []string{"*", service.Alias}
	s.start(options)
	s.awaitInitialized(self)

	ready := []byte(`{"status":{"conditions":[{"type":"Ready","status":"True"}]}}`)
	ask(s, func(ctx context.Context) (*corev1.Node, error) {
		return s.client.CoreV1().Nodes().Patch(ctx, self.Nodename(), types.StrategicMergePatchType, ready, metav1.PatchOptions{}, "status")
	})

	s.eventually("Event about missing endpoints", func() bool {
		list := ask(s, func(ctx context.Context) (*corev1.EventList, error) {
			return s.client.CoreV1().Events(namespace).List(ctx, metav1.ListOptions{FieldSelector: "reason=" + service.ReasonNoEligibleNodes})
		})

		return len(list.Items) > 0 && strings.Contains(list.Items[0].Message, "ready endpoint")
	})

	// The Service has no class, so this also proves that the configuration is in force.
	ask(s, func(ctx context.Context) (*corev1.Service, error) {
		return services.Patch(ctx, "web", types.MergePatchType, []byte(`{"spec":{"externalTrafficPolicy":"Cluster"}}`), metav1.PatchOptions{})
	})
	s.eventually("Service has the address of the Node", func() bool {
		svc := ask(s, func(ctx context.Context) (*corev1.Service, error) {
			return services.Get(ctx, "web", metav1.GetOptions{})
		})

		return len(svc.Status.LoadBalancer.Ingress) == 1 && svc.Status.LoadBalancer.Ingress[0].IP == "203.0.113.7"
	})

	s.configure(self, "{}")
	s.eventually("Service has no address", func() bool {
		svc := ask(s, func(ctx context.Context) (*corev1.Service, error) {
			return services.Get(ctx, "web", metav1.GetOptions{})
		})

		return len(svc.Status.LoadBalancer.Ingress) == 0
	})
}
