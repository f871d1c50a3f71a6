package nodeipam_test

import (
	"context"
	"crypto/rand"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cosi-project/runtime/pkg/safe"
	talosmachine "github.com/siderolabs/talos/pkg/machinery/config/machine"
	"github.com/siderolabs/talos/pkg/machinery/nethelpers"
	"github.com/siderolabs/talos/pkg/machinery/resources/k8s"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	kuberesource "k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/record"
	cloudproviderapi "k8s.io/cloud-provider/api"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/talos-ccm/talos-ccm/pkg/controllers/nodeipam"
	"github.com/talos-ccm/talos-ccm/pkg/controlplane"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/pkg/reflector"
	"github.com/talos-ccm/talos-ccm/pkg/rules"
	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/ctest"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

const (
	// labelWorld separates the Nodes of a test from those of other tests.
	labelWorld = "test/world"
	// labelUncached is the label of Nodes that no informer reports.
	labelUncached = "test/uncached"
)

var bed ctest.Bed

func TestMain(m *testing.M) {
	bed.Main(m, kube.Options{ControllerManager: kube.ControllerManager{Absent: true}}, nil)
}

// world is one test's part of the bed: its own Nodes, which are the only ones its controllers see, an inventory, and a
// control-plane machine. The names of its Nodes and machines begin with its own, which the methods add.
type world struct {
	ctest.Suite

	name         string
	controlPlane *talostest.Machine
	inventory    *inventory.Inventory
	events       *events

	// Settings of the controllers. The selector and dial cannot be changed once they run.
	selector *rules.Selector
	pools    atomic.Pointer[[]nodeipam.Pool]
	fallback atomic.Bool
	dial     talosapi.DialFunc

	// clock is used by the controllers, readerClock by the control-plane readers, and pollClock by their reflectors.
	clock, readerClock, pollClock manualClock
}

// newWorld returns the world of a test, which becomes parallel. Its kube-controller-manager does not allocate.
func newWorld(t *testing.T) *world {
	t.Helper()
	t.Parallel()

	w := &world{
		Suite: bed.NewSuite(t), name: "w-" + strings.ToLower(rand.Text()), inventory: inventory.New(time.Now), events: &events{},
		clock: newManualClock(), readerClock: newManualClock(), pollClock: newManualClock(), dial: ctest.Dial(bed.Talos),
	}
	w.setPools()

	w.controlPlane = w.machine("cp")
	t.Cleanup(func() {
		nodes := w.Client.CoreV1().Nodes()
		assert.NoError(w, nodes.DeleteCollection(context.WithoutCancel(t.Context()), metav1.DeleteOptions{}, metav1.ListOptions{LabelSelector: w.label()}))
	})

	return w
}

// start returns a world in which a controller runs.
func start(t *testing.T, options nodeipam.Options) *world {
	t.Helper()

	w := newWorld(t)
	w.run(options)

	return w
}

// label selects the Nodes of this world.
func (w *world) label() string { return labelWorld + "=" + w.name }

// node returns the full name of a Node of this world.
func (w *world) node(name string) string { return w.name + "-" + name }

// manualClock advances only when the test steps it. Short timers, such as those of retries, run in real time.
type manualClock struct{ *clocktesting.FakeClock }

func newManualClock() manualClock { return manualClock{clocktesting.NewFakeClock(time.Now())} }

// NewTimer implements clock.Clock.
func (c manualClock) NewTimer(d time.Duration) clock.Timer {
	if d < 10*time.Second {
		return clock.RealClock{}.NewTimer(d)
	}

	return c.FakeClock.NewTimer(d)
}

// After implements clock.Clock.
func (c manualClock) After(d time.Duration) <-chan time.Time { return c.NewTimer(d).C() }

// step advances a clock once it has a waiter.
func (w *world) step(clock manualClock, d time.Duration) {
	w.Helper()
	w.eventually("the clock has a waiter", clock.HasWaiters)
	clock.Step(d)
}

// refresh has the control plane read again.
func (w *world) refresh() {
	w.Helper()
	w.step(w.pollClock, time.Minute)
	w.step(w.readerClock, time.Minute)
}

func (w *world) setPools(pools ...nodeipam.Pool) { w.pools.Store(&pools) }

// machine adds a Talos control-plane machine whose kube-controller-manager does not allocate.
func (w *world) machine(name string) *talostest.Machine {
	w.Helper()

	m := w.Machine(talostest.MachineSpec{Nodename: w.node(name), Type: talosmachine.TypeControlPlane, ServeSocket: true})
	w.setArguments(m, "--allocate-node-cidrs=true", "--controllers=*,tokencleaner,-node-ipam-controller")

	return m
}

// controlPlanes adds control-plane machines and their Nodes.
func (w *world) controlPlanes(names ...string) []*talostest.Machine {
	w.Helper()

	machines := make([]*talostest.Machine, len(names))

	for i, name := range names {
		machines[i] = w.machine(name)
		w.register(name, having(fmt.Sprintf("192.168.%d.0/24", i)), func(node *corev1.Node) {
			node.Labels["node-role.kubernetes.io/control-plane"] = ""
			node.Annotations = map[string]string{cloudproviderapi.AnnotationAlphaProvidedIPAddr: machines[i].Address().String()}
		})
	}

	return machines
}

// setArguments sets the arguments of kube-controller-manager in its static pod.
func (w *world) setArguments(m *talostest.Machine, args ...string) {
	w.Helper()

	command := []any{"/usr/local/bin/kube-controller-manager"}
	for _, arg := range args {
		command = append(command, arg)
	}

	container := map[string]any{"name": "kube-controller-manager", "command": command}

	require.NoError(w, safe.StateModify(w.Context(), m.State(), k8s.NewStaticPod(k8s.NamespaceName, k8s.ControllerManagerID), func(pod *k8s.StaticPod) error {
		pod.TypedSpec().Pod = map[string]any{"spec": map[string]any{"containers": []any{container}}}

		return nil
	}))
}

// setCIDRs sets the CIDRs of kube-controller-manager.
func (w *world) setCIDRs(m *talostest.Machine, pods, services []string) {
	w.Helper()

	require.NoError(w, safe.StateModify(w.Context(), m.State(), k8s.NewControllerManagerConfig(k8s.ControllerManagerConfigID), func(config *k8s.ControllerManagerConfig) error {
		config.TypedSpec().PodCIDRs, config.TypedSpec().ServiceCIDRs = pods, services

		return nil
	}))
}

// process is one run of a controller.
type process struct {
	*ctest.Instance
	*nodeipam.Controller

	reader    *controlplane.Reader
	reflector *reflector.Reflector // of the reader's machines
	wire      *wire
}

// prepare returns a standby with a synced cache, which stops at the end of the test.
func (w *world) prepare(options nodeipam.Options) *process {
	w.Helper()

	p := &process{wire: newWire(w.label())}
	config := w.Kube.Config()
	config.Wrap(p.wire.wrap)

	var err error

	p.Instance, err = ctest.NewInstance(w.Context(), config, nil)
	require.NoError(w, err)

	machines := inventory.New(time.Now)
	p.reflector = reflector.New(machines, func(ctx context.Context, nodename string, addr netip.Addr) (talosapi.State, error) {
		st, err := w.dial(ctx, nodename, addr)
		if node, _ := p.Nodes.Lister().Get(nodename); err != nil || node == nil || !nodespec.IsControlPlane(node) {
			return st, err
		}

		return talosapi.ControlPlane{State: st}, nil
	}, w.pollClock)
	p.reflector.TrackLocal(w.controlPlane.Nodename(), func() (talosapi.State, error) { return talosapi.DialSocket(w.controlPlane.Socket()) })
	p.reader = controlplane.New(controlplane.Config{
		Kubernetes: config, Client: p.Client, Nodes: p.Nodes, Machines: machines, Local: p.reflector.Local, Clock: w.readerClock,
	})
	require.NoError(w, p.reflector.FollowNodes(p.Nodes))

	p.Controller, err = nodeipam.New(nodeipam.Config{
		Client: p.Client, Nodes: p.Nodes, Inventory: w.inventory, ControlPlane: p.reader.Network(), Recorder: w.events, Clock: w.clock, Options: options,
		Selector: func() *rules.Selector { return w.selector }, Pools: func() []nodeipam.Pool { return *w.pools.Load() }, Fallback: w.fallback.Load,
	})
	require.NoError(w, err)

	w.Cleanup(p.Stop)
	p.Start()
	p.Factory.WaitForCacheSync(w.Context().Done())

	return p
}

// lead starts the controller.
func (p *process) lead() { p.Start(p.reflector.Run, p.reader.Run, p.Run) }

func (w *world) run(options nodeipam.Options) *process {
	w.Helper()

	p := w.prepare(options)
	p.lead()

	return p
}

// register registers a Node of this world, with changes, as the kubelet of a Talos machine does.
func (w *world) register(name string, changes ...func(*corev1.Node)) *corev1.Node {
	w.Helper()

	node := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: w.node(name), Labels: map[string]string{labelWorld: w.name}},
		Spec:       corev1.NodeSpec{Taints: []corev1.Taint{{Key: cloudproviderapi.TaintExternalCloudProvider, Value: "true", Effect: corev1.TaintEffectNoSchedule}}},
		Status: corev1.NodeStatus{
			NodeInfo:    corev1.NodeSystemInfo{OSImage: kube.DefaultOSImage},
			Allocatable: corev1.ResourceList{corev1.ResourcePods: kuberesource.MustParse("110")},
		},
	}

	for _, change := range changes {
		change(node)
	}

	node, err := w.Client.CoreV1().Nodes().Create(w.Context(), node, metav1.CreateOptions{FieldManager: "kubelet"})
	assert.NoError(w, err) // tests register from several goroutines

	return node
}

func initialized(node *corev1.Node) { node.Spec.Taints = nil }

func foreign(node *corev1.Node) { node.Status.NodeInfo.OSImage = "Fedora CoreOS" }

func having(cidrs ...string) func(*corev1.Node) {
	return func(node *corev1.Node) { node.Spec.PodCIDR, node.Spec.PodCIDRs = cidrs[0], cidrs }
}

// remove deletes a Node if it exists.
func (w *world) remove(name string) {
	w.Helper()
	w.Remove(w.node(name))
}

// cidrs returns the podCIDRs that a Node has now.
func (w *world) cidrs(name string) []string {
	w.Helper()

	return w.Node(w.node(name)).Spec.PodCIDRs
}

func (w *world) patch(name, manager, patch string, subresources ...string) {
	w.Helper()
	w.PatchNode(w.node(name), manager, patch, subresources...)
}

// setOSImage changes the operating system that a Node reports.
func (w *world) setOSImage(name, image string) {
	w.Helper()
	w.patch(name, "kubelet", fmt.Sprintf(`{"status":{"nodeInfo":{"osImage":%q}}}`, image), "status")
}

// awaitCIDRs waits until a Node has podCIDRs.
func (w *world) awaitCIDRs(name string) []string {
	w.Helper()

	var node *corev1.Node

	w.eventually(name+" has podCIDRs", func() bool {
		node = w.Node(w.node(name))

		return len(node.Spec.PodCIDRs) > 0
	})
	assert.Equal(w, node.Spec.PodCIDRs[0], node.Spec.PodCIDR, name)

	return node.Spec.PodCIDRs
}

func (w *world) wantCIDRs(name string, want ...string) {
	w.Helper()
	assert.Equal(w, want, w.awaitCIDRs(name), name)
}

// awaitPending waits for an Event with the given reason and texts, and fails if the Node has podCIDRs.
func (w *world) awaitPending(name, reason string, texts ...string) {
	w.Helper()
	w.awaitEvent(name, reason, texts...)
	assert.Empty(w, w.cidrs(name), "%s: %s", name, reason)
}

// awaitEvent waits for an Event with the given reason, whose message must contain the texts.
func (w *world) awaitEvent(name, reason string, texts ...string) {
	w.Helper()

	w.eventually(fmt.Sprintf("%s has an Event %s", name, reason), func() bool { return len(w.events.of(w.node(name), reason)) > 0 })

	for _, text := range texts {
		assert.Contains(w, w.events.of(w.node(name), reason)[0].message, text)
	}
}

// wantReasons compares the reasons of a Node's Events so far.
func (w *world) wantReasons(name string, want ...string) {
	w.Helper()

	var reasons []string
	for _, e := range w.events.of(w.node(name), "") {
		reasons = append(reasons, e.reason)
	}

	assert.Equal(w, want, reasons, name)
}

func (w *world) eventually(what string, ok func() bool) {
	w.Helper()

	defer func() {
		if w.Failed() {
			w.Logf("Events: %+v", w.events.of("", ""))
		}
	}()

	ctest.Eventually(w, what, ok)
}

// show replaces the inventory's view of a machine.
func (w *world) show(name string, addresses ...string) {
	w.showAs(name, func(*machine.Machine) {}, addresses...)
}

// showAs is show with a change of the machine.
func (w *world) showAs(name string, change func(*machine.Machine), addresses ...string) {
	m := machine.Machine{Nodename: w.node(name)}

	for _, text := range addresses {
		m.Addresses = append(m.Addresses, machine.Address{
			Prefix: netip.MustParsePrefix(text), Link: "eth0", Scope: nethelpers.ScopeGlobal, Flags: nethelpers.AddressFlags(nethelpers.AddressPermanent),
		})
	}

	change(&m)
	w.inventory.Replace(m.Nodename, m)
}

// join adds a machine to the inventory and registers its Node.
func (w *world) join(name string, addresses ...string) {
	w.Helper()
	w.show(name, addresses...)
	w.register(name)
}

// events records Events in order.
type events struct {
	record.EventRecorder // only Event is used

	mu   sync.Mutex
	list []event
}

type event struct{ node, reason, message string }

// Event implements record.EventRecorder.
func (e *events) Event(object runtime.Object, _, reason, message string) {
	e.mu.Lock()
	defer e.mu.Unlock()

	if node, ok := object.(*corev1.Node); ok {
		e.list = append(e.list, event{node.Name, reason, message})
	}
}

// of returns the Events on a Node with the given reason, or all if it is empty.
func (e *events) of(node, reason string) (found []event) {
	e.mu.Lock()
	defer e.mu.Unlock()

	for _, one := range e.list {
		if (node == "" || node == one.node) && (reason == "" || reason == one.reason) {
			found = append(found, one)
		}
	}

	return found
}
