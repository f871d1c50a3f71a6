package node

import (
	"net/netip"
	"strconv"
	"testing"

	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	k8sruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	cloudproviderapi "k8s.io/cloud-provider/api"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
)

// syncFixture is a Node that needs requests for its labels, its status and its spec. answer answers the request with the
// given number; do sends it to the API server.
type syncFixture struct {
	*history

	controller *Controller
	requests   int
	versions   int
	answer     func(number int, do func() *corev1.Node) (*corev1.Node, error)
}

func newSyncFixture(t *testing.T) *syncFixture {
	t.Helper()

	f := &syncFixture{
		history:    registered(t, corev1.Taint{Key: cloudproviderapi.TaintExternalCloudProvider, Effect: corev1.TaintEffectNoSchedule}),
		controller: newController(t),
		answer:     func(_ int, do func() *corev1.Node) (*corev1.Node, error) { return do(), nil },
	}
	f.update("kubelet", func(n *corev1.Node) {
		n.Annotations = map[string]string{cloudproviderapi.AnnotationAlphaProvidedIPAddr: "10.0.0.1"}
		n.Status.NodeInfo.OSImage = "Talos (v1.14.1)"
	})

	clientset, isFake := f.client.(*fake.Clientset)
	require.True(t, isFake)

	clientset.PrependReactor("patch", "nodes", func(action clienttesting.Action) (bool, k8sruntime.Object, error) {
		f.requests++

		node, err := f.answer(f.requests, func() *corev1.Node {
			_, object, err := clienttesting.ObjectReaction(clientset.Tracker())(action)
			require.NoError(t, err)

			node, isNode := object.(*corev1.Node)
			require.True(t, isNode)

			node = node.DeepCopy()
			f.versions++
			node.ResourceVersion = strconv.Itoa(f.versions) // which the fake API server does not set

			return node
		})

		return true, node, err
	})

	f.controller.config.Client = f.client
	f.controller.config.Inventory.Replace(nodename, machine.Machine{
		Nodename: nodename, Stage: runtime.MachineStageRunning,
		Platform:  runtime.PlatformMetadataSpec{Platform: "aws", Zone: "a", InstanceID: "i-1"},
		Addresses: []machine.Address{{Prefix: netip.MustParsePrefix("10.0.0.1/24"), Link: "eth0"}},
	})

	return f
}

// sync syncs the Node, and returns it with the number of requests.
func (f *syncFixture) sync() (node *corev1.Node, requests int, err error) {
	f.t.Helper()

	cached := f.node()
	cached.ResourceVersion = strconv.Itoa(f.versions)
	require.NoError(f.t, f.controller.indexer.Add(cached))

	f.requests = 0
	_, err = f.controller.sync(f.t.Context(), nodename)

	return f.node(), f.requests, err
}

func TestController_SendsSixRequestsPerSync(t *testing.T) {
	f := newSyncFixture(t)

	// As an admission webhook does.
	f.answer = func(_ int, do func() *corev1.Node) (*corev1.Node, error) {
		node := do()
		delete(node.Labels, corev1.LabelTopologyZone)

		return node, nil
	}

	node, requests, err := f.sync()
	require.ErrorContains(t, err, "needs further changes after 6 requests: labels and annotations")
	assert.Equal(t, 6, requests)
	assert.True(t, nodespec.IsUninitialized(node))
	assert.Empty(t, node.Spec.ProviderID)
}

func TestController_SendsRevertedRequestOnce(t *testing.T) {
	f := newSyncFixture(t)
	before := f.node()
	before.ResourceVersion = "0"

	// As an admission webhook that reverts every change.
	f.answer = func(int, func() *corev1.Node) (*corev1.Node, error) { return before, nil }

	_, requests, err := f.sync()
	require.ErrorContains(t, err, "labels and annotations of node worker-1: accepted without effect")
	assert.Equal(t, 1, requests)
}

func TestController_WaitsForRecord(t *testing.T) {
	f := newSyncFixture(t)
	recorded := f.controller.planner.recorded
	f.controller.planner.recorded = func(*corev1.Node) bool { return false }

	node, requests, err := f.sync()
	require.NoError(t, err)
	assert.Zero(t, requests)
	assert.True(t, nodespec.IsUninitialized(node))

	f.controller.planner.recorded = recorded
	node, _, err = f.sync()
	require.NoError(t, err)
	assert.False(t, nodespec.IsUninitialized(node))

	// An initialized Node does not wait.
	f.update("kubelet", func(n *corev1.Node) { n.Status.Addresses = nil })
	f.controller.planner.recorded = func(*corev1.Node) bool { return false }
	_, requests, err = f.sync()
	require.NoError(t, err)
	assert.NotZero(t, requests)
}

func TestController_ContinuesAfterFailedRequest(t *testing.T) {
	for failing := 1; failing <= 3; failing++ {
		f := newSyncFixture(t)
		succeed := f.answer
		conflict := apierrors.NewConflict(corev1.Resource("nodes"), nodename, nil)

		f.answer = func(number int, do func() *corev1.Node) (*corev1.Node, error) {
			if number == failing {
				return nil, conflict
			}

			return do(), nil
		}

		node, requests, err := f.sync()
		require.ErrorIs(t, err, conflict)
		assert.Equal(t, failing, requests)
		assert.True(t, nodespec.IsUninitialized(node), "request %d", failing)
		assert.Empty(t, node.Spec.ProviderID)

		f.answer = succeed
		node, requests, err = f.sync()
		require.NoError(t, err)
		assert.Equal(t, 4-failing, requests, "requests that were answered are not repeated")
		assert.False(t, nodespec.IsUninitialized(node))
		assert.Equal(t, "talos://aws/i-1", node.Spec.ProviderID)

		_, requests, err = f.sync()
		require.NoError(t, err)
		assert.Zero(t, requests)
	}
}

func TestController_NodeDeletedBetweenRequests(t *testing.T) {
	f := newSyncFixture(t)

	f.answer = func(number int, do func() *corev1.Node) (*corev1.Node, error) {
		if number == 2 {
			return nil, apierrors.NewNotFound(corev1.Resource("nodes"), nodename)
		}

		return do(), nil
	}

	f.controller.takeQueued()

	_, requests, err := f.sync()
	require.NoError(t, err)
	assert.Equal(t, 2, requests)
	assert.Empty(t, f.controller.takeQueued(), "the next sync would fail again")
}
