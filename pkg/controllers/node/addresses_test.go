package node_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/talos-ccm/talos-ccm/pkg/controllers/node"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
)

// As hcloud-cloud-controller-manager does, which lists other IPv6 addresses.
func TestController_ReportsClientThatReplacesAddresses(t *testing.T) {
	s := parallel(t)

	const name = "replaced"

	s.initialize(talostest.MachineSpec{Nodename: name, Platform: platform("hcloud", name)})

	want := s.Node(name).Status.Addresses
	replace := func(manager string) {
		t.Helper()

		before := s.Node(name)
		patch := []byte(`{"status":{"addresses":[{"type":"Hostname","address":"other"}]}}`)
		_, err := s.Client.CoreV1().Nodes().Patch(t.Context(), name, types.MergePatchType, patch, metav1.PatchOptions{FieldManager: manager}, "status")
		require.NoError(t, err)

		s.AwaitNodeSince(before, func(n *corev1.Node, asrt *assert.Assertions) {
			asrt.NotEqual(before.ResourceVersion, n.ResourceVersion)
			asrt.Equal(want, n.Status.Addresses)
		})
		s.waitForIdle()
	}

	replace("kubectl")
	replace("hcloud-cloud-controller-manager")
	assert.Empty(t, s.Events(name, node.ReasonOwnershipConflict), "once each")

	replace("hcloud-cloud-controller-manager")
	s.AwaitEvent(name, node.ReasonOwnershipConflict)
	replace("hcloud-cloud-controller-manager")
	s.assertOneEvent(name, node.ReasonOwnershipConflict, `field manager "hcloud-cloud-controller-manager"`)
}
