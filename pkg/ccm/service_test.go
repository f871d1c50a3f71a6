package ccm_test

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/talos-ccm/talos-ccm/pkg/controllers/service"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/ctest"
)

// The RBAC of the extension suffices: for a Service in any namespace, and its Events.
func TestManager_PublishesNodeAddresses(t *testing.T) {
	s := newSuite(t)
	self := s.controlPlane("cp")

	for _, link := range []string{"eth0", talostest.LinkExternal} {
		require.NoError(s, self.AddAddress(t.Context(), link, netip.MustParsePrefix("203.0.113.7/32")))
	}

	s.configure(self, "service: {default: true}")
	s.register(self)

	namespace := s.prefix + "namespace"
	_, err := s.Client.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}, metav1.CreateOptions{})
	require.NoError(t, err)

	services := s.Client.CoreV1().Services(namespace)
	web := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "web"}, Spec: corev1.ServiceSpec{
		Type: corev1.ServiceTypeLoadBalancer, ExternalTrafficPolicy: corev1.ServiceExternalTrafficPolicyLocal, Ports: []corev1.ServicePort{{Port: 80}},
	}}
	_, err = services.Create(t.Context(), web, metav1.CreateOptions{})
	require.NoError(t, err)

	options := s.options(self)
	options.Framework.Generic.Controllers = []string{"*", service.Alias}
	s.start(options)
	s.awaitInitialized(self)

	s.SetReady(self.Nodename(), corev1.ConditionTrue)

	s.Namespace = namespace
	s.AwaitEvent("web", service.ReasonNoEligibleNodes, "ready endpoint")

	// The Service has no class, so this also proves that the configuration is in force.
	_, err = services.Patch(t.Context(), "web", types.MergePatchType, []byte(`{"spec":{"externalTrafficPolicy":"Cluster"}}`), metav1.PatchOptions{})
	require.NoError(t, err)
	ctest.Await(s, services, metav1.ListOptions{}, "the Service has the address of the Node", func(svc *corev1.Service) bool {
		return len(svc.Status.LoadBalancer.Ingress) == 1 && svc.Status.LoadBalancer.Ingress[0].IP == "203.0.113.7"
	})

	s.configure(self, "{}")
	ctest.Await(s, services, metav1.ListOptions{}, "the Service has no address", func(svc *corev1.Service) bool {
		return len(svc.Status.LoadBalancer.Ingress) == 0
	})
}
