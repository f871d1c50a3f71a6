package ctest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/util/retry"

	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

// Machine adds a machine, which stops when the test ends.
func (s Suite) Machine(spec talostest.MachineSpec) *talostest.Machine {
	s.Helper()

	m, err := s.Talos.AddMachine(spec)
	require.NoError(s, err)
	s.Cleanup(func() { _ = m.Stop(context.Background()) })

	return m
}

// Register registers a Node, as its kubelet does, until the test ends.
func (s Suite) Register(spec kube.NodeSpec) *corev1.Node {
	s.Helper()

	node, err := s.Kube.RegisterNode(s.Context(), spec)
	require.NoError(s, err)
	s.Cleanup(func() { s.Remove(spec.Name) })

	return node
}

// NodeOf describes the Node of a machine.
func NodeOf(m *talostest.Machine) kube.NodeSpec {
	return kube.NodeSpec{Name: m.Nodename(), NodeIPs: []netip.Addr{m.Address()}}
}

// Join adds a machine and registers its Node.
func (s Suite) Join(spec talostest.MachineSpec) *talostest.Machine {
	s.Helper()

	m := s.Machine(spec)
	s.Register(NodeOf(m))

	return m
}

// Remove deletes a Node, if it exists. Cleanups may use it.
func (s Suite) Remove(nodename string) {
	s.Helper()

	Ask(s, func(ctx context.Context) (any, error) {
		return nil, IgnoreNotFound(s.Client.CoreV1().Nodes().Delete(ctx, nodename, metav1.DeleteOptions{}))
	})
}

// IgnoreNotFound returns nil for errors that an object does not exist.
func IgnoreNotFound(err error) error {
	if apierrors.IsNotFound(err) {
		return nil
	}

	return err
}

// Ask repeats a request while the API server is overloaded or restarts, and returns its answer. Cleanups may use it.
func Ask[T any](t testing.TB, request func(context.Context) (T, error)) (answer T) {
	t.Helper()

	EventuallyNoError(t, func(ctx context.Context) (err error) {
		answer, err = request(ctx)

		var status apierrors.APIStatus
		if errors.As(err, &status) && status.Status().Code < http.StatusInternalServerError && status.Status().Code != http.StatusTooManyRequests {
			require.NoError(t, err)
		}

		return err
	})

	return answer
}

// Node returns a Node.
func (s Suite) Node(nodename string) *corev1.Node {
	s.Helper()

	return Ask(s, func(ctx context.Context) (*corev1.Node, error) {
		return s.Client.CoreV1().Nodes().Get(ctx, nodename, metav1.GetOptions{})
	})
}

// PatchNode applies a merge patch with the given field manager, and returns the result. Even a patch without
// resourceVersion can conflict: the API server gives up after a few attempts.
func (s Suite) PatchNode(nodename, manager, patch string, subresources ...string) *corev1.Node {
	s.Helper()

	return s.patchNode(nodename, types.MergePatchType, manager, patch, subresources...)
}

// SetReady sets the condition Ready of a Node.
func (s Suite) SetReady(nodename string, status corev1.ConditionStatus) {
	s.Helper()

	s.SetCondition(nodename, "kubelet", fmt.Sprintf(`{"type":"Ready","status":%q}`, status))
}

// SetCondition sets a condition of a Node.
func (s Suite) SetCondition(nodename, manager, condition string) {
	s.Helper()

	s.patchNode(nodename, types.StrategicMergePatchType, manager, fmt.Sprintf(`{"status":{"conditions":[%s]}}`, condition), "status")
}

func (s Suite) patchNode(nodename string, kind types.PatchType, manager, patch string, subresources ...string) (node *corev1.Node) {
	s.Helper()

	backoff := retry.DefaultRetry
	backoff.Steps = 1000

	require.NoError(s, retry.RetryOnConflict(backoff, func() (err error) {
		node, err = s.Client.CoreV1().Nodes().Patch(s.Context(), nodename, kind, []byte(patch), metav1.PatchOptions{FieldManager: manager}, subresources...)

		return err
	}))

	return node
}

// AwaitNode watches a Node until all assertions hold for a version, and returns that version. The first version may be
// older than the last write of the test: an assertion must fail for it. Use Node for other assertions.
func (s Suite) AwaitNode(nodename string, assertions func(n *corev1.Node, asrt *assert.Assertions)) *corev1.Node {
	s.Helper()

	return s.AwaitNodeSince(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodename}}, assertions)
}

// AwaitNodeSince is AwaitNode for versions after the given one.
func (s Suite) AwaitNodeSince(seen *corev1.Node, assertions func(n *corev1.Node, asrt *assert.Assertions)) *corev1.Node {
	s.Helper()

	options := Named(seen.Name)
	options.ResourceVersion = seen.ResourceVersion

	return Await(s, s.Client.CoreV1().Nodes(), options, assertions)
}

// Initialized asserts that a Node has a providerID and no uninitialized taint.
func Initialized(n *corev1.Node, asrt *assert.Assertions) {
	Schedulable(n, asrt)
	asrt.NotEmpty(n.Spec.ProviderID)
}

// Schedulable asserts that a Node has no uninitialized taint.
func Schedulable(n *corev1.Node, asrt *assert.Assertions) {
	asrt.False(nodespec.IsUninitialized(n), "has the uninitialized taint")
}

// Labeled asserts that a label of a Node has a value; empty means that the label may be absent.
func Labeled(key, value string) func(n *corev1.Node, asrt *assert.Assertions) {
	return func(n *corev1.Node, asrt *assert.Assertions) { asrt.Equal(value, n.Labels[key], key) }
}

// Published asserts that a Service has exactly these addresses, in this order.
func Published(addresses ...string) func(svc *corev1.Service, asrt *assert.Assertions) {
	return func(svc *corev1.Service, asrt *assert.Assertions) { asrt.Equal(addresses, Addresses(svc)) }
}

// Addresses returns the addresses in the status of a Service.
func Addresses(svc *corev1.Service) (list []string) {
	for _, ingress := range svc.Status.LoadBalancer.Ingress {
		list = append(list, ingress.IP)
	}

	return list
}

// Named selects the object with the given name.
func Named(name string) metav1.ListOptions {
	return metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector(metav1.ObjectNameField, name).String()}
}

// watcher is a client of one type of objects.
type watcher interface {
	Watch(ctx context.Context, options metav1.ListOptions) (watch.Interface, error)
}

// failures collects what assertions report.
type failures []string

// Errorf implements assert.TestingT.
func (f *failures) Errorf(format string, args ...any) { *f = append(*f, fmt.Sprintf(format, args...)) }

// Await watches objects until all assertions hold for a version of one, and returns it. It starts with the current
// versions, or after that in options, and restarts a watch that ends, as the API server may end it at any time.
func Await[T metav1.Object](t testing.TB, client watcher, options metav1.ListOptions, assertions func(object T, asrt *assert.Assertions)) T {
	t.Helper()

	ctx, cancel := context.WithTimeout(t.Context(), Timeout)
	defer cancel()

	var (
		last   T
		failed failures
	)

	holds := func(object T) bool {
		last, failed = object, nil
		assertions(object, assert.New(&failed))

		return len(failed) == 0
	}

	for ; ctx.Err() == nil; time.Sleep(maxPause) {
		if w, err := client.Watch(ctx, options); err != nil {
			t.Logf("restarting watch: %v", err)
		} else if receive(w, holds) {
			return last
		}
	}

	text, err := json.MarshalIndent(last, "", "  ")
	require.FailNow(t, fmt.Sprintf("not true after %s: %s%s", Timeout, options.FieldSelector, strings.Join(failed, "")), "last version, %v: %s", err, text)

	return last
}

// receive reports whether holds has returned true for an object that exists.
func receive[T metav1.Object](w watch.Interface, holds func(T) bool) bool {
	defer w.Stop()

	for event := range w.ResultChan() {
		object, isObject := event.Object.(T)
		if !isObject {
			return false
		}

		if event.Type != watch.Deleted && holds(object) {
			return true
		}
	}

	return false
}

// eventsOn selects the Events with the given reason, or all if it is empty.
func eventsOn(name, reason string) metav1.ListOptions {
	selector := fields.Set{"involvedObject.name": name}
	if reason != "" {
		selector["reason"] = reason
	}

	return metav1.ListOptions{FieldSelector: selector.String()}
}

// Events returns the Events on an object with the given reason, or all if it is empty.
func (s Suite) Events(name, reason string) []corev1.Event {
	s.Helper()

	return Ask(s, func(ctx context.Context) (*corev1.EventList, error) {
		return s.Client.CoreV1().Events(s.Namespace).List(ctx, eventsOn(name, reason))
	}).Items
}

// AwaitEvent waits for an Event whose message contains the texts.
func (s Suite) AwaitEvent(name, reason string, texts ...string) *corev1.Event {
	s.Helper()

	defer func() {
		if s.Failed() {
			s.Logf("all Events: %q", Messages(s.Events(name, "")))
		}
	}()

	return Await(s, s.Client.CoreV1().Events(s.Namespace), eventsOn(name, reason), func(event *corev1.Event, asrt *assert.Assertions) {
		for _, text := range texts {
			asrt.Contains(event.Message, text)
		}
	})
}

// Messages describes Events.
func Messages(events []corev1.Event) (list []string) {
	for i := range events {
		list = append(list, fmt.Sprintf("%s: %d× %s: %s", events[i].InvolvedObject.Name, events[i].Count, events[i].Reason, events[i].Message))
	}

	return list
}
