package nodeipam

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"

	"github.com/talos-ccm/talos-ccm/pkg/cidrset"
	"github.com/talos-ccm/talos-ccm/pkg/internal/queue"
)

// version is a Node as the API server has it at a resourceVersion.
func version(name, uid string, resourceVersion int, cidrs ...string) *corev1.Node {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(uid), ResourceVersion: fmt.Sprint(resourceVersion)}}
	node.Spec.PodCIDRs = cidrs

	return node
}

func listAt(resourceVersion int, nodes ...*corev1.Node) *corev1.NodeList {
	list := &corev1.NodeList{ListMeta: metav1.ListMeta{ResourceVersion: fmt.Sprint(resourceVersion)}}
	for _, node := range nodes {
		list.Items = append(list.Items, *node)
	}

	return list
}

// ledger is a book in a test, and a pool of four blocks, 10.0.0.0/24 to 10.0.3.0/24.
type ledger struct {
	*testing.T
	*book

	pool  cidrset.Pool
	freed int
}

func newLedger(t *testing.T) *ledger {
	pool, err := cidrset.NewPool(netip.MustParsePrefix("10.0.0.0/22"), 24)
	if err != nil {
		t.Fatal(err)
	}

	l := &ledger{T: t, pool: pool}
	l.book = newBook(func() { l.freed++ })

	return l
}

func (l *ledger) mustTake(node *corev1.Node) string {
	l.Helper()

	blocks, problem := l.take(node, []request{{family: ipv4, pools: []cidrset.Pool{l.pool}}})
	if problem != nil {
		l.Fatal(problem.message)
	}

	return blocks[0].String()
}

func (l *ledger) want(used int) {
	l.Helper()

	if got := l.stats(l.pool).Used; int(got) != used { //nolint:gosec // four at most
		l.Errorf("%d blocks in use, want %d: %v", got, used, l.entries)
	}
}

// scene is something that happens to a book, and what comes of it.
type scene struct {
	name string
	play func(l *ledger)
}

func playAll(t *testing.T, scenes []scene) {
	t.Helper()
	t.Parallel()

	for _, s := range scenes {
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			s.play(newLedger(t))
		})
	}
}

func TestBlocksOfNodes(t *testing.T) {
	playAll(t, []scene{
		{"a block is a Node's until its end is shown", func(l *ledger) {
			l.show(version("a", "1", 10, "10.0.1.0/24"))
			l.want(1)
			l.gone("a", "1")
			l.want(0)
		}},
		{"an end that is shown twice frees nothing of the successor's", func(l *ledger) {
			l.show(version("a", "1", 10, "10.0.1.0/24"))
			l.gone("a", "1")
			l.show(version("a", "2", 12, "10.0.1.0/24"))
			l.gone("a", "1")
			l.want(1)
		}},
		{"a successor of the same name takes the place", func(l *ledger) {
			l.show(version("a", "1", 10, "10.0.1.0/24"))
			l.show(version("a", "2", 12))
			l.want(0)

			if l.freed != 1 {
				l.Errorf("freed %d times, want once", l.freed)
			}
		}},
		{"what the cache shows late does not undo what was listed", func(l *ledger) {
			l.list(listAt(20, version("a", "2", 20, "10.0.2.0/24")))
			l.show(version("a", "1", 10, "10.0.1.0/24"))
			l.gone("a", "1")
			l.want(1)
			l.show(version("a", "2", 18))
			l.want(1)

			if _, waiting := l.settle("a", version("a", "2", 18)); waiting {
				l.Error("the Node has been given its blocks, and is to wait for none")
			}
		}},
		{"a Node that is not on a list is gone, shown or not", func(l *ledger) {
			l.list(listAt(22, version("a", "1", 20, "10.0.2.0/24"), version("b", "2", 21, "10.0.3.0/24")))
			l.show(version("b", "2", 21, "10.0.3.0/24"))
			l.want(2)
			l.list(listAt(23))
			l.want(0)
		}},
		{"a Node that is younger than a list is not gone", func(l *ledger) {
			l.show(version("a", "1", 20, "10.0.2.0/24"))
			l.list(listAt(19))
			l.want(1)
		}},
		{"two Nodes with one block both hold it", func(l *ledger) {
			l.show(version("a", "1", 10, "10.0.1.0/24"))
			l.show(version("b", "2", 11, "10.0.0.0/23"))

			if other, found := l.overlap("b"); !found || other != "a" {
				l.Errorf("b overlaps %q, %t; want a", other, found)
			}

			l.gone("b", "2")
			l.want(1)
			l.show(version("c", "3", 12, "10.0.1.0/24"))
			l.gone("a", "1")
			l.want(1)
		}},
	})
}

func TestBlocksTaken(t *testing.T) {
	playAll(t, []scene{
		{"a block that was taken stays taken while the cache is behind", func(l *ledger) {
			node := version("a", "1", 10)
			l.show(node)

			block := l.mustTake(node)
			if blocks, waiting := l.settle("a", node); !waiting || blocks[0].String() != block {
				l.Errorf("to be written again: %v, %t; want the same block %s", blocks, waiting, block)
			}

			l.show(node)
			l.want(1)
		}},
		{"a block that was written is not written again", func(l *ledger) {
			node := version("a", "1", 10)
			block := l.mustTake(node)
			l.wrote(version("a", "1", 11, block))

			if blocks, waiting := l.settle("a", node); waiting {
				l.Errorf("to be written again: %v", blocks)
			}

			l.show(version("a", "1", 11, block))
			l.want(1)
			l.gone("a", "1")
			l.want(0)
		}},
		{"a later version without blocks shows that the write failed", func(l *ledger) {
			l.mustTake(version("a", "1", 10))

			if blocks, waiting := l.settle("a", version("a", "1", 12)); !waiting || blocks != nil {
				l.Errorf("to be written: %v, %t; want blocks chosen anew", blocks, waiting)
			}

			l.want(0)
		}},
		{"what was taken for a Node goes with it, written or not", func(l *ledger) {
			for i, written := range []bool{false, true} {
				uid := fmt.Sprint(i)
				node := version("a", uid, 10*i+1)
				block := l.mustTake(node)

				if written {
					l.wrote(version("a", uid, 10*i+2, block))
				}

				l.settle("a", nil)
				l.want(0)
			}
		}},
		{"an end that overtakes the answer to the write is not undone", func(l *ledger) {
			node := version("a", "1", 10)
			block := l.mustTake(node)
			l.gone("a", "1")
			l.wrote(version("a", "1", 11, block))
			l.want(0)
		}},
	})
}

func TestNothingIsTakenByHalves(t *testing.T) {
	playAll(t, []scene{
		{"nothing is taken for a Node of which the book has learned meanwhile", func(l *ledger) {
			node := version("a", "2", 12)
			if _, waiting := l.settle("a", node); !waiting {
				l.Fatal("the Node is to wait for blocks")
			}

			l.show(version("a", "1", 10, "10.0.0.0/24")) // the handlers are behind the cache

			if blocks, problem := l.take(node, []request{{family: ipv4, pools: []cidrset.Pool{l.pool}}}); len(blocks) > 0 || problem != nil {
				l.Errorf("took %v, %v; want nothing for now", blocks, problem)
			}

			l.want(1)
			l.gone("a", "1")
			l.want(0)
		}},
		{"nothing is taken of one family if the other is exhausted", func(l *ledger) {
			none, err := cidrset.NewPool(netip.MustParsePrefix("fd00::/64"), 64)
			if err != nil {
				l.Fatal(err)
			}

			l.reserve("somebody", prefixes("fd00::1/128"))

			requests := []request{{family: ipv4, pool: "p", pools: []cidrset.Pool{l.pool}}, {family: ipv6, pool: "p", pools: []cidrset.Pool{none}}}
			if blocks, problem := l.take(version("a", "1", 10), requests); reasonOf(problem) != ReasonExhausted {
				l.Errorf("took %v, %v; want %s", blocks, problem, ReasonExhausted)
			}

			l.want(0)
		}},
		{"reservations follow their owner and free what they give up", func(l *ledger) {
			l.reserve("a", prefixes("10.0.0.5/32", "10.0.1.5/32"))
			l.reserve("b", prefixes("10.0.0.5/32"))
			l.want(2)
			l.reserve("a", prefixes("10.0.2.5/32"))
			l.want(2)
			l.reserve("a", nil)
			l.want(1)

			if l.freed != 2 {
				l.Errorf("freed %d times, want twice", l.freed)
			}
		}},
	})
}

func TestPodCIDRsInSpellingsOfOldClusters(t *testing.T) {
	t.Parallel()

	blocks, invalid := podCIDRs(version("a", "1", 1, "010.0.1.0/24", "10.0.2.7/24", "<nil>", "fd00::/64"))
	if want := prefixes("10.0.1.0/24", "10.0.2.0/24", "fd00::/64"); !slices.Equal(blocks, want) || !slices.Equal(invalid, []string{"<nil>"}) {
		t.Errorf("blocks %v, invalid %v; want %v and <nil>", blocks, invalid, want)
	}

	node := version("a", "1", 1)
	node.Spec.PodCIDR = "10.0.4.0/24"

	if blocks, _ := podCIDRs(node); !slices.Equal(blocks, prefixes("10.0.4.0/24")) {
		t.Errorf("blocks %v of a Node with podCIDR alone", blocks)
	}
}

// TestI6DeletedFinalStateUnknown: an end that the watch has missed is an end.
func TestI6DeletedFinalStateUnknown(t *testing.T) {
	t.Parallel()

	l := newLedger(t)
	c := &Controller{book: l.book, reporter: newReporter(nil), queue: queue.New(nodeIPAMAlias)}

	l.show(version("a", "1", 10, "10.0.1.0/24"))
	c.deleted(cache.DeletedFinalStateUnknown{Key: "a", Obj: version("a", "1", 10, "10.0.1.0/24")})
	l.want(0)

	for _, obj := range []any{cache.DeletedFinalStateUnknown{Key: "a"}, (*corev1.Pod)(nil), nil} {
		c.deleted(obj) // is none of ours, and ends nothing
	}
}

// TestI8DoubleRelease: however often an end is told, the block goes to one other Node.
func TestI8DoubleRelease(t *testing.T) {
	t.Parallel()

	l := newLedger(t)
	c := &Controller{book: l.book, reporter: newReporter(nil), queue: queue.New(nodeIPAMAlias)}
	a := version("a", "1", 10, "10.0.0.0/24")

	l.show(a)
	c.deleted(a)

	first := l.mustTake(version("b", "2", 12))

	c.deleted(a)
	c.deleted(cache.DeletedFinalStateUnknown{Key: "a", Obj: a})

	if second := l.mustTake(version("c", "3", 14)); second == first {
		t.Errorf("b and c were both given %s", first)
	}

	l.want(2)
}
