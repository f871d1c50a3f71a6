package ccm

import (
	"strconv"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/talos-ccm/talos-ccm/pkg/noderecord"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
)

func TestMemoryCeiling_FollowsKnownNodes(t *testing.T) {
	nodes := cache.NewIndexer(cache.MetaNamespaceKeyFunc, nil)
	m := Manager{options: new(Options)}
	ceiling := func() uint64 { return m.memoryCeiling(corelisters.NewNodeLister(nodes)) / mebibyte }

	add := func(prefix string, count int, labels map[string]string) {
		for i := range count {
			require.NoError(t, nodes.Add(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: prefix + strconv.Itoa(i), Labels: labels}}))
		}
	}

	half := machineMemory() / 2 / mebibyte
	require.Greater(t, half, uint64(600), "this test needs more memory")
	require.Less(t, half, uint64(16<<20))

	// The Nodes that a bootstrap token can register.
	add("new", 100, map[string]string{corev1.LabelTopologyRegion: "eu"})
	assert.EqualValues(t, 512, ceiling())

	add("initialized", 50, map[string]string{nodespec.LabelPlatform: "metal"})
	assert.EqualValues(t, 562, ceiling())

	add("recorded", int(half), map[string]string{noderecord.LabelAddress: "192.0.2.1"}) //nolint:gosec // checked above
	assert.Equal(t, half, ceiling())

	m.options.MemoryCeiling.Quantity = resource.MustParse("100Gi")
	assert.EqualValues(t, 100<<10, ceiling())
}

func TestMemoryCeiling_IsNotNegative(t *testing.T) {
	options := Options{MemoryCeiling: resource.QuantityValue{Quantity: resource.MustParse("-1Gi")}}
	assert.ErrorContains(t, options.checkMemory(), "-1Gi")
}
