package node

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	corev1ac "k8s.io/client-go/applyconfigurations/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
)

const (
	nodename  = "worker-1"
	keyZone   = "example.org/zone"
	keyRegion = "example.org/region"
	kubectl   = "kubectl-label"
	talos     = "talos"
)

// history builds a Node, with its managedFields, from the writes of several field managers.
type history struct {
	t      *testing.T
	client kubernetes.Interface
}

// registered starts with a Node as the kubelet registers it.
func registered(t *testing.T, taints ...corev1.Taint) *history {
	t.Helper()

	h := &history{t: t, client: fake.NewClientset()}

	_, err := h.client.CoreV1().Nodes().Create(t.Context(), &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: nodename, UID: "u-1", Labels: map[string]string{"kubernetes.io/hostname": nodename}},
		Spec:       corev1.NodeSpec{Taints: taints},
	}, metav1.CreateOptions{FieldManager: "kubelet"})
	require.NoError(t, err)

	return h
}

// apply applies labels by server-side apply. Labels that it omits are removed unless another manager owns them.
func (h *history) apply(manager string, labels map[string]string) *history {
	h.t.Helper()

	_, err := h.client.CoreV1().Nodes().Apply(h.t.Context(), corev1ac.Node(nodename).WithLabels(labels), metav1.ApplyOptions{FieldManager: manager, Force: true})
	if err != nil {
		h.t.Fatalf("apply labels by %s: %v", manager, err)
	}

	return h
}

// update updates the whole Node, as Talos and kubectl do.
func (h *history) update(manager string, change func(*corev1.Node)) *history {
	h.t.Helper()

	node := h.node()
	change(node)

	if _, err := h.client.CoreV1().Nodes().Update(h.t.Context(), node, metav1.UpdateOptions{FieldManager: manager}); err != nil {
		h.t.Fatalf("update node by %s: %v", manager, err)
	}

	return h
}

func (h *history) label(manager, key, value string) *history {
	h.t.Helper()

	return h.update(manager, func(node *corev1.Node) { node.Labels[key] = value })
}

// ownedByTalos sets the annotation in which Talos lists the keys that it owns (k8s/NodeApplyController): a list in
// JSON.
func (h *history) ownedByTalos(list string) *history {
	h.t.Helper()

	return h.update(talos, func(node *corev1.Node) { node.Annotations = map[string]string{"talos.dev/owned-labels": list} })
}

func (h *history) node() *corev1.Node {
	h.t.Helper()

	node, err := h.client.CoreV1().Nodes().Get(h.t.Context(), nodename, metav1.GetOptions{})
	if err != nil {
		h.t.Fatalf("get node: %v", err)
	}

	return node
}

func mustPlan(t *testing.T, node *corev1.Node, spec nodespec.Spec) plan {
	t.Helper()

	before := node.DeepCopy()

	p, err := makePlan(node, spec)
	require.NoError(t, err)

	assert.True(t, sameNode(before, node), "makePlan changed the node")

	return p
}

func sameNode(a, b *corev1.Node) bool {
	return maps.Equal(a.Labels, b.Labels) && slices.Equal(a.Status.Addresses, b.Status.Addresses) && slices.Equal(a.Spec.Taints, b.Spec.Taints) && a.Spec.ProviderID == b.Spec.ProviderID
}

func TestMakePlan_CompletesInterruptedTakeover(t *testing.T) {
	h := registered(t)
	node := h.label(upstreamManager, keyZone, "old").node()

	// The state after the patch of managedFields.
	node.ManagedFields = slices.DeleteFunc(node.ManagedFields, func(e metav1.ManagedFieldsEntry) bool { return e.Manager == upstreamManager })

	p := mustPlan(t, node, nodespec.Spec{Labels: map[string]string{keyZone: "new"}})
	assert.True(t, p.apply)
	assert.Equal(t, "new", p.labels[keyZone])
	assert.Empty(t, p.problems)
}

func TestMakePlan_Labels(t *testing.T) {
	zone := func(value string) map[string]string { return map[string]string{keyZone: value} }
	none := map[string]string{}

	for _, test := range []struct {
		name    string
		node    func(*history)
		desired map[string]string
		apply   bool
		// labels are to be applied, or already applied. conflicts are their current values.
		labels, conflicts map[string]string
	}{
		{"missing label", func(*history) {}, zone("a"), true, zone("a"), none},
		{"already applied", func(h *history) { h.apply(FieldManager, zone("a")) }, zone("a"), false, zone("a"), none},
		{"applied with another value", func(h *history) { h.apply(FieldManager, zone("a")) }, zone("b"), true, zone("b"), none},
		{
			"one applied, one missing",
			func(h *history) { h.apply(FieldManager, zone("a")) },
			map[string]string{keyZone: "a", keyRegion: "r"},
			true,
			map[string]string{keyZone: "a", keyRegion: "r"},
			none,
		},
		{
			"no longer desired",
			func(h *history) { h.apply(FieldManager, map[string]string{keyZone: "a", keyRegion: "r"}) },
			zone("a"), true, zone("a"), none,
		},
		{"last label no longer desired", func(h *history) { h.apply(FieldManager, zone("a")) }, none, true, none, none},
		{"label of another manager that is not desired", func(h *history) { h.label(kubectl, "team", "blue") }, none, false, none, none},
		{"owned by another manager with another value", func(h *history) { h.label(kubectl, keyZone, "z") }, zone("a"), false, none, zone("z")},
		{
			"conflict with one of two labels",
			func(h *history) { h.label(kubectl, keyZone, "z") },
			map[string]string{keyZone: "a", keyRegion: "r"},
			true,
			map[string]string{keyRegion: "r"},
			zone("z"),
		},
		{"owned by another manager with the same value", func(h *history) { h.label(kubectl, keyZone, "a") }, zone("a"), true, zone("a"), none},
		{
			"owned by another manager and applied",
			func(h *history) { h.label(kubectl, keyZone, "a").apply(FieldManager, zone("a")) },
			zone("a"), false, zone("a"), none,
		},
		{
			"taken over by another manager's update",
			func(h *history) {
				h.apply(FieldManager, map[string]string{keyZone: "a", keyRegion: "r"}).label(kubectl, keyZone, "z")
			},
			map[string]string{keyZone: "a", keyRegion: "r"},
			false,
			map[string]string{keyRegion: "r"},
			zone("z"),
		},
		{
			"taken over by another manager's apply",
			func(h *history) { h.apply(FieldManager, zone("a")).apply("argocd", zone("z")) },
			zone("a"), false, none, zone("z"),
		},
		{
			"removed by another manager",
			func(h *history) {
				h.apply(FieldManager, zone("a")).update(kubectl, func(node *corev1.Node) { delete(node.Labels, keyZone) })
			},
			zone("a"), true, zone("a"), none,
		},
		{
			"updated but not applied by our field manager, as patches of the status are",
			func(h *history) { h.label(FieldManager, keyZone, "z") },
			zone("a"), false, none, zone("z"),
		},
		{
			"empty value of another manager",
			func(h *history) { h.label(kubectl, keyZone, "") },
			zone("a"), false, none, zone(""),
		},
		{
			"owned by Talos with another value",
			func(h *history) { h.label(talos, keyZone, "z").ownedByTalos(`["` + keyZone + `"]`) },
			zone("a"), false, none, zone("z"),
		},
		{
			"one of several labels owned by Talos",
			func(h *history) { h.label(talos, keyZone, "z").ownedByTalos(`["a","` + keyZone + `","b"]`) },
			zone("a"), false, none, zone("z"),
		},
		{
			"owned by Talos with the same value",
			func(h *history) { h.label(talos, keyZone, "a").ownedByTalos(`["` + keyZone + `"]`) },
			zone("a"), false, none, none,
		},
		{
			"applied, then owned by Talos with the same value: removed if released",
			func(h *history) {
				h.apply(FieldManager, zone("a")).label(talos, keyZone, "a").ownedByTalos(`["` + keyZone + `"]`)
			},
			zone("a"), false, zone("a"), none,
		},
		{
			"applied, then owned by Talos with another value",
			func(h *history) {
				h.apply(FieldManager, zone("a")).ownedByTalos(`["`+keyZone+`"]`).label(talos, keyZone, "z")
			},
			zone("a"), false, none, zone("z"),
		},
		{
			"owned by another manager and applied, with another desired value",
			func(h *history) { h.label(kubectl, keyZone, "a").apply(FieldManager, zone("a")) },
			zone("b"), true, none, zone("a"),
		},
		{
			"invalid list of labels owned by Talos",
			func(h *history) { h.ownedByTalos(keyZone) },
			zone("a"), true, zone("a"), none,
		},
		{
			"two addresses of one type",
			func(h *history) {
				h.apply(FieldManager, zone("a")).update("kubelet", func(node *corev1.Node) {
					node.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "10.0.0.1"}, {Type: corev1.NodeInternalIP, Address: "fd00::1"}}
				})
			},
			zone("b"), true, zone("b"), none,
		},
		{
			"label with a longer name owned by Talos",
			func(h *history) { h.ownedByTalos(`["` + keyZone + `-2"]`) },
			zone("a"), true, zone("a"), none,
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			h := registered(t)
			test.node(h)

			p := mustPlan(t, h.node(), nodespec.Spec{Labels: test.desired})
			assert.Equal(t, test.apply, p.apply)

			assert.Equal(t, test.labels, p.labels)

			requireConflicts(t, p, test.conflicts)
		})
	}
}

func requireConflicts(t *testing.T, p plan, want map[string]string) {
	t.Helper()

	got := map[string]string{}
	for _, c := range p.problems {
		got[c.Subject], _, _ = strings.Cut(c.Message, " is owned by ")
	}

	wanted := map[string]string{}
	for key, value := range want {
		wanted["labels/"+key] = fmt.Sprintf("Label %s=%q", key, value)
	}

	assert.Equal(t, wanted, got)
}

func TestMakePlan_ConflictNamesTheOwner(t *testing.T) {
	for _, test := range []struct {
		name string
		node func(*history)
		want string
	}{
		{"field manager", func(h *history) { h.label(kubectl, keyZone, "z") }, `Label example.org/zone="z" is owned by field manager "kubectl-label"; skipped`},
		{
			"Talos", func(h *history) { h.label("machined", keyZone, "z").ownedByTalos(`["` + keyZone + `"]`) },
			`Label example.org/zone="z" is owned by Talos; skipped`,
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			h := registered(t)
			test.node(h)

			p := mustPlan(t, h.node(), nodespec.Spec{Labels: map[string]string{keyZone: "a"}})
			require.Len(t, p.problems, 1)
			assert.Equal(t, test.want, p.problems[0].Message)
		})
	}
}

func TestMakePlan_IsEmptyAfterLabelsWereApplied(t *testing.T) {
	desired := map[string]string{keyZone: "a", keyRegion: "r"}

	for _, before := range []func(*history){
		func(*history) {},
		func(h *history) { h.label(kubectl, keyZone, "z") },
		func(h *history) { h.label(kubectl, keyZone, "a") },
		func(h *history) { h.apply(FieldManager, map[string]string{"old": "x"}) },
		func(h *history) { h.apply(FieldManager, desired).label(kubectl, keyRegion, "z") },
		func(h *history) { h.label(talos, keyZone, "z").ownedByTalos(`["` + keyZone + `"]`) },
	} {
		h := registered(t)
		before(h)

		p := mustPlan(t, h.node(), nodespec.Spec{Labels: desired})
		if p.apply {
			// Without force: there must be no conflict.
			_, err := h.client.CoreV1().Nodes().Apply(t.Context(), corev1ac.Node(nodename).WithLabels(p.labels), metav1.ApplyOptions{FieldManager: FieldManager})
			assert.NoError(t, err)
		}

		again := mustPlan(t, h.node(), nodespec.Spec{Labels: desired})
		assert.Empty(t, again.requests(h.node()))

		if _, stale := h.node().Labels["old"]; stale {
			t.Error("label that is no longer desired was not removed")
		}
	}
}

func TestMakePlan_Addresses(t *testing.T) {
	internal := corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: "10.0.0.1"}
	external := corev1.NodeAddress{Type: corev1.NodeExternalIP, Address: "203.0.113.5"}
	name := corev1.NodeAddress{Type: corev1.NodeHostName, Address: nodename}

	for _, test := range []struct {
		name             string
		present, desired []corev1.NodeAddress
		write            bool
	}{
		{"equal", []corev1.NodeAddress{internal, external, name}, []corev1.NodeAddress{internal, external, name}, false},
		{"no addresses", nil, []corev1.NodeAddress{internal, name}, true},
		{"missing address", []corev1.NodeAddress{internal, name}, []corev1.NodeAddress{internal, external, name}, true},
		{"stale address", []corev1.NodeAddress{internal, external, name}, []corev1.NodeAddress{internal, name}, true},
		{"another order, since the first address of a type is preferred", []corev1.NodeAddress{name, internal}, []corev1.NodeAddress{internal, name}, true},
		{"another type", []corev1.NodeAddress{internal}, []corev1.NodeAddress{{Type: corev1.NodeExternalIP, Address: internal.Address}}, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			node := registered(t).node()
			node.Status.Addresses = test.present

			p := mustPlan(t, node, nodespec.Spec{Addresses: test.desired})

			var want []corev1.NodeAddress
			if test.write {
				want = test.desired
			}

			assert.Equal(t, want, p.addresses)
			assert.NotEqual(t, test.write, len(p.requests(node)) == 0)
		})
	}
}

func TestMakePlan_Identity(t *testing.T) {
	uninitializedTaint := corev1.Taint{Key: "node.cloudprovider.kubernetes.io/uninitialized", Value: "true", Effect: corev1.TaintEffectNoSchedule}
	otherTaint := corev1.Taint{Key: "node.kubernetes.io/not-ready", Effect: corev1.TaintEffectNoSchedule}

	for _, test := range []struct {
		name       string
		taints     []corev1.Taint
		present    string
		providerID string
		initialize bool
	}{
		{"new", []corev1.Taint{otherTaint, uninitializedTaint}, "", "talos://metal/u-1", true},
		{"uninitialized with a providerID", []corev1.Taint{uninitializedTaint}, "talos://metal/10.0.0.1", "", true},
		{"uninitialized with a kubelet's providerID for CAPT", []corev1.Taint{uninitializedTaint}, "tinkerbell://default/worker-1", "", true},
		{"uninitialized with a kubelet's providerID for CAPH", []corev1.Taint{uninitializedTaint}, "hrobot://321", "", true},
		{"initialized without a providerID", []corev1.Taint{otherTaint}, "", "talos://metal/u-1", false},
		{"initialized", nil, "talos://metal/u-1", "", false},
		{"initialized with other taints", []corev1.Taint{otherTaint}, "talos://metal/u-1", "", false},
	} {
		t.Run(test.name, func(t *testing.T) {
			node := registered(t, test.taints...).node()
			node.Spec.ProviderID = test.present

			p := mustPlan(t, node, nodespec.Spec{ProviderID: "talos://metal/u-1"})
			assert.Equal(t, test.providerID, p.providerID)
			assert.Equal(t, test.initialize, slices.ContainsFunc(p.requests(node), func(r request) bool { return r.initializes }))

			requests := p.requests(node)
			assert.Equal(t, test.providerID == "" && !test.initialize, len(requests) == 0)
		})
	}
}

func TestMakePlan_IsEmptyForDesiredState(t *testing.T) {
	spec := nodespec.Spec{
		ProviderID: "talos://metal/u-1",
		Labels:     map[string]string{keyZone: "a"},
		Addresses:  []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "10.0.0.1"}},
	}
	node := registered(t).apply(FieldManager, spec.Labels).node()
	node.Spec.ProviderID, node.Status.Addresses, node.UID = spec.ProviderID, spec.Addresses, types.UID("u-1")

	p := mustPlan(t, node, spec)
	assert.Empty(t, p.requests(node))
}

func TestMakePlan_FailsOnInvalidManagedFields(t *testing.T) {
	node := registered(t).apply(FieldManager, map[string]string{keyZone: "a"}).node()
	for i := range node.ManagedFields {
		node.ManagedFields[i].FieldsV1 = metav1.NewFieldsV1(`{"f:metadata":`)
	}

	if _, err := makePlan(node, nodespec.Spec{}); err == nil {
		t.Error("no error")
	}
}
