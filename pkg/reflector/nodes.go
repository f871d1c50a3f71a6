package reflector

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	coreinformers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
)

// FollowNodes has the machines of all Nodes that say they run Talos tracked as long as their Nodes are there.
func (r *Reflector) FollowNodes(nodes coreinformers.NodeInformer) error {
	track := func(obj any) {
		if node, ok := obj.(*corev1.Node); ok && nodespec.IsTalos(node) {
			r.Track(node.Name, nodespec.DialAddresses(node))
		}
	}

	_, err := nodes.Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: track,
		UpdateFunc: func(old, obj any) {
			// A Node deleted and registered again between two looks: nothing of its predecessor's machine holds for it.
			if before, ok := old.(*corev1.Node); ok && !sameUID(before, obj) {
				r.Untrack(before.Name)
			}

			track(obj)
		},
		DeleteFunc: func(obj any) {
			if key, err := cache.DeletionHandlingMetaNamespaceKeyFunc(obj); err == nil {
				r.Untrack(key)
			}
		},
	})
	if err != nil {
		return fmt.Errorf("watch nodes: %w", err)
	}

	return nil
}

func sameUID(node *corev1.Node, obj any) bool {
	other, ok := obj.(*corev1.Node)

	return ok && other.UID == node.UID
}
