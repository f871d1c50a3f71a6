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

// stopwatch measures for how long the controller has observed the cluster. A longer gap between two readings counts as
// maxGap: neither a jump of the clock nor a process that was suspended ends a grace period. It is safe for concurrent
// use.
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

// heartbeatLimit is the longest time after which Kubernetes notices that a kubelet has stopped. By default, it waits for
// 50 s (--node-monitor-grace-period).
const heartbeatLimit = 2 * time.Minute

// history is what was observed of one Node. Times are readings of the stopwatch.
type history struct {
	uid types.UID
	// silent is true since silentSince, while the machine does not respond.
	silent      bool
	silentSince time.Duration
	// unreported is true if the kubelet has stopped to report since then, and outdated if it has reported again, or for
	// longer than a stopped kubelet explains.
	unreported, outdated bool
	// proof holds since goneSince without interruption; empty if there is none.
	proof     Proof
	goneSince time.Duration
	// shutdown holds since shutdownSince without interruption.
	shutdown      bool
	shutdownSince time.Duration
}

// after returns the history of a Node after its state was observed. Another Node of the same name has a new one.
func (h history) after(node *corev1.Node, condition inventory.Condition, now time.Duration) history {
	reporting, silent := reports(node), condition != inventory.Current

	if h.uid != node.UID {
		h = history{uid: node.UID}
	}

	if !silent || !h.silent {
		h.silent, h.silentSince, h.unreported, h.outdated = silent, now, false, false
	}

	if silent && !reporting && !h.unreported {
		h.unreported, h.outdated = true, now-h.silentSince > heartbeatLimit
	}

	h.outdated = h.outdated || (silent && reporting && h.unreported)

	return h
}

// judged returns the history after a verdict.
func (h history) judged(v verdict, now time.Duration) history {
	if h.proof != v.proof {
		h.proof, h.goneSince = v.proof, now
	}

	if h.shutdown != v.shutdown {
		h.shutdown, h.shutdownSince = v.shutdown, now
	}

	return h
}

// deletionWindow is the period in which deletions are limited.
const deletionWindow = 10 * time.Minute

// deletion is a recorded deletion of a Node. The proof is empty if another leader has recorded it.
type deletion struct {
	proof Proof
	at    time.Duration // reading of the stopwatch
}

// deletions are the recent ones.
type deletions map[types.UID]deletion

// recent returns the number of deletions in the window before now, and forgets earlier ones.
func (d deletions) recent(now time.Duration) int {
	for uid, recorded := range d {
		if now-recorded.at >= deletionWindow {
			delete(d, uid)
		}
	}

	return len(d)
}

// maxDeletions is the number of deletions in one window: a tenth of the managed Nodes, but at least one.
func maxDeletions(managed int) int { return max(1, managed/10) }
