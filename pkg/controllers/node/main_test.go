package node_test

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/controllers/node"
	"github.com/talos-ccm/talos-ccm/pkg/internal/nodes"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/ctest"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

// conflictBackoff is for writes that may conflict with the writes of the controller.
var conflictBackoff = wait.Backoff{Steps: 1000, Duration: 20 * time.Millisecond, Jitter: .5}

// environment is the controller that all tests share.
type environment struct {
	transport *ctest.Transport
	inventory *inventory.Inventory
	// options apply to all tests: the rules of each select its own Nodes.
	options atomicOptions
	resync  func()
}

var (
	bed    ctest.Bed
	shared environment
)

func TestMain(m *testing.M) { bed.Main(m, kube.Options{}, shared.start) }

// start starts the controller as the product does, but without leader election and bootstrap.
func (e *environment) start() (stop func(), err error) {
	config := bed.Kube.Config()
	e.transport = ctest.NewTransport(config)

	i, err := ctest.NewInstance(context.Background(), config, ctest.Dial(bed.Talos))
	if err != nil {
		return nil, err
	}

	hasNodes, err := nodes.Watch(i.Nodes, i.Inventory.Claims.NodeChanged)
	if err != nil {
		return nil, err
	}

	controller, err := node.New(node.Config{
		Client: i.Client, Nodes: i.Nodes, Inventory: i.Inventory, Recorder: i.Recorder, Clock: clock.RealClock{}, Workers: 10, HasNodes: hasNodes,
		IsRecorded: func(*corev1.Node) bool { return true },
		Options: func() nodespec.Options {
			options := e.options.get()
			options.OmitConditions = true // they have tests of their own

			return options
		},
	})
	if err != nil {
		return nil, err
	}

	if err := i.Reflector.FollowNodes(i.Nodes); err != nil {
		return nil, err
	}

	e.inventory, e.resync = i.Inventory, controller.Resync
	i.Start(i.Reflector.Run, controller.Run)

	return i.Stop, nil
}

// suite is a test with the shared controller.
type suite struct {
	ctest.Suite
	*environment
}

// parallel returns the suite of a parallel test. Other tests use alone.
func parallel(t *testing.T) suite {
	t.Parallel()

	return alone(t)
}

func alone(t *testing.T) suite { return suite{bed.NewSuite(t), &shared} }

// update changes the platform metadata of a machine.
func (s suite) update(m *talostest.Machine, change func(*runtime.PlatformMetadataSpec)) {
	s.Helper()
	require.NoError(s, m.UpdatePlatform(s.Context(), change))
}

// initialize adds a machine, registers its Node, and waits until that is initialized.
func (s suite) initialize(spec talostest.MachineSpec) *talostest.Machine {
	s.Helper()

	m := s.Join(spec)
	s.awaitInitialized(m.Nodename())

	return m
}

func (s suite) awaitInitialized(nodename string) *corev1.Node {
	s.Helper()

	return s.AwaitNode(nodename, ctest.Initialized)
}

// addressesOf returns a Node's addresses of one type.
func addressesOf(n *corev1.Node, kind corev1.NodeAddressType) (list []string) {
	for _, a := range n.Status.Addresses {
		if a.Type == kind {
			list = append(list, a.Address)
		}
	}

	return list
}

// lists asserts that a Node has exactly these addresses of one type.
func lists(kind corev1.NodeAddressType, addresses ...string) func(*corev1.Node, *assert.Assertions) {
	return func(n *corev1.Node, asrt *assert.Assertions) { asrt.Equal(addresses, addressesOf(n, kind)) }
}

// isWritten reports whether the controller owns a field of the Node.
func isWritten(n *corev1.Node) bool {
	return slices.ContainsFunc(n.ManagedFields, func(m metav1.ManagedFieldsEntry) bool { return m.Manager == node.FieldManager })
}

// assertUntouched fails if the controller has written the Node.
func (s suite) assertUntouched(nodename string) {
	s.Helper()

	n := s.Node(nodename)
	assert.False(s, isWritten(n), "%s was written: %v", nodename, n.ManagedFields)
	assert.Empty(s, n.Spec.ProviderID)
}

// assertOneEvent fails unless exactly one Event with the reason was emitted, and its message contains the texts.
func (s suite) assertOneEvent(nodename, reason string, texts ...string) {
	s.Helper()

	found := s.Events(nodename, reason)
	if assert.Len(s, found, 1) {
		assert.EqualValues(s, 1, found[0].Count, found[0].Message)

		for _, text := range texts {
			assert.Contains(s, found[0].Message, text)
		}
	}
}

// waitForIdle returns after the controller has processed all earlier changes and recorded their Events: it has
// reported a Node that was registered last. Neither waitForIdle nor the controller writes a Node for that.
func (s suite) waitForIdle() {
	s.Helper()

	name := "idle-probe-" + strings.ToLower(strings.NewReplacer("/", "-", "_", "-").Replace(s.Name()))
	name = fmt.Sprintf("%.40s-%d", name, time.Now().UnixNano())

	s.Join(talostest.MachineSpec{Nodename: name, Platform: platform("aws", name), PlatformPending: true})
	s.AwaitEvent(name, node.ReasonMetadataPending)
	s.Remove(name)
}

// overtake calls change before the controller's n-th write of the Node from now on. wait returns after that.
func (s suite) overtake(nodename string, n int, change func()) (wait func()) {
	return s.transport.Overtake(s, http.MethodPatch, nodename, n, change)
}

// touch makes irrelevant changes to the Node, as heartbeats do.
func (s suite) touch(nodename string, times int) {
	s.Helper()

	for i := range times {
		s.PatchNode(nodename, "toucher", fmt.Sprintf(`{"metadata":{"annotations":{"test/touched":"%d"}}}`, i))
	}
}

// history records every version of a Node from now on. The returned function returns the versions up to the given one.
func (s suite) history(nodename string) (until func(resourceVersion string) []*corev1.Node) {
	s.Helper()

	list, err := s.Client.CoreV1().Nodes().List(s.Context(), ctest.Named(nodename))
	require.NoError(s, err)

	options := ctest.Named(nodename)
	options.ResourceVersion = list.ResourceVersion

	w, err := s.Client.CoreV1().Nodes().Watch(s.Context(), options)
	require.NoError(s, err)
	s.Cleanup(w.Stop)

	return func(resourceVersion string) (seen []*corev1.Node) {
		s.Helper()

		for event := range w.ResultChan() {
			n, ok := event.Object.(*corev1.Node)
			require.True(s, ok, "watch of node %s ended before version %s", nodename, resourceVersion)

			if seen = append(seen, n); n.ResourceVersion == resourceVersion {
				return seen
			}
		}

		require.FailNow(s, "watch ended", "node %s, before version %s", nodename, resourceVersion)

		return nil
	}
}
