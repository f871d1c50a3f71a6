package node

import (
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/resourceversion"
)

// written remembers in which version our last write left each Node. The informer shows older versions for a moment; a sync of one of
// those would plan the same write again, and run into a conflict with itself.
type written struct {
	mu       sync.Mutex
	versions map[string]string // nodename → resourceVersion
}

func newWritten() *written { return &written{versions: map[string]string{}} }

// note takes down the version in which a write has left node.
func (w *written) note(node *corev1.Node) {
	w.mu.Lock()
	defer w.mu.Unlock()

	w.versions[node.Name] = node.ResourceVersion
}

// outdates tells whether node is a version from before our last write. The version after it is on its way.
func (w *written) outdates(node *corev1.Node) bool {
	w.mu.Lock()
	defer w.mu.Unlock()

	version, known := w.versions[node.Name]
	if !known {
		return false
	}

	order, err := resourceversion.CompareResourceVersion(node.ResourceVersion, version)

	return err == nil && order < 0
}

// forget drops what is known of a Node that is gone.
func (w *written) forget(nodename string) {
	w.mu.Lock()
	defer w.mu.Unlock()

	delete(w.versions, nodename)
}
