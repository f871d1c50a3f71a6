package node

import (
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
)

// newController returns a controller that does not run, and the cache of which has the Nodes.
func newController(t *testing.T, nodes ...*corev1.Node) *Controller {
	t.Helper()

	c, err := New(Config{
		Nodes:      informers.NewSharedInformerFactory(nil, 0).Core().V1().Nodes(),
		Inventory:  inventory.New(time.Now),
		Recorder:   &record.FakeRecorder{},
		Clock:      clock.RealClock{},
		Options:    func() nodespec.Options { return nodespec.Options{} },
		IsRecorded: func(*corev1.Node) bool { return true },
	})
	require.NoError(t, err)
	t.Cleanup(c.queue.ShutDown)

	for _, n := range nodes {
		require.NoError(t, c.indexer.Add(n))
	}

	return c
}

// identified returns a Node that was initialized with the providerID.
func identified(name, providerID string) *corev1.Node {
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{nodespec.LabelPlatform: "metal"}},
		Spec:       corev1.NodeSpec{ProviderID: providerID},
	}
}

// faked returns a Node of which only the kubelet has written anything.
func faked(name, osImage, providerID string) *corev1.Node {
	node := identified(name, providerID)
	node.Labels, node.Status.NodeInfo.OSImage = nil, osImage

	return node
}

// takeQueued returns the Nodes in the queue, and empties it.
func (c *Controller) takeQueued() (names []string) {
	for c.queue.Len() > 0 {
		name, _ := c.queue.Get()
		c.queue.Done(name)

		names = append(names, name)
	}

	slices.Sort(names)

	return names
}

func TestProviderIDs_AreReserved(t *testing.T) {
	const id, other = "talos://metal/u-1", "talos://metal/u-2"

	for _, test := range []struct {
		name   string
		before func(*providerIDs)
		want   string
	}{
		{"free", func(*providerIDs) {}, ""},
		{"reserved by this Node", func(p *providerIDs) { p.reserve(id, "a") }, ""},
		{"reserved by another Node", func(p *providerIDs) { p.reserve(id, "b") }, "b"},
		{"requested by two others", func(p *providerIDs) { p.reserve(id, "b"); p.reserve(id, "c") }, "b"},
		{"released by another Node", func(p *providerIDs) { p.reserve(id, "b"); p.release("b") }, ""},
		{"another Node has reserved a different one since", func(p *providerIDs) { p.reserve(id, "b"); p.reserve(other, "b") }, ""},
		{"another Node has failed to reserve a different one since", func(p *providerIDs) { p.reserve(id, "b"); p.reserve(other, "c"); p.reserve(other, "b") }, "b"},
		{"released by a Node that failed to reserve it", func(p *providerIDs) { p.reserve(id, "b"); p.reserve(id, "c"); p.release("c") }, "b"},
		{"released twice", func(p *providerIDs) { p.reserve(id, "b"); p.release("b"); p.release("b") }, ""},
		{"released by a Node without reservation", func(p *providerIDs) { p.release("a") }, ""},
		{"in the cache, of this Node", func(p *providerIDs) { assert.NoError(t, p.nodes.Add(identified("a", id))) }, ""},
		{"in the cache, of another Node", func(p *providerIDs) { assert.NoError(t, p.nodes.Add(identified("b", id))) }, "b"},
		{"registered by a kubelet, machine not dialed yet", func(p *providerIDs) { assert.NoError(t, p.nodes.Add(faked("b", "Talos (v1.14.1)", id))) }, "b"},
		{"registered by a kubelet of another system", func(p *providerIDs) { assert.NoError(t, p.nodes.Add(faked("b", "Ubuntu", id))) }, ""},
		{"in the cache after it was reserved", func(p *providerIDs) {
			p.reserve(id, "b")
			assert.NoError(t, p.nodes.Add(identified("b", id)))
			p.release("b")
		}, "b"},
	} {
		t.Run(test.name, func(t *testing.T) {
			p := newController(t).providerIDs
			test.before(p)

			assert.Equal(t, test.want, p.reserve(id, "a"))
		})
	}
}

func TestProviderIDs_OneOfManyConcurrentReservationsSucceeds(t *testing.T) {
	p := newController(t).providerIDs

	var (
		group  sync.WaitGroup
		mu     sync.Mutex
		owners []string
	)

	for i := range 50 {
		group.Go(func() {
			name := fmt.Sprintf("worker-%d", i)
			if owner := p.reserve("talos://metal/u-1", name); owner == "" {
				mu.Lock()
				defer mu.Unlock()

				owners = append(owners, name)
			}
		})
	}

	group.Wait()

	assert.Len(t, owners, 1)
}

func TestController_EndsReservations(t *testing.T) {
	const id, other = "talos://metal/u-1", "talos://metal/u-2"

	for _, test := range []struct {
		name   string
		change func(*Controller, *corev1.Node)
		want   string
	}{
		{"managed, and its machine has not responded", func(_ *Controller, n *corev1.Node) { n.Status.NodeInfo.OSImage = "Talos (v1.14.1)" }, "a"},
		{"not managed", func(*Controller, *corev1.Node) {}, ""},
		{"machine of another Node", func(c *Controller, n *corev1.Node) {
			n.Status.NodeInfo.OSImage = "Talos (v1.14.1)"
			c.config.Inventory.MarkMismatch("a", "z", "machine reports nodename z")
		}, ""},
		{"a different one written by another client", func(_ *Controller, n *corev1.Node) { n.Spec.ProviderID = other }, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			n := identified("a", "")
			c := newController(t, n, identified("b", ""))
			c.providerIDs.reserve(id, "a")
			test.change(c, n)

			_, err := c.sync(t.Context(), "a")
			require.NoError(t, err)
			assert.Equal(t, test.want, c.providerIDs.reserve(id, "b"))
		})
	}
}

// Another Node may have reserved the providerID, and give it up.
func TestController_RetriesNodesWithoutProviderID(t *testing.T) {
	renamed := identified("renamed", "")
	renamed.Status.NodeInfo.OSImage = "Talos (v1.14.1)"
	c := newController(t, renamed)

	again, err := c.sync(t.Context(), "renamed")
	require.NoError(t, err)
	assert.Equal(t, factsTimeout, again)

	other := identified("other", "")
	require.NoError(t, c.indexer.Add(other))

	again, err = c.sync(t.Context(), "other")
	require.NoError(t, err)
	assert.Zero(t, again, "is not managed")
}
