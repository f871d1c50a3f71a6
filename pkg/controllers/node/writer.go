package node

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	corev1ac "k8s.io/client-go/applyconfigurations/core/v1"
)

var errChanged = errors.New("another client changed it after the plan was made")

// write writes the plan in the order that makes initialization atomic for the scheduler: labels and annotations,
// addresses and last, in one request, providerID and taints. It returns the Node after the last successful request, or
// the given Node. Every request contains the UID of the Node that the plan was made for, so that it can neither change
// another Node of the same name nor create one.
func (c *Controller) write(ctx context.Context, node *corev1.Node, p plan) (*corev1.Node, error) {
	for _, step := range []struct {
		action string
		needed bool
		write  func(context.Context, *corev1.Node, plan) (*corev1.Node, error)
	}{
		{"take over from the upstream Talos CCM", p.managedFields != nil, c.patchManagedFields},
		{"apply labels and annotations", p.apply, c.apply},
		{"patch addresses", p.addresses != nil, c.patchAddresses},
		{"patch spec", p.patchesSpec(), c.patchSpec},
	} {
		if !step.needed {
			continue
		}

		written, err := step.write(ctx, node, p)
		if err != nil {
			return node, fmt.Errorf("%s: %w", step.action, err)
		}

		node = written
	}

	return node, nil
}

// patchManagedFields contains the resourceVersion, because it replaces a list.
func (c *Controller) patchManagedFields(ctx context.Context, node *corev1.Node, p plan) (*corev1.Node, error) {
	return c.patch(ctx, node.Name, map[string]any{
		"metadata": map[string]any{"uid": node.UID, "resourceVersion": node.ResourceVersion, "managedFields": p.managedFields},
	})
}

// apply does not force ownership: if another client has taken a key since the plan was made, the request fails, and
// the next sync skips the key. It contains the resourceVersion if it records a taint as enforced: the plan is right
// about the taint's owner in that version only, and the record hides it afterwards. (A taint that another client adds
// between this request and patchSpec is mistaken for an enforced one.)
func (c *Controller) apply(ctx context.Context, node *corev1.Node, p plan) (*corev1.Node, error) {
	config := corev1ac.Node(node.Name).WithUID(node.UID).WithLabels(p.labels).WithAnnotations(p.annotations)
	if p.recordsTaint {
		config.WithResourceVersion(node.ResourceVersion)
	}

	return c.config.Client.CoreV1().Nodes().Apply(ctx, config, metav1.ApplyOptions{FieldManager: FieldManager})
}

// patchAddresses uses a JSON merge patch, which replaces the list: the merge key for strategic merge patches is the
// type, but a Node can have several addresses of one type (https://github.com/kubernetes/kubernetes/issues/79391).
func (c *Controller) patchAddresses(ctx context.Context, node *corev1.Node, p plan) (*corev1.Node, error) {
	return c.patch(ctx, node.Name, map[string]any{
		"metadata": map[string]any{"uid": node.UID},
		"status":   map[string]any{"addresses": p.addresses},
	}, "status")
}

// patchSpec contains the resourceVersion, because it replaces the list of taints, and a providerID cannot be changed
// once it is set. The other requests do not contain it: what else the plan is about must be in place now.
func (c *Controller) patchSpec(ctx context.Context, node *corev1.Node, p plan) (*corev1.Node, error) {
	left, err := makePlan(node, p.spec)
	if err != nil {
		return nil, err
	} else if left.apply || left.addresses != nil || left.providerID != p.providerID {
		return nil, apierrors.NewConflict(corev1.Resource("nodes"), node.Name, errChanged)
	}

	spec := map[string]any{}
	if p.providerID != "" {
		spec["providerID"] = p.providerID
	}

	if p.updateTaints {
		spec["taints"] = planTaints(node, p.spec.Taints).list
	}

	return c.patch(ctx, node.Name, map[string]any{
		"metadata": map[string]any{"uid": node.UID, "resourceVersion": node.ResourceVersion},
		"spec":     spec,
	})
}

func (c *Controller) patch(ctx context.Context, nodename string, patch map[string]any, subresources ...string) (*corev1.Node, error) {
	data, err := json.Marshal(patch)
	if err != nil {
		return nil, err
	}

	return c.config.Client.CoreV1().Nodes().Patch(ctx, nodename, types.MergePatchType, data, metav1.PatchOptions{FieldManager: FieldManager}, subresources...)
}
