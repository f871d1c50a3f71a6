package node

import (
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	cloudproviderapi "k8s.io/cloud-provider/api"
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/testutil"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/pkg/rules"
)

func TestController_CountsPendingNodes(t *testing.T) {
	selector, errs := rules.CompileSelector([]rules.SelectorTerm{{MatchExpressions: []rules.Expression{
		{Key: "nodename", Operator: rules.NotIn, Values: []string{"unmanaged", "unmanaged-unknown"}},
	}}}, nil)
	require.Empty(t, errs)

	gauge := metrics.NewGauge(&metrics.GaugeOpts{Name: "test"}) // not the product's, because tests run in parallel
	metrics.NewKubeRegistry().MustRegister(gauge)

	c := newController(t)
	c.planner.options = func() nodespec.Options {
		return nodespec.Options{Selector: selector, OmitConditions: true}
	}
	c.pending = &pendingNodes{gauge: gauge, names: sets.New[string]()}

	for _, test := range []struct {
		name   string
		change func(n *corev1.Node)
		want   float64
	}{
		{"managed", func(*corev1.Node) {}, 1},
		{"unknown", func(*corev1.Node) {}, 1},
		{"unmanaged", func(*corev1.Node) {}, 0},
		{"unmanaged-unknown", func(*corev1.Node) {}, 1}, // selectors match machines
		{"initialized", func(n *corev1.Node) { n.Spec.Taints = nil }, 0},
		{"another-system", func(n *corev1.Node) { n.Status.NodeInfo.OSImage = "Debian" }, 0},
		{"being-deleted", func(n *corev1.Node) { n.DeletionTimestamp = &metav1.Time{} }, 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Cleanup(func() { c.pending.names.Clear() })

			n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: test.name}}
			n.Spec.Taints = []corev1.Taint{{Key: cloudproviderapi.TaintExternalCloudProvider}}
			n.Status.NodeInfo.OSImage = "Talos (v1.13.5)"
			test.change(n)

			if test.name != "unknown" && test.name != "unmanaged-unknown" {
				c.config.Inventory.Replace(test.name, machine.Machine{Nodename: test.name})
			}

			for _, step := range []struct {
				do   func(obj any) error
				want float64
			}{{c.indexer.Add, test.want}, {c.indexer.Update, test.want}, {c.indexer.Delete, 0}} {
				require.NoError(t, step.do(n))

				_, err := c.sync(t.Context(), test.name)
				require.NoError(t, err)

				if got, err := testutil.GetGaugeMetricValue(gauge); err != nil || got != step.want {
					t.Errorf("got %v, %v; want %v", got, err, step.want)
				}
			}
		})
	}
}
