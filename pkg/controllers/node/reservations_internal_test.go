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
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
)

// newController returns a controller that does not run, and the cache of which has the Nodes.
func newController(t *testing.T, nodes ...*corev1.Node) *Controller {
	t.Helper()

	c, err := New(Config{
		Nodes:     informers.NewSharedInformerFactory(nil, 0).Core().V1().Nodes(),
		Inventory: inventory.New(time.Now),
		Recorder:  &record.FakeRecorder{},
		Clock:     clock.RealClock{},
		Options:   func(machine.Machine) nodespec.Options { return nodespec.Options{} },
	})
	require.NoError(t, err)
	t.Cleanup(c.queue.ShutDown)

	for _, n := range nodes {
		require.NoError(t, c.indexer.Add(n))
	}

	return c
}

func identified(name, providerID string) *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.NodeSpec{ProviderID: providerID}}
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

func TestController_ReservesProviderIDs(t *testing.T) {
	const id, other = "talos://metal/u-1", "talos://metal/u-2"

	for _, test := range []struct {
		name   string
		before func(*Controller)
		want   string
	}{
		{"free", func(*Controller) {}, ""},
		{"reserved by this Node", func(c *Controller) { c.reserve(id, "a") }, ""},
		{"reserved by another Node", func(c *Controller) { c.reserve(id, "b") }, "b"},
		{"requested by two others", func(c *Controller) { c.reserve(id, "b"); c.reserve(id, "c") }, "b"},
		{"released by another Node", func(c *Controller) { c.reserve(id, "b"); c.release("b", "") }, ""},
		{"another Node has reserved a different one since", func(c *Controller) { c.reserve(id, "b"); c.reserve(other, "b") }, ""},
		{"another Node has failed to reserve a different one since", func(c *Controller) { c.reserve(id, "b"); c.reserve(other, "c"); c.reserve(other, "b") }, "b"},
		{"released by a Node that failed to reserve it", func(c *Controller) { c.reserve(id, "b"); c.reserve(id, "c"); c.release("c", "") }, "b"},
		{"released twice", func(c *Controller) { c.reserve(id, "b"); c.release("b", ""); c.release("b", "") }, ""},
		{"released by a Node without reservation", func(c *Controller) { c.release("a", "") }, ""},
		{"in the cache, of this Node", func(c *Controller) { assert.NoError(t, c.indexer.Add(identified("a", id))) }, ""},
		{"in the cache, of another Node", func(c *Controller) { assert.NoError(t, c.indexer.Add(identified("b", id))) }, "b"},
		{"in the cache after it was reserved", func(c *Controller) {
			c.reserve(id, "b")
			assert.NoError(t, c.indexer.Add(identified("b", id)))
			c.release("b", id)
		}, "b"},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := newController(t)
			test.before(c)

			assert.Equal(t, test.want, c.reserve(id, "a"))
		})
	}
}

func TestController_OneOfManyConcurrentReservationsSucceeds(t *testing.T) {
	c := newController(t)

	var (
		group  sync.WaitGroup
		mu     sync.Mutex
		owners []string
	)

	for i := range 50 {
		group.Go(func() {
			name := fmt.Sprintf("worker-%d", i)
			if owner := c.reserve("talos://metal/u-1", name); owner == "" {
				mu.Lock()
				defer mu.Unlock()

				owners = append(owners, name)
			}
		})
	}

	group.Wait()

	assert.Len(t, owners, 1)
}

func TestController_QueuesNodesWithoutProviderIDWhenOneBecomesFree(t *testing.T) {
	const id, other = "talos://metal/u-1", "talos://metal/u-2"

	for _, test := range []struct {
		name   string
		change func(*Controller)
		want   []string
	}{
		{"released", func(c *Controller) { c.release("a", "") }, []string{"a", "b"}},
		{"released without reservation", func(c *Controller) { c.release("b", "") }, nil},
		{"different one reserved", func(c *Controller) { c.reserve(other, "a") }, []string{"a", "b"}},
		{"same one reserved", func(c *Controller) { c.reserve(id, "a") }, nil},
		{"written", func(c *Controller) { c.release("a", id) }, nil},
		{"a different one written by another client", func(c *Controller) { c.release("a", other) }, []string{"a", "b"}},
	} {
		c := newController(t, identified("a", ""), identified("b", ""), identified("c", "talos://metal/u-3"))
		c.reserve(id, "a")
		c.reserve(id, "b")
		assert.Empty(t, c.takeQueued(), test.name)

		test.change(c)
		assert.Equal(t, test.want, c.takeQueued(), test.name)
	}
}
