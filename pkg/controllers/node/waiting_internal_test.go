package node

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	cloudproviderapi "k8s.io/cloud-provider/api"
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/testutil"

	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/pkg/rules"
)

// newNumber is a gauge of a test's own: the product's is set by the controller that runs beside the tests.
func newNumber() metrics.GaugeMetric {
	number := metrics.NewGauge(&metrics.GaugeOpts{Name: "number"})
	metrics.NewKubeRegistry().MustRegister(number)

	return number
}

func TestOnlyNodesOfOursThatAreThereWait(t *testing.T) {
	claim, errs := rules.CompileSelector([]rules.SelectorTerm{{MatchExpressions: []rules.Expression{
		{Key: "nodename", Operator: rules.NotIn, Values: []string{"unclaimed", "unclaimed-unseen"}},
	}}})
	if len(errs) > 0 {
		t.Fatal(errs)
	}

	number := newNumber()
	nodes := cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{})
	machines := inventory.New(time.Now)
	c := &Controller{
		lister:    corelisters.NewNodeLister(nodes),
		inventory: machines,
		options:   func() nodespec.Options { return nodespec.Options{Selector: claim} },
		waiting:   newWaiting(number),
	}

	for _, test := range []struct {
		name   string
		change func(n *corev1.Node)
		want   float64
	}{
		{"ours", func(*corev1.Node) {}, 1},
		{"unseen", func(*corev1.Node) {}, 1},
		{"unclaimed", func(*corev1.Node) {}, 0},
		{"unclaimed-unseen", func(*corev1.Node) {}, 1}, // what it is, only its machine can say
		{"initialized", func(n *corev1.Node) { n.Spec.Taints = nil }, 0},
		{"another-system", func(n *corev1.Node) { n.Status.NodeInfo.OSImage = "Debian" }, 0},
		{"being-deleted", func(n *corev1.Node) { n.DeletionTimestamp = &metav1.Time{} }, 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Cleanup(c.waiting.clear)

			n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: test.name}}
			n.Spec.Taints = []corev1.Taint{{Key: cloudproviderapi.TaintExternalCloudProvider}}
			n.Status.NodeInfo.OSImage = "Talos (v1.13.5)"
			test.change(n)

			if test.name != "unseen" && test.name != "unclaimed-unseen" {
				machines.Replace(test.name, machine.Machine{Nodename: test.name})
			}

			for _, step := range []struct {
				do   func(obj any) error
				want float64
			}{{nodes.Add, test.want}, {nodes.Delete, 0}} {
				if err := step.do(n); err != nil {
					t.Fatal(err)
				}

				c.countWaiting(test.name)

				if got, err := testutil.GetGaugeMetricValue(number); err != nil || got != step.want {
					t.Errorf("got %v, %v; want %v", got, err, step.want)
				}
			}
		})
	}
}

func TestNodesThatWaitAreCountedOnce(t *testing.T) {
	number := newNumber()
	w := newWaiting(number)

	for _, step := range []struct {
		rule string
		do   func()
		want float64
	}{
		{"one waits", func() { w.add("a") }, 1},
		{"it still waits", func() { w.add("a") }, 1},
		{"another waits, too", func() { w.add("b") }, 2},
		{"one that never waited does not", func() { w.remove("c") }, 2},
		{"one is done", func() { w.remove("a") }, 1},
		{"nobody knows any longer", w.clear, 0},
	} {
		step.do()

		if got, err := testutil.GetGaugeMetricValue(number); err != nil || got != step.want {
			t.Errorf("%s: got %v, %v; want %v", step.rule, got, err, step.want)
		}
	}
}
