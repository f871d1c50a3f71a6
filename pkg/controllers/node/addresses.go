package node

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/talos-ccm/talos-ccm/pkg/internal/events"
)

// conflictPeriod is how long the replacement of a Node's addresses by another client counts.
const conflictPeriod = time.Hour

// addressWriters notices clients that replace the addresses of a Node again and again.
type addressWriters struct {
	mu     sync.Mutex
	byNode map[string]addressWriter
}

// addressWriter is the field manager that replaced the addresses of a Node last.
type addressWriter struct {
	manager string
	times   int
	last    time.Time
	// correct are the addresses while they are right; nil after they were replaced.
	correct []corev1.NodeAddress
}

func (a *addressWriters) forget(nodename string) {
	a.mu.Lock()
	defer a.mu.Unlock()

	delete(a.byNode, nodename)
}

// observe returns a problem if a client has replaced the addresses of the Node twice. wanted replaces the addresses; nil
// if they are right.
func (a *addressWriters) observe(node *corev1.Node, wanted []corev1.NodeAddress, now time.Time) []events.Problem {
	a.mu.Lock()
	defer a.mu.Unlock()

	w := a.byNode[node.Name]

	switch {
	case wanted == nil:
		w.correct = node.Status.Addresses
	case slices.Equal(w.correct, wanted): // the machine still has the same addresses
		addressesReplaced.Inc()

		manager := addressManager(node)
		if manager != w.manager || now.Sub(w.last) > conflictPeriod {
			w.times = 0
		}

		w = addressWriter{manager: manager, times: w.times + 1, last: now}
	default: // the machine has other addresses
		w.correct = nil
	}

	a.byNode[node.Name] = w

	if w.times < 2 || now.Sub(w.last) > conflictPeriod {
		return nil
	}

	return []events.Problem{{Reason: ReasonOwnershipConflict, Subject: "addresses", Message: fmt.Sprintf(
		"The addresses are replaced by field manager %q, and restored each time; let only one of the two manage the Node", w.manager)}}
}

// addressManager returns the other field manager that wrote status.addresses last.
func addressManager(node *corev1.Node) string {
	others := slices.DeleteFunc(slices.Clone(node.ManagedFields), func(e metav1.ManagedFieldsEntry) bool {
		return e.Manager == FieldManager || e.FieldsV1 == nil || e.Time == nil || !strings.Contains(e.FieldsV1.GetRawString(), `"f:addresses"`)
	})
	if len(others) == 0 {
		return "unknown"
	}

	return slices.MaxFunc(others, func(x, y metav1.ManagedFieldsEntry) int { return x.Time.Compare(y.Time.Time) }).Manager
}
