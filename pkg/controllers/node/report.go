package node

import (
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/record"
)

// Reasons of the Events on Nodes.
const (
	ReasonInitialized       = "Initialized"
	ReasonMetadataPending   = "MetadataPending"
	ReasonUnreachable       = "MachineUnreachable"
	ReasonIdentityMismatch  = "IdentityMismatch"
	ReasonOwnershipConflict = "OwnershipConflict"
	ReasonInvalidValue      = "InvalidValue"
	ReasonProviderIDInUse   = "ProviderIDInUse"
)

// finding is something an operator should know of a Node. It holds until a sync no longer finds it.
type finding struct {
	reason string
	// subject tells findings of one reason apart, such as the key concerned; empty where there can be only one.
	subject string
	message string
	// kind is for the metric of values that were left out; empty for other findings.
	kind string
}

func (f finding) count() {
	if f.kind != "" {
		transformationErrors.WithLabelValues(f.kind).Inc()
	}
}

// reporter turns findings into Events: one when a finding appears, none while it holds, however often it is found.
type reporter struct {
	recorder record.EventRecorder

	mu    sync.Mutex
	known map[string]map[[2]string]bool // node → reason and subject
}

func newReporter(recorder record.EventRecorder) *reporter {
	return &reporter{recorder: recorder, known: map[string]map[[2]string]bool{}}
}

// report makes findings all that holds of node.
func (r *reporter) report(node *corev1.Node, findings []finding) {
	r.mu.Lock()
	defer r.mu.Unlock()

	known := r.known[node.Name]
	now := map[[2]string]bool{}

	for _, f := range findings {
		id := [2]string{f.reason, f.subject}
		now[id] = true

		if !known[id] {
			f.count()
			r.recorder.Event(node, corev1.EventTypeWarning, f.reason, f.message)
		}
	}

	r.known[node.Name] = now
}

// forget drops what is known of a Node that is gone.
func (r *reporter) forget(nodename string) {
	r.mu.Lock()
	defer r.mu.Unlock()

	delete(r.known, nodename)
}
