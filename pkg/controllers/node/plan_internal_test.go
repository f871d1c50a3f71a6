package node

import (
	"fmt"
	"maps"
	"slices"
	"testing"

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
	keyZone   = "topology.kubernetes.io/zone"
	keyRegion = "topology.kubernetes.io/region"
	kubectl   = "kubectl-label"
	talos     = "talos"
)

// history makes a Node by what managers did to it, one after the other, with the managedFields that come of it.
type history struct {
	t      *testing.T
	client kubernetes.Interface
}

// registered begins with a Node as the kubelet registers it.
func registered(t *testing.T, taints ...corev1.Taint) *history {
	t.Helper()

	h := &history{t: t, client: fake.NewClientset()}

	_, err := h.client.CoreV1().Nodes().Create(t.Context(), &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: nodename, UID: "u-1", Labels: map[string]string{"kubernetes.io/hostname": nodename}},
		Spec:       corev1.NodeSpec{Taints: taints},
	}, metav1.CreateOptions{FieldManager: "kubelet"})
	if err != nil {
		t.Fatalf("create node: %v", err)
	}

	return h
}

// apply is a server-side apply of labels by manager: what it leaves out, and nobody else holds, is removed.
func (h *history) apply(manager string, labels map[string]string) *history {
	h.t.Helper()

	_, err := h.client.CoreV1().Nodes().Apply(h.t.Context(), corev1ac.Node(nodename).WithLabels(labels), metav1.ApplyOptions{FieldManager: manager, Force: true})
	if err != nil {
		h.t.Fatalf("apply labels by %s: %v", manager, err)
	}

	return h
}

// update changes the whole Node, as Talos and kubectl do.
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

// ownedByTalos has Talos's own controller record keys as its own, in its format (k8s/NodeApplyController): a list in JSON.
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
	if err != nil {
		t.Fatalf("make plan: %v", err)
	}

	if !apiEqual(before, node) {
		t.Error("the node was changed")
	}

	return p
}

func apiEqual(a, b *corev1.Node) bool {
	return maps.Equal(a.Labels, b.Labels) && slices.Equal(a.Status.Addresses, b.Status.Addresses) && slices.Equal(a.Spec.Taints, b.Spec.Taints) && a.Spec.ProviderID == b.Spec.ProviderID
}

func TestATakeOverThatWasInterruptedIsFinished(t *testing.T) {
	h := registered(t)
	node := h.label(upstreamManager, keyZone, "old").node()

	// As the patch of managedFields leaves it, if nothing is applied after that.
	node.ManagedFields = slices.DeleteFunc(node.ManagedFields, func(e metav1.ManagedFieldsEntry) bool { return e.Manager == upstreamManager })

	p := mustPlan(t, node, nodespec.Spec{Labels: map[string]string{keyZone: "new"}})
	if !p.apply || p.labels[keyZone] != "new" || len(p.foreign) > 0 {
		t.Errorf("labels %v are applied: %t; foreign are %v", p.labels, p.apply, p.foreign)
	}
}

func TestPlanOfLabels(t *testing.T) {
	zone := func(value string) map[string]string { return map[string]string{keyZone: value} }
	none := map[string]string{}

	for _, test := range []struct {
		rule   string
		node   func(*history)
		wanted map[string]string
		apply  bool
		// labels are those to be applied, or held already if nothing is.
		labels, foreign map[string]string
	}{
		{"what is missing is applied", func(*history) {}, zone("a"), true, zone("a"), none},
		{"what we hold already is not applied again", func(h *history) { h.apply(FieldManager, zone("a")) }, zone("a"), false, zone("a"), none},
		{"what we hold with another value is", func(h *history) { h.apply(FieldManager, zone("a")) }, zone("b"), true, zone("b"), none},
		{
			"what we hold stays in when something is added",
			func(h *history) { h.apply(FieldManager, zone("a")) },
			map[string]string{keyZone: "a", keyRegion: "r"},
			true,
			map[string]string{keyZone: "a", keyRegion: "r"},
			none,
		},
		{
			"what is no longer wanted is left out, and so removed",
			func(h *history) { h.apply(FieldManager, map[string]string{keyZone: "a", keyRegion: "r"}) },
			zone("a"), true, zone("a"), none,
		},
		{"so is the last one", func(h *history) { h.apply(FieldManager, zone("a")) }, none, true, none, none},
		{"labels that nobody wants and we do not hold are none of our business", func(h *history) { h.label(kubectl, "team", "blue") }, none, false, none, none},
		{"a key that somebody else holds with another value is foreign", func(h *history) { h.label(kubectl, keyZone, "z") }, zone("a"), false, none, zone("z")},
		{
			"the others are applied all the same",
			func(h *history) { h.label(kubectl, keyZone, "z") },
			map[string]string{keyZone: "a", keyRegion: "r"},
			true,
			map[string]string{keyRegion: "r"},
			zone("z"),
		},
		{"a key that somebody else holds with our value is held by both", func(h *history) { h.label(kubectl, keyZone, "a") }, zone("a"), true, zone("a"), none},
		{
			"a key that is held by both is not applied again",
			func(h *history) { h.label(kubectl, keyZone, "a").apply(FieldManager, zone("a")) },
			zone("a"), false, zone("a"), none,
		},
		{
			"a key that somebody took from us is foreign, and we let go of it",
			func(h *history) {
				h.apply(FieldManager, map[string]string{keyZone: "a", keyRegion: "r"}).label(kubectl, keyZone, "z")
			},
			map[string]string{keyZone: "a", keyRegion: "r"},
			false,
			map[string]string{keyRegion: "r"},
			zone("z"),
		},
		{
			"a key that somebody took from us by apply is foreign too",
			func(h *history) { h.apply(FieldManager, zone("a")).apply("argocd", zone("z")) },
			zone("a"), false, none, zone("z"),
		},
		{
			"a key that somebody removed from us is applied again",
			func(h *history) {
				h.apply(FieldManager, zone("a")).update(kubectl, func(node *corev1.Node) { delete(node.Labels, keyZone) })
			},
			zone("a"), true, zone("a"), none,
		},
		{
			"what our name has updated but not applied is not ours: our patches of the status go by the same name",
			func(h *history) { h.label(FieldManager, keyZone, "z") },
			zone("a"), false, none, zone("z"),
		},
		{
			"an empty value of somebody else is a value",
			func(h *history) { h.label(kubectl, keyZone, "") },
			zone("a"), false, none, zone(""),
		},
		{
			"a key of Talos's is foreign",
			func(h *history) { h.label(talos, keyZone, "z").ownedByTalos(`["` + keyZone + `"]`) },
			zone("a"), false, none, zone("z"),
		},
		{
			"a key of Talos's among several is foreign",
			func(h *history) { h.label(talos, keyZone, "z").ownedByTalos(`["a","` + keyZone + `","b"]`) },
			zone("a"), false, none, zone("z"),
		},
		{
			"a key of Talos's with our value is left to Talos",
			func(h *history) { h.label(talos, keyZone, "a").ownedByTalos(`["` + keyZone + `"]`) },
			zone("a"), false, none, none,
		},
		{
			"a key of ours that Talos takes over with our value is held on to: nobody else holds it, and it would be removed",
			func(h *history) {
				h.apply(FieldManager, zone("a")).label(talos, keyZone, "a").ownedByTalos(`["` + keyZone + `"]`)
			},
			zone("a"), false, zone("a"), none,
		},
		{
			"a key of ours that Talos takes over with another value is foreign",
			func(h *history) {
				h.apply(FieldManager, zone("a")).ownedByTalos(`["`+keyZone+`"]`).label(talos, keyZone, "z")
			},
			zone("a"), false, none, zone("z"),
		},
		{
			"a key that is held by both is foreign once we want another value",
			func(h *history) { h.label(kubectl, keyZone, "a").apply(FieldManager, zone("a")) },
			zone("b"), true, none, zone("a"),
		},
		{
			"a list of Talos's that cannot be read names no key",
			func(h *history) { h.ownedByTalos(keyZone) },
			zone("a"), true, zone("a"), none,
		},
		{
			"two addresses of one type are no obstacle",
			func(h *history) {
				h.apply(FieldManager, zone("a")).update("kubelet", func(node *corev1.Node) {
					node.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "10.0.0.1"}, {Type: corev1.NodeInternalIP, Address: "fd00::1"}}
				})
			},
			zone("b"), true, zone("b"), none,
		},
		{
			"a key whose name only begins like one of Talos's is not Talos's",
			func(h *history) { h.ownedByTalos(`["` + keyZone + `-2"]`) },
			zone("a"), true, zone("a"), none,
		},
	} {
		t.Run(test.rule, func(t *testing.T) {
			h := registered(t)
			test.node(h)

			p := mustPlan(t, h.node(), nodespec.Spec{Labels: test.wanted})
			if p.apply != test.apply {
				t.Errorf("apply: got %v, want %v", p.apply, test.apply)
			}

			if !maps.Equal(p.labels, test.labels) {
				t.Errorf("ours: got %v, want %v", p.labels, test.labels)
			}

			requireForeignLabels(t, p, test.foreign)
		})
	}
}

func requireForeignLabels(t *testing.T, p plan, want map[string]string) {
	t.Helper()

	got := map[string]string{}
	for _, f := range p.foreign {
		got[f.subject] = f.message
	}

	wanted := map[string]string{}
	for key, value := range want {
		wanted["labels/"+key] = fmt.Sprintf("Label %s=%q was set by somebody else and is left alone", key, value)
	}

	if !maps.Equal(got, wanted) {
		t.Errorf("foreign: got %v, want %v", got, wanted)
	}
}

// Carrying a plan out leaves nothing to do, whatever was there before.
func TestAPlanOfLabelsThatWasCarriedOutIsEmpty(t *testing.T) {
	wanted := map[string]string{keyZone: "a", keyRegion: "r"}

	for _, before := range []func(*history){
		func(*history) {},
		func(h *history) { h.label(kubectl, keyZone, "z") },
		func(h *history) { h.label(kubectl, keyZone, "a") },
		func(h *history) { h.apply(FieldManager, map[string]string{"old": "x"}) },
		func(h *history) { h.apply(FieldManager, wanted).label(kubectl, keyRegion, "z") },
		func(h *history) { h.label(talos, keyZone, "z").ownedByTalos(`["` + keyZone + `"]`) },
	} {
		h := registered(t)
		before(h)

		p := mustPlan(t, h.node(), nodespec.Spec{Labels: wanted})
		if p.apply {
			// Not forced: what we apply nobody else holds with another value.
			_, err := h.client.CoreV1().Nodes().Apply(t.Context(), corev1ac.Node(nodename).WithLabels(p.labels), metav1.ApplyOptions{FieldManager: FieldManager})
			if err != nil {
				t.Errorf("apply: %v", err)
			}
		}

		if again := mustPlan(t, h.node(), nodespec.Spec{Labels: wanted}); !again.empty() {
			t.Errorf("still to do: %+v", again)
		}

		if _, stale := h.node().Labels["old"]; stale {
			t.Error("a label that is no longer wanted is still there")
		}
	}
}

func TestPlanOfAddresses(t *testing.T) {
	internal := corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: "10.0.0.1"}
	external := corev1.NodeAddress{Type: corev1.NodeExternalIP, Address: "203.0.113.5"}
	name := corev1.NodeAddress{Type: corev1.NodeHostName, Address: nodename}

	for _, test := range []struct {
		rule            string
		present, wanted []corev1.NodeAddress
		write           bool
	}{
		{"equal", []corev1.NodeAddress{internal, external, name}, []corev1.NodeAddress{internal, external, name}, false},
		{"none there yet", nil, []corev1.NodeAddress{internal, name}, true},
		{"one more", []corev1.NodeAddress{internal, name}, []corev1.NodeAddress{internal, external, name}, true},
		{"one less", []corev1.NodeAddress{internal, external, name}, []corev1.NodeAddress{internal, name}, true},
		{"another order is another list: the first of a type is the one that counts", []corev1.NodeAddress{name, internal}, []corev1.NodeAddress{internal, name}, true},
		{"the same address as another type", []corev1.NodeAddress{internal}, []corev1.NodeAddress{{Type: corev1.NodeExternalIP, Address: internal.Address}}, true},
	} {
		t.Run(test.rule, func(t *testing.T) {
			node := registered(t).node()
			node.Status.Addresses = test.present

			p := mustPlan(t, node, nodespec.Spec{Addresses: test.wanted})

			var want []corev1.NodeAddress
			if test.write {
				want = test.wanted
			}

			if !slices.Equal(p.addresses, want) || p.empty() == test.write {
				t.Errorf("got %v (empty: %v), want %v", p.addresses, p.empty(), want)
			}
		})
	}
}

func TestPlanOfIdentity(t *testing.T) {
	uninitializedTaint := corev1.Taint{Key: "node.cloudprovider.kubernetes.io/uninitialized", Value: "true", Effect: corev1.TaintEffectNoSchedule}
	otherTaint := corev1.Taint{Key: "node.kubernetes.io/not-ready", Effect: corev1.TaintEffectNoSchedule}

	for _, test := range []struct {
		rule       string
		taints     []corev1.Taint
		present    string
		providerID string
		initialize bool
	}{
		{"a new Node gets a providerID and loses its taint", []corev1.Taint{otherTaint, uninitializedTaint}, "", "talos://metal/u-1", true},
		{"a providerID that is there stays, whatever it is", []corev1.Taint{uninitializedTaint}, "talos://metal/10.0.0.1", "", true},
		{"a Node without the taint still lacks a providerID", []corev1.Taint{otherTaint}, "", "talos://metal/u-1", false},
		{"an initialized Node needs neither", nil, "talos://metal/u-1", "", false},
		{"other taints are none of our business", []corev1.Taint{otherTaint}, "talos://metal/u-1", "", false},
	} {
		t.Run(test.rule, func(t *testing.T) {
			node := registered(t, test.taints...).node()
			node.Spec.ProviderID = test.present

			p := mustPlan(t, node, nodespec.Spec{ProviderID: "talos://metal/u-1"})
			if p.providerID != test.providerID || p.initialize != test.initialize {
				t.Errorf("got %q and %v, want %q and %v", p.providerID, p.initialize, test.providerID, test.initialize)
			}

			if p.empty() != (test.providerID == "" && !test.initialize) {
				t.Errorf("empty: %v", p.empty())
			}
		})
	}
}

func TestANodeThatIsAsItShouldBeNeedsNothing(t *testing.T) {
	spec := nodespec.Spec{
		ProviderID: "talos://metal/u-1",
		Labels:     map[string]string{keyZone: "a"},
		Addresses:  []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "10.0.0.1"}},
	}
	node := registered(t).apply(FieldManager, spec.Labels).node()
	node.Spec.ProviderID, node.Status.Addresses, node.UID = spec.ProviderID, spec.Addresses, types.UID("u-1")

	if p := mustPlan(t, node, spec); !p.empty() {
		t.Errorf("to do: %+v", p)
	}
}

func TestManagedFieldsThatCannotBeReadAreAnError(t *testing.T) {
	node := registered(t).apply(FieldManager, map[string]string{keyZone: "a"}).node()
	for i := range node.ManagedFields {
		node.ManagedFields[i].FieldsV1 = metav1.NewFieldsV1(`{"f:metadata":`)
	}

	if _, err := makePlan(node, nodespec.Spec{}); err == nil {
		t.Error("no error")
	}
}
