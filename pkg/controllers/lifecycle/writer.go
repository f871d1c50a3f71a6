package lifecycle

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/talos-ccm/talos-ccm/pkg/config"
	"github.com/talos-ccm/talos-ccm/pkg/internal/events"
)

// setTaints replaces the taints of the Node. The patch contains UID and resourceVersion, because it replaces the list.
func (c *Controller) setTaints(ctx context.Context, node *corev1.Node, taints []corev1.Taint) error {
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"uid": node.UID, "resourceVersion": node.ResourceVersion},
		"spec":     map[string]any{"taints": taints},
	})
	if err != nil {
		return err
	}

	_, err = c.config.Client.CoreV1().Nodes().Patch(ctx, node.Name, types.MergePatchType, patch, metav1.PatchOptions{FieldManager: component})
	if apierrors.IsNotFound(err) {
		return nil
	} else if err != nil {
		return fmt.Errorf("patch taints of node %s: %w", node.Name, err)
	}

	klog.FromContext(ctx).Info("Updated lifecycle taints", "taints", taints)

	return nil
}

// labelResetting has the boot ID of a machine that was being reset while it had the lease.
const labelResetting = "talos-ccm.node-restriction.kubernetes.io/resetting"

func isResetRecorded(node *corev1.Node) bool {
	bootID, recorded := node.Labels[labelResetting]

	return recorded && bootID == node.Status.NodeInfo.BootID
}

// recordReset records on the Node of the local machine that it is being reset, because the next leader has not seen it.
func (c *Controller) recordReset(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, recordTimeout)
	defer cancel()

	node, err := c.lister.Get(c.config.Resetting(ctx)) // fails only if there is none
	if err != nil || !c.isManaged(node) || c.config.Settings().DryRun {
		return
	}

	patch := fmt.Appendf(nil, `{"metadata":{"uid":%q,"labels":{%q:%q}}}`, node.UID, labelResetting, node.Status.NodeInfo.BootID)

	_, err = c.config.Client.CoreV1().Nodes().Patch(ctx, node.Name, types.MergePatchType, patch, metav1.PatchOptions{FieldManager: component})
	if err != nil {
		klog.FromContext(ctx).Error(err, "Failed to record the reset of the local machine", "node", node.Name)
	}
}

// delete deletes the Node if a live read confirms the verdict. It stores an Event first, because the next leader counts
// deletions by their Events.
func (c *Controller) delete(ctx context.Context, node *corev1.Node, v verdict, s config.CompiledLifecycle) error {
	live, err := c.config.Client.CoreV1().Nodes().Get(ctx, node.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	} else if err != nil {
		return fmt.Errorf("get node %s: %w", node.Name, err)
	}

	if live.UID != node.UID || !c.isManaged(live) {
		return nil // the informer will deliver it
	}

	if err := c.record(ctx, live, v); err != nil {
		return fmt.Errorf("record deletion of node %s: %w", node.Name, err)
	}

	if now := decide(c.evidence(live, c.config.Inventory.Get(node.Name), c.histories[node.Name]), s); now.proof != v.proof || now.weakness != "" {
		return nil
	}

	preconditions := metav1.Preconditions{UID: &live.UID, ResourceVersion: &live.ResourceVersion}

	err = c.config.Client.CoreV1().Nodes().Delete(ctx, node.Name, metav1.DeleteOptions{Preconditions: &preconditions})

	// A webhook may have rejected earlier attempts, so the deletion counts from now on.
	if !isRejection(err) {
		c.deletions[node.UID] = deletion{proof: v.proof, at: c.observed.read()}
	}

	switch {
	case apierrors.IsNotFound(err):
		return nil
	case apierrors.IsConflict(err):
		return fmt.Errorf("delete node %s: %w", node.Name, err)
	case err != nil:
		c.config.Recorder.Eventf(live, corev1.EventTypeWarning, ReasonDeletingFailed, "Failed to delete node: %v", err)

		return fmt.Errorf("delete node %s: %w", node.Name, err)
	}

	deletionsTotal.WithLabelValues(string(v.proof)).Inc()
	klog.FromContext(ctx).Info("Deleted node", "proof", v.proof, "reason", v.message)

	return nil
}

// isRejection reports whether the API server has not carried out the request. Other errors may be a lost reply.
func isRejection(err error) bool {
	status := apierrors.APIStatus(nil)

	return errors.As(err, &status) && status.Status().Code < http.StatusInternalServerError
}

// record stores the Event of a deletion and counts the deletion. It does nothing if an earlier attempt has done so.
func (c *Controller) record(ctx context.Context, node *corev1.Node, v verdict) error {
	if c.deletions[node.UID].proof == v.proof {
		return nil
	}

	now := metav1.NewTime(c.config.Clock.Now())

	_, err := c.config.Client.CoreV1().Events(metav1.NamespaceDefault).Create(ctx, &corev1.Event{
		ObjectMeta:     metav1.ObjectMeta{GenerateName: node.Name + ".", Namespace: metav1.NamespaceDefault},
		InvolvedObject: corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: node.Name, UID: node.UID},
		Reason:         ReasonDeleting,
		Message:        events.Truncate(fmt.Sprintf("Deleting node, which is not ready: %s", v.message)),
		Type:           corev1.EventTypeNormal,
		Source:         corev1.EventSource{Component: component},
		FirstTimestamp: now, LastTimestamp: now, Count: 1,
	}, metav1.CreateOptions{})
	if err != nil {
		return err
	}

	c.deletions[node.UID] = deletion{proof: v.proof, at: c.observed.read()}

	return nil
}

// loadDeletions counts the deletions that earlier leaders have recorded, as if they were recorded now. A new leader may
// therefore wait ten minutes before it deletes a Node.
func (c *Controller) loadDeletions(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, syncTimeout)
	defer cancel()

	selector := fields.Set{"involvedObject.kind": "Node", "reason": ReasonDeleting, "source": component}.AsSelector().String()

	list, err := c.config.Client.CoreV1().Events(metav1.NamespaceDefault).List(ctx, metav1.ListOptions{FieldSelector: selector})
	if err != nil {
		return fmt.Errorf("list Events of deletions: %w", err)
	}

	for i := range list.Items {
		c.deletions[list.Items[i].InvolvedObject.UID] = deletion{at: c.observed.read()}
	}

	return nil
}
