package nodeipam_test

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	watchtools "k8s.io/client-go/tools/watch"

	"github.com/talos-ccm/talos-ccm/pkg/controllers/nodeipam"
)

var (
	schedules = flag.Int("schedules", 80, "number of random schedules of the crash test")
	seed      = flag.Uint64("seed", 0, "seed of the crash test; 0: another each time")
)

const (
	// worlds is the number of concurrent histories.
	worlds = 16
	// capacity is the number of Nodes that the pools have blocks for, and crowd the maximum number of Nodes.
	capacity = 8
	crowd    = 10
	// patience is how long a Node may wait for its blocks without a refresh. A retry is due earlier.
	patience = 30 * time.Second
)

// tally counts events of all histories.
type tally struct{ processes, given, removed, faults, refreshes atomic.Int64 }

// TestController_NeitherAllocatesTwiceNorLeaks runs random schedules: Nodes are created and deleted while processes
// crash between any two steps, lose responses, read a stale cache, and hand over leadership. No two Nodes may ever
// share an address of their blocks, and at the end of a schedule every block can be allocated: none has leaked.
func TestController_NeitherAllocatesTwiceNorLeaks(t *testing.T) {
	t.Parallel()

	if *seed == 0 {
		*seed = rand.Uint64()
	}

	var total tally

	t.Cleanup(func() {
		t.Logf("%d schedules, seed %d: %d processes, %d Nodes given blocks, %d deleted, %d writes with a fault, %d refreshes",
			*schedules, *seed, total.processes.Load(), total.given.Load(), total.removed.Load(), total.faults.Load(), total.refreshes.Load())
		assert.LessOrEqual(t, total.refreshes.Load(), int64(1+*schedules/100), "schedules that required a refresh")
	})

	for i := range worlds {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			h := newHistory(t, i, &total)
			for range (*schedules + worlds - 1) / worlds {
				h.schedule()
			}
		})
	}
}

// history is a sequence of schedules over the same Nodes.
type history struct {
	*world
	*tally

	rng     *rand.Rand
	options nodeipam.Options
	process *process             // the current one
	nodes   map[string]types.UID // the Nodes that exist, by name

	mu     sync.Mutex
	blocks map[types.UID][]netip.Prefix // of the Nodes that the auditor has seen with podCIDRs
}

func newHistory(t *testing.T, number int, total *tally) *history {
	t.Helper()

	h := &history{world: newWorld(t), tally: total, nodes: map[string]types.UID{}, blocks: map[types.UID][]netip.Prefix{}}
	h.rng = rand.New(rand.NewPCG(*seed, uint64(number))) //nolint:gosec // a seed can be given
	h.options.ClusterCIDRs = []netip.Prefix{
		netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 200, byte(number * capacity), 0}), 21),
		netip.PrefixFrom(netip.AddrFrom16([16]byte{0xfd, 1: byte(number), 15: 0}), 77), // eight of /80
	}
	h.audit()
	h.begin()

	return h
}

// schedule takes a few random steps, and then checks that no block has leaked and that every Node gets blocks.
func (h *history) schedule() {
	h.Helper()
	h.takeOver()

	faults := h.rng.IntN(4) // calm to mad

	h.process.wire.plan(h.faultsOf(faults))
	h.churn()

	for range 3 + h.rng.IntN(6) {
		h.step()

		if h.process.wire.killed() {
			h.takeOver()
			h.process.wire.plan(h.faultsOf(faults))
		}
	}

	h.rest()
}

// churn creates and deletes many Nodes.
func (h *history) churn() {
	for i := range crowd {
		name := fmt.Sprintf("n%d", i)

		if h.rng.IntN(2) == 0 {
			h.delete(name)
		}

		if h.rng.IntN(2) == 0 {
			h.create(name)
		}
	}
}

// begin starts a leader.
func (h *history) begin() {
	h.Helper()
	h.process = h.run(h.options)
	h.processes.Add(1)
}

// takeOver replaces the leading process, which is killed or hands over. The cache of the new leader may be stale: it may
// have synced and then been paused while the previous leader continued.
func (h *history) takeOver() {
	h.Helper()

	before, heldUp := h.process, h.rng.IntN(2) == 0
	h.process = h.prepare(h.options)

	if heldUp {
		h.process.wire.pause()
		h.churn()
		h.linger(before)
	}

	if h.rng.IntN(2) == 0 {
		before.wire.kill()
	}

	before.Stop()
	before.wire.land() // a write that is on its way succeeds or fails before the lease expires
	h.process.lead()
	h.processes.Add(1)
}

// faultsOf plans the faults of one process; a higher degree has more of them.
func (h *history) faultsOf(degree int) func(string) fault {
	rng := rand.New(rand.NewPCG(h.rng.Uint64(), 0)) //nolint:gosec // a seed can be given

	var mu sync.Mutex

	return func(string) fault {
		mu.Lock()
		defer mu.Unlock()

		if rng.IntN(5) >= degree {
			return none
		}

		h.faults.Add(1)

		return []fault{refused, unanswered, late, killBefore, killAfter}[rng.IntN(5)]
	}
}

// step performs one random action.
func (h *history) step() {
	h.Helper()

	name := fmt.Sprintf("n%d", h.rng.IntN(crowd))

	switch h.rng.IntN(17) {
	case 0, 1, 2:
		h.create(name)
	case 3, 4:
		h.delete(name)
	case 5:
		h.delete(name)
		h.create(name)
	case 6:
		if h.nodes[name] != "" { // a new version of a Node, for which the process has not allocated
			h.patch(name, "test", fmt.Sprintf(`{"metadata":{"annotations":{"test/touched":"%d"}}}`, h.rng.Uint32()))
		}
	case 7:
		h.process.wire.pause()
	case 8:
		h.process.wire.resume()
	case 9:
		h.process.wire.kill()
	case 10:
		h.takeOver()
	case 11:
		h.process.wire.land()
	default:
		h.linger(h.process)
	}
}

// rest ends all faults and creates more Nodes than there are blocks. Every block must be assigned: none has leaked. Then it
// deletes Nodes, and the others must get their blocks. The clock stands still, because the periodic refresh would queue
// Nodes that no event has queued. It steps only if nothing else helps, which the test allows rarely: the blocks of a Node
// that was deleted while a new leader listed the Nodes are released by the next refresh.
func (h *history) rest() {
	h.Helper()
	h.process.wire.resume()
	h.process.wire.plan(calm)
	h.process.wire.land()

	for i := range crowd {
		h.create(fmt.Sprintf("n%d", i))
	}

	refresh := time.AfterFunc(patience, func() {
		h.clock.Step(30 * time.Second)
		h.refreshes.Add(1)
	})

	assigned := func() bool {
		if h.process.wire.killed() { // also later, by a write that began before the faults ended
			h.process.Stop()
			h.begin()
		}

		return len(h.served()) == capacity
	}

	h.eventually("every block is assigned", assigned)
	refresh.Stop()

	for _, name := range h.served()[:crowd-capacity] {
		h.delete(name)
	}

	h.eventually("every Node has blocks", assigned)

	if h.Failed() {
		h.FailNow()
	}
}

// linger waits a moment, until the process is idle or dead. How much it achieves is random.
func (h *history) linger(p *process) {
	for end := time.Now().Add(100 * time.Millisecond); time.Now().Before(end) && !p.wire.killed() && len(h.served()) < len(h.nodes); {
		time.Sleep(5 * time.Millisecond)
	}
}

// served returns the names of the Nodes whose blocks the auditor has seen, in random order.
func (h *history) served() (names []string) {
	h.mu.Lock()
	defer h.mu.Unlock()

	for name, uid := range h.nodes {
		if h.blocks[uid] != nil {
			names = append(names, name)
		}
	}

	return names
}

func (h *history) create(name string) {
	if h.nodes[name] == "" {
		h.nodes[name] = h.register(name).UID
	}
}

func (h *history) delete(name string) {
	if h.nodes[name] != "" {
		h.remove(name)
		delete(h.nodes, name)
	}
}

// audit checks every version of every Node, in order, until the test ends.
func (h *history) audit() {
	h.Helper()

	client := h.Client.CoreV1().Nodes()
	list, err := client.List(h.Context(), metav1.ListOptions{LabelSelector: h.label()})
	require.NoError(h, err)

	w, err := watchtools.NewRetryWatcherWithContext(h.Context(), list.ResourceVersion, &cache.ListWatch{
		WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			options.LabelSelector = h.label()

			return client.Watch(ctx, options)
		},
	})
	require.NoError(h, err)

	done := make(chan struct{})

	go func() {
		defer close(done)

		for event := range w.ResultChan() {
			h.see(event)
		}
	}()

	h.Cleanup(func() {
		w.Stop()
		<-done
	})
}

// see checks one version of a Node.
func (h *history) see(event watch.Event) {
	node, ok := event.Object.(*corev1.Node)

	h.mu.Lock()
	defer h.mu.Unlock()

	switch {
	case h.Context().Err() != nil:
	case !ok:
		h.Errorf("the auditor's watch broke: %v", event.Object)
	case event.Type == watch.Deleted:
		delete(h.blocks, node.UID)
		h.removed.Add(1)
	case len(node.Spec.PodCIDRs) > 0 && h.blocks[node.UID] == nil:
		h.check(node)
	}
}

// check checks the first version of a Node with podCIDRs. h.mu must be held.
func (h *history) check(node *corev1.Node) {
	blocks := prefixes(node.Spec.PodCIDRs...)
	valid := node.Spec.PodCIDR == node.Spec.PodCIDRs[0] && slices.EqualFunc(h.options.ClusterCIDRs, blocks, func(cidr, block netip.Prefix) bool {
		return cidr.Contains(block.Addr())
	})
	assert.True(h, valid, "node %s: podCIDR %s, podCIDRs %v, want one of each of %v", node.Name, node.Spec.PodCIDR, blocks, h.options.ClusterCIDRs)

	for other, theirs := range h.blocks {
		for _, block := range blocks {
			assert.False(h, slices.ContainsFunc(theirs, block.Overlaps), "node %s: podCIDRs %v overlap those of UID %s, %v", node.Name, blocks, other, theirs)
		}
	}

	h.blocks[node.UID] = blocks
	h.given.Add(1)
}
