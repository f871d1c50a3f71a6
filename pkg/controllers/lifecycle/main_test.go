package lifecycle_test

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/constants"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/client-go/informers"
	coreinformers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/kubernetes"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	corelisters "k8s.io/client-go/listers/core/v1"
	cloudproviderapi "k8s.io/cloud-provider/api"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/talos-ccm/talos-ccm/pkg/config"
	"github.com/talos-ccm/talos-ccm/pkg/controllers/lifecycle"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/noderecord"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/pkg/rules"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/ctest"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

const (
	// tick is the controller's check interval.
	tick = 10 * time.Second

	// controlPlane is a machine that always works.
	controlPlane = "cp-1"
)

var bed ctest.Bed

func TestMain(m *testing.M) {
	bed.Main(m, kube.Options{ControllerManager: kube.ControllerManager{Absent: true}}, nil)
}

// world is a cluster of a control-plane machine and several workers, and a leading controller. Names of its Nodes and
// machines have its name as prefix, which the methods add and remove. The reflector uses the system clock, and the
// controller a fake one.
type world struct {
	ctest.Suite

	name     string
	machines map[string]*talostest.Machine // by the first nodename
	clock    *clocktesting.FakeClock
	// registered are the names of all Nodes that ever existed.
	registered sets.Set[string]

	mu       sync.Mutex
	settings config.CompiledLifecycle
	local    string                // the machine that the controller runs on
	absent   sets.Set[string]      // full names of Nodes whose machines are no members
	members  map[string]netip.Addr // by full name

	transport *ctest.Transport // of the controller
	inventory *inventory.Inventory
	resign    func()
	// processed is the resourceVersion of the control-plane Node that the controller has processed last.
	processed atomic.Value
}

func workers(n int) []string {
	var names []string
	for i := range n {
		names = append(names, fmt.Sprintf("w-%d", i+1))
	}

	return names
}

// newWorld starts a world in which all Nodes are ready.
func newWorld(t *testing.T, settings config.CompiledLifecycle, names ...string) *world {
	t.Helper()

	w := &world{
		Suite: bed.NewSuite(t), name: strings.ToLower(rand.Text()), machines: map[string]*talostest.Machine{}, clock: clocktesting.NewFakeClock(time.Now()), settings: settings,
		registered: sets.New[string](), absent: sets.New[string](),
	}
	w.Talos = ctest.NewTalos(t, talostest.Options{})
	w.Client = client{w.Client, w.node("")}

	for _, name := range append([]string{controlPlane}, names...) {
		w.addMachine(name)
		w.register(name, w.machines[name].Address())
		w.ready(name)
	}

	w.lead()

	for _, name := range names {
		w.await(name, inventory.Current)
		w.record(name, w.entry(name).Last)
	}

	return w
}

// record records a machine for the Node of a worker, as the leader does.
func (w *world) record(name string, m machine.Machine) {
	w.Helper()

	record := noderecord.Record{
		Credential: noderecord.ID([]byte(name)), Address: m.Endpoint, IsWorker: true,
		NodeID: noderecord.Fingerprint(m.NodeID), Volume: noderecord.ID([]byte(m.EphemeralID)),
	}
	w.setLabels(name, record.ByLeader())
}

// unrecord removes the record of a Node.
func (w *world) unrecord(name string) {
	w.Helper()

	labels := noderecord.Labels{}
	for key := range (noderecord.Record{}).ByLeader() {
		labels[key] = nil
	}

	w.setLabels(name, labels)
}

func (w *world) setLabels(name string, labels noderecord.Labels) {
	w.Helper()

	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"labels": labels}})
	require.NoError(w, err)
	w.patch(name, string(patch))
}

// node returns the full name of a Node.
func (w *world) node(name string) string { return w.name + "-" + name }

// label selects the Nodes of this world.
func (w *world) label() string { return "test/world=" + w.name }

func (w *world) addMachine(name string) {
	w.Helper()

	m := w.Machine(talostest.MachineSpec{Nodename: w.node(name)})
	require.NoError(w, m.SetIdentity(w.Context(), rand.Text(), newUUID()))
	require.NoError(w, m.FormatVolume(w.Context(), constants.EphemeralPartitionLabel, "volume of "+name))
	w.machines[name] = m
}

func newUUID() string { return string(uuid.NewUUID()) }

// lead replaces the controller, and waits until the new one watches all machines that respond.
func (w *world) lead() {
	w.Helper()

	if w.resign != nil {
		w.resign()
	}

	config := w.Kube.Config()
	w.transport = ctest.NewTransport(config)

	i, err := ctest.NewInstance(context.Background(), config, ctest.Dial(w.Talos))
	require.NoError(w, err)

	i.Factory = informers.NewSharedInformerFactoryWithOptions(i.Client, 0, informers.WithTweakListOptions(func(options *metav1.ListOptions) {
		options.LabelSelector = w.label()
	}))
	i.Nodes = i.Factory.Core().V1().Nodes()
	require.NoError(w, i.Reflector.FollowNodes(i.Nodes))

	controller, err := lifecycle.New(lifecycle.Config{
		Client: client{i.Client, w.node("")}, Nodes: nodes{i.Nodes, w}, Inventory: i.Inventory, Recorder: i.Recorder, Clock: w.clock,
		Settings:  w.inForce,
		Selected:  func(node *corev1.Node, _ machine.Machine) bool { return node.Labels["unmanaged"] == "" },
		Absent:    w.whyAbsent,
		Members:   w.discovered,
		Resetting: w.resetting,
		Spec: func(*corev1.Node, machine.Machine) nodespec.Spec {
			return nodespec.Spec{
				Labels: map[string]string{"rule.node-restriction.kubernetes.io/name": "a"},
				Taints: []rules.Taint{{Taint: corev1.Taint{Key: "example.com/rule", Value: "a", Effect: corev1.TaintEffectNoSchedule}}},
			}
		},
	})
	require.NoError(w, err)

	i.Start(i.Reflector.Run, controller.Run)
	w.inventory, w.resign = i.Inventory, i.Stop
	w.Cleanup(i.Stop)
	w.await(controlPlane, inventory.Current)
}

func (w *world) inForce() config.CompiledLifecycle {
	w.mu.Lock()
	defer w.mu.Unlock()

	return w.settings
}

func (w *world) set(settings config.CompiledLifecycle) {
	w.mu.Lock()
	defer w.mu.Unlock()

	w.settings = settings
}

func (w *world) setLocal(name string) {
	w.mu.Lock()
	defer w.mu.Unlock()

	w.local = name
}

// resetting returns the full name of the Node of the local machine if that is being reset.
func (w *world) resetting(context.Context) string {
	w.mu.Lock()
	defer w.mu.Unlock()

	if w.local == "" || w.entry(w.local).Last.Stage != runtime.MachineStageResetting {
		return ""
	}

	return w.node(w.local)
}

func (w *world) whyAbsent(nodename, _ string) string {
	w.mu.Lock()
	defer w.mu.Unlock()

	if w.absent.Has(nodename) {
		return "not seen"
	}

	return ""
}

// discovered returns a copy of the members.
func (w *world) discovered() map[string]netip.Addr {
	w.mu.Lock()
	defer w.mu.Unlock()

	return maps.Collect(maps.All(w.members))
}

// discover replaces the members.
func (w *world) discover(nodenames ...string) {
	w.mu.Lock()
	defer w.mu.Unlock()

	w.members = map[string]netip.Addr{}
	for _, name := range nodenames {
		w.members[w.node(name)] = w.machines[name].Address()
	}
}

// leave removes a nodename from the members of the cluster.
func (w *world) leave(nodename string) {
	w.mu.Lock()
	defer w.mu.Unlock()

	w.absent.Insert(w.node(nodename))
}

func (w *world) register(name string, addr netip.Addr) {
	w.Helper()

	w.Register(kube.NodeSpec{
		Name: w.node(name), Labels: map[string]string{"test/world": w.name}, NodeIPs: []netip.Addr{addr}, WithoutCloudProvider: true,
	})
	w.registered.Insert(name)
}

func (w *world) ready(name string) { w.SetReady(w.node(name), corev1.ConditionTrue) }

func (w *world) notReady(name string) { w.SetReady(w.node(name), corev1.ConditionUnknown) }

// patch changes a Node as another client.
func (w *world) patch(name, patch string) *corev1.Node {
	w.Helper()

	return w.PatchNode(w.node(name), "other", patch)
}

func (w *world) entry(name string) inventory.Entry { return w.inventory.Get(w.node(name)) }

func (w *world) await(nodename string, condition inventory.Condition) {
	w.Helper()
	ctest.Eventually(w, nodename+" is "+condition.String(), func() bool { return w.entry(nodename).Condition == condition })
}

// announce sets the stage of a machine, and waits until the inventory has it.
func (w *world) announce(name string, stage runtime.MachineStage) {
	w.Helper()
	require.NoError(w, w.machines[name].SetStage(w.Context(), stage))
	ctest.Eventually(w, fmt.Sprintf("the stage of %s is known", name), func() bool { return w.entry(name).Last.Stage == stage })
}

// stop stops a machine. Kubernetes has not marked the Node yet.
func (w *world) stop(name string) {
	w.Helper()
	require.NoError(w, w.machines[name].Stop(w.Context()))
	w.await(name, inventory.Unreachable)
}

// powerOff stops a machine and its kubelet.
func (w *world) powerOff(name string) {
	w.Helper()
	w.stop(name)
	w.notReady(name)
}

// booted has a kubelet report after a boot that the controller does not see.
func (w *world) booted(name string) {
	w.Helper()
	w.PatchNode(w.node(name), "kubelet", fmt.Sprintf(`{"status":{"nodeInfo":{"bootID":%q}}}`, newUUID()), "status")
	w.ready(name)
}

// boot starts a machine, and waits until it responds under the nodename.
func (w *world) boot(name, nodename string, stage runtime.MachineStage) {
	w.Helper()
	require.NoError(w, w.machines[name].SetStage(w.Context(), stage))
	w.machines[name].Start()
	w.await(nodename, inventory.Current)
}

// rename changes the nodename of a machine.
func (w *world) rename(name, nodename string) {
	w.Helper()
	require.NoError(w, w.machines[name].SetNodename(w.Context(), w.node(nodename)))
}

// advance lets time pass in the steps of the controller. Before and after the first step, and after the last, it waits until
// the controller has processed all changes. The first step includes changes without an event, such as a lost member.
func (w *world) advance(d time.Duration) {
	w.Helper()
	w.waitForIdle()

	for step := range d / tick {
		ctest.Eventually(w, "the controller waits", w.clock.HasWaiters)
		w.clock.Step(tick)

		if step == 0 {
			w.waitForIdle()
		}
	}

	w.waitForIdle()
}

// waitForIdle waits until the controller has processed all changes. The queue has one worker and keeps the order,
// except that a Node that changes while it is processed is queued again at the end. So two consecutive changes of the
// control-plane Node come last.
func (w *world) waitForIdle() {
	w.Helper()
	ctest.Eventually(w, "the controller waits", w.clock.HasWaiters)

	for range 2 {
		last := w.patch(controlPlane, fmt.Sprintf(`{"metadata":{"annotations":{"test/last":%q}}}`, rand.Text())).ResourceVersion
		ctest.Eventually(w, "the controller has processed the last change", func() bool { return w.processed.Load() == last })
	}
}

// outcome lists the Nodes that the controller has deleted or tainted. The names are sorted.
type outcome struct {
	deleted, shutdown, outOfService []string
}

func (w *world) outcome() outcome {
	w.Helper()

	list, err := w.Client.CoreV1().Nodes().List(w.Context(), metav1.ListOptions{LabelSelector: w.label()})
	require.NoError(w, err)

	var o outcome

	deleted := w.registered.Clone()

	for i := range list.Items {
		node := &list.Items[i]
		name := strings.TrimPrefix(node.Name, w.node(""))
		deleted.Delete(name)

		if hasTaint(node, cloudproviderapi.TaintNodeShutdown) {
			o.shutdown = append(o.shutdown, name)
		}

		if hasTaint(node, corev1.TaintNodeOutOfService) {
			o.outOfService = append(o.outOfService, name)
		}
	}

	o.deleted = append(o.deleted, sets.List(deleted)...)

	return o
}

func hasTaint(node *corev1.Node, key string) bool {
	return slices.ContainsFunc(node.Spec.Taints, func(taint corev1.Taint) bool { return taint.Key == key })
}

// expect fails unless the controller makes exactly the wanted changes. It may retry a write that caused a conflict.
func (w *world) expect(when string, want outcome) {
	w.Helper()

	ctest.EventuallyNoError(w, func(context.Context) error {
		if got := w.outcome(); !reflect.DeepEqual(got, want) {
			return fmt.Errorf("%s: got %+v, want %+v; Events: %v", when, got, want, w.events(""))
		}

		return nil
	})
}

// events returns the messages of all Events with the reason, or of all reasons if it is empty.
func (w *world) events(reason string) []string {
	w.Helper()

	var options metav1.ListOptions
	if reason != "" {
		options.FieldSelector = fields.OneTermEqualSelector("reason", reason).String()
	}

	list, err := w.Client.CoreV1().Events(metav1.NamespaceDefault).List(w.Context(), options)
	require.NoError(w, err)

	return ctest.Messages(list.Items)
}

func (w *world) awaitEvent(reason string) {
	w.Helper()
	ctest.EventuallyNoError(w, func(context.Context) error {
		if len(w.events(reason)) == 0 {
			return fmt.Errorf("no Event %s at %s; Events: %v", reason, w.clock.Now(), w.events(""))
		}

		return nil
	})
}

// awaitEventOn waits for an Event on a Node.
func (w *world) awaitEventOn(name, reason string) {
	w.Helper()
	w.AwaitEvent(w.node(name), reason)
}

// nodes is an informer that records what the worker of the controller processes.
type nodes struct {
	coreinformers.NodeInformer

	world *world
}

// Lister implements coreinformers.NodeInformer.
func (n nodes) Lister() corelisters.NodeLister { return lister{n.NodeInformer.Lister(), n.world} }

type lister struct {
	corelisters.NodeLister

	world *world
}

// Get implements corelisters.NodeLister. The worker calls it first for each Node that it takes from its queue.
func (l lister) Get(name string) (*corev1.Node, error) {
	node, err := l.NodeLister.Get(name)
	if err == nil && name == l.world.node(controlPlane) {
		l.world.processed.Store(node.ResourceVersion)
	}

	return node, err
}

// client returns only the Events on Nodes whose names begin with prefix: the controller counts all deletions.
type client struct {
	kubernetes.Interface

	prefix string
}

// CoreV1 implements kubernetes.Interface.
func (c client) CoreV1() typedcorev1.CoreV1Interface {
	return coreClient{c.Interface.CoreV1(), c.prefix}
}

type coreClient struct {
	typedcorev1.CoreV1Interface

	prefix string
}

// Events implements typedcorev1.EventsGetter.
func (c coreClient) Events(namespace string) typedcorev1.EventInterface {
	return eventClient{c.CoreV1Interface.Events(namespace), c.prefix}
}

type eventClient struct {
	typedcorev1.EventInterface

	prefix string
}

// List implements typedcorev1.EventInterface.
func (c eventClient) List(ctx context.Context, options metav1.ListOptions) (*corev1.EventList, error) {
	list, err := c.EventInterface.List(ctx, options)
	if err == nil {
		list.Items = slices.DeleteFunc(list.Items, func(event corev1.Event) bool { return !strings.HasPrefix(event.InvolvedObject.Name, c.prefix) })
	}

	return list, err
}
