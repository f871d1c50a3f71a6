package cidrset_test

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"go4.org/netipx"

	"github.com/talos-ccm/talos-ccm/pkg/cidrset"
)

// model is a Set implemented as a list, slow but obviously correct.
type model []netip.Prefix

func (m model) overlaps(prefix netip.Prefix) bool {
	return slices.ContainsFunc(m, prefix.Overlaps)
}

// blocks returns the free blocks of a pool and the number of used ones.
func (m model) blocks(pool cidrset.Pool) (free []netip.Prefix, used uint64) {
	block := netip.PrefixFrom(pool.CIDR().Addr(), pool.Bits())

	for range pool.Size() {
		if m.overlaps(block) {
			used++
		} else {
			free = append(free, block)
		}

		block = netip.PrefixFrom(netipx.PrefixLastIP(block).Next(), pool.Bits())
	}

	return free, used
}

// pools returns pools that overlap, have different block sizes, include the first and the last addresses, and are small
// enough for the model.
func pools(t testing.TB) []cidrset.Pool {
	return []cidrset.Pool{
		pool(t, "10.0.0.0/24", 28), pool(t, "10.0.0.0/24", 26), pool(t, "10.0.0.128/25", 30), pool(t, "10.0.0.0/27", 32), pool(t, "10.0.0.7/32", 32),
		pool(t, "0.0.0.0/0", 4), pool(t, "255.255.255.192/26", 30),
		pool(t, "2001:db8::/48", 53), pool(t, "2001:db8::/48", 50), pool(t, "2001:db8::/62", 64), pool(t, "2001:db8::/123", 128), pool(t, "2001:db8::7/128", 128),
		pool(t, "8000::/1", 5), pool(t, "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffc0/122", 126),
	}
}

// history applies a script to a set and its model.
type history struct {
	script []byte
	pools  []cidrset.Pool
	set    cidrset.Set
	model  model
}

// draw returns the next number of the script, below n, or 0 at the end of the script.
func (h *history) draw(n int) int {
	if len(h.script) == 0 {
		return 0
	}

	drawn := int(h.script[0]) % n
	h.script = h.script[1:]

	return drawn
}

// prefix returns a prefix inside, around or next to a pool.
func (h *history) prefix() netip.Prefix {
	cidr := h.pools[h.draw(len(h.pools))].CIDR()
	addr := cidr.Addr().AsSlice()

	for range h.draw(4) {
		i := max(cidr.Bits()-2, 0) + h.draw(14)
		if i < len(addr)*8 {
			addr[i/8] ^= 0x80 >> (i % 8)
		}
	}

	length := min(max(cidr.Bits()-2, 0)+h.draw(14), len(addr)*8)
	if h.draw(8) == 0 {
		length = len(addr) * 8
	}

	near, _ := netip.AddrFromSlice(addr)

	return netip.PrefixFrom(near, length).Masked()
}

func (h *history) insert(prefix netip.Prefix) {
	h.set.Insert(prefix)
	h.model = append(h.model, prefix)
}

func (h *history) remove(t *testing.T, prefix netip.Prefix) {
	t.Helper()

	i := slices.Index(h.model, prefix)
	if i >= 0 {
		h.model = slices.Delete(h.model, i, i+1)
	}

	if removed := h.set.Remove(prefix); removed != (i >= 0) {
		t.Fatalf("remove %s: %v", prefix, removed)
	}
}

func (h *history) step(t *testing.T) {
	t.Helper()

	switch h.draw(8) {
	case 0, 1:
		h.insert(h.prefix())
	case 2:
		h.remove(t, h.prefix())
	case 3, 4:
		if len(h.model) > 0 {
			h.remove(t, h.model[h.draw(len(h.model))])
		}
	default:
		if block, ok := h.set.Next(h.pools[h.draw(len(h.pools))]); ok {
			h.insert(block)
		}
	}
}

// compare compares the set with its model in one pool and with one prefix.
func (h *history) compare(t *testing.T) {
	t.Helper()

	pool, prefix := h.pools[h.draw(len(h.pools))], h.prefix()
	free, used := h.model.blocks(pool)

	block, ok := h.set.Next(pool)
	if ok != (len(free) > 0) || ok && block != free[0] {
		t.Fatalf("next /%d of %s: %v, %v; free are %v of %v", pool.Bits(), pool.CIDR(), block, ok, free, h.model)
	}

	if got, want := h.set.Stats(pool), (cidrset.Stats{Size: pool.Size(), Used: used, Free: uint64(len(free))}); got != want {
		t.Fatalf("/%d of %s: %+v, want %+v; %v", pool.Bits(), pool.CIDR(), got, want, h.model)
	}

	if got, want := h.set.Overlaps(prefix), h.model.overlaps(prefix); got != want {
		t.Fatalf("overlaps %s: %v, want %v; %v", prefix, got, want, h.model)
	}
}

// compareLarger compares the larger prefixes with those of the model.
func (h *history) compareLarger(t *testing.T) {
	t.Helper()

	prefix, length := h.prefix(), h.draw(129)
	want := slices.DeleteFunc(slices.Clone(h.model), func(p netip.Prefix) bool { return p.Bits() >= length || !p.Overlaps(prefix) })

	got := h.set.Larger(prefix, length)
	slices.SortFunc(got, netip.Prefix.Compare)
	slices.SortFunc(want, netip.Prefix.Compare)

	if !slices.Equal(got, want) {
		t.Fatalf("larger than /%d in %s: %v, want %v", length, prefix, got, want)
	}
}

// run applies the script, and then compares the set with one of the same content and another history, and empties it.
func (h *history) run(t *testing.T, r *rand.Rand) {
	t.Helper()

	for len(h.script) > 0 {
		h.step(t)
		h.compare(t)
		h.compareLarger(t)
	}

	var other cidrset.Set

	content := slices.Clone(h.model)
	r.Shuffle(len(content), func(i, j int) { content[i], content[j] = content[j], content[i] })

	for _, prefix := range content {
		other.Insert(prefix)
	}

	require.Equal(t, &other, &h.set, "the set depends on its history; content %v", content)

	for _, prefix := range content {
		h.remove(t, prefix)
	}

	require.Zero(t, h.set, "the set is not empty after removal of %v", content)
}

func TestSet_BehavesLikeAList(t *testing.T) {
	const histories, length = 2000, 1000

	for seed := range uint64(histories) {
		r := rand.New(rand.NewPCG(seed, 0))
		h := history{script: make([]byte, length), pools: pools(t)}

		for i := range h.script {
			h.script[i] = byte(r.Uint32())
		}

		h.run(t, r)
	}
}

func FuzzHistory(f *testing.F) {
	f.Add([]byte{})
	f.Add([]byte{5, 0, 5, 1, 5, 2, 5, 7, 5, 8, 0, 1, 2, 3, 4, 5, 6, 7})

	f.Fuzz(func(t *testing.T, script []byte) {
		h := history{script: script[:min(len(script), 4096)], pools: pools(t)} // the model is slow
		h.run(t, rand.New(rand.NewPCG(uint64(len(script)), 0)))
	})
}
