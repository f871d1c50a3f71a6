package lifecycle_test

import (
	"context"
	"crypto/rand"
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/uuid"
	cloudproviderapi "k8s.io/cloud-provider/api"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/talos-ccm/talos-ccm/pkg/config"
	"github.com/talos-ccm/talos-ccm/pkg/controllers/lifecycle"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
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

// beds has a control plane for each test: the limit of deletions applies to all Nodes.
var beds ctest.Pool

// The histories step a clock. They run one after the other, because a busy machine may process a step too late.
func TestMain(m *testing.M) { beds.Main(m, kube.Options{}, 1, nil) }

// world is a cluster of a control-plane machine and four workers, and a leading controller. The reflector uses the
// system clock, and the controller a fake one.
type world struct {
	ctest.Suite

	machines map[string]*talostest.Machine // by the first nodename
	clock    *clocktesting.FakeClock
	settings config.CompiledLifecycle
	// registered are the names of all Nodes that ever existed.
	registered sets.Set[string]

	mu     sync.Mutex
	absent sets.Set[string] // nodenames that are no members

	inventory *inventory.Inventory
	resign    func()
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
		Suite: beds.NewSuite(t), machines: map[string]*talostest.Machine{}, clock: clocktesting.NewFakeClock(time.Now()), settings: settings,
		registered: sets.New[string](), absent: sets.New[string](),
	}
	w.Talos = ctest.NewTalos(t, talostest.Options{})
	t.Cleanup(func() {
		require.NoError(t, w.Client.CoreV1().Events(metav1.NamespaceDefault).DeleteCollection(context.WithoutCancel(t.Context()), metav1.DeleteOptions{}, metav1.ListOptions{}))
	})

	for _, name := range append([]string{controlPlane}, names...) {
		w.addMachine(name)
		w.register(name, w.machines[name].Address())
		w.ready(name)
	}

	w.lead()

	return w
}

func (w *world) addMachine(name string) {
	w.Helper()

	m := w.Machine(talostest.MachineSpec{Nodename: name})
	require.NoError(w, m.SetIdentity(w.Context(), rand.Text(), newUUID()))
	w.machines[name] = m
}

func newUUID() string { return string(uuid.NewUUID()) }

// lead starts a controller, in place of the present one, and waits until it watches all machines that respond.
func (w *world) lead() {
	w.Helper()

	if w.resign != nil {
		w.resign()
	}

	i, err := ctest.NewInstance(context.Background(), w.Kube.Config(), ctest.Dial(w.Talos))
	require.NoError(w, err)
	require.NoError(w, i.Reflector.FollowNodes(i.Nodes))

	controller, err := lifecycle.New(lifecycle.Config{
		Client: i.Client, Nodes: i.Nodes, Inventory: i.Inventory, Recorder: i.Recorder, Clock: w.clock,
		Settings: func() config.CompiledLifecycle { return w.settings },
		Selected: func(node *corev1.Node, _ machine.Machine) bool { return node.Labels["unmanaged"] == "" },
		Absent:   w.whyAbsent,
	})
	require.NoError(w, err)

	i.Start(i.Reflector.Run, controller.Run)
	w.inventory, w.resign = i.Inventory, i.Stop
	w.Cleanup(i.Stop)
	w.await(controlPlane, inventory.Current)
}

func (w *world) whyAbsent(nodename, _ string) string {
	w.mu.Lock()
	defer w.mu.Unlock()

	if w.absent.Has(nodename) {
		return "not seen"
	}

	return ""
}

// leave removes a nodename from the members of the cluster.
func (w *world) leave(nodename string) {
	w.mu.Lock()
	defer w.mu.Unlock()

	w.absent.Insert(nodename)
}

func (w *world) register(name string, addr netip.Addr) {
	w.Helper()

	w.Register(kube.NodeSpec{Name: name, NodeIPs: []netip.Addr{addr}, WithoutCloudProvider: true})
	w.registered.Insert(name)
}

func (w *world) ready(name string) { w.SetReady(name, corev1.ConditionTrue) }

func (w *world) notReady(name string) { w.SetReady(name, corev1.ConditionUnknown) }

func (w *world) await(nodename string, condition inventory.Condition) {
	w.Helper()
	ctest.Eventually(w, nodename+" is "+condition.String(), func() bool { return w.inventory.Get(nodename).Condition == condition })
}

// announce sets the stage of a machine, and waits until the controller knows it.
func (w *world) announce(name string, stage runtime.MachineStage) {
	w.Helper()
	require.NoError(w, w.machines[name].SetStage(w.Context(), stage))
	ctest.Eventually(w, fmt.Sprintf("the stage of %s is known", name), func() bool { return w.inventory.Get(name).Last.Stage == stage })
}

// silence stops a machine and its kubelet.
func (w *world) silence(name string) {
	w.Helper()
	require.NoError(w, w.machines[name].Stop(w.Context()))
	w.await(name, inventory.Unreachable)
	w.notReady(name)
}

// boot starts a machine, and waits until it responds under the nodename.
func (w *world) boot(name, nodename string, stage runtime.MachineStage) {
	w.Helper()
	require.NoError(w, w.machines[name].SetStage(w.Context(), stage))
	w.machines[name].Start()
	w.await(nodename, inventory.Current)
}

// advance lets time pass in the steps of the controller, and waits until the controller has processed everything.
func (w *world) advance(d time.Duration) {
	w.Helper()

	for range d / tick {
		ctest.Eventually(w, "the controller waits", w.clock.HasWaiters)
		w.clock.Step(tick)
	}

	w.settle()
}

// settle waits until the controller has processed all changes. It has one worker, which takes the Nodes in order: it
// removes a stray taint of a ready Node last.
func (w *world) settle() {
	w.Helper()
	ctest.Eventually(w, "the controller waits", w.clock.HasWaiters)

	if w.settings.DryRun {
		return
	}

	stray := fmt.Sprintf(`{"spec":{"taints":[{"key":%q,"effect":"NoSchedule"}]}}`, cloudproviderapi.TaintNodeShutdown)
	patched := w.PatchNode(controlPlane, "other", stray)
	w.AwaitNodeSince(patched, "processed", func(n *corev1.Node) bool { return len(n.Spec.Taints) == 0 })
}

// outcome is what the controller has done. The names are sorted.
type outcome struct {
	deleted, shutdown, outOfService []string
}

func (w *world) outcome() outcome {
	w.Helper()

	list, err := w.Client.CoreV1().Nodes().List(w.Context(), metav1.ListOptions{})
	require.NoError(w, err)

	var o outcome

	deleted := w.registered.Clone()

	for i := range list.Items {
		node := &list.Items[i]
		deleted.Delete(node.Name)

		if hasTaint(node, cloudproviderapi.TaintNodeShutdown) {
			o.shutdown = append(o.shutdown, node.Name)
		}

		if hasTaint(node, corev1.TaintNodeOutOfService) {
			o.outOfService = append(o.outOfService, node.Name)
		}
	}

	o.deleted = append(o.deleted, sets.List(deleted)...)

	return o
}

func hasTaint(node *corev1.Node, key string) bool {
	return slices.ContainsFunc(node.Spec.Taints, func(taint corev1.Taint) bool { return taint.Key == key })
}

// expect fails unless the controller does exactly what is wanted. It may retry a write that conflicted with another one.
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
	ctest.Eventually(w, "Event "+reason, func() bool { return len(w.events(reason)) > 0 })
}
