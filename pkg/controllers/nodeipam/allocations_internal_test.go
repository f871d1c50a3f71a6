package nodeipam

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

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

	source   source
	released int
}

func newSuite(t *testing.T) *suite {
	s := &suite{T: t, source: newSource(t, "10.0.0.0/22", 24)}
	s.allocations = newAllocations(func() { s.released++ })

	return s
}

// newSource returns a source without a limit on the size of podCIDRs.
func newSource(t *testing.T, cidr string, bits int) source {
	t.Helper()

	pool, err := cidrset.NewPool(netip.MustParsePrefix(cidr), bits)
	require.NoError(t, err)

	return source{Pool: pool}
}

func (s *suite) mustAllocate(node *corev1.Node) string {
	s.Helper()

	blocks, condition := s.allocate(node, []familySources{{family: ipv4, sources: []source{s.source}}})
	require.Nil(s, condition)

	return blocks[0].String()
}

// want compares the number of blocks in use.
func (s *suite) want(used uint64) {
	s.Helper()
	assert.Equal(s, used, s.stats(s.source).Used, s.byNode)
}

// wantResolved compares the blocks of a Node, and whether it is pending.
func (s *suite) wantResolved(node *corev1.Node, pending bool, blocks ...string) {
	s.Helper()

	gotBlocks, gotPending := s.resolve(node.Name, node)
	assert.Equal(s, pending, gotPending)
	assert.Equal(s, prefixes(blocks...), gotBlocks)
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

func TestAllocations_FollowNodes(t *testing.T) {
	runAll(t, []testCase{
		{"a block belongs to its Node until the Node is deleted", func(s *suite) {
			s.record(version("a", "1", 10, "10.0.1.0/24"))
			s.want(1)
			s.release("a", "1")
			s.want(0)
		}},
		{"a repeated deletion does not release the block of a new Node of the same name", func(s *suite) {
			s.record(version("a", "1", 10, "10.0.1.0/24"))
			s.release("a", "1")
			s.record(version("a", "2", 12, "10.0.1.0/24"))
			s.release("a", "1")
			s.want(1)
		}},
		{"a new Node of the same name replaces the old one", func(s *suite) {
			s.record(version("a", "1", 10, "10.0.1.0/24"))
			s.record(version("a", "2", 12))
			s.want(0)
			assert.Equal(s, 1, s.released)
		}},
		{"a stale cache does not override a list", func(s *suite) {
			s.recordList(listAt(20, version("a", "2", 20, "10.0.2.0/24")))
			s.record(version("a", "1", 10, "10.0.1.0/24"))
			s.release("a", "1")
			s.want(1)
			s.record(version("a", "2", 18))
			s.want(1)
			s.wantResolved(version("a", "2", 18), false, "10.0.2.0/24")
		}},
		{"a Node that is not in a list is deleted, cached or not", func(s *suite) {
			s.recordList(listAt(22, version("a", "1", 20, "10.0.2.0/24"), version("b", "2", 21, "10.0.3.0/24")))
			s.record(version("b", "2", 21, "10.0.3.0/24"))
			s.want(2)
			s.recordList(listAt(23))
			s.want(0)
		}},
		{"a Node that is newer than a list is not deleted", func(s *suite) {
			s.record(version("a", "1", 20, "10.0.2.0/24"))
			s.recordList(listAt(19))
			s.want(1)
		}},
		{"two Nodes can hold the same block", func(s *suite) {
			s.record(version("a", "1", 10, "10.0.1.0/24"))

			b := version("b", "2", 11, "10.0.0.0/23")
			s.record(b)
			condition := s.overlap(b)
			require.Equal(s, ReasonOverlap, reasonOf(condition))
			assert.Contains(s, condition.Message, "those of other Nodes: a [10.0.1.0/24];")

			s.release("b", "2")
			s.want(1)
			s.record(version("c", "3", 12, "10.0.1.0/24"))
			s.release("a", "1")
			s.want(1)
		}},
		{"podCIDRs that overlap those of several Nodes are reported with all of them", func(s *suite) {
			s.record(version("b", "2", 11, "10.0.1.0/24"))
			s.record(version("a", "1", 10, "10.0.0.0/24"))

			wide := version("c", "3", 12, "10.0.0.0/23")
			s.record(wide)
			condition := s.overlap(wide)
			require.Equal(s, ReasonOverlap, reasonOf(condition))
			assert.Regexp(s, `those of other Nodes: a \[10\.0\.0\.0/24\], b \[10\.0\.1\.0/24\]; delete the Node`, condition.Message)
		}},
	})
}

func TestAllocations_RememberOwnWrites(t *testing.T) {
	runAll(t, []testCase{
		{"a block stays allocated while the cache is stale", func(s *suite) {
			node := version("a", "1", 10)
			s.record(node)
			s.wantResolved(node, true, s.mustAllocate(node))
			s.record(node)
			s.want(1)
		}},
		{"a written block is not written again", func(s *suite) {
			node := version("a", "1", 10)
			block := s.mustAllocate(node)
			s.confirm(version("a", "1", 11, block))
			s.wantResolved(node, false, block)
			s.record(version("a", "1", 11, block))
			s.want(1)
			s.release("a", "1")
			s.want(0)
		}},
		{"the late result of a write to a deleted Node does not count for the new Node of the same name", func(s *suite) {
			lost := s.mustAllocate(version("a", "1", 10))
			s.release("a", "1")

			recreated := version("a", "2", 12)
			block := s.mustAllocate(recreated)
			s.confirm(version("a", "1", 11, lost))
			s.wantResolved(recreated, true, block)
		}},
		{"a later version without blocks proves that the write failed", func(s *suite) {
			s.mustAllocate(version("a", "1", 10))
			s.wantResolved(version("a", "1", 12), true)
			s.want(0)
		}},
		{"the blocks of a deleted Node are released, written or not", func(s *suite) {
			s.mustAllocate(version("a", "1", 1)) // after the handler has received the deletion
			s.resolve("a", nil)
			s.want(0)

			block := s.mustAllocate(version("a", "2", 11))
			s.confirm(version("a", "2", 12, block))
			s.release("a", "2")
			s.want(0)
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
			s.wantResolved(node, true)
			s.record(version("a", "1", 10, "10.0.0.0/24")) // the handlers are behind the cache

			blocks, condition := s.allocate(node, []familySources{{family: ipv4, sources: []source{s.source}}})
			assert.Empty(s, blocks)
			assert.Nil(s, condition)
			s.want(1)
			s.release("a", "1")
			s.want(0)
		}},
		{"nothing is allocated of one family if the other is exhausted", func(s *suite) {
			none := newSource(s.T, "fd00::/64", 64)
			s.reserve("owner", prefixes("fd00::1/128"))

			sources := []familySources{{family: ipv4, sources: []source{s.source}}, {family: ipv6, sources: []source{none}}}
			_, condition := s.allocate(version("a", "1", 10), sources)
			assert.Equal(s, ReasonExhausted, reasonOf(condition))
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
			assert.Equal(s, 2, s.released)
		}},
	})
}

// TestAllocations_CountPodCIDRsUpToAQuarter: a larger podCIDR never counts, unless the configuration assigns it. Other
// podCIDRs count even if no other block is free.
func TestAllocations_CountPodCIDRsUpToAQuarter(t *testing.T) {
	t.Parallel()

	for _, test := range []struct {
		name, pool string
		size       int
		podCIDRs   []string
		want       string // block or reason
		tooLarge   bool   // the first podCIDR
	}{
		{"blocks of the configuration", "10.0.0.0/22", 24, []string{"10.0.0.0/24", "10.0.1.0/24", "10.0.2.0/24"}, "10.0.3.0/24", false},
		{"all blocks of the configuration", "10.0.0.0/22", 24, []string{"10.0.0.0/24", "10.0.1.0/24", "10.0.2.0/24", "10.0.3.0/24"}, ReasonExhausted, false},
		{"half of a /22", "10.0.0.0/22", 24, []string{"10.0.0.0/23"}, "10.0.0.0/24", true},
		{"all of a /22", "10.0.0.0/22", 24, []string{"10.0.0.0/22"}, "10.0.0.0/24", true},
		{"more than a /22", "10.0.0.0/22", 24, []string{"10.0.0.0/8"}, "10.0.0.0/24", true},
		{"quarter of a /21", "10.0.0.0/21", 24, []string{"10.0.0.0/23"}, "10.0.2.0/24", false},
		{"all quarters of a /21", "10.0.0.0/21", 24, []string{"10.0.0.0/23", "10.0.2.0/23", "10.0.4.0/23", "10.0.6.0/23"}, ReasonExhausted, false},
		{"half of a /21", "10.0.0.0/21", 24, []string{"10.0.0.0/22"}, "10.0.0.0/24", true},
		{"both halves of a /21", "10.0.0.0/21", 24, []string{"10.0.0.0/22", "10.0.4.0/22"}, "10.0.0.0/24", true},
		{"all of a /21, twice, beside blocks", "10.0.0.0/21", 24, []string{"10.0.0.0/21", "10.0.0.0/21", "10.0.0.0/24"}, "10.0.1.0/24", true},
		{"/22 with a mask size that went from 24 to 26", "10.0.0.0/22", 26, []string{"10.0.0.0/24", "10.0.1.0/24", "10.0.2.0/24"}, "10.0.3.0/26", false},
		{"full /22 with a mask size that went from 24 to 26", "10.0.0.0/22", 26, []string{"10.0.0.0/24", "10.0.1.0/24", "10.0.2.0/24", "10.0.3.0/24"}, ReasonExhausted, false},
		{"blocks larger than a quarter", "10.0.0.0/22", 23, []string{"10.0.0.0/23"}, "10.0.2.0/23", false},
		{"the only block", "10.0.0.0/22", 22, []string{"10.0.0.0/22"}, ReasonExhausted, false},
	} {
		a := newAllocations(func() {})
		for i, podCIDR := range test.podCIDRs {
			a.record(version(fmt.Sprint(i), fmt.Sprint(i), 10+i, podCIDR))
		}

		p := assignment{node: version("0", "0", 10, test.podCIDRs[0]), options: Options{ClusterCIDRs: prefixes(test.pool), MaskSizeIPv4: test.size}}
		sources, condition := p.sourcesByFamily()
		require.Nil(t, condition, test.name)

		total := a.stats(sources[0].sources[0])

		blocks, condition := a.allocate(version("new", "new", 50), sources)
		if condition == nil {
			assert.Equal(t, prefixes(test.want), blocks, test.name)
			assert.Equal(t, total.Free-1, a.stats(sources[0].sources[0]).Free, test.name)
		} else {
			assert.Equal(t, test.want, condition.Reason, test.name)
			assert.Zero(t, total.Free, test.name)
			assert.Equal(t, netip.MustParsePrefix(test.podCIDRs[0]).Bits() < test.size, strings.Contains(condition.Message, "; Nodes have larger podCIDRs ["+test.podCIDRs[0]), test.name)
		}

		assert.Equal(t, test.tooLarge, reasonOf(p.unusable()) == ReasonTooLarge, test.name)
	}
}

// TestAllocations_ReservationsCountWhateverTheirSize: nothing limits service CIDRs, even if a podCIDR is equal.
func TestAllocations_ReservationsCountWhateverTheirSize(t *testing.T) {
	t.Parallel()

	s := newSuite(t)
	s.source.limit = 24
	s.reserve("services", prefixes("10.0.0.0/23"))
	s.record(version("a", "1", 10, "10.0.0.0/23"))
	assert.Equal(t, "10.0.2.0/24", s.mustAllocate(version("b", "2", 11)))
	s.release("a", "1")
	s.want(3)
}

func TestPodCIDRs_AcceptsSpellingsOfOldClusters(t *testing.T) {
	t.Parallel()

	blocks := podCIDRs(version("a", "1", 1, "010.0.1.0/24", "10.0.2.7/24", "fd00::/64"))
	assert.Equal(t, prefixes("10.0.1.0/24", "10.0.2.0/24", "fd00::/64"), blocks)
}

// Repeated reports of a deletion release a block only once.
func TestNodeChanged_ReleasesOnce(t *testing.T) {
	t.Parallel()

	s := newSuite(t)
	c := &Controller{allocations: s.allocations, reporter: events.New(nil), queue: queue.New(Alias)}
	a := version("a", "1", 10, "10.0.0.0/24")

	s.record(a)
	c.nodeChanged(a, nil)

	first := s.mustAllocate(version("b", "2", 12))

	c.nodeChanged(a, nil)
	assert.NotEqual(t, first, s.mustAllocate(version("c", "3", 14)))
	s.want(2)
}
