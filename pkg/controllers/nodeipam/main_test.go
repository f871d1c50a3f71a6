package nodeipam_test

import (
	"context"
	"crypto/rand"
	"flag"
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cosi-project/runtime/pkg/safe"
	talosmachine "github.com/siderolabs/talos/pkg/machinery/config/machine"
	"github.com/siderolabs/talos/pkg/machinery/nethelpers"
	"github.com/siderolabs/talos/pkg/machinery/resources/k8s"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	watchtools "k8s.io/client-go/tools/watch"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/controllers/nodeipam"
	"github.com/talos-ccm/talos-ccm/pkg/controlplane"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/rules"
	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

const (
	// pollTimeout bounds every wait for something that takes a moment on an idle machine, or until the controller's
	// periodic refresh.
	pollTimeout  = 2 * time.Minute
	pollInterval = 10 * time.Millisecond

	// labelWorld separates the Nodes of a test from those of other tests.
	labelWorld = "test/world"
)

// bed is shared by the tests of this package: a real API server, and Talos machines.
type bed struct {
	kube   *kube.Cluster
	talos  *talostest.Cluster
	client kubernetes.Interface
}

var shared bed

func TestMain(m *testing.M) {
	// The tests mostly wait. The flag -parallel still overrides this.
	if err := flag.Set("test.parallel", "16"); err != nil {
		panic(err)
	}

	code, err := runTests(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)

		code = 1
	}

	os.Exit(code)
}

func runTests(m *testing.M) (code int, err error) {
	shared.kube, err = kube.Start(context.Background(), kube.Options{Progress: os.Stderr, ControllerManager: kube.ControllerManager{Absent: true}})
	if err != nil {
		return 1, err
	}
	defer shared.kube.Stop()

	if shared.talos, err = talostest.New(talostest.Options{}); err != nil {
		return 1, err
	}
	defer shared.talos.Close()

	if shared.client, err = kubernetes.NewForConfig(shared.kube.Config()); err != nil {
		return 1, err
	}

	return m.Run(), nil
}

// world is one test's part of the bed: its own Nodes, which are the only ones its controllers see, an inventory, and a
// control-plane machine.
type world struct {
	testing.TB
	*bed

	name         string
	controlPlane *talostest.Machine
	inventory    *inventory.Inventory
	events       *events
}

// newWorld returns a world for a test that can run in parallel. Its kube-controller-manager does not allocate.
func newWorld(t testing.TB) *world {
	t.Helper()

	w := &world{TB: t, bed: &shared, name: "w-" + strings.ToLower(rand.Text()), inventory: inventory.New(time.Now), events: &events{}}
	w.controlPlane = w.machine("cp")
	w.setArguments(w.controlPlane, "--allocate-node-cidrs=true", "--controllers=*,tokencleaner,-node-ipam-controller")

	t.Cleanup(func() {
		err := w.client.CoreV1().Nodes().DeleteCollection(context.WithoutCancel(t.Context()), metav1.DeleteOptions{}, metav1.ListOptions{LabelSelector: w.selector()})
		if err != nil {
			t.Error(err)
		}
	})

	return w
}

func (w *world) selector() string { return labelWorld + "=" + w.name }

// node returns the full name of a Node of this world.
func (w *world) node(name string) string { return w.name + "-" + name }

// machine adds a Talos control-plane machine.
func (w *world) machine(name string) *talostest.Machine {
	w.Helper()

	m, err := w.talos.AddMachine(talostest.MachineSpec{Nodename: w.node(name), Type: talosmachine.TypeControlPlane})
	w.require(err)
	w.Cleanup(func() { _ = m.Stop(context.Background()) })

	return m
}

// setArguments sets the arguments of kube-controller-manager in its static pod.
func (w *world) setArguments(m *talostest.Machine, args ...string) {
	w.Helper()

	w.require(safe.StateModify(w.Context(), m.State(), k8s.NewStaticPod(k8s.NamespaceName, k8s.ControllerManagerID), func(pod *k8s.StaticPod) error {
		command := []any{"/usr/local/bin/kube-controller-manager"}
		for _, arg := range args {
			command = append(command, arg)
		}

		pod.TypedSpec().Pod = map[string]any{"spec": map[string]any{"containers": []any{
			map[string]any{"name": "kube-controller-manager", "command": command},
		}}}

		return nil
	}))
}

// setCIDRs sets the CIDRs of kube-controller-manager.
func (w *world) setCIDRs(m *talostest.Machine, pods, services []string) {
	w.Helper()

	w.require(safe.StateModify(w.Context(), m.State(), k8s.NewControllerManagerConfig(), func(config *k8s.ControllerManagerConfig) error {
		config.TypedSpec().PodCIDRs, config.TypedSpec().ServiceCIDRs = pods, services

		return nil
	}))
}

// setup configures a process; the zero value is a RangeAllocator without cluster CIDRs.
type setup struct {
	nodeipam.Options

	selector func() *rules.Selector
	pools    func() []nodeipam.Pool
	fallback func() bool
	// clock is used by the controller, readerClock by the control-plane reader.
	clock, readerClock clock.Clock
	// dial connects to the machines of control-plane Nodes.
	dial talosapi.DialFunc
	// wire is the connection to the API server; nil: one without faults.
	wire *wire
}

// process is one run of a controller.
type process struct {
	// lead starts the controller. Before, the process is a standby with a synced cache.
	lead func()
	// resync notifies the controller of a changed configuration.
	resync func()
	// cancel stops the controller without waiting, stop waits until it has stopped.
	cancel, stop func()
}

// run starts a controller that stops at the end of the test.
func (w *world) run(s setup) *process {
	w.Helper()

	p := w.prepare(s)
	p.lead()

	return p
}

func (w *world) prepare(s setup) *process {
	w.Helper()

	if s.wire == nil {
		s.wire = newWire()
	}

	if s.clock == nil {
		s.clock = clock.RealClock{}
	}

	if s.readerClock == nil {
		s.readerClock = clock.RealClock{}
	}

	if s.selector == nil {
		s.selector = func() *rules.Selector { return nil }
	}

	if s.fallback == nil {
		s.fallback = func() bool { return false }
	}

	if s.pools == nil {
		s.pools = func() []nodeipam.Pool { return nil }
	}

	s.wire.selector = w.selector()
	config := w.kube.Config()
	config.Wrap(s.wire.wrap)

	client, err := kubernetes.NewForConfig(config)
	w.require(err)

	factory := informers.NewSharedInformerFactory(client, 0)

	reader := controlplane.New(controlplane.Config{
		Kubernetes: config, Client: client, Nodes: factory.Core().V1().Nodes(), Dial: s.dial, LocalState: w.controlPlane.State(), Clock: s.readerClock,
	})

	controller, err := nodeipam.New(nodeipam.Config{
		Client: client, Nodes: factory.Core().V1().Nodes(), Inventory: w.inventory, ControlPlane: reader.Network(), Recorder: w.events, Clock: s.clock,
		Selector: s.selector, Pools: s.pools, Fallback: s.fallback, Options: s.Options,
	})
	w.require(err)

	ctx, cancel := context.WithCancel(w.Context())

	var group sync.WaitGroup

	p := &process{
		lead: func() {
			group.Go(func() { reader.Run(ctx) })
			group.Go(func() { controller.Run(ctx) })
		},
		resync: controller.Resync,
		cancel: cancel,
		stop: func() {
			cancel()
			group.Wait()
			factory.Shutdown()
		},
	}

	factory.Start(ctx.Done())
	factory.WaitForCacheSync(ctx.Done())
	w.Cleanup(p.stop)

	return p
}

// register registers a Node of this world as the kubelet of a Talos machine does. The changes are made before.
func (w *world) register(name string, changes ...func(*corev1.Node)) *corev1.Node {
	w.Helper()

	node, err := w.tryRegister(w.Context(), name, changes...)
	w.require(err)

	return node
}

func (w *world) tryRegister(ctx context.Context, name string, changes ...func(*corev1.Node)) (*corev1.Node, error) {
	node := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: w.node(name), Labels: map[string]string{labelWorld: w.name}},
		Spec: corev1.NodeSpec{Taints: []corev1.Taint{{
			Key: "node.cloudprovider.kubernetes.io/uninitialized", Value: "true", Effect: corev1.TaintEffectNoSchedule,
		}}},
		Status: corev1.NodeStatus{
			NodeInfo:    corev1.NodeSystemInfo{OSImage: kube.DefaultOSImage, Architecture: "amd64"},
			Allocatable: corev1.ResourceList{corev1.ResourcePods: resource.MustParse("110")},
		},
	}

	for _, change := range changes {
		change(node)
	}

	return w.client.CoreV1().Nodes().Create(ctx, node, metav1.CreateOptions{FieldManager: "kubelet"})
}

func initialized(node *corev1.Node) { node.Spec.Taints = nil }

func controlPlane(node *corev1.Node) { node.Labels["node-role.kubernetes.io/control-plane"] = "" }

// at sets the address at which the Node's machine is dialed.
func at(addr netip.Addr) func(*corev1.Node) {
	return func(node *corev1.Node) {
		node.Annotations = map[string]string{"alpha.kubernetes.io/provided-node-ip": addr.String()}
	}
}

func having(cidrs ...string) func(*corev1.Node) {
	return func(node *corev1.Node) { node.Spec.PodCIDR, node.Spec.PodCIDRs = cidrs[0], cidrs }
}

// remove deletes a Node if it exists.
func (w *world) remove(name string) {
	w.Helper()

	if err := w.client.CoreV1().Nodes().Delete(w.Context(), w.node(name), metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
		w.Fatal(err)
	}
}

func (w *world) get(name string) *corev1.Node {
	w.Helper()

	node, err := w.client.CoreV1().Nodes().Get(w.Context(), w.node(name), metav1.GetOptions{})
	w.require(err)

	return node
}

// watch returns every later version of this world's Nodes. It resumes when the API server ends the watch.
func (w *world) watch() watch.Interface {
	w.Helper()

	list, err := w.client.CoreV1().Nodes().List(w.Context(), metav1.ListOptions{LabelSelector: w.selector()})
	w.require(err)

	again := func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
		options.LabelSelector = w.selector()

		return w.client.CoreV1().Nodes().Watch(ctx, options)
	}

	watcher, err := watchtools.NewRetryWatcherWithContext(w.Context(), list.ResourceVersion, &cache.ListWatch{WatchFuncWithContext: again})
	w.require(err)

	return watcher
}

func (w *world) patch(name, manager, patch string) {
	w.Helper()

	_, err := w.client.CoreV1().Nodes().Patch(w.Context(), w.node(name), types.MergePatchType, []byte(patch), metav1.PatchOptions{FieldManager: manager})
	w.require(err)
}

// awaitCIDRs waits until a Node has podCIDRs.
func (w *world) awaitCIDRs(name string) []string {
	w.Helper()

	var node *corev1.Node

	w.eventually(name+" has podCIDRs", func() bool {
		node = w.get(name)

		return len(node.Spec.PodCIDRs) > 0
	})

	if node.Spec.PodCIDR != node.Spec.PodCIDRs[0] {
		w.Errorf("node %s: podCIDR %s is not the first of %v", name, node.Spec.PodCIDR, node.Spec.PodCIDRs)
	}

	return node.Spec.PodCIDRs
}

func (w *world) wantCIDRs(name string, want ...string) {
	w.Helper()

	if got := w.awaitCIDRs(name); !slices.Equal(got, want) {
		w.Errorf("node %s: podCIDRs %v, want %v", name, got, want)
	}
}

// awaitPending waits for an Event with the given reason, and fails if the Node has podCIDRs. It returns the message of
// the Event.
func (w *world) awaitPending(name, reason string) string {
	w.Helper()

	message := w.awaitEvent(name, reason)
	if cidrs := w.get(name).Spec.PodCIDRs; len(cidrs) > 0 {
		w.Errorf("node %s: podCIDRs %v, want none because of %s", name, cidrs, reason)
	}

	return message
}

func (w *world) awaitEvent(name, reason string) (message string) {
	w.Helper()

	w.eventually(fmt.Sprintf("%s has an Event %s", name, reason), func() bool {
		var found bool

		message, found = w.events.find(w.node(name), reason)

		return found
	})

	return message
}

// eventually polls until ok returns true.
func (w *world) eventually(what string, ok func() bool) {
	w.Helper()

	err := wait.PollUntilContextTimeout(w.Context(), pollInterval, pollTimeout, true, func(context.Context) (bool, error) { return ok(), nil })
	if err != nil {
		w.Fatalf("timed out waiting until %s; Events: %s", what, w.events)
	}
}

func (w *world) require(err error) {
	w.Helper()

	if err != nil {
		w.Fatal(err)
	}
}

// view returns a machine of this world with the given addresses on eth0.
func (w *world) view(name string, addresses ...string) machine.Machine {
	m := machine.Machine{Nodename: w.node(name)}

	for _, text := range addresses {
		prefix := netip.MustParsePrefix(text)
		m.Addresses = append(m.Addresses, machine.Address{
			Prefix: prefix, Link: "eth0", Scope: nethelpers.ScopeGlobal, Flags: nethelpers.AddressFlags(nethelpers.AddressPermanent),
		})
	}

	return m
}

// join adds a machine to the inventory and registers its Node.
func (w *world) join(name string, addresses ...string) {
	w.Helper()

	w.inventory.Replace(w.node(name), w.view(name, addresses...))
	w.register(name)
}

// events records Events.
type events struct {
	mu   sync.Mutex
	list []event
}

type event struct{ node, reason, message string }

// Event implements record.EventRecorder.
func (e *events) Event(object runtime.Object, _, reason, message string) {
	e.mu.Lock()
	defer e.mu.Unlock()

	if node, ok := object.(*corev1.Node); ok {
		e.list = append(e.list, event{node: node.Name, reason: reason, message: message})
	}
}

// Eventf implements record.EventRecorder.
func (e *events) Eventf(object runtime.Object, kind, reason, format string, args ...any) {
	e.Event(object, kind, reason, fmt.Sprintf(format, args...))
}

// AnnotatedEventf implements record.EventRecorder.
func (e *events) AnnotatedEventf(object runtime.Object, _ map[string]string, kind, reason, format string, args ...any) {
	e.Eventf(object, kind, reason, format, args...)
}

func (e *events) find(node, reason string) (message string, found bool) {
	e.mu.Lock()
	defer e.mu.Unlock()

	for _, one := range e.list {
		if one.node == node && one.reason == reason {
			return one.message, true
		}
	}

	return "", false
}

// of returns the reasons of a Node's Events, in order.
func (e *events) of(node string) []string {
	e.mu.Lock()
	defer e.mu.Unlock()

	var reasons []string

	for _, one := range e.list {
		if one.node == node {
			reasons = append(reasons, one.reason)
		}
	}

	return reasons
}

// String lists all Events.
func (e *events) String() string {
	e.mu.Lock()
	defer e.mu.Unlock()

	return fmt.Sprint(e.list)
}

// roundTripper implements http.RoundTripper with a function.
type roundTripper func(*http.Request) (*http.Response, error)

// RoundTrip implements http.RoundTripper.
func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }
