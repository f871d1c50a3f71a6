package preview_test

import (
	"bytes"
	"encoding/json"
	"slices"
	"testing"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/talos-ccm/talos-ccm/pkg/controllers/node"
	"github.com/talos-ccm/talos-ccm/pkg/internal/events"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/pkg/preview"
)

func comparison() preview.Comparison {
	return preview.Comparison{
		Lease: preview.Lease{Name: "kube-system/lease", Holder: "talos-cloud-controller-manager-1"},
		Nodes: []preview.Report{
			{
				Name:       "web-1",
				ProviderID: &preview.ProviderIDs{Current: "talos://metal/10.0.0.21", New: "talos://metal/30a0bdf7"},
				Changes: []preview.Change{
					{Field: "address", Key: "ExternalIP", Before: new("10.96.0.1")},
					{Field: "label", Key: "example.org/site", Before: new("old"), After: new("new\n"), From: "rule site"},
					{Field: "taint", Key: "dedicated:NoSchedule", After: new(""), From: "rule web, enforced"},
				},
				Upstream: []node.UpstreamField{{Name: "metadata.labels", Key: "example.org/site", TakenOver: true}, {Name: "metadata.labels", Key: "example.org/stray"}, {Name: "spec.providerID"}},
				Problems: []events.Problem{{Reason: "OwnershipConflict", Message: "skipped"}},
			},
			{Name: "equal"},
			{Name: "gone", Pending: true, Upstream: []node.UpstreamField{{Name: "metadata.labels", Key: "example.org/stray"}}},
			{Name: "other-os", Unmanaged: true},
		},
	}
}

func TestWrite_ComparisonTable(t *testing.T) {
	const want = `
Node web-1
providerID talos://metal/10.0.0.21 kept; a new Node would get talos://metal/30a0bdf7
- address ExternalIP 10.96.0.1
- label example.org/site old
+ label example.org/site "new\n" rule site
+ taint dedicated:NoSchedule rule web, enforced
upstream metadata.labels example.org/site taken over
upstream metadata.labels example.org/stray stays, talos-ccm does not set it
upstream spec.providerID
problem OwnershipConflict skipped

Node gone
upstream metadata.labels example.org/stray

Lease kube-system/lease: held by talos-cloud-controller-manager-1
4 Nodes: 1 would change, 1 would not, 1 cannot be compared, 1 not managed
`

	var out bytes.Buffer
	require.NoError(t, preview.Write(&out, "table", comparison()))
	assert.Equal(t, squeeze(want), squeeze("\n"+out.String()))
}

func TestWrite_ComparisonYAMLAndJSON(t *testing.T) {
	for name, unmarshal := range map[string]func([]byte, any) error{
		"json": json.Unmarshal,
		"yaml": func(text []byte, value any) error { return yaml.UnmarshalStrict(text, value) },
	} {
		var (
			out bytes.Buffer
			got preview.Comparison
		)
		require.NoError(t, preview.Write(&out, name, comparison()))
		require.NoError(t, unmarshal(out.Bytes(), &got))
		assert.Equal(t, comparison(), got)
	}
}

// Only talos-ccm sets the providerID of a Node that has no uninitialized taint.
func TestCompare_MarksProviderIDOfInitializedNode(t *testing.T) {
	m := running("talos-wk", "10.77.0.3")
	m.Platform = runtime.PlatformMetadataSpec{Platform: "container"}

	found := inventory.New(time.Now)
	found.Replace("talos-wk", m)

	uninitialized := corev1.Taint{Key: "node.cloudprovider.kubernetes.io/uninitialized", Effect: corev1.TaintEffectNoSchedule}

	for want, taints := range map[string][]corev1.Taint{"machine, permanently, although the Node is initialized": nil, "machine": {uninitialized}} {
		before := &corev1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: "talos-wk"}, Spec: corev1.NodeSpec{Taints: taints},
			Status: corev1.NodeStatus{NodeInfo: corev1.NodeSystemInfo{OSImage: "Talos (v1.13.5)"}},
		}

		diffs, err := preview.Compare([]*corev1.Node{before}, found, nodespec.Options{})
		require.NoError(t, err)
		assert.Contains(t, diffs[0].Changes, preview.Change{Field: "providerID", After: new("talos://container/10.77.0.3"), From: want})
	}
}

func TestCompare_Addresses(t *testing.T) {
	m := running("talos-wk", "10.77.0.3")
	m.Platform = runtime.PlatformMetadataSpec{Platform: "container", Hostname: "talos-wk"}

	internal := corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: "10.77.0.3"}
	name := corev1.NodeAddress{Type: corev1.NodeHostName, Address: "talos-wk"}
	other := corev1.NodeAddress{Type: corev1.NodeExternalIP, Address: "10.96.0.1"}

	for _, test := range []struct {
		name    string
		present []corev1.NodeAddress
		want    []preview.Change
	}{
		{"equal", []corev1.NodeAddress{internal, name}, nil},
		{"added", []corev1.NodeAddress{internal}, []preview.Change{{Field: "address", Key: "Hostname", After: new("talos-wk"), From: "machine"}}},
		{"removed", []corev1.NodeAddress{internal, name, other}, []preview.Change{{Field: "address", Key: "ExternalIP", Before: new("10.96.0.1")}}},
		{"reordered", []corev1.NodeAddress{name, internal}, []preview.Change{{Field: "address order", Before: new("talos-wk, 10.77.0.3"), After: new("10.77.0.3, talos-wk"), From: "machine"}}},
	} {
		t.Run(test.name, func(t *testing.T) {
			found := inventory.New(time.Now)
			found.Replace("talos-wk", m)

			before := &corev1.Node{
				ObjectMeta: metav1.ObjectMeta{Name: "talos-wk"},
				Spec:       corev1.NodeSpec{ProviderID: "talos://container/10.77.0.3"},
				Status:     corev1.NodeStatus{Addresses: test.present, NodeInfo: corev1.NodeSystemInfo{OSImage: "Talos (v1.13.5)"}},
			}

			diffs, err := preview.Compare([]*corev1.Node{before}, found, nodespec.Options{})
			require.NoError(t, err)

			got := slices.DeleteFunc(diffs[0].Changes, func(c preview.Change) bool { return c.Field == "label" })
			assert.ElementsMatch(t, test.want, got)
		})
	}
}
