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
	// worlds is how many histories go on side by side.
	worlds = 16
	// capacity is how many Nodes the pools have blocks for, and crowd how many there may be.
	capacity = 8
	crowd    = 10
)

// TestI3NothingIsGivenTwiceOrLost runs random schedules of Nodes that come and go and of processes that are killed between any two steps, lose answers, see an old
// cache, and hand over. Whatever happens no two Nodes share an address of their blocks, and when the schedule has come to rest every block
// there is can be given: none has leaked.
func TestI3NothingIsGivenTwiceOrLost(t *testing.T) {
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

// tally counts what has happened.
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

// String is the tally for people.
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

	// The process that lives now.
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

// schedule is a few random steps, and then a rest.
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

// churn has many Nodes come and go at once.
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

// takeOver has another process lead. The one that does is killed, or hands over. The cache of the other may be older than its term: it may have been filled
// before, and held up, while the one before it went on.
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

// begin has a process lead where none does.
func (h *history) begin() {
	h.Helper()

	h.wire = newWire()
	h.process = h.run(setup{Options: h.options, wire: h.wire})
	h.tally.lives++
}

// faults are those of a life; the more of them the higher the degree.
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

// step does one thing that can happen at any time.
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

// rest ends all trouble, has as many Nodes as there are blocks, and waits until each of them has one. The process is the one that has seen the
// trouble, so that what it has lost is missed.
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

// linger gives the process time to work, unless it has nothing to do or is dead. How much it gets done is left to chance.
func (h *history) linger() {
	_ = wait.PollUntilContextTimeout(h.Context(), interval, 250*time.Millisecond, true, func(context.Context) (bool, error) {
		return h.wire.killed() || h.served(), nil
	})
}

// served tells whether every Node has blocks.
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

// touch makes a version of a Node that the process has not decided for.
func (h *history) touch(name string) {
	node, err := h.client.CoreV1().Nodes().Get(h.Context(), h.node(name), metav1.GetOptions{})
	if err != nil {
		return
	}

	node.Annotations = map[string]string{"test/touched": fmt.Sprint(h.rng.Uint32())}

	if _, err := h.client.CoreV1().Nodes().Update(h.Context(), node, metav1.UpdateOptions{}); err != nil && !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) {
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

// auditor sees every version of every Node, in the order in which they came about.
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

	// Whoever fails must not do so when the test is over.
	h.Cleanup(func() {
		w.Stop()
		<-a.done
	})

	return a
}

// see looks at one version of a Node; false if there will be no more.
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

// lastNode is the Node after which there is nothing to see.
const lastNode = "last"

func (a *auditor) finish() (given, removed int) {
	a.register(lastNode)
	<-a.done

	return a.given, a.removed
}
