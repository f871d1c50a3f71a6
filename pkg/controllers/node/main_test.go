package node_test

import (
	"context"
	"crypto/tls"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/role"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/record"
	"k8s.io/client-go/util/retry"
	cloudproviderapi "k8s.io/cloud-provider/api"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/controllers/node"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/reflector"
	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

const (
	// timeout of every wait. It is generous for slow machines, and longer than the maximum backoff of the reflector,
	// 78 s.
	timeout  = 2 * time.Minute
	interval = 20 * time.Millisecond
)

// conflictBackoff is for writes that may conflict with the writes of the controller.
var conflictBackoff = wait.Backoff{Steps: 100, Duration: interval, Jitter: .5}

// environment is shared by all tests of this package: an API server, Talos machines and a running controller.
type environment struct {
	kube      *kube.Cluster
	talos     *talostest.Cluster
	client    kubernetes.Interface // of the tests
	transport *transport           // of the controller
	inventory *inventory.Inventory
	// options apply to all tests: the rules of each select its own Nodes.
	options atomicOptions
	resync  func()
}

var shared environment

func TestMain(m *testing.M) {
	code, err := runTests(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)

		code = 1
	}

	os.Exit(code)
}

func runTests(m *testing.M) (code int, err error) {
	ctx, cancel := context.WithCancel(context.Background())

	var group sync.WaitGroup

	defer group.Wait()
	defer cancel()

	if shared.kube, err = kube.Start(ctx, kube.Options{Progress: os.Stderr}); err != nil {
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

	if err := shared.startController(ctx, &group); err != nil {
		return 1, err
	}

	code = m.Run()

	cancel()
	group.Wait()

	return code, nil
}

// startController starts the controller as the product does, but without leader election and bootstrap.
func (e *environment) startController(ctx context.Context, group *sync.WaitGroup) error {
	credentials, err := e.talos.ClientTLS(string(role.Reader))
	if err != nil {
		return err
	}

	e.transport = newTransport()
	config := e.kube.Config()
	config.Wrap(e.transport.wrap)

	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}

	broadcaster := record.NewBroadcaster(record.WithContext(ctx))
	broadcaster.StartRecordingToSink(&typedcorev1.EventSinkImpl{Interface: client.CoreV1().Events("")})

	e.inventory = inventory.New(time.Now)
	machines := reflector.New(e.inventory, func(ctx context.Context, _ string, addr netip.Addr) (talosapi.State, error) {
		return talosapi.Dial(ctx, staticCredentials{credentials}, addr)
	}, clock.RealClock{})
	factory := informers.NewSharedInformerFactory(client, 0)

	controller, err := node.New(node.Config{
		Client:    client,
		Nodes:     factory.Core().V1().Nodes(),
		Inventory: e.inventory,
		Recorder:  broadcaster.NewRecorder(scheme.Scheme, corev1.EventSource{Component: "talos-ccm"}),
		Clock:     clock.RealClock{},
		Options:   e.options.get,
		Workers:   10,
	})
	if err != nil {
		return err
	}

	e.resync = controller.Resync

	if err := machines.FollowNodes(factory.Core().V1().Nodes()); err != nil {
		return err
	}

	group.Go(func() { machines.Run(ctx) })
	group.Go(func() { controller.Run(ctx) })
	factory.Start(ctx.Done())

	return nil
}

// staticCredentials are talosapi.Credentials that never change.
type staticCredentials struct {
	config *tls.Config
}

// TLSConfig implements talosapi.Credentials.
func (c staticCredentials) TLSConfig() (*tls.Config, error) { return c.config.Clone(), nil }

// suite is a test with the shared environment.
type suite struct {
	*testing.T
	*environment
}

// parallel returns the suite of a test that runs in parallel.
func parallel(t *testing.T) suite {
	t.Parallel()

	return suite{t, &shared}
}

// machine adds a Talos machine until the test ends.
func (s suite) machine(spec talostest.MachineSpec) *talostest.Machine {
	s.Helper()

	m, err := s.talos.AddMachine(spec)
	s.require(err)
	s.Cleanup(func() { _ = m.Stop(context.Background()) })

	return m
}

// register registers a Node, as a kubelet does, until the test ends.
func (s suite) register(spec kube.NodeSpec) *corev1.Node {
	s.Helper()

	n, err := s.kube.RegisterNode(s.Context(), spec)
	s.require(err)
	s.Cleanup(func() { s.remove(spec.Name) })

	return n
}

// join adds a machine and registers its Node.
func (s suite) join(spec talostest.MachineSpec) *talostest.Machine {
	s.Helper()

	m := s.machine(spec)
	s.register(nodeOf(m))

	return m
}

func nodeOf(m *talostest.Machine) kube.NodeSpec {
	return kube.NodeSpec{Name: m.Nodename(), NodeIPs: []netip.Addr{m.Address()}}
}

// remove deletes a Node, if it exists.
func (s suite) remove(nodename string) {
	s.Helper()

	err := s.client.CoreV1().Nodes().Delete(context.Background(), nodename, metav1.DeleteOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		s.Error(err)
	}
}

func (s suite) require(err error) {
	s.Helper()

	if err != nil {
		s.Fatal(err)
	}
}

func (s suite) get(nodename string) *corev1.Node {
	s.Helper()

	n, err := s.client.CoreV1().Nodes().Get(s.Context(), nodename, metav1.GetOptions{})
	s.require(err)

	return n
}

// await watches a Node until ok returns true, and returns that version. The first version may be older than the last
// write of the test: ok must return false for it. Use get for other assertions.
func (s suite) await(nodename, what string, ok func(*corev1.Node) bool) *corev1.Node {
	s.Helper()

	return s.awaitSince(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodename}}, what, ok)
}

// awaitSince is await for versions after the given one.
func (s suite) awaitSince(seen *corev1.Node, what string, ok func(*corev1.Node) bool) *corev1.Node {
	s.Helper()

	last := seen
	options := byName(seen.Name)
	// Without a version, the watch starts with the present state.
	options.ResourceVersion = seen.ResourceVersion

	found := s.watch(func(ctx context.Context) (watch.Interface, error) {
		return s.client.CoreV1().Nodes().Watch(ctx, options)
	}, func(event watch.Event) bool {
		n, isNode := event.Object.(*corev1.Node)
		if isNode {
			last = n
		}

		return isNode && event.Type != watch.Deleted && ok(n)
	})
	if !found {
		s.Fatalf("node %s is not %s after %s: %s", seen.Name, what, timeout, describe(last))
	}

	return last
}

// watch watches until ok returns true, and reports whether that was before the timeout. It restarts a watch that ends,
// as the API server may end it at any time.
func (s suite) watch(start func(context.Context) (watch.Interface, error), ok func(watch.Event) bool) (found bool) {
	ctx, cancel := context.WithTimeout(s.Context(), timeout)
	defer cancel()

	err := wait.PollUntilContextCancel(ctx, interval, true, func(ctx context.Context) (bool, error) {
		w, err := start(ctx)
		if err != nil {
			s.Logf("restarting watch: %v", err)

			return false, nil
		}

		defer w.Stop()

		for event := range w.ResultChan() {
			if ok(event) {
				return true, nil
			}
		}

		return false, nil
	})

	return err == nil
}

func byName(nodename string) metav1.ListOptions {
	return metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector(metav1.ObjectNameField, nodename).String()}
}

func describe(n *corev1.Node) string {
	if n.UID == "" {
		return "absent"
	}

	return fmt.Sprintf("providerID %q, taints %v, labels %v, addresses %v", n.Spec.ProviderID, n.Spec.Taints, n.Labels, n.Status.Addresses)
}

func (s suite) awaitInitialized(nodename string) *corev1.Node {
	s.Helper()

	return s.await(nodename, "initialized", initialized)
}

func initialized(n *corev1.Node) bool { return !tainted(n) && n.Spec.ProviderID != "" }

func tainted(n *corev1.Node) bool {
	return slices.ContainsFunc(n.Spec.Taints, func(t corev1.Taint) bool { return t.Key == cloudproviderapi.TaintExternalCloudProvider })
}

// addressesOf returns a Node's addresses of one type.
func addressesOf(n *corev1.Node, kind corev1.NodeAddressType) []string {
	var list []string

	for _, a := range n.Status.Addresses {
		if a.Type == kind {
			list = append(list, a.Address)
		}
	}

	return list
}

// isWritten reports whether the controller owns a field of the Node.
func isWritten(n *corev1.Node) bool {
	return slices.ContainsFunc(n.ManagedFields, func(m metav1.ManagedFieldsEntry) bool { return m.Manager == node.FieldManager })
}

// requireUntouched fails if the controller has written the Node.
func (s suite) requireUntouched(nodename string) {
	s.Helper()

	n := s.get(nodename)
	if isWritten(n) || n.Spec.ProviderID != "" {
		s.Errorf("node %s was written by %s: %s; managed fields: %v", nodename, node.FieldManager, describe(n), n.ManagedFields)
	}
}

// eventsOn selects the Events of a Node with the given reason, or all if it is empty.
func eventsOn(nodename, reason string) metav1.ListOptions {
	selector := fields.Set{"involvedObject.kind": "Node", "involvedObject.name": nodename}
	if reason != "" {
		selector["reason"] = reason
	}

	return metav1.ListOptions{FieldSelector: selector.String()}
}

// events returns the Events of a Node with the given reason, or all if it is empty.
func (s suite) events(nodename, reason string) []corev1.Event {
	s.Helper()

	list, err := s.client.CoreV1().Events(metav1.NamespaceAll).List(s.Context(), eventsOn(nodename, reason))
	s.require(err)

	return list.Items
}

func (s suite) awaitEvent(nodename, reason string) *corev1.Event {
	s.Helper()

	var e *corev1.Event

	start := func(ctx context.Context) (watch.Interface, error) {
		return s.client.CoreV1().Events(metav1.NamespaceAll).Watch(ctx, eventsOn(nodename, reason))
	}

	found := s.watch(start, func(event watch.Event) (isEvent bool) {
		e, isEvent = event.Object.(*corev1.Event)

		return isEvent
	})
	if !found {
		s.Fatalf("node %s has no Event %s after %s, only: %s", nodename, reason, timeout, messages(s.events(nodename, "")))
	}

	return e
}

// requireOneEvent fails unless exactly one Event with the reason was emitted.
func (s suite) requireOneEvent(nodename, reason string) {
	s.Helper()

	found := s.events(nodename, reason)
	if len(found) != 1 || found[0].Count != 1 {
		s.Errorf("node %s has %d Events %s, want one with count 1: %v", nodename, len(found), reason, messages(found))
	}
}

func messages(events []corev1.Event) string {
	var list []string
	for _, e := range events {
		list = append(list, fmt.Sprintf("%d× %s %s", e.Count, e.Reason, e.Message))
	}

	return strings.Join(list, "; ")
}

// patch applies a merge patch with the given field manager and returns the result. Even a patch without
// resourceVersion can conflict: the API server gives up after a few attempts.
func (s suite) patch(nodename, manager, patch string) *corev1.Node {
	s.Helper()

	var n *corev1.Node

	s.require(retry.RetryOnConflict(conflictBackoff, func() (err error) {
		n, err = s.client.CoreV1().Nodes().Patch(s.Context(), nodename, types.MergePatchType, []byte(patch), metav1.PatchOptions{FieldManager: manager})

		return err
	}))

	return n
}

// eventually polls until ok returns true, for conditions that cannot be watched.
func (s suite) eventually(what string, ok func() bool) {
	s.Helper()

	err := wait.PollUntilContextTimeout(s.Context(), interval, timeout, true, func(context.Context) (bool, error) { return ok(), nil })
	if err != nil {
		s.Fatalf("not true after %s: %s", timeout, what)
	}
}

// waitForIdle returns after the controller has processed all earlier changes and recorded their Events: it has
// reported a Node that was registered last. Neither waitForIdle nor the controller writes a Node for that.
func (s suite) waitForIdle() {
	s.Helper()

	name := "idle-probe-" + strings.ToLower(strings.NewReplacer("/", "-", "_", "-").Replace(s.Name()))
	name = fmt.Sprintf("%.40s-%d", name, time.Now().UnixNano())

	m := s.machine(talostest.MachineSpec{Nodename: name, Platform: platform("aws", name), PlatformPending: true})
	s.register(nodeOf(m))
	s.awaitEvent(name, node.ReasonMetadataPending)
	s.remove(name)
}

// touch makes irrelevant changes to the Node, as heartbeats do.
func (s suite) touch(nodename string, times int) {
	s.Helper()

	for i := range times {
		s.patch(nodename, "toucher", fmt.Sprintf(`{"metadata":{"annotations":{"test/touched":"%d"}}}`, i))
	}
}

// history records every version of a Node from now on. The returned function returns the versions up to the given one.
func (s suite) history(nodename string) (until func(resourceVersion string) []*corev1.Node) {
	s.Helper()

	list, err := s.client.CoreV1().Nodes().List(s.Context(), byName(nodename))
	s.require(err)

	options := byName(nodename)
	options.ResourceVersion = list.ResourceVersion

	w, err := s.client.CoreV1().Nodes().Watch(s.Context(), options)
	s.require(err)
	s.Cleanup(w.Stop)

	return func(resourceVersion string) []*corev1.Node {
		s.Helper()

		var seen []*corev1.Node

		for event := range w.ResultChan() {
			n, ok := event.Object.(*corev1.Node)
			if !ok {
				break
			}

			if seen = append(seen, n); n.ResourceVersion == resourceVersion {
				return seen
			}
		}

		s.Fatalf("watch of node %s ended before version %s", nodename, resourceVersion)

		return nil
	}
}
