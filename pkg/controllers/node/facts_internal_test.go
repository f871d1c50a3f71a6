package node

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/cosi-project/runtime/pkg/resource"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	cloudproviderapi "k8s.io/cloud-provider/api"

	"github.com/talos-ccm/talos-ccm/pkg/internal/events"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/pkg/rules"
)

func TestController_AwaitsFactsForAMinute(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		compiled, errs := rules.Compile([]rules.Rule{{PlatformMetadata: map[string]string{"ProviderID": "x:///{{ .CPUs }}1"}}}, nil, nil)
		require.Empty(t, errs)

		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n", CreationTimestamp: metav1.Now()}}
		n.Spec.Taints = []corev1.Taint{{Key: cloudproviderapi.TaintExternalCloudProvider}}
		n.Status.NodeInfo.OSImage = "Talos (v1.14.1)"

		c := newController(t, n)
		c.planner.options = func() nodespec.Options { return nodespec.Options{Rules: compiled} }
		c.config.Inventory.Replace("n", machine.Machine{Nodename: "n", Stage: runtime.MachineStageBooting})

		again, err := c.syncNode(t.Context(), n)
		require.NoError(t, err)
		assert.Equal(t, factsTimeout, again)

		assert.True(t, c.planner.observe(n).input.AwaitsFacts)

		time.Sleep(factsTimeout)

		assert.False(t, c.planner.observe(n).input.AwaitsFacts)
	})
}

func TestController_ReportsResourcesThatAreIgnored(t *testing.T) {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n"}}
	n.Status.NodeInfo.OSImage = "Talos (v1.14.1)"

	c := newController(t, n)
	c.config.Inventory.Replace("n", machine.Machine{Nodename: "n", Ignored: map[resource.Type]string{"LinkStatuses.net.talos.dev": "too many"}})

	assert.Contains(t, c.planner.observe(n).problems, events.Problem{
		Reason: ReasonInvalidValue, Subject: "machine//LinkStatuses.net.talos.dev", Message: "Resources of the machine are ignored: too many",
	})
}
