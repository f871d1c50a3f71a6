package service_test

import (
	"context"
	"crypto/rand"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/record"

	"github.com/talos-ccm/talos-ccm/pkg/config"
	"github.com/talos-ccm/talos-ccm/pkg/controllers/service"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

const (
	// timeout of every wait. It is generous for slow machines.
	timeout  = 2 * time.Minute
	interval = 20 * time.Millisecond
)

// The API server that all tests share. Services and Nodes are global, so the tests do not run in parallel.
var (
	cluster *kube.Cluster
	client  kubernetes.Interface
)

func TestMain(m *testing.M) {
	code, err := runTests(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)

		code = 1
	}

	os.Exit(code)
}

func runTests(m *testing.M) (code int, err error) {
	cluster, err = kube.Start(context.Background(), kube.Options{Progress: os.Stderr, ControllerManager: kube.ControllerManager{Absent: true}})
	if err != nil {
		return 1, err
	}
	defer cluster.Stop()

	if client, err = kubernetes.NewForConfig(cluster.Config()); err != nil {
		return 1, err
	}

	return m.Run(), nil
}

// suite is a test with its own Nodes, namespace and inventory.
type suite struct {
	*testing.T

	namespace string
	inventory *inventory.Inventory
	options   atomic.Pointer[config.Service]
	// resync notifies the running controller of changed options; stop ends it after its current pass.
	resync, stop func()
}

func newSuite(t *testing.T) *suite {
	t.Helper()

	s := &suite{T: t, namespace: "test-" + strings.ToLower(rand.Text())}
	s.options.Store(&config.Service{})

	_, err := client.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: s.namespace}}, metav1.CreateOptions{})
	s.require(err)

	return s
}

// run starts a controller with an empty inventory, as after a change of the leader, until stop or the end of the test.
func (s *suite) run() {
	s.Helper()

	ctx, cancel := context.WithCancel(s.Context())
	broadcaster := record.NewBroadcaster(record.WithContext(ctx))
	broadcaster.StartRecordingToSink(&typedcorev1.EventSinkImpl{Interface: client.CoreV1().Events("")})

	s.inventory = inventory.New(time.Now)
	factory := informers.NewSharedInformerFactory(client, 0)

	controller, err := service.New(service.Config{
		Client:    client,
		Nodes:     factory.Core().V1().Nodes(),
		Inventory: s.inventory,
		Recorder:  broadcaster.NewRecorder(scheme.Scheme, corev1.EventSource{Component: "talos-ccm"}),
		Managed:   func(node *corev1.Node, _ machine.Machine) bool { return node.Labels["test/unmanaged"] == "" },
		Options:   func() config.Service { return *s.options.Load() },
	})
	if err != nil {
		cancel()
		s.Fatal(err)
	}

	factory.Start(ctx.Done())

	var group sync.WaitGroup

	group.Go(func() { controller.Run(ctx) })

	s.resync = controller.Resync
	s.stop = func() {
		cancel()
		group.Wait()
		factory.Shutdown()
		broadcaster.Shutdown()
	}
	s.Cleanup(s.stop)
}

func (s *suite) require(err error) {
	s.Helper()

	if err != nil {
		s.Fatal(err)
	}
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

	_, err := cluster.RegisterNode(s.Context(), kube.NodeSpec{Name: name, NodeIPs: []netip.Addr{netip.MustParseAddr(address)}, WithoutCloudProvider: true})
	s.require(err)
	s.Cleanup(func() {
		_ = client.CoreV1().Nodes().Delete(context.WithoutCancel(s.Context()), name, metav1.DeleteOptions{})
	})
	s.setReady(name, corev1.ConditionTrue)
}

// respond makes the machine of a Node known.
func (s *suite) respond(name string, addresses ...string) {
	m := machine.Machine{Nodename: name}
	for _, address := range addresses {
		m.Addresses = append(m.Addresses, machine.Address{Link: "eth0", Prefix: netip.MustParsePrefix(address + "/24")})
	}

	s.inventory.Replace(name, m)
}

func (s *suite) setReady(name string, status corev1.ConditionStatus) {
	s.Helper()
	s.patchNode(name, fmt.Sprintf(`{"status":{"conditions":[{"type":"Ready","status":%q}]}}`, status), "status")
}

func (s *suite) patchNode(name, patch string, subresources ...string) {
	s.Helper()

	_, err := client.CoreV1().Nodes().Patch(s.Context(), name, types.StrategicMergePatchType, []byte(patch), metav1.PatchOptions{}, subresources...)
	s.require(err)
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

	_, err := client.CoreV1().Services(s.namespace).Create(s.Context(), svc, metav1.CreateOptions{})
	s.require(err)
	s.Cleanup(func() {
		_ = client.CoreV1().Services(s.namespace).Delete(context.WithoutCancel(s.Context()), name, metav1.DeleteOptions{})
	})
}

// patch applies a merge patch to a Service or to its subresource.
func (s *suite) patch(name, patch string, subresources ...string) {
	s.Helper()

	_, err := client.CoreV1().Services(s.namespace).Patch(s.Context(), name, types.MergePatchType, []byte(patch), metav1.PatchOptions{FieldManager: "other"}, subresources...)
	s.require(err)
}

func (s *suite) get(name string) *corev1.Service {
	s.Helper()

	svc, err := client.CoreV1().Services(s.namespace).Get(s.Context(), name, metav1.GetOptions{})
	s.require(err)

	return svc
}

func addresses(svc *corev1.Service) (list []string) {
	for _, ingress := range svc.Status.LoadBalancer.Ingress {
		list = append(list, ingress.IP)
	}

	return list
}

// await waits until a Service has exactly these addresses, in this order.
func (s *suite) await(name string, want ...string) {
	s.Helper()
	s.awaitThat(name, fmt.Sprint(want), func(svc *corev1.Service) bool { return slices.Equal(addresses(svc), want) })
}

func (s *suite) awaitThat(name, what string, ok func(*corev1.Service) bool) *corev1.Service {
	s.Helper()

	var svc *corev1.Service

	err := wait.PollUntilContextTimeout(s.Context(), interval, timeout, true, func(context.Context) (bool, error) {
		svc = s.get(name)

		return ok(svc), nil
	})
	if err != nil {
		s.Fatalf("service %s: got addresses %v, want %s", name, addresses(svc), what)
	}

	return svc
}

// awaitEvent waits for an Event of a Service whose message contains the text.
func (s *suite) awaitEvent(name, reason, text string) {
	s.Helper()

	var messages []string

	selector := fields.Set{"involvedObject.kind": "Service", "involvedObject.name": name}.AsSelector().String()

	err := wait.PollUntilContextTimeout(s.Context(), interval, timeout, true, func(ctx context.Context) (bool, error) {
		list, err := client.CoreV1().Events(s.namespace).List(ctx, metav1.ListOptions{FieldSelector: selector})
		s.require(err)

		messages = nil
		for i := range list.Items {
			messages = append(messages, list.Items[i].Reason+" "+list.Items[i].Message)
		}

		return slices.ContainsFunc(messages, func(m string) bool { return strings.HasPrefix(m, reason+" ") && strings.Contains(m, text) }), nil
	})
	if err != nil {
		s.Fatalf("service %s: got Events %q, want %s with %q", name, messages, reason, text)
	}
}
