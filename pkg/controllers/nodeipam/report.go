package nodeipam

import (
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/record"
)

// Reasons of the Events on Nodes, and of waiting in the metrics.
const (
	// ReasonAllocatorConflict: somebody else allocates pod CIDRs too.
	ReasonAllocatorConflict = "PodCIDRAllocatorConflict"
	// ReasonAllocatorUnknown: what kube-controller-manager does, or what the service CIDRs are, could not be read.
	ReasonAllocatorUnknown = "PodCIDRAllocatorUnknown"
	// ReasonClusterCIDRMissing: neither the options nor Talos name any.
	ReasonClusterCIDRMissing = "PodCIDRClusterCIDRMissing"
	// ReasonMachineUnknown: the machine has to be known for this Node, and is not.
	ReasonMachineUnknown = "PodCIDRMachineUnavailable"
	// ReasonNotInitialized: pools are selected, and the Node is not initialized.
	ReasonNotInitialized = "PodCIDRNodeNotInitialized"
	// ReasonPrefixMissing: the machine has no global IPv6 prefix.
	ReasonPrefixMissing = "PodCIDRIPv6PrefixMissing"
	// ReasonPrefixTooSmall: a prefix cannot be cut into blocks of the wanted size.
	ReasonPrefixTooSmall = "PodCIDRPrefixTooSmall"
	// ReasonMaxPodsUnknown: the size of the block follows from max-pods, and the kubelet has not said it.
	ReasonMaxPodsUnknown = "PodCIDRMaxPodsUnknown"
	// ReasonExhausted: no block is free.
	ReasonExhausted = "PodCIDRPoolExhausted"
	// ReasonWriteFailed: the API server refused the blocks, or did not answer.
	ReasonWriteFailed = "PodCIDRWriteFailed"
	// ReasonOverlap: the Node's podCIDRs overlap another Node's.
	ReasonOverlap = "PodCIDROverlap"
	// ReasonInvalid: the Node's podCIDRs are not CIDRs.
	ReasonInvalid = "PodCIDRInvalid"
)

// finding is why a Node is without podCIDRs, or what is wrong with those it has.
type finding struct {
	reason  string
	message string
}

// reporter turns findings into Events and metrics: once when a finding appears, not again while it holds.
type reporter struct {
	recorder record.EventRecorder

	mu    sync.Mutex
	known map[string]string // nodename → reason
}

func newReporter(recorder record.EventRecorder) *reporter {
	return &reporter{recorder: recorder, known: map[string]string{}}
}

// report makes f all that is to be said of node.
func (r *reporter) report(node *corev1.Node, f finding) {
	r.mu.Lock()
	defer r.mu.Unlock()

	if r.known[node.Name] == f.reason {
		return
	}

	r.known[node.Name] = f.reason

	failures.WithLabelValues(f.reason).Inc()
	r.recorder.Event(node, corev1.EventTypeWarning, f.reason, f.message)
}

// clear takes down that there is nothing to be said of a Node, or no Node.
func (r *reporter) clear(nodename string) {
	r.mu.Lock()
	defer r.mu.Unlock()

	delete(r.known, nodename)
}

// byReason counts the Nodes with a finding.
func (r *reporter) byReason() map[string]int {
	r.mu.Lock()
	defer r.mu.Unlock()

	counts := map[string]int{}
	for _, reason := range r.known {
		counts[reason]++
	}

	return counts
}
