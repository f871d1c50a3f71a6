package ccm_test

import (
	"context"
	"testing"

	"github.com/siderolabs/talos/pkg/machinery/constants"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/talos-ccm/talos-ccm/pkg/controllers/csrapproval"
	nodecontroller "github.com/talos-ccm/talos-ccm/pkg/controllers/node"
	"github.com/talos-ccm/talos-ccm/pkg/noderecord"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/test/ctest"
)

// The scheduler places no pod on a Node before its machine is recorded.
func TestManager_RecordsMachineBeforeInitialization(t *testing.T) {
	s, self, worker := newCluster(t)
	before := s.Node(worker.Nodename())

	watcher := ctest.Ask(s, func(ctx context.Context) (watch.Interface, error) {
		options := ctest.Named(worker.Nodename())
		options.ResourceVersion = before.ResourceVersion

		return s.Client.CoreV1().Nodes().Watch(context.WithoutCancel(ctx), options)
	})
	defer watcher.Stop()

	options := s.options(self)
	options.Framework.Generic.Controllers = []string{nodecontroller.Alias}
	s.start(options)
	s.awaitInitialized(self, worker)

	for {
		node, ok := ctest.Receive(s, watcher.ResultChan(), "a version of the Node").Object.(*corev1.Node)
		require.True(t, ok)

		if record := noderecord.Of(node); !nodespec.IsUninitialized(node) {
			assert.Equal(t, worker.Address(), record.Address)
			assert.Empty(t, record.Credential)
			assert.True(t, record.IsWorker)
			assert.NotEqual(t, before.ResourceVersion, node.ResourceVersion)

			return
		}
	}
}

// Existing Nodes are recorded also if no controller writes Nodes.
func TestManager_RecordsMachinesOfExistingNodes(t *testing.T) {
	s, self, worker := newCluster(t)
	s.label(self)
	require.NoError(t, self.FormatVolume(t.Context(), constants.EphemeralPartitionLabel, "volume"))

	for _, m := range []string{self.Nodename(), worker.Nodename()} {
		s.PatchNode(m, "", `{"spec":{"taints":null}}`)
	}

	options := s.options(self)
	options.Framework.Generic.Controllers = []string{csrapproval.Alias}
	s.start(options)

	s.AwaitNode(worker.Nodename(), func(n *corev1.Node, asrt *assert.Assertions) { asrt.Equal(worker.Address(), noderecord.Of(n).Address) })

	node := s.AwaitNode(self.Nodename(), func(n *corev1.Node, asrt *assert.Assertions) {
		asrt.Equal(self.Address(), noderecord.Of(n).Address)
		asrt.NotEmpty(noderecord.Of(n).Stated)
	})
	assert.False(t, noderecord.Of(node).IsWorker)
}
