package node_test

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	cloudproviderapi "k8s.io/cloud-provider/api"

	"github.com/talos-ccm/talos-ccm/pkg/controllers/node"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/pkg/rules"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/ctest"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

const upstream = "talos-cloud-controller-manager"

// view returns the machine as the reflector would read it.
func (s suite) view(m *talostest.Machine) machine.Machine {
	s.Helper()

	var view machine.View

	for _, kind := range machine.BaseKinds().All() {
		list, err := m.State().List(s.Context(), kind)
		require.NoError(s, err)
		view.ReplaceKind(kind, list.Items)
	}

	return view.Machine()
}

// preview returns the preview of a Node whose kubelet will report Talos, and of its machine.
func (s suite) preview(n *corev1.Node, m *talostest.Machine) node.Preview {
	s.Helper()

	machines := inventory.New(time.Now)
	machines.Replace(n.Name, s.view(m))

	talos := n.DeepCopy()
	talos.Status.NodeInfo.OSImage = kube.DefaultOSImage

	previews, err := node.NewPreviews([]*corev1.Node{talos}, machines, s.options.get())
	require.NoError(s, err)

	return previews[0]
}

// release makes the controller write a Node that it has ignored because its kubelet has not reported Talos.
func (s suite) release(nodename string) {
	s.Helper()

	s.PatchNode(nodename, "kubelet", fmt.Sprintf(`{"status":{"nodeInfo":{"osImage":%q}}}`, kube.DefaultOSImage), "status")
}

// sameContent compares the fields that the controller writes. kube-controller-manager may write others at the same time.
func sameContent(a, b *corev1.Node) bool {
	content := func(n *corev1.Node) (map[string]string, []corev1.Taint) {
		annotations := maps.Clone(n.Annotations)
		maps.DeleteFunc(annotations, func(key, _ string) bool { return strings.HasPrefix(key, "node.alpha.kubernetes.io/") })

		return annotations, slices.DeleteFunc(slices.Clone(n.Spec.Taints), func(t corev1.Taint) bool { return strings.HasPrefix(t.Key, "node.kubernetes.io/") })
	}

	annotationsA, taintsA := content(a)
	annotationsB, taintsB := content(b)

	return maps.Equal(annotationsA, annotationsB) && slices.Equal(taintsA, taintsB) && maps.Equal(a.Labels, b.Labels) &&
		a.Spec.ProviderID == b.Spec.ProviderID && slices.Equal(a.Status.Addresses, b.Status.Addresses)
}

func TestNewPreviews_AgreeWithWrites(t *testing.T) {
	const site, gone, common = "example.com/site", "example.com/gone", "example.com/common"

	labels := func(value string) map[string]string { return map[string]string{site: value} }

	for _, test := range []struct {
		nodename string
		before   func(s suite, nodename string)
		rule     rules.Rule
	}{
		{
			"preview-new",
			func(suite, string) {},
			rules.Rule{Labels: labels("new"), Annotations: labels("new"), Taints: map[string]string{storageTaint: "ceph:NoSchedule"}},
		},
		{"preview-migrated", initializeAsUpstream, rules.Rule{Labels: labels("new"), Enforce: true, Taints: map[string]string{storageTaint: "ceph:NoSchedule"}}},
		{
			"preview-applied",
			func(s suite, nodename string) {
				s.applyAs(node.FieldManager, nodename, map[string]string{site: "old", gone: "true", common: "true"})
				s.applyAs("kubectl", nodename, map[string]string{common: "true"})
			},
			rules.Rule{Labels: labels("new")},
		},
		{
			"preview-conflict",
			func(s suite, nodename string) {
				s.PatchNode(nodename, "kubectl", `{"metadata":{"labels":{"example.com/site":"old"}}}`)
			},
			rules.Rule{Labels: labels("new"), Annotations: labels("new")},
		},
	} {
		t.Run(test.nodename, func(t *testing.T) {
			s := parallel(t)
			m := s.Machine(aws(test.nodename))

			registered := ctest.NodeOf(m)
			registered.OSImage = "Another OS"
			s.Register(registered)
			test.before(s, test.nodename)
			s.rules(test.nodename, test.rule)

			p := s.preview(s.Node(test.nodename), m)
			require.NotNil(t, p.After)
			require.False(t, sameContent(p.Before, p.After), "no change: %+v", p)

			s.release(test.nodename)
			n := s.AwaitNode(test.nodename, func(n *corev1.Node, asrt *assert.Assertions) { asrt.True(sameContent(n, p.After)) })

			// Nothing more is written.
			s.waitForIdle()

			assert.True(t, sameContent(s.Node(test.nodename), n), "got %+v, want %+v", s.Node(test.nodename), n)
			after := s.preview(n, m)
			assert.True(t, sameContent(after.Before, after.After), "change of a written Node: %+v", after)
		})
	}
}

// initializeAsUpstream writes the fields that the upstream Talos CCM writes, including those it keeps by mistake.
func initializeAsUpstream(s suite, nodename string) {
	s.PatchNode(nodename, upstream, `{
		"metadata":{"labels":{"example.com/site":"old","example.com/stray":"left","topology.kubernetes.io/zone":"eu-1a"}},
		"spec":{"providerID":"talos://metal/10.0.0.9","taints":null}}`)
	s.PatchNode(nodename, upstream,
		`{"status":{"addresses":[{"type":"InternalIP","address":"10.0.0.9"},{"type":"ExternalIP","address":"10.96.0.1"}]}}`, "status")
}

func TestNewPreviews_ListFieldsOfUpstreamCCM(t *testing.T) {
	s := parallel(t)
	m := s.Machine(aws("preview-upstream"))

	registered := ctest.NodeOf(m)
	registered.OSImage = "Another OS"
	s.Register(registered)
	initializeAsUpstream(s, "preview-upstream")
	s.rules("preview-upstream", rules.Rule{Labels: map[string]string{"example.com/site": "new"}})

	p := s.preview(s.Node("preview-upstream"), m)
	want := []node.UpstreamField{
		{Name: "metadata.labels", Key: "example.com/site", TakenOver: true},
		{Name: "metadata.labels", Key: "example.com/stray"},
		{Name: "metadata.labels", Key: "topology.kubernetes.io/zone", TakenOver: true},
		{Name: "spec.providerID"},
		{Name: "status.addresses"},
	}

	assert.Equal(t, want, p.Upstream)

	assert.Equal(t, "talos://metal/10.0.0.9", p.Before.Spec.ProviderID)
	assert.Equal(t, p.Before.Spec.ProviderID, p.After.Spec.ProviderID)
	assert.Contains(t, p.Spec.ProviderID, "i-preview-upstream")
}

func TestNewPreviews_DoNotChangeUnmanagedNodes(t *testing.T) {
	nodes := []*corev1.Node{
		{ObjectMeta: metav1.ObjectMeta{Name: "other-os"}},
		{ObjectMeta: metav1.ObjectMeta{Name: "unread"}, Status: corev1.NodeStatus{NodeInfo: corev1.NodeSystemInfo{OSImage: kube.DefaultOSImage}}},
	}

	previews, err := node.NewPreviews(nodes, inventory.New(time.Now), nodespec.Options{})
	require.NoError(t, err)
	assert.True(t, previews[0].Unmanaged)
	assert.Nil(t, previews[0].After)
	assert.False(t, previews[1].Unmanaged)
	assert.Nil(t, previews[1].After)
}

func TestNewPreviews_ReportProviderIDInUse(t *testing.T) {
	var nodes []*corev1.Node

	machines := inventory.New(time.Now)

	for _, name := range []string{"first", "second"} {
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{cloudproviderapi.AnnotationAlphaProvidedIPAddr: "10.0.0.1"}}}
		n.Status.NodeInfo.OSImage = kube.DefaultOSImage
		nodes = append(nodes, n)
		machines.Replace(name, machine.Machine{
			Nodename: name, Platform: identified("hcloud", "hcloud://clones"), Addresses: []machine.Address{{Link: "eth0", Prefix: netip.MustParsePrefix("10.0.0.1/24")}},
		})
	}

	previews, err := node.NewPreviews(nodes, machines, nodespec.Options{})
	require.NoError(t, err)
	assert.Equal(t, "hcloud://clones", previews[0].After.Spec.ProviderID)
	assert.Nil(t, previews[1].After)
	require.Len(t, previews[1].Problems, 1)
	assert.Equal(t, node.ReasonProviderIDInUse, previews[1].Problems[0].Reason)
}
