package nodeipam

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"

	"github.com/talos-ccm/talos-ccm/pkg/cidrset"
	"github.com/talos-ccm/talos-ccm/pkg/internal/events"
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

// suite tests allocations with a pool of four blocks, 10.0.0.0/24 to 10.0.3.0/24.
type suite struct {
	*testing.T
	*allocations

	pool     cidrset.Pool
	released int
}

func newSuite(t *testing.T) *suite {
	pool, err := cidrset.NewPool(netip.MustParsePrefix("10.0.0.0/22"), 24)
	if err != nil {
		t.Fatal(err)
	}

	s := &suite{T: t, pool: pool}
	s.allocations = newAllocations(func() { s.released++ })

	return s
}

func (s *suite) mustAllocate(node *corev1.Node) string {
	s.Helper()

	blocks, condition := s.allocate(node, []request{{family: ipv4, pools: []cidrset.Pool{s.pool}}})
	if condition != nil {
		s.Fatal(condition.Message)
	}

	return blocks[0].String()
}

func (s *suite) want(used int) {
	s.Helper()

	if got := s.stats(s.pool).Used; int(got) != used { //nolint:gosec // four at most
		s.Errorf("%d blocks in use, want %d: %v", got, used, s.entries)
	}
}

type testCase struct {
	name string
	run  func(s *suite)
}

func runAll(t *testing.T, cases []testCase) {
	t.Helper()
	t.Parallel()

	for _, test := range cases {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			test.run(newSuite(t))
		})
	}
}

func TestAllocations_Observe(t *testing.T) {
	runAll(t, []testCase{
		{"a block belongs to its Node until the Node is deleted", func(s *suite) {
			s.observe(version("a", "1", 10, "10.0.1.0/24"))
			s.want(1)
			s.release("a", "1")
			s.want(0)
		}},
		{"a repeated deletion does not release the block of a new Node of the same name", func(s *suite) {
			s.observe(version("a", "1", 10, "10.0.1.0/24"))
			s.release("a", "1")
			s.observe(version("a", "2", 12, "10.0.1.0/24"))
			s.release("a", "1")
			s.want(1)
		}},
		{"a new Node of the same name replaces the old one", func(s *suite) {
			s.observe(version("a", "1", 10, "10.0.1.0/24"))
			s.observe(version("a", "2", 12))
			s.want(0)

			if s.released != 1 {
				s.Errorf("released %d times, want once", s.released)
			}
		}},
		{"a stale cache does not override a list", func(s *suite) {
			s.observeList(listAt(20, version("a", "2", 20, "10.0.2.0/24")))
			s.observe(version("a", "1", 10, "10.0.1.0/24"))
			s.release("a", "1")
			s.want(1)
			s.observe(version("a", "2", 18))
			s.want(1)

			if _, pending := s.resolve("a", version("a", "2", 18)); pending {
				s.Error("the Node is pending although it has blocks")
			}
		}},
		{"a Node that is not in a list is deleted, cached or not", func(s *suite) {
			s.observeList(listAt(22, version("a", "1", 20, "10.0.2.0/24"), version("b", "2", 21, "10.0.3.0/24")))
			s.observe(version("b", "2", 21, "10.0.3.0/24"))
			s.want(2)
			s.observeList(listAt(23))
			s.want(0)
		}},
		{"a Node that is newer than a list is not deleted", func(s *suite) {
			s.observe(version("a", "1", 20, "10.0.2.0/24"))
			s.observeList(listAt(19))
			s.want(1)
		}},
		{"two Nodes can hold the same block", func(s *suite) {
			s.observe(version("a", "1", 10, "10.0.1.0/24"))

			b := version("b", "2", 11, "10.0.0.0/23")
			s.observe(b)

			if condition := s.review(b, plan{}); reasonOf(condition) != ReasonOverlap || !strings.Contains(condition.Message, "those of Node a [10.0.1.0/24];") {
				s.Errorf("review of b returned %v, want an overlap with Node a", condition)
			}

			s.release("b", "2")
			s.want(1)
			s.observe(version("c", "3", 12, "10.0.1.0/24"))
			s.release("a", "1")
			s.want(1)
		}},
		{"podCIDRs that overlap those of several Nodes are reported with all of them", func(s *suite) {
			s.observe(version("b", "2", 11, "10.0.1.0/24"))
			s.observe(version("a", "1", 10, "10.0.0.0/24"))

			wide := version("c", "3", 12, "10.0.0.0/23")
			s.observe(wide)

			if condition := s.review(wide, plan{}); reasonOf(condition) != ReasonOverlap ||
				!strings.Contains(condition.Message, "of 2 Nodes; delete this Node") || !strings.HasSuffix(condition.Message, "a [10.0.0.0/24], b [10.0.1.0/24]") {
				s.Errorf("review of c returned %v, want an overlap with a and b", condition)
			}
		}},
	})
}

func TestAllocations_Allocate(t *testing.T) {
	runAll(t, []testCase{
		{"a block stays allocated while the cache is stale", func(s *suite) {
			node := version("a", "1", 10)
			s.observe(node)

			block := s.mustAllocate(node)
			if blocks, pending := s.resolve("a", node); !pending || blocks[0].String() != block {
				s.Errorf("pending blocks are %v, %t; want the same block %s", blocks, pending, block)
			}

			s.observe(node)
			s.want(1)
		}},
		{"a written block is not written again", func(s *suite) {
			node := version("a", "1", 10)
			block := s.mustAllocate(node)
			s.confirm(version("a", "1", 11, block))

			if blocks, pending := s.resolve("a", node); pending {
				s.Errorf("blocks are pending again: %v", blocks)
			}

			s.observe(version("a", "1", 11, block))
			s.want(1)
			s.release("a", "1")
			s.want(0)
		}},
		{"a later version without blocks proves that the write failed", func(s *suite) {
			s.mustAllocate(version("a", "1", 10))

			if blocks, pending := s.resolve("a", version("a", "1", 12)); !pending || blocks != nil {
				s.Errorf("pending blocks are %v, %t; want none allocated", blocks, pending)
			}

			s.want(0)
		}},
		{"the blocks of a deleted Node are released, written or not", func(s *suite) {
			for i, written := range []bool{false, true} {
				uid := fmt.Sprint(i)
				node := version("a", uid, 10*i+1)
				block := s.mustAllocate(node)

				if written {
					s.confirm(version("a", uid, 10*i+2, block))
				}

				s.resolve("a", nil)
				s.want(0)
			}
		}},
		{"a deletion before the response to the write is not undone", func(s *suite) {
			node := version("a", "1", 10)
			block := s.mustAllocate(node)
			s.release("a", "1")
			s.confirm(version("a", "1", 11, block))
			s.want(0)
		}},
	})
}

func TestAllocations_AllocateAllOrNothing(t *testing.T) {
	runAll(t, []testCase{
		{"nothing is allocated if the Node was observed since it was resolved", func(s *suite) {
			node := version("a", "2", 12)
			if _, pending := s.resolve("a", node); !pending {
				s.Fatal("the Node is not pending")
			}

			s.observe(version("a", "1", 10, "10.0.0.0/24")) // the handlers are behind the cache

			if blocks, condition := s.allocate(node, []request{{family: ipv4, pools: []cidrset.Pool{s.pool}}}); len(blocks) > 0 || condition != nil {
				s.Errorf("allocated %v, %v; want nothing for now", blocks, condition)
			}

			s.want(1)
			s.release("a", "1")
			s.want(0)
		}},
		{"nothing is allocated of one family if the other is exhausted", func(s *suite) {
			none, err := cidrset.NewPool(netip.MustParsePrefix("fd00::/64"), 64)
			if err != nil {
				s.Fatal(err)
			}

			s.reserve("owner", prefixes("fd00::1/128"))

			requests := []request{{family: ipv4, pool: "p", pools: []cidrset.Pool{s.pool}}, {family: ipv6, pool: "p", pools: []cidrset.Pool{none}}}
			if blocks, condition := s.allocate(version("a", "1", 10), requests); reasonOf(condition) != ReasonExhausted {
				s.Errorf("allocated %v, %v; want %s", blocks, condition, ReasonExhausted)
			}

			s.want(0)
		}},
		{"reservations are replaced by owner", func(s *suite) {
			s.reserve("a", prefixes("10.0.0.5/32", "10.0.1.5/32"))
			s.reserve("b", prefixes("10.0.0.5/32"))
			s.want(2)
			s.reserve("a", prefixes("10.0.2.5/32"))
			s.want(2)
			s.reserve("a", nil)
			s.want(1)

			if s.released != 2 {
				s.Errorf("released %d times, want twice", s.released)
			}
		}},
	})
}

func TestAllocations_LargePodCIDRs(t *testing.T) {
	runAll(t, []testCase{
		{"podCIDRs that are too large exclude blocks only as long as others are free", func(s *suite) {
			s.observe(version("wide", "1", 10, "10.0.0.0/23"))

			for i, want := range []string{"10.0.2.0/24", "10.0.3.0/24", "10.0.0.0/24", "10.0.1.0/24"} {
				requests := []request{{family: ipv4, pools: []cidrset.Pool{s.pool}, largest: 24}}

				blocks, condition := s.allocate(version(fmt.Sprint(i), "uid", 11+i), requests)
				if condition != nil || blocks[0].String() != want {
					s.Errorf("allocated %v, %v; want %s", blocks, condition, want)
				}
			}

			if _, condition := s.allocate(version("last", "uid", 20), []request{{family: ipv4, pools: []cidrset.Pool{s.pool}, largest: 24}}); reasonOf(condition) != ReasonExhausted {
				s.Errorf("got %v, want %s", condition, ReasonExhausted)
			}
		}},
		{"podCIDRs of the size that most Nodes have exclude blocks, whatever the configured size", func(s *suite) {
			s.observe(version("a", "1", 10, "10.0.0.0/23"))
			s.observe(version("b", "2", 11, "10.0.2.0/23"))

			requests := []request{{family: ipv4, pools: []cidrset.Pool{s.pool}, largest: 24}}
			if blocks, condition := s.allocate(version("c", "3", 12), requests); reasonOf(condition) != ReasonExhausted {
				s.Errorf("allocated %v, %v; want %s", blocks, condition, ReasonExhausted)
			}

			p := plan{options: Options{ClusterCIDRs: []netip.Prefix{s.pool.CIDR()}}}
			if condition := s.review(version("a", "1", 10, "10.0.0.0/23"), p); condition != nil {
				s.Errorf("review returned %v, want nothing", condition)
			}

			// A kubelet that registers with all of the pool excludes nothing.
			wide := version("wide", "4", 13, "10.0.0.0/22")
			s.observe(wide)
			s.release("b", "2")

			if blocks, condition := s.allocate(version("c", "3", 12), requests); condition != nil || blocks[0].String() != "10.0.2.0/24" {
				s.Errorf("allocated %v, %v; want 10.0.2.0/24", blocks, condition)
			}

			if condition := s.review(wide, p); reasonOf(condition) != ReasonTooLarge {
				s.Errorf("review returned %v, want %s", condition, ReasonTooLarge)
			}
		}},
	})
}

func TestPodCIDRs_AcceptsSpellingsOfOldClusters(t *testing.T) {
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

// TestNodeDeleted_DeletedFinalStateUnknown: a deletion that the watch missed counts.
func TestNodeDeleted_DeletedFinalStateUnknown(t *testing.T) {
	t.Parallel()

	s := newSuite(t)
	c := &Controller{allocations: s.allocations, reporter: events.New(nil), queue: queue.New(Alias)}

	s.observe(version("a", "1", 10, "10.0.1.0/24"))
	c.nodeDeleted(cache.DeletedFinalStateUnknown{Key: "a", Obj: version("a", "1", 10, "10.0.1.0/24")})
	s.want(0)

	for _, obj := range []any{cache.DeletedFinalStateUnknown{Key: "a"}, (*corev1.Pod)(nil), nil} {
		c.nodeDeleted(obj) // ignored
	}
}

// TestNodeDeleted_Repeatedly: a block is released once, however often its Node is reported as deleted.
func TestNodeDeleted_Repeatedly(t *testing.T) {
	t.Parallel()

	s := newSuite(t)
	c := &Controller{allocations: s.allocations, reporter: events.New(nil), queue: queue.New(Alias)}
	a := version("a", "1", 10, "10.0.0.0/24")

	s.observe(a)
	c.nodeDeleted(a)

	first := s.mustAllocate(version("b", "2", 12))

	c.nodeDeleted(a)
	c.nodeDeleted(cache.DeletedFinalStateUnknown{Key: "a", Obj: a})

	if second := s.mustAllocate(version("c", "3", 14)); second == first {
		t.Errorf("b and c were both assigned %s", first)
	}

	s.want(2)
}
