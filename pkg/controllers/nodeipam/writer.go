package nodeipam

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
)

// FieldManager is who podCIDRs are owned by that we have written. It tells ours from everybody else's.
const FieldManager = "talos-ccm-node-ipam"

// writeTimeout bounds a write here and at the API server. It must be shorter than the time in which a leader that has to stop can be sure that no
// other leads: then whatever it has begun to write is in the list that the next one starts from.
const writeTimeout = 3 * time.Second

// write gives the Node its blocks, in one patch: podCIDR and podCIDRs of both families. It names UID and resourceVersion of the Node that it was decided
// for, so that no later version of it is written, and no successor of the same name. Once begun it is not canceled: what became of it must be known before
// somebody else leads.
func write(ctx context.Context, client kubernetes.Interface, node *corev1.Node, blocks []netip.Prefix) (*corev1.Node, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}

	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), writeTimeout)
	defer cancel()

	texts := make([]string, len(blocks))
	for i, block := range blocks {
		texts[i] = block.String()
	}

	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"uid": node.UID, "resourceVersion": node.ResourceVersion},
		"spec":     map[string]any{"podCIDR": texts[0], "podCIDRs": texts},
	})
	if err != nil {
		return nil, err
	}

	after := &corev1.Node{}

	err = client.CoreV1().RESTClient().Patch(types.MergePatchType).Resource("nodes").Name(node.Name).
		VersionedParams(&metav1.PatchOptions{FieldManager: FieldManager}, scheme.ParameterCodec).
		Timeout(writeTimeout).Body(patch).Do(ctx).Into(after)
	if err != nil {
		return nil, fmt.Errorf("patch podCIDRs %v: %w", texts, err)
	}

	return after, nil
}
