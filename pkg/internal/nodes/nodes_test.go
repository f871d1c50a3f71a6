package nodes_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	coreinformers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/talos-ccm/talos-ccm/pkg/internal/nodes"
)

// informer captures the handler.
type informer struct {
	coreinformers.NodeInformer
	cache.SharedIndexInformer

	handler cache.ResourceEventHandler
}

func (i *informer) Informer() cache.SharedIndexInformer { return i }

func (i *informer) AddEventHandler(handler cache.ResourceEventHandler) (cache.ResourceEventHandlerRegistration, error) {
	i.handler = handler

	return registration{}, nil
}

type registration struct {
	cache.ResourceEventHandlerRegistration
}

func (registration) HasSynced() bool { return true }

func node(uid types.UID, version string) *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a", UID: uid, ResourceVersion: version}}
}

func TestWatch_ReportsEachChange(t *testing.T) {
	t.Parallel()

	var changes []string

	describe := func(node *corev1.Node) string {
		if node == nil {
			return "none"
		}

		return string(node.UID) + node.ResourceVersion
	}

	var i informer

	synced, err := nodes.Watch(&i, func(before, after *corev1.Node) {
		changes = append(changes, describe(before)+"→"+describe(after))
	})
	require.NoError(t, err)
	assert.True(t, synced())

	i.handler.OnAdd(node("x", "1"), true)
	i.handler.OnUpdate(node("x", "1"), node("x", "2"))
	i.handler.OnUpdate(node("x", "2"), node("y", "3")) // deleted and created again between two lists
	i.handler.OnDelete(node("y", "3"))
	i.handler.OnDelete(cache.DeletedFinalStateUnknown{Key: "a", Obj: node("z", "4")}) // a deletion that the watch has missed
	assert.Equal(t, []string{"none→x1", "x1→x2", "x2→none", "none→y3", "y3→none", "z4→none"}, changes)
}

func TestWatch_IgnoresOtherObjects(t *testing.T) {
	t.Parallel()

	var i informer

	_, err := nodes.Watch(&i, func(_, _ *corev1.Node) { assert.Fail(t, "called") })
	require.NoError(t, err)

	for _, obj := range []any{nil, (*corev1.Node)(nil), &corev1.Pod{}, cache.DeletedFinalStateUnknown{Key: "a"}} {
		i.handler.OnAdd(obj, false)
		i.handler.OnUpdate(obj, obj)
		i.handler.OnDelete(obj)
	}
}
