package node_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/ctest"
)

// As hcloud-cloud-controller-manager does, which lists other IPv6 addresses.
func TestController_RestoresAndCountsReplacedAddresses(t *testing.T) {
	s := parallel(t)

	const name = "replaced"

	s.initialize(talostest.MachineSpec{Nodename: name, Platform: platform("hcloud", name)})

	before := s.Node(name)
	updates := func() float64 { return ctest.Metrics(t)["talosccm_node_address_updates_total"] }
	counted := updates()

	patch := []byte(`{"status":{"addresses":[{"type":"Hostname","address":"other"}]}}`)
	_, err := s.Client.CoreV1().Nodes().Patch(t.Context(), name, types.MergePatchType, patch, metav1.PatchOptions{FieldManager: "hcloud"}, "status")
	require.NoError(t, err)

	s.AwaitNodeSince(before, func(n *corev1.Node, asrt *assert.Assertions) {
		asrt.NotEqual(before.ResourceVersion, n.ResourceVersion)
		asrt.Equal(before.Status.Addresses, n.Status.Addresses)
	})
	s.waitForIdle()
	assert.Greater(t, updates(), counted)
}
