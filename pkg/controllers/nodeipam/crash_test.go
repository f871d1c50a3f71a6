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

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/talos-ccm/talos-ccm/pkg/controllers/nodeipam"
)

var (
	schedules = flag.Int("schedules", 1000, "number of random schedules of the crash test")
	seed      = flag.Uint64("seed", 0, "seed of the crash test; 0: another each time")
)

const (
	// worlds is the number of concurrent histories.
	worlds = 16
	// capacity is the number of Nodes that the pools have blocks for, and crowd the maximum number of Nodes.
	capacity = 8
	crowd    = 10
)

// TestController_NeitherAllocatesTwiceNorLeaks runs random schedules: Nodes are created and deleted while processes
// crash between any two steps, lose responses, read a stale cache, and hand over leadership. No two Nodes may ever
// share an address of their blocks, and at the end of a schedule every block can be allocated: none has leaked.
func TestController_NeitherAllocatesTwiceNorLeaks(t *testing.T) {
	t.Parallel()

	if *seed == 0 {
		*seed = rand.Uint64()
	}

	t.Logf("%d schedules, seed %d", *schedules, *seed)

	var total tally

	t.Run("worlds", func(t *testing.T) {
		for i := range worlds {
			t.Run(fmt.Sprint(i), func(t *testing.T) {
				t.Parallel()

				h := newHistory(t, i)
				for range (*schedules + worlds - 1) / worlds {
					h.schedule()
				}

				total.add(h.finish())
			})
		}
	})

	t.Logf("%s", total.String())
}

// tally counts events of a test run.
type tally struct {
	mu sync.Mutex

	schedules, lives, given, removed, faults int
}

func (t *tally) add(other *tally) {
	t.mu.Lock()
	defer t.mu.Unlock()

	t.schedules += other.schedules
	t.lives += other.lives
	t.given += other.given
	t.removed += other.removed
	t.faults += other.faults
}

// String implements fmt.Stringer.
func (t *tally) String() string {
	return fmt.Sprintf("%d schedules: %d processes, %d Nodes given blocks, %d deleted, %d writes with a fault", t.schedules, t.lives, t.given, t.removed, t.faults)
}

// history is a sequence of schedules over the same Nodes.
type history struct {
	*world

	rng     *rand.Rand
	options nodeipam.Options
	auditor *auditor
	tally   tally
	writes  atomic.Int64 // with a fault

	// The current process.
	process *process
	wire    *wire
}

func newHistory(t *testing.T, number int) *history {
	h := &history{world: newWorld(t), rng: rand.New(rand.NewPCG(*seed, uint64(number)))} //nolint:gosec // a seed can be given
	h.options.ClusterCIDRs = []netip.Prefix{
		netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 200, byte(number * capacity), 0}), 21),
		netip.PrefixFrom(netip.AddrFrom16([16]byte{0xfd, 1: byte(number), 15: 0}), 77), // eight of /80
	}
	h.auditor = h.audit()

	return h
}

// schedule takes a few random steps, and then waits until every Node has blocks.
func (h *history) schedule() {
	h.Helper()
	h.takeOver()

	faults := h.rng.IntN(4) // calm to mad

	h.wire.plan(h.faults(faults))
	h.churn()

	for range 3 + h.rng.IntN(6) {
		h.step()

		if h.wire.killed() {
			h.takeOver()
			h.wire.plan(h.faults(faults))
		}
	}

	h.rest()
	h.tally.schedules++
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

// takeOver replaces the leading process, which is killed or hands over. The cache of the new leader may be stale: it may
// have synced and then been paused while the previous leader continued.
func (h *history) takeOver() {
	h.Helper()

	if h.process == nil {
		h.begin()

		return
	}

	before, heldUp := h.wire, h.rng.IntN(2) == 0

	process, wire := h.process, newWire()
	h.process, h.wire = h.prepare(setup{Options: h.options, wire: wire}), wire

	if heldUp {
		wire.pause()
		h.churn()
		h.linger()
	}

	if h.rng.IntN(2) == 0 {
		before.kill()
	}

	process.stop()
	before.land() // a write that is on its way is done, or refused, within the time that the lease leaves
	h.process.lead()

	h.tally.lives++
}

// begin starts the first leader.
func (h *history) begin() {
	h.Helper()

	h.wire = newWire()
	h.process = h.run(setup{Options: h.options, wire: h.wire})
	h.tally.lives++
}

// faults plans the faults of one process; a higher degree has more of them.
func (h *history) faults(degree int) func(string) fault {
	rng := rand.New(rand.NewPCG(h.rng.Uint64(), 0)) //nolint:gosec // a seed can be given

	return func(string) fault {
		if rng.IntN(5) >= degree {
			return none
		}

		h.writes.Add(1)

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
		h.touch(name)
	case 7:
		h.wire.pause()
	case 8:
		h.wire.resume()
	case 9:
		h.wire.kill()
	case 10:
		h.takeOver()
	case 11:
		h.wire.land()
	default:
		h.linger()
	}
}

// rest ends all faults, creates as many Nodes as there are blocks, and waits until each has one. The process keeps running,
// so that anything it has leaked is missing.
func (h *history) rest() {
	h.Helper()
	h.wire.resume()
	h.wire.plan(calm)
	h.wire.land()

	for i := range crowd {
		if name := fmt.Sprintf("n%d", i); i < capacity {
			h.create(name)
		} else {
			h.delete(name)
		}
	}

	h.eventually("every Node has blocks", func() bool {
		if h.wire.killed() {
			h.process.stop()
			h.begin()
		}

		return h.served()
	})

	if h.Failed() {
		h.FailNow()
	}
}

// linger waits a moment, until the process is idle or dead. How much it achieves is random.
func (h *history) linger() {
	_ = wait.PollUntilContextTimeout(h.Context(), pollInterval, 250*time.Millisecond, true, func(context.Context) (bool, error) {
		return h.wire.killed() || h.served(), nil
	})
}

// served reports whether every Node has blocks.
func (h *history) served() bool {
	list, err := h.client.CoreV1().Nodes().List(h.Context(), metav1.ListOptions{LabelSelector: h.selector()})
	h.require(err)

	return !slices.ContainsFunc(list.Items, func(n corev1.Node) bool { return len(n.Spec.PodCIDRs) == 0 })
}

func (h *history) create(name string) {
	if _, err := h.tryRegister(h.Context(), name); err != nil && !apierrors.IsAlreadyExists(err) {
		h.Fatal(err)
	}
}

func (h *history) delete(name string) { h.remove(name) }

// touch makes a new version of a Node, for which the process has not allocated.
func (h *history) touch(name string) {
	node, err := h.client.CoreV1().Nodes().Get(h.Context(), h.node(name), metav1.GetOptions{})
	if err != nil {
		return
	}

	node.Annotations = map[string]string{"test/touched": fmt.Sprint(h.rng.Uint32())}

	_, err = h.client.CoreV1().Nodes().Update(h.Context(), node, metav1.UpdateOptions{})
	if err != nil && !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) {
		h.Fatal(err)
	}
}

func (h *history) finish() *tally {
	h.Helper()
	h.process.stop()

	h.tally.given, h.tally.removed = h.auditor.finish()
	h.tally.faults = int(h.writes.Load())

	return &h.tally
}

// auditor checks every version of every Node, in order.
type auditor struct {
	*history

	done           chan struct{}
	blocks         map[string][]netip.Prefix
	given, removed int
}

func (h *history) audit() *auditor {
	h.Helper()

	w := h.watch()
	a := &auditor{history: h, done: make(chan struct{}), blocks: map[string][]netip.Prefix{}}

	go func() {
		defer close(a.done)

		for event := range w.ResultChan() {
			if !a.see(event) {
				return
			}
		}
	}()

	// The auditor must not fail after the test has ended.
	h.Cleanup(func() {
		w.Stop()
		<-a.done
	})

	return a
}

// see checks one version of a Node, and returns false after the last one.
func (a *auditor) see(event watch.Event) bool {
	node, ok := event.Object.(*corev1.Node)

	switch {
	case a.Context().Err() != nil, ok && node.Name == a.node(lastNode):
		return false
	case !ok:
		a.Errorf("the auditor's watch broke: %v", event.Object)
	case event.Type == watch.Deleted:
		delete(a.blocks, node.Name)

		a.removed++
	case len(node.Spec.PodCIDRs) > 0 && a.blocks[node.Name] == nil:
		a.check(node)
	}

	return ok
}

func (a *auditor) check(node *corev1.Node) {
	var blocks []netip.Prefix
	for _, text := range node.Spec.PodCIDRs {
		blocks = append(blocks, netip.MustParsePrefix(text))
	}

	for i, cidr := range a.options.ClusterCIDRs {
		if len(blocks) != len(a.options.ClusterCIDRs) || !cidr.Contains(blocks[i].Addr()) || node.Spec.PodCIDR != node.Spec.PodCIDRs[0] {
			a.Errorf("node %s: podCIDR %s, podCIDRs %v, want one of each of %v", node.Name, node.Spec.PodCIDR, blocks, a.options.ClusterCIDRs)

			return
		}
	}

	for other, theirs := range a.blocks {
		for _, block := range blocks {
			if slices.ContainsFunc(theirs, block.Overlaps) {
				a.Errorf("node %s: podCIDRs %v overlap those of node %s, %v", node.Name, blocks, other, theirs)
			}
		}
	}

	a.blocks[node.Name] = blocks
	a.given++
}

// lastNode ends the audit.
const lastNode = "last"

func (a *auditor) finish() (given, removed int) {
	a.register(lastNode)
	<-a.done

	return a.given, a.removed
}
