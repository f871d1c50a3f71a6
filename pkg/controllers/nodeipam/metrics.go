package nodeipam

import (
	"net/netip"
	"slices"

	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"

	"github.com/talos-ccm/talos-ccm/pkg/cidrset"
)

var (
	allocations = metrics.NewCounterVec(&metrics.CounterOpts{
		Name:           "talosccm_ipam_allocations_total",
		Help:           "Number of blocks written to Nodes, by pool and family.",
		StabilityLevel: metrics.ALPHA,
	}, []string{"pool", "family"})

	failures = metrics.NewCounterVec(&metrics.CounterOpts{
		Name:           "talosccm_ipam_failures_total",
		Help:           "Number of times a Node began to wait for podCIDRs, or its own were found wrong, by reason.",
		StabilityLevel: metrics.ALPHA,
	}, []string{"reason"})

	concerned = metrics.NewGaugeVec(&metrics.GaugeOpts{
		Name:           "talosccm_ipam_affected_nodes",
		Help:           "Number of Nodes that wait for podCIDRs, or whose own are wrong, by reason.",
		StabilityLevel: metrics.ALPHA,
	}, []string{"reason"})

	refusing = metrics.NewGauge(&metrics.GaugeOpts{
		Name:           "talosccm_ipam_blocked",
		Help:           "1 while nothing is allocated, because somebody else allocates pod CIDRs too or because that cannot be told.",
		StabilityLevel: metrics.ALPHA,
	})

	blocksTotal = metrics.NewGaugeVec(&metrics.GaugeOpts{
		Name:           "talosccm_ipam_pool_blocks",
		Help:           "Number of blocks that a pool's CIDR is cut into.",
		StabilityLevel: metrics.ALPHA,
	}, []string{"pool", "family", "cidr"})

	blocksUsed = metrics.NewGaugeVec(&metrics.GaugeOpts{
		Name:           "talosccm_ipam_pool_blocks_used",
		Help:           "Number of a pool's blocks that are a Node's or reserved, in whole or in part.",
		StabilityLevel: metrics.ALPHA,
	}, []string{"pool", "family", "cidr"})

	blocksFree = metrics.NewGaugeVec(&metrics.GaugeOpts{
		Name:           "talosccm_ipam_pool_blocks_free",
		Help:           "Number of a pool's blocks that can be allocated.",
		StabilityLevel: metrics.ALPHA,
	}, []string{"pool", "family", "cidr"})
)

func init() {
	legacyregistry.MustRegister(allocations, failures, concerned, refusing, blocksTotal, blocksUsed, blocksFree)
}

// resetGauges is also for one that no longer leads, and no longer knows.
func resetGauges() {
	refusing.Set(0)

	for _, gauge := range []*metrics.GaugeVec{concerned, blocksTotal, blocksUsed, blocksFree} {
		gauge.Reset()
	}
}

// measure sets the gauges. What is no more goes.
func (c *Controller) measure() {
	resetGauges()

	if c.obstacle() != nil {
		refusing.Set(1)
	}

	for reason, count := range c.reporter.byReason() {
		concerned.WithLabelValues(reason).Set(float64(count))
	}

	for _, pool := range slices.Concat(c.pools(), []Pool{{Name: poolCluster, CIDRs: c.environment.Load().clusterCIDRs}}) {
		for _, cidr := range pool.CIDRs {
			c.measurePool(pool.Name, cidr, c.options.maskSize(pool, familyOf(cidr.Addr())))
		}
	}

	for prefix := range c.ownPrefixes() {
		c.measurePool(poolMachine, prefix, blockBits(prefix, c.options.MaskSizeIPv6))
	}
}

// measurePool counts blocks of the pool's usual size.
func (c *Controller) measurePool(name string, cidr netip.Prefix, size int) {
	pool, err := cidrset.NewPool(cidr, size)
	if err != nil {
		return // its Nodes say so
	}

	stats, labels := c.book.stats(pool), []string{name, string(familyOf(cidr.Addr())), cidr.String()}

	blocksTotal.WithLabelValues(labels...).Set(float64(stats.Size))
	blocksUsed.WithLabelValues(labels...).Set(float64(stats.Used))
	blocksFree.WithLabelValues(labels...).Set(float64(stats.Free))
}

// ownPrefixes are the prefixes of the machines that blocks are cut from.
func (c *Controller) ownPrefixes() map[netip.Prefix]struct{} {
	prefixes := map[netip.Prefix]struct{}{}

	nodes, err := c.lister.List(labels.Everything())
	if err != nil || c.options.Allocator != CloudAllocator {
		return prefixes
	}

	for _, node := range nodes {
		if prefix, problem := ownPrefix(c.inventory.Get(node.Name).Machine); problem == nil {
			prefixes[prefix] = struct{}{}
		}
	}

	return prefixes
}
