package service_test

import (
	"context"
	"crypto/rand"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"

	"github.com/talos-ccm/talos-ccm/pkg/config"
	"github.com/talos-ccm/talos-ccm/pkg/controllers/service"
	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/test/ctest"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

// bed is shared by all tests. Services and Nodes are global, so the tests do not run in parallel.
var bed ctest.Bed

func TestMain(m *testing.M) {
	bed.Main(m, kube.Options{ControllerManager: kube.ControllerManager{Absent: true}}, nil)
}

// suite is a test with its own Nodes, namespace and inventory.
type suite struct {
	ctest.Suite

	inventory *inventory.Inventory
	identity  atomic.Pointer[csrpolicy.ClusterIdentity]
	options   atomic.Pointer[config.Service]
	// unreachable are machines that accept no connections.
	unreachable sync.Map
	// resync notifies the running controller of changed options; stop ends it after its current pass.
	resync, stop func()
}

func newSuite(t *testing.T) *suite {
	t.Helper()

	s := &suite{Suite: bed.NewSuite(t)}
	s.Namespace = "test-" + strings.ToLower(rand.Text())
	s.options.Store(&config.Service{})
	s.identity.Store(&csrpolicy.ClusterIdentity{Known: true})

	_, err := s.Client.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: s.Namespace}}, metav1.CreateOptions{})
	require.NoError(t, err)

	return s
}

// run starts a controller with an empty inventory, as after a change of the leader, until stop or the end of the test.
func (s *suite) run() {
	s.Helper()

	i, err := ctest.NewInstance(s.Context(), s.Kube.Config(), nil)
	require.NoError(s, err)

	controller, err := service.New(service.Config{
		Client: i.Client, Nodes: i.Nodes, Inventory: i.Inventory, Recorder: i.Recorder,
		Probe: func(nodename string) {
			if _, isUnreachable := s.unreachable.Load(nodename); isUnreachable {
				i.Inventory.MarkUnreachable(nodename, "connection timed out")
			}
		},
		Managed:  func(node *corev1.Node, _ machine.Machine) bool { return node.Labels["test/unmanaged"] == "" },
		Identity: func() csrpolicy.ClusterIdentity { return *s.identity.Load() },
		Options:  func() config.Service { return *s.options.Load() },
	})
	require.NoError(s, err)

	i.Start(controller.Run)
	s.inventory, s.resync, s.stop = i.Inventory, controller.Resync, i.Stop
	s.Cleanup(i.Stop)
}

// join registers a ready Node whose machine has the address and has responded.
func (s *suite) join(name, address string) {
	s.Helper()
	s.register(name, address)
	s.respond(name, address)
}

// register registers a ready Node.
func (s *suite) register(name, address string) {
	s.Helper()
	s.Register(kube.NodeSpec{Name: name, NodeIPs: []netip.Addr{netip.MustParseAddr(address)}, WithoutCloudProvider: true})
	s.SetReady(name, corev1.ConditionTrue)
}

// respond makes the machine of a Node known.
func (s *suite) respond(name string, addresses ...string) {
	s.announce(name, runtime.MachineStageRunning, addresses...)
}

// announce makes the stage of the machine of a Node known.
func (s *suite) announce(name string, stage runtime.MachineStage, addresses ...string) {
	m := machine.Machine{Nodename: name, Stage: stage}
	for _, address := range addresses {
		m.Addresses = append(m.Addresses, machine.Address{Link: "eth0", Prefix: netip.MustParsePrefix(address + "/24")})
	}

	s.inventory.Replace(name, m)
}

// renew renews the Lease of a kubelet.
func (s *suite) renew(nodename string) {
	s.Helper()
	require.NoError(s, s.Kube.RenewLease(s.Context(), nodename))
}

func (s *suite) services() typedcorev1.ServiceInterface {
	return s.Client.CoreV1().Services(s.Namespace)
}

// create creates a Service of type LoadBalancer for TCP port 80 with the class of the controller, and a change.
func (s *suite) create(name string, change func(*corev1.Service)) {
	s.Helper()

	svc := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.ServiceSpec{
		Type:              corev1.ServiceTypeLoadBalancer,
		LoadBalancerClass: new(service.Class),
		Ports:             []corev1.ServicePort{{Name: "main", Port: 80}},
	}}
	if change != nil {
		change(svc)
	}

	_, err := s.services().Create(s.Context(), svc, metav1.CreateOptions{})
	require.NoError(s, err)
	s.Cleanup(func() { _ = s.services().Delete(context.WithoutCancel(s.Context()), name, metav1.DeleteOptions{}) })
}

// patch applies a merge patch to a Service or to its subresource.
func (s *suite) patch(name, patch string, subresources ...string) {
	s.Helper()

	_, err := s.services().Patch(s.Context(), name, types.MergePatchType, []byte(patch), metav1.PatchOptions{FieldManager: "other"}, subresources...)
	require.NoError(s, err)
}

func (s *suite) get(name string) *corev1.Service {
	s.Helper()

	svc, err := s.services().Get(s.Context(), name, metav1.GetOptions{})
	require.NoError(s, err)

	return svc
}

// await waits until a Service has exactly these addresses, in this order.
func (s *suite) await(name string, want ...string) {
	s.Helper()
	ctest.Await(s, s.services(), ctest.Named(name), ctest.Published(want...))
}
