package node

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	cloudproviderapi "k8s.io/cloud-provider/api"

	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/pkg/rules"
)

func inZone(value string) map[string]string {
	return map[string]string{corev1.LabelTopologyZone: value, corev1.LabelFailureDomainBetaZone: value}
}

func inZones(stable, beta string) map[string]string {
	return map[string]string{corev1.LabelTopologyZone: stable, corev1.LabelFailureDomainBetaZone: beta}
}

// remove removes a label, as `kubectl label node worker-1 KEY-` does.
func (h *history) remove(key string) *history {
	h.t.Helper()

	return h.update(kubectl, func(node *corev1.Node) { delete(node.Labels, key) })
}

func TestMakePlan_KeepsTopology(t *testing.T) {
	const stable, beta = corev1.LabelTopologyZone, corev1.LabelFailureDomainBetaZone

	uninitialized := corev1.Taint{Key: cloudproviderapi.TaintExternalCloudProvider, Value: "true", Effect: corev1.TaintEffectNoSchedule}
	ours := func(h *history) { h.apply(FieldManager, inZone("a")) }

	for _, test := range []struct {
		name    string
		taints  []corev1.Taint
		past    func(*history)
		desired map[string]string
		follow  bool
		// want are the applied labels, and changed the labels with an Event TopologyChanged.
		want    map[string]string
		changed []string
	}{
		{name: "unchanged", past: ours, desired: inZone("a"), want: inZone("a")},
		{name: "changed", past: ours, desired: inZone("b"), want: inZone("a"), changed: []string{stable}},
		{name: "changed and followed", past: ours, desired: inZone("b"), follow: true, want: inZone("b")},
		{name: "gone", past: ours, desired: nil, want: inZone("a"), changed: []string{stable}},
		{name: "gone and followed", past: ours, desired: nil, follow: true, want: map[string]string{}},
		{name: "initialized without a zone", past: func(*history) {}, desired: inZone("a"), want: inZone("a")},
		{
			name: "uninitialized", taints: []corev1.Taint{uninitialized}, past: ours, desired: inZone("b"), want: inZone("b"),
		},
		{
			name: "both labels removed by hand", past: func(h *history) { ours(h); h.remove(stable).remove(beta) },
			desired: inZone("b"), want: inZone("b"),
		},
		{name: "stable label removed by hand", past: func(h *history) { ours(h); h.remove(stable) }, desired: inZone("b"), want: inZone("b")},
		{
			name: "beta label removed by hand", past: func(h *history) { ours(h); h.remove(beta) },
			desired: inZone("b"), want: inZone("a"), changed: []string{stable},
		},
		{name: "relabeled by hand with the new value", past: func(h *history) { ours(h); h.label(kubectl, stable, "b") }, desired: inZone("b"), want: inZone("b")},
		{
			name: "relabeled by hand with another value", past: func(h *history) { ours(h); h.label(kubectl, stable, "c") },
			desired: inZone("b"), want: map[string]string{beta: "c"},
		},
		{
			name: "set by the upstream Talos CCM", past: func(h *history) { h.label(upstreamManager, stable, "a").label(upstreamManager, beta, "a") },
			desired: inZone("b"), want: inZone("a"), changed: []string{stable},
		},
		{
			name: "set by the upstream Talos CCM and gone", past: func(h *history) { h.label(upstreamManager, stable, "a") },
			desired: nil, want: map[string]string{},
		},
		{
			name: "set by hand on a machine without a zone", past: func(h *history) { h.label(kubectl, stable, "a") },
			desired: nil, want: map[string]string{},
		},
		{
			name: "set by Talos", past: func(h *history) { ours(h); h.ownedByTalos(`["` + stable + `"]`) },
			desired: inZone("b"), want: map[string]string{beta: "a"},
		},
		{
			name: "a rule changes only the stable label", past: ours, desired: inZones("b", "a"), want: inZone("a"), changed: []string{stable},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			h := registered(t, test.taints...)
			test.past(h)
			p := mustPlan(t, h.node(), nodespec.Spec{Labels: test.desired, FollowTopology: test.follow})

			assert.Equal(t, test.want, p.labels)

			var changed []string

			for _, c := range p.problems {
				if c.Reason == ReasonTopologyChanged {
					changed = append(changed, c.Subject)
				}
			}

			slices.Sort(changed)

			assert.Equal(t, test.changed, changed)
		})
	}
}

func TestMakePlan_NamesTheSourceOfChangedTopology(t *testing.T) {
	replaced := rules.Result{Replaced: map[string]string{"Zone": "racks"}}
	labeled := rules.Result{Labels: map[string]rules.Value{corev1.LabelTopologyZone: {Value: "b", Rule: "site"}}}

	for _, test := range []struct {
		transformed rules.Result
		labels      map[string]string
		want        string
	}{
		{rules.Result{}, inZone("b"), `but its machine now sets "b"`},
		{rules.Result{}, nil, "but its machine no longer sets it"},
		{replaced, inZone("b"), `but rule "racks" now sets "b"`},
		{labeled, inZone("b"), `but rule "site" now sets "b"`},
	} {
		h := registered(t).apply(FieldManager, inZone("a"))
		p := mustPlan(t, h.node(), nodespec.Spec{Labels: test.labels, Transformed: test.transformed})

		require.Len(t, p.problems, 1)
		assert.Contains(t, p.problems[0].Message, `zone="a", `+test.want)
	}
}
