package node

import (
	"context"
	"encoding/json"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	corev1ac "k8s.io/client-go/applyconfigurations/core/v1"
	"k8s.io/client-go/kubernetes"
)

// writer carries plans out. Every write names the UID of the Node that was looked at, so that none reaches a successor of the
// same name, and none creates a Node.
type writer struct {
	client kubernetes.Interface
}

// write does the parts of p in the order that makes initialization atomic for the scheduler: labels and annotations, addresses, and last, in
// one write, providerID and taints. It returns the Node as the last part that succeeded has left it, or as it was.
func (w writer) write(ctx context.Context, node *corev1.Node, p plan) (*corev1.Node, error) {
	for _, part := range []struct {
		name  string
		due   bool
		write func(context.Context, *corev1.Node, plan) (*corev1.Node, error)
	}{
		{"take over from the upstream Talos CCM", p.managedFields != nil, w.patchManagedFields},
		{"apply labels and annotations", p.apply, w.apply},
		{"patch addresses", p.addresses != nil, w.patchAddresses},
		{"patch spec", p.patchesSpec(), w.patchSpec},
	} {
		if !part.due {
			continue
		}

		after, err := part.write(ctx, node, p)
		if err != nil {
			return node, fmt.Errorf("%s: %w", part.name, err)
		}

		node = after
	}

	return node, nil
}

// patchManagedFields carries the resourceVersion it has seen: it replaces the list.
func (w writer) patchManagedFields(ctx context.Context, node *corev1.Node, p plan) (*corev1.Node, error) {
	return w.patch(ctx, node.Name, map[string]any{
		"metadata": map[string]any{"uid": node.UID, "resourceVersion": node.ResourceVersion, "managedFields": p.managedFields},
	})
}

// apply does not force: a key that somebody else took meanwhile fails the whole, and the next sync leaves it out. It carries the resourceVersion it has
// seen if it records a taint: whose the taint is was seen in that version, and cannot be told once it is recorded. (What somebody else sets between this
// write and that of the taint is taken for ours.)
func (w writer) apply(ctx context.Context, node *corev1.Node, p plan) (*corev1.Node, error) {
	config := corev1ac.Node(node.Name).WithUID(node.UID).WithLabels(p.labels).WithAnnotations(p.annotations)
	if p.records {
		config.WithResourceVersion(node.ResourceVersion)
	}

	return w.client.CoreV1().Nodes().Apply(ctx, config, metav1.ApplyOptions{FieldManager: FieldManager})
}

// patchAddresses uses a JSON merge patch, which replaces the list as a whole: the list's strategic merge key is the type, and one
// type can occur more than once (https://github.com/kubernetes/kubernetes/issues/79391).
func (w writer) patchAddresses(ctx context.Context, node *corev1.Node, p plan) (*corev1.Node, error) {
	return w.patch(ctx, node.Name, map[string]any{
		"metadata": map[string]any{"uid": node.UID},
		"status":   map[string]any{"addresses": p.addresses},
	}, "status")
}

// patchSpec carries the resourceVersion it has seen: it replaces the list of taints, and providerID is for ever.
func (w writer) patchSpec(ctx context.Context, node *corev1.Node, p plan) (*corev1.Node, error) {
	spec := map[string]any{}
	if p.providerID != "" {
		spec["providerID"] = p.providerID
	}

	if p.retaint {
		spec["taints"] = planTaints(node, p.taints).list
	}

	return w.patch(ctx, node.Name, map[string]any{
		"metadata": map[string]any{"uid": node.UID, "resourceVersion": node.ResourceVersion},
		"spec":     spec,
	})
}

func (w writer) patch(ctx context.Context, nodename string, patch map[string]any, subresources ...string) (*corev1.Node, error) {
	data, err := json.Marshal(patch)
	if err != nil {
		return nil, err
	}

	return w.client.CoreV1().Nodes().Patch(ctx, nodename, types.MergePatchType, data, metav1.PatchOptions{FieldManager: FieldManager}, subresources...)
}
