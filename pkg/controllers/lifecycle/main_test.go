package lifecycle_test

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/siderolabs/talos/pkg/machinery/role"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/record"
	cloudproviderapi "k8s.io/cloud-provider/api"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/talos-ccm/talos-ccm/pkg/config"
	"github.com/talos-ccm/talos-ccm/pkg/controllers/lifecycle"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/reflector"
	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

const (
	// timeout of every wait. It is generous for slow machines.
	timeout  = 2 * time.Minute
	interval = 2 * time.Millisecond

	// tick is the controller's check interval.
	tick = 10 * time.Second

	// controlPlane is a machine that always works.
	controlPlane = "cp-1"
)

// cluster is shared by all tests, which run one after the other: the limit of deletions applies to all Nodes.
var cluster *kube.Cluster

func TestMain(m *testing.M) {
	code := 1

	var err error

	if cluster, err = kube.Start(context.Background(), kube.Options{Progress: os.Stderr}); err == nil {
		code = m.Run()
		err = cluster.Stop()
	}

	if err != nil {
		fmt.Fprintln(os.Stderr, err)

		code = 1
	}

	os.Exit(code)
}

// world is a cluster of a control-plane machine and four workers, and a leading controller. The reflector uses the
// system clock, and the controller a fake one.
type world struct {
	*testing.T

	client   kubernetes.Interface
	talos    *talostest.Cluster
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
		T: t, machines: map[string]*talostest.Machine{}, clock: clocktesting.NewFakeClock(time.Now()), settings: settings,
		registered: sets.New[string](), absent: sets.New[string](),
	}

	var err error

	w.client, err = kubernetes.NewForConfig(cluster.Config())
	w.require(err)

	w.talos, err = talostest.New(talostest.Options{})
	w.require(err)
	t.Cleanup(w.talos.Close)
	t.Cleanup(w.clear)

	for _, name := range append([]string{controlPlane}, names...) {
		w.addMachine(name)
		w.register(name, w.machines[name].Address())
		w.ready(name)
	}

	w.lead()

	return w
}

// clear removes all Nodes and Events.
func (w *world) clear() {
	ctx := context.Background()

	w.require(w.client.CoreV1().Nodes().DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{}))
	w.require(w.client.CoreV1().Events(metav1.NamespaceDefault).DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{}))
}

func (w *world) require(err error) {
	w.Helper()

	if err != nil {
		w.Fatal(err)
	}
}

func (w *world) addMachine(name string) {
	w.Helper()

	m, err := w.talos.AddMachine(talostest.MachineSpec{Nodename: name})
	w.require(err)
	w.require(m.SetIdentity(w.Context(), rand.Text(), newUUID()))
	w.machines[name] = m
}

func newUUID() string {
	raw := make([]byte, 16)
	_, _ = rand.Read(raw)
	text := hex.EncodeToString(raw)

	return fmt.Sprintf("%s-%s-%s-%s-%s", text[:8], text[8:12], text[12:16], text[16:20], text[20:])
}

// lead starts a controller, in place of the present one, and waits until it watches all machines that respond.
func (w *world) lead() {
	w.Helper()

	if w.resign != nil {
		w.resign()
	}

	credentials, err := w.talos.ClientTLS(string(role.Reader))
	w.require(err)

	ctx, cancel := context.WithCancel(context.Background())
	factory := informers.NewSharedInformerFactory(w.client, 0)
	broadcaster := record.NewBroadcaster(record.WithContext(ctx))
	broadcaster.StartRecordingToSink(&typedcorev1.EventSinkImpl{Interface: w.client.CoreV1().Events("")})

	w.inventory = inventory.New(time.Now)
	machines := reflector.New(w.inventory, func(ctx context.Context, _ string, addr netip.Addr) (talosapi.State, error) {
		return talosapi.Dial(ctx, staticCredentials{credentials}, addr)
	}, clock.RealClock{})
	w.require(machines.FollowNodes(factory.Core().V1().Nodes()))

	controller, err := lifecycle.New(lifecycle.Config{
		Client:    w.client,
		Nodes:     factory.Core().V1().Nodes(),
		Inventory: w.inventory,
		Recorder:  broadcaster.NewRecorder(scheme.Scheme, corev1.EventSource{Component: "talos-ccm"}),
		Clock:     w.clock,
		Settings:  func() config.CompiledLifecycle { return w.settings },
		Selected:  func(node *corev1.Node, _ machine.Machine) bool { return node.Labels["unmanaged"] == "" },
		Absent:    w.whyAbsent,
	})
	w.require(err)

	var group sync.WaitGroup

	group.Go(func() { machines.Run(ctx) })
	group.Go(func() { controller.Run(ctx) })
	factory.Start(ctx.Done())

	w.resign = sync.OnceFunc(func() {
		cancel()
		group.Wait()
		factory.Shutdown()
		broadcaster.Shutdown()
	})
	w.Cleanup(w.resign)
	w.await(controlPlane, inventory.Current)
}

// staticCredentials are talosapi.Credentials that never change.
type staticCredentials struct{ config *tls.Config }

// TLSConfig implements talosapi.Credentials.
func (c staticCredentials) TLSConfig() (*tls.Config, error) { return c.config.Clone(), nil }

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

	_, err := cluster.RegisterNode(w.Context(), kube.NodeSpec{Name: name, NodeIPs: []netip.Addr{addr}, WithoutCloudProvider: true})
	w.require(err)
	w.registered.Insert(name)
}

func (w *world) ready(name string) { w.setReady(name, corev1.ConditionTrue) }

func (w *world) notReady(name string) { w.setReady(name, corev1.ConditionUnknown) }

func (w *world) setReady(name string, status corev1.ConditionStatus) {
	w.Helper()
	w.patch(name, map[string]any{"status": map[string]any{"conditions": []corev1.NodeCondition{{Type: corev1.NodeReady, Status: status}}}}, "status")
}

func (w *world) patch(name string, patch map[string]any, subresources ...string) {
	w.Helper()

	data, err := json.Marshal(patch)
	w.require(err)

	_, err = w.client.CoreV1().Nodes().Patch(w.Context(), name, types.StrategicMergePatchType, data, metav1.PatchOptions{}, subresources...)
	w.require(err)
}

// eventually polls until ok returns true.
func (w *world) eventually(what string, ok func() bool) {
	w.Helper()

	for deadline := time.Now().Add(timeout); !ok(); time.Sleep(interval) {
		if time.Now().After(deadline) {
			w.Fatalf("not true after %s: %s", timeout, what)
		}
	}
}

func (w *world) await(nodename string, condition inventory.Condition) {
	w.Helper()
	w.eventually(nodename+" is "+condition.String(), func() bool { return w.inventory.Get(nodename).Condition == condition })
}

// announce sets the stage of a machine, and waits until the controller knows it.
func (w *world) announce(name string, stage runtime.MachineStage) {
	w.Helper()
	w.require(w.machines[name].SetStage(w.Context(), stage))
	w.eventually(fmt.Sprintf("the stage of %s is known", name), func() bool { return w.inventory.Get(name).Last.Stage == stage })
}

// silence stops a machine and its kubelet.
func (w *world) silence(name string) {
	w.Helper()
	w.require(w.machines[name].Stop(w.Context()))
	w.await(name, inventory.Unreachable)
	w.notReady(name)
}

// boot starts a machine, and waits until it responds under the nodename.
func (w *world) boot(name, nodename string, stage runtime.MachineStage) {
	w.Helper()
	w.require(w.machines[name].SetStage(w.Context(), stage))
	w.machines[name].Start()
	w.await(nodename, inventory.Current)
}

// advance lets time pass in the steps of the controller, and waits until the controller has processed everything.
func (w *world) advance(d time.Duration) {
	w.Helper()

	for range d / tick {
		w.eventually("the controller waits", w.clock.HasWaiters)
		w.clock.Step(tick)
	}

	w.settle()
}

// settle waits until the controller has processed all changes. It has one worker, which takes the Nodes in order: it
// removes a stray taint of a ready Node last.
func (w *world) settle() {
	w.Helper()
	w.eventually("the controller waits", w.clock.HasWaiters)

	if w.settings.DryRun {
		return
	}

	stray := corev1.Taint{Key: cloudproviderapi.TaintNodeShutdown, Effect: corev1.TaintEffectNoSchedule}
	w.patch(controlPlane, map[string]any{"spec": map[string]any{"taints": []corev1.Taint{stray}}})

	w.eventually("the controller has processed all changes", func() bool {
		node, err := w.client.CoreV1().Nodes().Get(w.Context(), controlPlane, metav1.GetOptions{})
		w.require(err)

		return len(node.Spec.Taints) == 0
	})
}

// outcome is what the controller has done. The names are sorted.
type outcome struct {
	deleted, shutdown, outOfService []string
}

func (w *world) outcome() outcome {
	w.Helper()

	list, err := w.client.CoreV1().Nodes().List(w.Context(), metav1.ListOptions{})
	w.require(err)

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

	o.deleted = sets.List(deleted)

	return o
}

func hasTaint(node *corev1.Node, key string) bool {
	return slices.ContainsFunc(node.Spec.Taints, func(taint corev1.Taint) bool { return taint.Key == key })
}

// expect fails unless the controller does exactly what is wanted. It may retry a write that conflicted with another one.
func (w *world) expect(when string, want outcome) {
	w.Helper()

	var got outcome

	for deadline := time.Now().Add(timeout); time.Now().Before(deadline); time.Sleep(interval) {
		got = w.outcome()
		if slices.Equal(got.deleted, want.deleted) && slices.Equal(got.shutdown, want.shutdown) && slices.Equal(got.outOfService, want.outOfService) {
			return
		}
	}

	w.Fatalf("%s: got %+v, want %+v; events: %v", when, got, want, w.events(""))
}

// events returns the messages of all Events with the reason, or of all reasons if it is empty.
func (w *world) events(reason string) []string {
	w.Helper()

	var options metav1.ListOptions
	if reason != "" {
		options.FieldSelector = fields.OneTermEqualSelector("reason", reason).String()
	}

	list, err := w.client.CoreV1().Events(metav1.NamespaceDefault).List(w.Context(), options)
	w.require(err)

	var messages []string
	for i := range list.Items {
		messages = append(messages, fmt.Sprintf("%s: %s: %s", list.Items[i].InvolvedObject.Name, list.Items[i].Reason, list.Items[i].Message))
	}

	return messages
}

func (w *world) awaitEvent(reason string) {
	w.Helper()
	w.eventually("Event "+reason, func() bool { return len(w.events(reason)) > 0 })
}
