package ccm_test

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/resources/k8s"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"

	"github.com/talos-ccm/talos-ccm/pkg/controllers/csrapproval"
	"github.com/talos-ccm/talos-ccm/pkg/controllers/nodeipam"
	"github.com/talos-ccm/talos-ccm/pkg/controllers/service"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/ctest"
)

// createService creates a Service of type LoadBalancer with port 80, and returns the client of its namespace. The Service is
// deleted after the test: in a later test on the same API server, it would be the older one and get the address.
func (s *suite) createService(namespace, name string, spec corev1.ServiceSpec) typedcorev1.ServiceInterface {
	s.Helper()

	services := s.Client.CoreV1().Services(namespace)
	spec.Type, spec.Ports = corev1.ServiceTypeLoadBalancer, []corev1.ServicePort{{Port: 80}}

	_, err := services.Create(s.Context(), &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: spec}, metav1.CreateOptions{})
	require.NoError(s, err)

	s.Cleanup(func() {
		ctest.Ask(s, func(ctx context.Context) (any, error) {
			return nil, ctest.IgnoreNotFound(services.Delete(ctx, name, metav1.DeleteOptions{}))
		})
	})

	return services
}

// The RBAC of the extension suffices: for a Service in any namespace, and its Events.
func TestManager_PublishesNodeAddresses(t *testing.T) {
	s := newSuite(t)
	self := s.controlPlane("cp")

	for _, link := range []string{"eth0", talostest.LinkExternal} {
		require.NoError(s, self.AddAddress(t.Context(), link, netip.MustParsePrefix("203.0.113.7/32")))
	}

	s.configure(self, "service: {default: true}")
	s.register(self)
	s.labelControlPlane(self)
	s.SetReady(self.Nodename(), corev1.ConditionTrue) // until then, the Event would have another message

	namespace := s.prefix + "namespace"
	_, err := s.Client.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}, metav1.CreateOptions{})
	require.NoError(t, err)

	services := s.createService(namespace, "web", corev1.ServiceSpec{ExternalTrafficPolicy: corev1.ServiceExternalTrafficPolicyLocal})

	options := s.options(self)
	options.Framework.Generic.Controllers = []string{"*", service.Alias}
	s.start(options)
	s.awaitInitialized(self)

	s.Namespace = namespace
	s.AwaitEvent("web", service.ReasonNoEligibleNodes, "ready endpoint")

	// The Service has no class, so this also proves that the configuration is in force.
	_, err = services.Patch(t.Context(), "web", types.MergePatchType, []byte(`{"spec":{"externalTrafficPolicy":"Cluster"}}`), metav1.PatchOptions{})
	require.NoError(t, err)
	ctest.Await(s, services, metav1.ListOptions{}, ctest.Published("203.0.113.7"))

	s.configure(self, "{}")
	ctest.Await(s, services, metav1.ListOptions{}, ctest.Published())
}

// The cluster identity is read without CSR approval, too. With node IPAM, its pod CIDRs count.
func TestManager_PublishesNoAddressOfTheClusterForWorker(t *testing.T) {
	for cidr, others := range map[string][]string{"": nil, "10.251.0.0/16": {nodeipam.Alias}} {
		t.Run("cluster CIDR "+cidr, func(t *testing.T) {
			s, self, worker := newCluster(t)
			endpoint := k8s.NewEndpoint(k8s.ControlPlaneNamespaceName, k8s.ControlPlaneKubernetesEndpointsID)
			endpoint.TypedSpec().Addresses = []netip.Addr{netip.MustParseAddr("203.0.113.100")}
			require.NoError(t, self.State().Create(t.Context(), endpoint))

			addresses := []string{"203.0.113.100/32", "203.0.113.101/32"} // the Node lists all, in this order
			if cidr != "" {
				addresses = append([]string{"10.251.0.7/32"}, addresses...)
			}

			for _, address := range addresses {
				for _, link := range []string{"eth0", talostest.LinkExternal} {
					require.NoError(t, worker.AddAddress(t.Context(), link, netip.MustParsePrefix(address)))
				}
			}

			options := s.options(self)
			options.Framework.Generic.Controllers = slices.Concat(others, []string{"*", "-" + csrapproval.Alias, service.Alias})
			options.Framework.KubeCloudShared.AllocateNodeCIDRs = cidr != ""
			options.Framework.KubeCloudShared.ClusterCIDR = cidr
			s.start(options)
			s.awaitInitialized(self, worker)

			name := s.prefix + "web"
			services := s.createService("default", name, corev1.ServiceSpec{LoadBalancerClass: new(service.Class)})
			s.SetReady(worker.Nodename(), corev1.ConditionTrue)
			s.labelControlPlane(self) // the identity becomes known last

			svc := ctest.Await(s, services, ctest.Named(name), func(svc *corev1.Service, asrt *assert.Assertions) {
				asrt.NotEmpty(svc.Status.LoadBalancer.Ingress)
			})
			assert.Equal(t, "203.0.113.101", svc.Status.LoadBalancer.Ingress[0].IP)
		})
	}
}

func TestManager_RemovesAddressOfMachineThatLosesPower(t *testing.T) {
	s, self, worker := newCluster(t)
	s.labelControlPlane(self)

	machines := []*talostest.Machine{self, worker}

	for i, m := range machines {
		for _, link := range []string{"eth0", talostest.LinkExternal} {
			require.NoError(t, m.AddAddress(t.Context(), link, netip.MustParsePrefix(fmt.Sprintf("203.0.113.%d/32", i+1))))
		}
	}

	options := s.options(self)
	options.Framework.Generic.Controllers = []string{"*", service.Alias}
	s.start(options)
	s.awaitInitialized(machines...)

	name := s.prefix + "web"
	services := s.createService("default", name, corev1.ServiceSpec{LoadBalancerClass: new(service.Class)})

	for _, m := range machines {
		s.SetReady(m.Nodename(), corev1.ConditionTrue)
		require.NoError(t, s.Kube.RenewLease(t.Context(), m.Nodename()))
	}

	awaitAddresses := func(want ...string) {
		ctest.Await(s, services, ctest.Named(name), ctest.Published(want...))
	}

	awaitAddresses("203.0.113.1", "203.0.113.2")

	start := time.Now()

	require.NoError(t, s.Kube.RenewLease(t.Context(), worker.Nodename()))
	require.NoError(t, worker.BlackHole())
	awaitAddresses("203.0.113.1") // although its own Lease is overdue, too

	took := time.Since(start)
	t.Logf("removed the address %s after the loss of power", took)
	assert.Less(t, took, 45*time.Second, "as long as without a probe")

	require.NoError(t, s.Kube.RenewLease(t.Context(), worker.Nodename()))
	awaitAddresses("203.0.113.1", "203.0.113.2")
}
