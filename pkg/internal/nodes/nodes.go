// Package nodes holds the event handler of Nodes that all controllers share.
package nodes

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	coreinformers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/tools/cache"
)

// Watch calls changed for each change of a Node. before is nil for a Node that was added, and after for one that was
// deleted. A Node that was deleted and created again between two lists, which the informer reports as an update, is
// deleted and added. hasSynced reports whether changed was called for all Nodes of the first list.
func Watch(informer coreinformers.NodeInformer, changed func(before, after *corev1.Node)) (hasSynced cache.InformerSynced, err error) {
	handle := func(old, obj any) {
		if deleted, isUnknown := old.(cache.DeletedFinalStateUnknown); isUnknown {
			old = deleted.Obj
		}

		before, _ := old.(*corev1.Node)
		after, _ := obj.(*corev1.Node)

		switch {
		case before == nil && after == nil:
		case before != nil && after != nil && before.UID != after.UID:
			changed(before, nil)
			changed(nil, after)
		default:
			changed(before, after)
		}
	}

	registration, err := informer.Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(obj any) { handle(nil, obj) }, UpdateFunc: handle, DeleteFunc: func(obj any) { handle(obj, nil) },
	})
	if err != nil {
		return nil, fmt.Errorf("watch nodes: %w", err)
	}

	return registration.HasSynced, nil
}
