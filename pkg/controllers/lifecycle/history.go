package lifecycle

import (
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/inventory"
)

// maxGap is the longest interval between two observations that counts in full.
const maxGap = 15 * time.Second

// stopwatch measures how long the controller has observed the cluster. A gap between two readings counts as maxGap at
// most, so neither a jump of the clock nor a suspended process ends a grace period. It is safe for concurrent use.
type stopwatch struct {
	clock clock.PassiveClock

	mu      sync.Mutex
	last    time.Time
	elapsed time.Duration
}

// read returns the observed time since the first reading.
func (s *stopwatch) read() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()

	now := s.clock.Now()
	if !s.last.IsZero() {
		s.elapsed += min(max(now.Sub(s.last), 0), maxGap)
	}

	s.last = now

	return s.elapsed
}

// history is what the controller has observed of a Node. Times are readings of the stopwatch.
type history struct {
	uid types.UID
	// bootID is the boot ID that the kubelet had reported when the machine last responded.
	bootID string
	// respondedAt is when the machine last responded or its kubelet last reported.
	respondedAt time.Duration
	// proof has held since goneSince without interruption; empty if there is none.
	proof     Proof
	goneSince time.Duration
	// shutdown has held since shutdownSince without interruption.
	shutdown      bool
	shutdownSince time.Duration
	// explained is true if the machine announced a shutdown or a reset before it stopped responding, or if Cluster
	// Autoscaler has marked the Node for deletion.
	explained bool
}

// after returns the history after an observation. It starts over for a new Node of the same name.
func (h history) after(node *corev1.Node, entry inventory.Entry, now time.Duration) history {
	if h.uid != node.UID {
		h = history{uid: node.UID, bootID: node.Status.NodeInfo.BootID, respondedAt: now}
	}

	if entry.Condition == inventory.Current {
		h.bootID = node.Status.NodeInfo.BootID
	}

	if entry.Condition == inventory.Current || reports(node) {
		h.respondedAt = now
	}

	return h
}
